"""Bounds of the real keys of each batch row, in one launch instead of a dozen small PyTorch operations.

    key_mask     0 0 1 1 1 0 1 0      ->   first 2, end 7, contiguous 0
                 1 1 1 1 1 0 0 0      ->   first 0, end 5, contiguous 1

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


def find_bounds(launch: Launch, key_mask: Tensor, batch: int) -> Tensor:
    """uint8 [batch or 1, L] -> int32 [batch, 3]: the first real key, the last + 1, whether all keys between are real."""
    key_mask = key_mask.contiguous()
    bounds = key_mask.new_empty(batch, 3, dtype=torch.int32)
    if batch:
        row = 0 if key_mask.shape[0] == 1 else key_mask.shape[1]
        launch(key_bounds_kernel, batch, key_mask, row, key_mask.shape[1], bounds, BLOCK=1024)
    return bounds
