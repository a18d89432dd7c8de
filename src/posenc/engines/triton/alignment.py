"""Head sizes and strides of half-precision tensors are multiples of 16 numbers before a kernel reads them.

Triton copies aligned rows to shared memory asynchronously. Others pass through registers, and on Hopper the compiler (Triton
3.6) may then order the steps as on the left, where the tensor cores may read a tile before a thread's stores are visible to
them; head sizes of 33 and 8 gave wrong outputs in rare calls:

    store tile, barrier, fence, product           needed: store tile, fence, barrier, product

Such tensors are copied, with zeros for the missing columns. This also lets their loads be pipelined.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .arguments import Inputs

UNIT = 16  # numbers: what Triton knows of an integer argument is whether 16 divides it


def is_padded(dtype: torch.dtype, size: int, v_size: int) -> bool:
    """Whether heads of these sizes get more columns."""
    return dtype != torch.float32 and bool(size % UNIT or v_size % UNIT)


def pad_heads(x: Inputs) -> Inputs:
    """The same call with head sizes that are multiples of UNIT."""
    if not is_padded(x.q.dtype, x.q.shape[3], x.v.shape[3]):
        return x
    table = x.table if x.table is None or x.states is not None else _pad(x.table)
    key_table, value = (None if one is None else _pad(one) for one in (x.key_table, x.value))
    return x._replace(q=_pad(x.q), k=_pad(x.k), v=_pad(x.v), table=table, key_table=key_table, value=value)


def _pad(x: Tensor) -> Tensor:
    return x if x.shape[-1] % UNIT == 0 else pad(x, (0, -x.shape[-1] % UNIT))


def align_rows(x: Tensor) -> Tensor:
    """x, or a copy whose rows are contiguous and begin at aligned addresses."""
    batch, head, row, column = x.stride()
    if column == 1 and (x.dtype == torch.float32 or (not (batch | head | row) % UNIT and not x.data_ptr() % 16)):
        return x
    return x.clone(memory_format=torch.contiguous_format)
