"""Add one float32 number to each column of a tile, by a product on the tensor cores (bf16x3).

A thread holds several columns of a tile of scores. Loading a vector along columns makes every thread load each of its
columns; a product with a matrix of ones distributes the numbers instead. Tensor cores multiply bfloat16, so each float32
number x_c is split into three bfloat16 parts of 8 significant bits, which together have all 24 bits:

    x_c  =  a_c + b_c + c_c          a = bf16(x),  b = bf16(x - a),  c = bf16(x - a - b)

    ones [rows, 16]            parts [columns, 16], transposed           tile [rows, columns]
    . . . 1 1 1 . .            .    .    .                               x_0  x_1  x_2
    . . . 1 1 1 . .      @     a_0  a_1  a_2    <- column `at` of parts  =     x_0  x_1  x_2      (+ acc)
    . . . 1 1 1 . .            b_0  b_1  b_2                             x_0  x_1  x_2
                               c_0  c_1  c_2

Products with 1 are exact and sums are float32. 16 columns of parts hold up to five numbers; the three ones of the left
matrix select one of them. Where the left matrix holds parts as well (a key's far term) and the right one its ones, one
product adds a number per row and a number per column.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_bf16x3(tile, columns, at, x):
    """The tile [rows, 16] with the three parts of x [rows] in the columns at, at + 1, at + 2; columns: tl.arange(0, 16)."""
    for part in tl.static_range(3):
        piece = x.to(tl.bfloat16).to(tl.float32)
        tile = tl.where(columns == at + part, piece[:, None], tile)
        x = x - piece
    return tile


@triton.jit
def load_ones(terms, at, ROWS: tl.constexpr):
    """[ROWS, 16]: ones in the columns at, at + 1, at + 2, zeros elsewhere."""
    return tl.load(terms.ones + (32 - at + tl.arange(0, 16))[None, :] + tl.zeros([ROWS, 1], tl.int32))


@triton.jit
def add_bf16x3(x, ones, parts):
    """x [rows, columns] + ones [rows, 16] @ parts [columns, 16]ᵀ."""
    return tl.dot(ones, tl.trans(parts), x)
