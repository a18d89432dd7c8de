"""Bounds of the real keys of each batch row and of each token's document, in one launch each instead of dozens of small PyTorch operations.

    key_mask     0 0 1 1 1 0 1 0      ->   first 2, end 7, contiguous 0
                 1 1 1 1 1 0 0 0      ->   first 0, end 5, contiguous 1

Tiles outside first .. end are skipped; if the keys between are contiguous, tiles inside need no mask.

    documents of keys   3 3 3 5 5     ->   a query of document 3: 0, 3; of 5: 3, 5; of 4: 3, 3
                        3 5 3 5 5     ->   -1, 5 for every query: ids that decrease say nothing
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launch
from .schedule import cdiv


@triton.jit(do_not_specialize=["row", "length"])
def key_bounds_kernel(key_mask, row, length, bounds, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.int32) + length
    last = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for j0 in range(0, length, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        real = tl.load(key_mask + b * row + j, mask=j < length, other=0) != 0
        first = tl.minimum(first, tl.where(real, j, length))
        last = tl.maximum(last, tl.where(real, j + 1, 0))
        count += real.to(tl.int32)
    begin, end = tl.min(first, 0), tl.max(last, 0)
    tl.store(bounds + 3 * b, begin)
    tl.store(bounds + 3 * b + 1, end)
    tl.store(bounds + 3 * b + 2, (tl.sum(count, 0) == end - begin).to(tl.int32))


def find_bounds(launch: Launch, key_mask: Tensor, batch: int) -> Tensor:
    """uint8 [batch or 1, L] -> int32 [batch, 3]: the first real key, the last + 1, whether all keys between are real."""
    key_mask = key_mask.contiguous()
    bounds = key_mask.new_empty(batch, 3, dtype=torch.int32)
    if batch:
        row = 0 if key_mask.shape[0] == 1 else key_mask.shape[1]
        launch(key_bounds_kernel, batch, key_mask, row, key_mask.shape[1], bounds, BLOCK=1024)
    return bounds


@triton.jit
def _find_document(own, own_row, other, other_row, out, own_length, other_length, b, block, BLOCK: tl.constexpr):
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(own + b * own_row + i, mask=i < own_length, other=0)
    y = other + b * other_row
    falls = tl.zeros([BLOCK], tl.int32)
    for j0 in range(1, other_length, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        before = tl.load(y + j - 1, mask=j < other_length, other=0)
        falls += (before > tl.load(y + j, mask=j < other_length, other=0)).to(tl.int32)
    is_known = tl.sum(falls, 0) == 0
    first, end = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)  # ids below x, and up to x, lie before them
    first_most, end_most = first + other_length, end + other_length
    size = other_length
    while size > 0:  # halved in each step
        middle = (first + first_most) // 2
        is_below = (first < first_most) & (tl.load(y + middle, mask=first < first_most, other=0) < x)
        first_most = tl.where(is_below, first_most, tl.minimum(middle, first_most))
        first = tl.where(is_below, middle + 1, first)
        middle = (end + end_most) // 2
        is_below = (end < end_most) & (tl.load(y + middle, mask=end < end_most, other=0) <= x)
        end_most = tl.where(is_below, end_most, tl.minimum(middle, end_most))
        end = tl.where(is_below, middle + 1, end)
        size = size // 2
    at = out + (b * own_length + i) * 2
    tl.store(at, tl.where(is_known, first, -1), mask=i < own_length)
    tl.store(at + 1, tl.where(is_known, end, other_length), mask=i < own_length)


@triton.jit(do_not_specialize=["q_row", "k_row", "q_length", "k_length", "q_blocks", "k_blocks"])
def document_bounds_kernel(
    q_ids, q_row, k_ids, k_row, q_keys, k_queries, q_length, k_length, q_blocks, k_blocks, BLOCK: tl.constexpr
):
    """One program for each batch row and block of queries, or of keys."""
    pid = tl.program_id(0)
    b, block = (pid // (q_blocks + k_blocks)).to(tl.int64), pid % (q_blocks + k_blocks)
    if block < q_blocks:
        _find_document(q_ids, q_row, k_ids, k_row, q_keys, q_length, k_length, b, block, BLOCK)
    else:
        _find_document(k_ids, k_row, q_ids, q_row, k_queries, k_length, q_length, b, block - q_blocks, BLOCK)


def find_documents(launch: Launch, q_ids: Tensor, k_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous ids [B or 1, Lq], [B or 1, Lk] -> int32 [B or 1, Lq, 2], [B or 1, Lk, 2]: where each query's document begins and ends among
    the keys, if their ids never decrease, else -1 and Lk; and the same for keys."""
    rows, q_length, k_length = max(q_ids.shape[0], k_ids.shape[0]), q_ids.shape[1], k_ids.shape[1]
    q_keys, k_queries = (q_ids.new_empty(rows, length, 2, dtype=torch.int32) for length in (q_length, k_length))
    block = 256
    blocks = cdiv(q_length, block), cdiv(k_length, block)
    if rows * sum(blocks):
        q_row, k_row = (0 if ids.shape[0] == 1 else ids.shape[1] for ids in (q_ids, k_ids))
        launch(
            document_bounds_kernel, rows * sum(blocks), q_ids, q_row, k_ids, k_row, q_keys, k_queries, q_length, k_length, *blocks,
            BLOCK=block,
        )  # fmt: skip
    return q_keys, k_queries
