"""Where each row's real keys begin and end: one launch, instead of a dozen small operations of PyTorch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .functions import is_traced, launch_on


@triton.jit(do_not_specialize=["row", "length"])
def spans_kernel(keys, row, length, spans, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.int32) + length
    last = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for j0 in range(0, length, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        real = tl.load(keys + b * row + j, mask=j < length, other=0) != 0
        first = tl.minimum(first, tl.where(real, j, length))
        last = tl.maximum(last, tl.where(real, j + 1, 0))
        count += real.to(tl.int32)
    begin, end = tl.min(first, 0), tl.max(last, 0)
    tl.store(spans + 3 * b, begin)
    tl.store(spans + 3 * b + 1, end)
    tl.store(spans + 3 * b + 2, (tl.sum(count, 0) == end - begin).to(tl.int32))


def _spans(keys: Tensor, batch: int) -> Tensor:
    """keys: uint8 [batch or 1, L] -> int32 [batch, 3]: the first real key, the last + 1, whether all between are real."""
    keys = keys.contiguous()
    spans = keys.new_empty(batch, 3, dtype=torch.int32)
    if batch:
        with launch_on(keys):
            spans_kernel[(batch,)](keys, 0 if keys.shape[0] == 1 else keys.shape[1], keys.shape[1], spans, BLOCK=1024)
    return spans


spans_op = torch.library.custom_op("posenc::spans", _spans, mutates_args=())


@spans_op.register_fake
def _(keys, batch):
    return keys.new_empty(batch, 3, dtype=torch.int32)


def spans_of(keys: Tensor, batch: int) -> Tensor:
    return (spans_op if is_traced(keys) else _spans)(keys, batch)
