"""What the kernels of stick-breaking and of contextual counts share: both walk over the keys from right to left."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_keys(real, ids, b, i, j, k_length, real_row, ids_row, STRICT: tl.constexpr):
    """[queries, keys]; i: slots of queries among the keys."""
    visible = (j[None, :] + STRICT <= i[:, None]) & (i < k_length)[:, None]
    if real is not None:
        visible = visible & (tl.load(real + b * real_row + j, mask=j < k_length, other=0) != 0)[None, :]
    if ids is not None:
        of_q = tl.load(ids + b * ids_row + i, mask=i < k_length, other=0)
        of_k = tl.load(ids + b * ids_row + j, mask=j < k_length, other=0)
        visible = visible & (of_q[:, None] == of_k[None, :])
    return visible


@triton.jit
def last_tile(stop, k_length, N: tl.constexpr):
    """The first key of the last tile that has a key before `stop`."""
    return tl.cdiv(tl.minimum(stop, k_length), N) * N - N


@triton.jit
def add_rows(x, first, j, length, d, D: tl.constexpr, value):
    """Add value [keys, d] to the rows first + j of contiguous float32 memory [.., D], by atomics."""
    at = x + (first + j)[:, None] * D + d[None, :]
    tl.atomic_add(at, value, mask=(j < length)[:, None] & (d < D)[None, :], sem="relaxed")
