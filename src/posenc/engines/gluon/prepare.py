"""What the Gluon kernel reads beside the tensors, made by one launch: which tiles each block visits, the
padded table, padding as bits."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.masking import add_start, key_tiles


@triton.jit(
    do_not_specialize=[
        "blocks", "count", "bias_row", "bias_lo", "bias_hi", "heads", "first", "width", "scale", "q_length", "k_length", "offset", "left",
        "right", "lo", "hi",
    ]
)  # fmt: skip
def prepare(
    tiles, blocks, count, positions, masks, q_length, k_length, offset, left, right, lo, hi,
    bias, bias_row, bias_lo, bias_hi, table, heads, first, width, scale, bits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs each split a block of queries, the next `heads` each pad a row of the bias, the others each pack
    the padding of a tile of keys."""
    pid = tl.program_id(0)
    if pid < blocks:
        split_block(
            pid, tiles, positions, masks, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N
        )
    elif pid < blocks + heads:
        if bias is not None:
            pad_bias(pid - blocks, bias, bias_row, bias_lo, bias_hi, table, first, width, scale, BLOCK)
    elif bits is not None:
        pack_padding(pid - blocks - heads, masks, bits, k_length, BLOCK_N)


@triton.jit
def split_block(
    at, tiles, positions, masks, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """tiles [.., count, 9]: kernel.load_tiles. A block that sees no key visits the first tile, in which all pairs are masked."""
    b, m0 = at // count, at % count * BLOCK_M
    offset = add_start(positions, offset, b)
    first, left0, left1, right0, right1, last, clear0, clear1 = key_tiles(
        m0, b, masks, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N, True
    )
    some = tl.where(last > first, 1, 0)
    to = tiles + at * 9
    tl.store(to, first * some)
    tl.store(to + 1, left0 * some)
    tl.store(to + 2, left1 * some)
    tl.store(to + 3, right0 * some)
    tl.store(to + 4, right1 * some)
    tl.store(to + 5, tl.maximum(last * some, 1))
    tl.store(to + 6, clear0)
    tl.store(to + 7, clear1 * some)
    tl.store(to + 8, offset)


@triton.jit
def pad_bias(h, bias, bias_row, bias_lo, bias_hi, table, first, width, scale, BLOCK: tl.constexpr):
    """table [heads, width]: by distance from `first` on, divided by the scale."""
    h = h.to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        r = tl.minimum(tl.maximum(first + at, bias_lo), bias_hi)
        tl.store(table + h * width + at, tl.load(bias + h * bias_row + (r - bias_lo)) / scale, mask=at < width)


@triton.jit
def pack_padding(at, masks, bits, k_length, BLOCK_N: tl.constexpr):
    """bits int32 [.., tiles of keys, 8]: bit e of number c is whether key 8 e + c of the tile is real."""
    count = tl.cdiv(k_length, BLOCK_N)
    e, c = tl.arange(0, BLOCK_N // 8)[:, None], tl.arange(0, 8)[None, :]
    j = at % count * BLOCK_N + 8 * e + c
    real = tl.load(masks.keys + (at // count).to(tl.int64) * masks.keys_row + j, mask=j < k_length, other=0) != 0
    tl.store(bits + at * 8 + tl.arange(0, 8), tl.sum(real.to(tl.int32) << e, 0))
