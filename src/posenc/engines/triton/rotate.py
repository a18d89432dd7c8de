"""Turning pairs of channels on a GPU: one read and one write of x, the phases loaded once for several heads.

The gradient is the same kernel with the angle turned back, so nothing but the phases is kept for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["length", "heads", "groups"])
def turn(
    x, out, cos, sin, x_b, x_h, x_l, out_b, out_h, out_l, c_b, c_l, length, heads, groups,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BLOCK positions of HEADS heads. R: rotated pairs, D: channels."""
    blocks = tl.cdiv(length, BLOCK)
    block = tl.program_id(0) % blocks
    group = (tl.program_id(0) // blocks) % groups
    b = (tl.program_id(0) // blocks // groups).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    place = rows.to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK_R)[None, :]
    inside = (rows < length)[:, None]
    ok = inside & (pair < R)
    c = tl.load(cos + b * c_b + place * c_l + pair, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + b * c_b + place * c_l + pair, mask=ok, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    for step in range(HEADS):
        h = group * HEADS + step
        end = tl.where(h < heads, D, 0)  # the last group may have fewer heads: then no channel is real
        here = ok & (pair < end)
        source = x + b * x_b + h.to(tl.int64) * x_h + place * x_l
        target = out + b * out_b + h.to(tl.int64) * out_h + place * out_l
        if INTERLEAVED:
            both = tl.arange(0, 2 * BLOCK_R)[None, :]
            wide = inside & (both < tl.minimum(end, 2 * R))
            value = tl.load(source + both, mask=wide, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(value, [BLOCK, BLOCK_R, 2]))
            turned = tl.join(first * c - second * s, first * s + second * c)
            tl.store(target + both, tl.reshape(turned, [BLOCK, 2 * BLOCK_R]).to(out.dtype.element_ty), mask=wide)
        else:
            first = tl.load(source + pair, mask=here, other=0.0).to(tl.float32)
            second = tl.load(source + R + pair, mask=here, other=0.0).to(tl.float32)
            tl.store(target + pair, (first * c - second * s).to(out.dtype.element_ty), mask=here)
            tl.store(target + R + pair, (first * s + second * c).to(out.dtype.element_ty), mask=here)
        if D > 2 * R:
            rest = 2 * R + tl.arange(0, BLOCK_REST)[None, :]
            still = inside & (rest < end)
            tl.store(target + rest, tl.load(source + rest, mask=still), mask=still)


@torch.library.custom_op("posenc::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """x [B, H, L, D] with its first 2 R channels turned by the phases [B or 1, L, R], or turned back."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, length, size = x.shape
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    pairs = cos.shape[-1]
    block_r = triton.next_power_of_2(pairs)
    block, each = 16, min(heads, 2)  # measured: docs/triton-log.md
    groups = triton.cdiv(heads, each)
    with torch.cuda.device(x.device) if x.is_cuda else torch.no_grad():
        turn[(triton.cdiv(length, block) * groups * batch,)](
            x, out, cos, sin, *x.stride()[:3], *out.stride()[:3],
            0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1), length, heads, groups,
            pairs, size, block_r, triton.next_power_of_2(max(1, size - 2 * pairs)), block, each, interleaved, back,
            num_warps=4,
        )  # fmt: skip
    return out


@rotate.register_fake
def _(x, cos, sin, interleaved, back):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    return rotate(grad, cos, sin, ctx.interleaved, not ctx.back), None, None, None, None


rotate.register_autograd(_backward, setup_context=_setup)
