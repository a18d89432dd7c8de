"""What the kernels share. Those of stick-breaking and of contextual counts take a block of queries and walk over the keys from right to
left; they add dK and dV to float32 memory by atomics, in no fixed order."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..engines.triton.tiles import load_tile

NEG_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)


class Tokens(NamedTuple):
    """Masks of keys, None where there are none; *_row: strides over B."""

    real: Any  # uint8 [B or 1, Lk]: padding is 0
    keys_row: Any
    ids: Any  # int64 [B or 1, Lk]: documents
    doc_k_row: Any


@triton.jit
def begin(q, k, v, heads, group, q_length, k_length, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
          M: tl.constexpr):  # fmt: skip
    """This program's batch row, head and queries (the longest walks begin first):
    b, h, the first query m0, slots i of queries among the keys, whether they exist, their numbers in [B, H, Lq], channels, queries, and
    pointers to the head's keys and values."""
    blocks = tl.cdiv(q_length, M)
    pid = tl.program_id(0)
    m0 = (blocks - 1 - pid % blocks) * M
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    row = m0 + tl.arange(0, M)
    i, inside = k_length - q_length + row, row < q_length
    at = bh * q_length + tl.minimum(row, q_length - 1)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, M, True)
    k_ptr, v_ptr = k.ptr + b * k.b + h // group * k.h, v.ptr + b * v.b + h // group * v.h
    return b, h, m0, i, inside, at, d, dv, q_tile, k_ptr, v_ptr


@triton.jit
def visible_keys(tokens, b, i, j, k_length, STRICT: tl.constexpr):
    """[queries, keys]; i: slots of queries among the keys."""
    visible = (j[None, :] + STRICT <= i[:, None]) & (i < k_length)[:, None]
    if tokens.real is not None:
        visible = visible & (tl.load(tokens.real + b * tokens.keys_row + j, mask=j < k_length, other=0) != 0)[None, :]
    if tokens.ids is not None:
        of_q = tl.load(tokens.ids + b * tokens.doc_k_row + i, mask=i < k_length, other=0)
        of_k = tl.load(tokens.ids + b * tokens.doc_k_row + j, mask=j < k_length, other=0)
        visible = visible & (of_q[:, None] == of_k[None, :])
    return visible


@triton.jit
def last_tile(stop, k_length, N: tl.constexpr):
    """The first key of the last tile that has a key before `stop`."""
    return tl.cdiv(tl.minimum(stop, k_length), N) * N - N


@triton.jit
def accumulate(s, v_tile, m_i, l_i, acc, PRECISION: tl.constexpr):
    """The online softmax. PRECISION: of products of float32."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    top = tl.where(m_new == NEG_INF, 0.0, m_new)
    weights = tl.exp2((s - top[:, None]) * LOG2E)
    share = tl.exp2((m_i - top) * LOG2E)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * share[:, None], input_precision=PRECISION)
    return m_new, l_i * share + tl.sum(weights, 1), acc


@triton.jit
def store_rows(x, at, inside, d, D: tl.constexpr, value):
    """value [queries, d] into the rows `at` of contiguous memory [.., D]."""
    tl.store(x + at[:, None] * D + d[None, :], value.to(x.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def add_rows(x, first, j, length, d, D: tl.constexpr, value):
    """Add value [keys, d] to the rows first + j of contiguous float32 memory [.., D]."""
    at = x + (first + j)[:, None] * D + d[None, :]
    tl.atomic_add(at, value, mask=(j < length)[:, None] & (d < D)[None, :], sem="relaxed")
