"""Functions of both positions (`pair`), a block of queries at a time: what they add is one dense float32 bias of the block, which
the kernels take like an additive mask.

    keys ──▶   ▒▒▒▒▒▒▒▒▒▒╲ . . .     bias [B or 1, H or 1, rows, visible keys], -inf where a key is masked: made by the function
    queries    ▒▒▒▒▒▒▒▒▒▒▒▒▒▒╲ .     itself, whatever it is, added in the kernels, made again for the gradients

Nothing of size [B, H, rows, keys] exists but what the function itself depends on: scores stay in the kernels, and the bias's gradient
is summed over the batch where all rows share the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.mask import Mask
from ...core.plan import Plan
from ...core.positions import Positions
from ...core.torch_modes import apply_function
from .. import blocked, reference
from ..lowering import LoweredPlan, lower_plan
from .arguments import mask_unit, with_whole_rows
from .device import define_operator, is_traced, launch_on
from .launcher import launch
from .schedule import cdiv, next_power_of_2
from .structs import view
from .tiles import load_tile, matmul

NUMBERS = 1 << 26
"""Most entries of the bias of a block: 256 MiB of float32."""
ROWS = 256
"""Fewest queries of a block. Where causality or a window limits the keys, a block has at most a quarter of all queries, as
smaller blocks skip more keys, ..."""
SMALL = 1 << 25
"""... unless the whole bias has at most this many entries: one block has fewer launches."""
KEPT = 1 << 25
"""Entries of all biases up to which they are kept for the backward pass; larger ones are made again."""


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    """q and k are rotated already."""
    mask, heads, q_length, k_length = lowered.mask, q.shape[1], q.shape[2], k.shape[2]
    limits = mask.limits
    block = max(ROWS, NUMBERS // max(1, heads * k_length))
    if limits != (None, None) and heads * q_length * k_length > SMALL:
        block = min(block, max(ROWS, cdiv(q_length, 4)))
    rows = [slice(start, min(start + block, q_length)) for start in range(0, q_length, block)]
    columns = [blocked.visible_keys(one, k_length - q_length, k_length, limits) for one in rows]
    numbers = heads * sum((i.stop - i.start) * (j.stop - j.start) for i, j in zip(rows, columns, strict=True))
    attention = partial(_attention, plan=lowered.plan, mask=mask)
    if len(rows) == 1:
        (visible,) = columns
        out, lse = attention(q, [k[:, :, visible]], [v[:, :, visible]], rows[0], visible)
    else:
        out, lse = blocked.run_blocks(q, k, v, rows, columns, attention, numbers > KEPT)
    return out, lse if lowered.facts.return_lse else None


def run_dense(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, bias: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attention with one bias [1, H or 1, Lq, Lk] in float32 beside causality: a plan's tables over a grid."""
    is_aligned = lowered.mask.limits == (None, 0)
    out, lse = _attend_with(q, k, v, with_whole_rows(bias.float()), lowered.scale, is_aligned)
    return out, lse if lowered.facts.return_lse else None


def _attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], rows: slice, columns: slice, *, plan: Plan, mask: Mask
) -> tuple[Tensor, Tensor]:
    keys, values = (blocked.join(x).to(q.dtype) for x in (k, v))
    offset = plan.positions.k_length - plan.positions.q_length
    is_aligned = mask.limits[1] == 0 and columns.stop == rows.stop + offset  # so that future tiles are skipped
    bias = _dense_bias(q, plan, mask, rows, columns, is_aligned)
    return _attend_with(q, keys, values, bias, plan.scale_of(q.shape[3]), is_aligned)


def _attend_with(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float | Tensor, is_aligned: bool
) -> tuple[Tensor, Tensor]:
    """The kernels, with a dense bias in place of an additive mask, and its gradient. is_aligned: causal, the last query with the last key."""
    from . import run as run_kernels

    own = Plan(Positions(q.shape[2], keys.shape[2]), scale=scale)
    inner = lower_plan(q, keys, values, own, Mask(is_aligned, extra=bias.detach()), 0.0, True)
    out, lse = run_kernels(q, keys, values, inner)
    assert lse is not None
    if bias.requires_grad and torch.is_grad_enabled():
        out, lse = apply_function(_BiasGradient, out, lse, bias, q, keys, values, own.scale, is_aligned)
    return out, lse


