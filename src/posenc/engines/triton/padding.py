"""Bounds of the real keys of each batch row, and of each token's document, in one launch instead of a dozen small PyTorch operations.

    key_mask     0 0 1 1 1 0 1 0      ->   first 2, end 7, contiguous 0
                 1 1 1 1 1 0 0 0      ->   first 0, end 5, contiguous 1
    documents    3 3 3 5 5 5 5 8      ->   0 3 of the first three tokens, 3 7, 7 8

Tiles outside first .. end are skipped; if the keys between are contiguous, tiles inside need no mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launch


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


@triton.jit
def first_from(ids, length, steps, own, AFTER: tl.constexpr):
    """Where ascending ids reach own; AFTER: where they exceed it."""
    begin, end = tl.zeros_like(own).to(tl.int32), tl.zeros_like(own).to(tl.int32) + length
    for _ in range(steps):
        is_open = begin < end
        middle = (begin + end) // 2
        x = tl.load(ids + middle, mask=is_open, other=0).to(tl.int64)
        is_before = is_open & ((x <= own) if AFTER else (x < own))
        end = tl.where(is_open & (is_before == 0), middle, end)
        begin = tl.where(is_before, middle + 1, begin)
    return begin


@triton.jit(do_not_specialize=["own_row", "own_length", "row", "length", "steps"])
def document_bounds_kernel(own, own_row, own_length, other, row, length, bounds, steps, BLOCK: tl.constexpr):
    blocks = tl.cdiv(own_length, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ids = other + b * row
    falls = tl.zeros([BLOCK], tl.int32)
    for j0 in range(0, length - 1, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        valid = j < length - 1
        falls += (tl.load(ids + j, mask=valid, other=0) > tl.load(ids + j + 1, mask=valid, other=0)).to(tl.int32)
    ascends = tl.sum(falls, 0) == 0
    own_ids = tl.load(own + b * own_row + i, mask=i < own_length, other=0).to(tl.int64)
    at = bounds + (b * own_length + i) * 2
    tl.store(at, tl.where(ascends, first_from(ids, length, steps, own_ids, False), -1), mask=i < own_length)
    tl.store(at + 1, tl.where(ascends, first_from(ids, length, steps, own_ids, True), length), mask=i < own_length)


def find_documents(launch: Launch, own: Tensor, other: Tensor) -> Tensor:
    """int32 [B or 1, L, 2]: where each token's document begins and ends on the other side, if ids never decrease there, as in packed
    sequences; else -1 ("unknown") and the length. Ids: [B or 1, L], contiguous."""
    rows, own_length, length = max(own.shape[0], other.shape[0]), own.shape[1], other.shape[1]
    bounds = own.new_empty(rows, own_length, 2, dtype=torch.int32)
    if bounds.numel():
        own_row, row = (0 if ids.shape[0] == 1 else ids.shape[1] for ids in (own, other))
        launch(
            document_bounds_kernel, rows * -(-own_length // 256), own, own_row, own_length, other, row, length, bounds, length.bit_length(), BLOCK=256
        )  # fmt: skip
    return bounds


def find_bounds(launch: Launch, key_mask: Tensor, batch: int) -> Tensor:
    """uint8 [batch or 1, L] -> int32 [batch, 3]: the first real key, the last + 1, whether all keys between are real."""
    key_mask = key_mask.contiguous()
    bounds = key_mask.new_empty(batch, 3, dtype=torch.int32)
    if batch:
        row = 0 if key_mask.shape[0] == 1 else key_mask.shape[1]
        launch(key_bounds_kernel, batch, key_mask, row, key_mask.shape[1], bounds, BLOCK=1024)
    return bounds
