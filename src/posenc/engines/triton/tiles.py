"""Tiles of [L, D] matrices: load, store, multiply."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, acc=None):
    """a @ b (+ acc) in float32; float32 inputs are multiplied exactly, not as TF32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def online_softmax(qk, m_i, l_i, KEYS: tl.constexpr):
    """p = exp2(qk - m), the factor alpha of earlier sums, and the running maximum m_i and sum l_i with this tile. KEYS: the axis of its keys."""
    m_new = tl.maximum(m_i, tl.max(qk, KEYS))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(qk - tl.expand_dims(base, KEYS))
    alpha = tl.exp2(m_i - base)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, KEYS)


@triton.jit
def padded(length):
    """The stride of per-query float32 vectors: a multiple of 64, so that their loads are wide."""
    return tl.cdiv(length, 64) * 64


@triton.jit
def load_tile(ptr, stride, start, length, d, D: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """Rows start .. start + BLOCK of a [L, D] matrix, zeros outside. CHECK=False: all rows exist."""
    rows = tl.arange(0, BLOCK)
    at = ptr + start.to(tl.int64) * stride + rows[:, None] * stride + d[None, :]
    EVEN: tl.constexpr = d.shape[0] == D
    if CHECK:
        if EVEN:
            return tl.load(at, mask=(start + rows)[:, None] < length, other=0.0)
        else:
            return tl.load(at, mask=((start + rows)[:, None] < length) & (d[None, :] < D), other=0.0)
    else:
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def store_tile(x, b, h, rows, d, D: tl.constexpr, value, valid, ACCUMULATE: tl.constexpr):
    """Store `value` [rows, d] into the View x, or add it to what is there."""
    at = x.ptr + b * x.b + h * x.h + rows.to(tl.int64)[:, None] * x.l + d[None, :]
    inside = valid[:, None] & (d[None, :] < D)
    if ACCUMULATE:
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, value.to(x.ptr.dtype.element_ty), mask=inside)