def _dense_bias(q: Tensor, plan: Plan, mask: Mask, rows: slice, columns: slice, is_aligned: bool) -> Tensor:
    """[B or 1, H or 1, rows, columns], float32, -inf where a key is masked by more than what is_aligned tells the kernels."""
    bias = reference.pair_block(plan, q.device, rows, columns).float()
    bias = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
    added = mask.added(rows, columns)
    if added is not None:
        bias = bias + added.float()
    if is_aligned and mask.window is None:
        allowed = mask.allowed_by_token(rows, columns)
    else:
        allowed = mask.allowed(plan.positions.q_length, plan.positions.k_length, q.device, rows, columns)
    if allowed is not None:
        bias = bias.masked_fill(~allowed, float("-inf"))
    if torch.compiler.is_compiling():  # the length would become a constant; the operators do it
        return bias
    return with_whole_rows(bias)


# ---- the gradient of the bias ------------------------------------------------------------------------------------------
class _BiasGradient(torch.autograd.Function):
    """(out, lse) as they are; backward, their gradients pass and the bias gets its own."""

    @staticmethod
    def forward(out, lse, bias, q, k, v, scale, is_aligned):
        return out.clone(), lse.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, lse, bias, q, k, v, ctx.scale, ctx.is_aligned = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lse, bias, q, k, v)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        lse, bias, q, k, v = ctx.saved_tensors
        given = torch.zeros_like(q[..., :1]).expand(*q.shape[:3], v.shape[3]) if d_out is None else d_out
        never = torch.where(lse == float("-inf"), float("inf"), lse)  # a fully masked query has no gradient
        run = gradient_op if is_traced(q) else gradient
        of_lse = None if d_lse is None else d_lse.contiguous()
        d_bias = run(given.to(q.dtype), of_lse, never.contiguous(), bias, q, k, v, ctx.scale, ctx.is_aligned)
        return d_out, d_lse, d_bias, None, None, None, None, None


def gradient(
    d_out: Tensor, d_lse: Tensor | None, lse: Tensor, bias: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, is_aligned: bool
) -> Tensor:  # fmt: skip
    """The gradient of a bias [B or 1, H or 1, Lq, Lk]: Σ p (dp - delta) over what shares a number of it.

    delta = Σ_j p dp - d_lse is summed here in float32. The output that the forward pass has rounded would give a delta that is wrong by
    the same amount for all keys of a query, and such an amount is what a smooth bias sums up.
    """
    made, delta = bias.new_empty(bias.shape), torch.empty_like(lse)
    batch, heads, q_length, size = q.shape
    k_length, v_size = v.shape[2], v.shape[3]
    block_d, block_dv = (max(16, next_power_of_2(x)) for x in (size, v_size))
    widest = max(block_d, block_dv)
    block = (64 if widest < 256 else 32) // (2 if q.dtype == torch.float32 else 1)
    rows, columns = cdiv(q_length, block), cdiv(k_length, block)
    views = [view(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k, v, d_out)]
    bias = with_whole_rows(bias)
    unit = mask_unit(bias)
    units = (bias, *(step // unit for step in bias.stride()[:3]))
    options = dict(D=size, DV=v_size, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK=block, CAUSAL=is_aligned, UNIT=unit)
    of_delta, of_bias = (dict(num_warps=warps, num_stages=stages) for warps, stages in WARPS_AND_STAGES[widest])
    sizes = (
        heads, heads // k.shape[1], q_length, k_length, bias.shape[1], heads // bias.shape[1], batch // bias.shape[0], scale
    )  # fmt: skip
    with launch_on(q):
        launch(delta_kernel, batch * heads * rows, *views, lse, d_lse, *units, delta, *sizes, **options, **of_delta)
        tiles = bias.shape[0] * bias.shape[1] * rows * columns
        launch(gradient_kernel, tiles, *views, lse, delta, *units, made, *sizes, **options, **of_bias)
    return made


gradient_op = define_operator("pair_gradient", gradient)


@torch.library.register_fake("posenc::pair_gradient")
def _(d_out, d_lse, lse, bias, q, k, v, scale, is_aligned):
    return bias.new_empty(bias.shape)


@triton.jit
def load_bias(
    bias, bias_b, bias_h, bias_q, b, h, i, j, q_length, k_length, CAUSAL: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """A tile [i, j] of the bias, whose strides count UNIT numbers; -inf where causality hides a key."""
    at = bias + (b * bias_b + h * bias_h) * UNIT + i[:, None].to(tl.int64) * (bias_q * UNIT) + j[None, :]
    added = tl.load(at, mask=(i < q_length)[:, None] & (j // UNIT * UNIT < k_length)[None, :], other=float("-inf"))
    if CAUSAL:
        added = tl.where(j[None, :] - i[:, None] <= k_length - q_length, added, float("-inf"))
    return added


WARPS_AND_STAGES = {**dict.fromkeys((16, 32, 64), ((4, 2), (8, 2))), 128: ((8, 2), (4, 1)), 256: ((8, 1), (8, 1))}
"""Of both kernels, by the head size."""
SIZES = ["bias_b", "bias_h", "bias_q", "heads", "group", "q_length", "k_length", "bias_heads", "shared_heads", "shared_rows"]  # fmt: skip


@triton.jit
def products(
    q, k, v, d_out, b, h, group, m0, n0, q_length, k_length, D: tl.constexpr, DV: tl.constexpr, d, dv,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """q.k and dp = d_out.v of a tile."""
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, BLOCK, True)
    k_tile = load_tile(k.ptr + b * k.b + h // group * k.h, k.l, n0, k_length, d, D, BLOCK, True)
    v_tile = load_tile(v.ptr + b * v.b + h // group * v.h, v.l, n0, k_length, dv, DV, BLOCK, True)
    do_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, m0, q_length, dv, DV, BLOCK, True)
    return matmul(q_tile, tl.trans(k_tile)), matmul(do_tile, tl.trans(v_tile))


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    q, k, v, d_out, lse, d_lse, bias, bias_b, bias_h, bias_q, delta, heads, group, q_length, k_length, bias_heads, shared_heads, shared_rows, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """delta of a block of queries of one head."""
    m_blocks = tl.cdiv(q_length, BLOCK)
    pid = tl.program_id(0)
    m0 = pid % m_blocks * BLOCK
    bh = (pid // m_blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = m0 + tl.arange(0, BLOCK)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row = bh * q_length + i
    lse_i = tl.load(lse + row, mask=i < q_length, other=float("inf"))
    total = tl.zeros([BLOCK], tl.float32)
    end = k_length
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(m0 + BLOCK + k_length - q_length, 0))
    for n in range(tl.cdiv(end, BLOCK)):
        n0 = n * BLOCK
        j = n0 + tl.arange(0, BLOCK)
        added = load_bias(
            bias, bias_b, bias_h, bias_q, b // shared_rows, h // shared_heads, i, j, q_length, k_length, CAUSAL, UNIT
        )
        s, dp = products(q, k, v, d_out, b, h, group, m0, n0, q_length, k_length, D, DV, d, dv, BLOCK)
        total += tl.sum(tl.exp(s * scale + added - lse_i[:, None]) * dp, 1)
    if d_lse is not None:
        total -= tl.load(d_lse + row, mask=i < q_length, other=0.0)
    tl.store(delta + row, total, mask=i < q_length)


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    q, k, v, d_out, lse, delta, bias, bias_b, bias_h, bias_q, made, heads, group, q_length, k_length, bias_heads, shared_heads, shared_rows, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One program for each tile of the bias: it sums over the rows of the batch and the heads that share the tile."""
    m_blocks, n_blocks = tl.cdiv(q_length, BLOCK), tl.cdiv(k_length, BLOCK)
    pid = tl.program_id(0)
    n0 = pid % n_blocks * BLOCK
    m0 = pid // n_blocks % m_blocks * BLOCK
    plane = (pid // n_blocks // m_blocks).to(tl.int64)
    own_b, own_h = plane // bias_heads, plane % bias_heads
    i, j = m0 + tl.arange(0, BLOCK), n0 + tl.arange(0, BLOCK)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    added = load_bias(bias, bias_b, bias_h, bias_q, own_b, own_h, i, j, q_length, k_length, CAUSAL, UNIT)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    sharing = shared_rows * shared_heads
    if tl.max(added) == float("-inf"):  # the tile is fully masked
        sharing = 0
    for t in range(sharing):
        b, h = own_b * shared_rows + t // shared_heads, own_h * shared_heads + t % shared_heads
        row = (b * heads + h) * q_length + i
        lse_i = tl.load(lse + row, mask=i < q_length, other=float("inf"))
        delta_i = tl.load(delta + row, mask=i < q_length, other=0.0)
        s, dp = products(q, k, v, d_out, b, h, group, m0, n0, q_length, k_length, D, DV, d, dv, BLOCK)
        total += tl.exp(s * scale + added - lse_i[:, None]) * (dp - delta_i[:, None])
    at = (plane * q_length + i.to(tl.int64)[:, None]) * k_length + j[None, :]
    tl.store(made + at, total, mask=(i < q_length)[:, None] & (j < k_length)[None, :])
