"""The formula as written, dense, in float32 or better: the oracle of every other engine. It supports every plan.

It reads the raw plan and rotates by the plain formula, so it depends on neither the lowering nor a rotation kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..core.dropout import as_dropout
from ..core.mask import Mask
from ..core.plan import Plan
from ..core.plan_checks import holds_nan
from ..core.positions import Positions
from ..core.rotation import rotate_by_formula
from ..core.torch_modes import is_exporting
from .lowering import LoweredPlan

reads_raw_plan = True
ALL = slice(None)
INF, NAN = float("inf"), float("nan")


def supports(lowered: LoweredPlan) -> str | None:
    return None


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor]:
    return attention(*_shift_and_rotate(q, k, v, lowered.plan), lowered.plan, lowered.mask, lowered.dropout)


def scores(q: Tensor, k: Tensor, lowered: LoweredPlan) -> Tensor:
    """The masked logits, [B, H, Lq, Lk]."""
    q, k, _ = _shift_and_rotate(q, k, k, lowered.plan)
    return masked(logits(q, k, lowered.plan), lowered.mask)


def _shift_and_rotate(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    if plan.shift is not None:
        q = q + plan.shift.to(q.dtype)[:, None, :]
    rotation = plan.rotate
    if rotation is not None:
        if rotation.polar:
            q, k = (torch.cat((x, torch.zeros_like(x)), -1) for x in (softplus(q), softplus(k)))
        if rotation.q is not None:
            q = rotate_by_formula(q, *rotation.q, rotation.layout)
        if rotation.k is not None:
            k = rotate_by_formula(k, *rotation.k, rotation.layout)
            v = rotate_by_formula(v, *rotation.k, rotation.layout) if rotation.values else v
    if plan.cosine is not None:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in (q, k))
        q = q * plan.cosine.to(q.dtype)[:, None, None]
    if plan.append is not None:
        q, k = (torch.cat((x, more.to(x.dtype).expand(*x.shape[:3], -1)), -1) for x, more in zip((q, k), plan.append))
    return q, k, v


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float, rows: slice = ALL, columns: slice = ALL
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of rotated q, k, v. q holds the query slots `rows`, k and v the key slots `columns`; plan and
    mask are for all of them.
    """
    positions = plan.positions
    s = masked(logits(q, k, plan, rows, columns), mask, rows, columns, positions)
    if plan.sinks is not None:  # one more column, which has no value
        s = torch.cat((s, plan.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)), -1)
    probabilities, lse = softmax_lse(s)
    if plan.sinks is not None:
        probabilities = probabilities[..., :-1]
    if dropout > 0.0:
        probabilities = drop(probabilities, dropout, rows, columns)
    values = repeat_heads(v, q.shape[1]).to(probabilities.dtype)
    sizes = positions.q_length, positions.k_length
    out = weigh_values(probabilities, values, lambda: mask.allowed(*sizes, q.device, rows, columns))
    for lookup in plan.lookups:
        if lookup.add_value is not None:
            table = lookup.add_value.to(probabilities.dtype)
            at = _expand_rows(lookup.index.of(positions, q.device, rows, columns), probabilities)
            by_row = probabilities.new_zeros(*probabilities.shape[:3], table.shape[1]).scatter_add(3, at, probabilities)
            out = out + by_row @ table
    return out.to(q.dtype), lse


def drop(probabilities: Tensor, dropout: float, rows: slice, columns: slice) -> Tensor:
    """Dropout on `rows` and `columns` of the probabilities. The mask depends on the slots of a pair, not on the block that computes it;
    compiled code and torch.func use PyTorch's own random numbers instead."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return torch.nn.functional.dropout(probabilities, dropout)
    batch, heads, count, keys = probabilities.shape
    draw = as_dropout(dropout, probabilities.device)
    first, begin = rows.start or 0, columns.start or 0
    slots = range(first, first + count), range(begin, begin + keys)
    return probabilities * draw.factors(batch, heads, *slots, probabilities.dtype)


def logits(q: Tensor, k: Tensor, plan: Plan, rows: slice = ALL, columns: slice = ALL) -> Tensor:
    """s [B, H, Lq, Lk], before any mask, in float32 or better."""
    precision = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(precision), repeat_heads(k, q.shape[1]).to(precision)
    positions, device = plan.positions, q.device
    s = q @ k.transpose(-1, -2)
    for lookup in plan.lookups:
        at = None
        if lookup.dot_query is not None:
            at = _expand_rows(lookup.index.of(positions, device, rows, columns), s)
            states = q if lookup.states is None else lookup.states[:, :, rows].to(precision)
            if lookup.query_shift is not None:
                states = states + lookup.query_shift.to(precision)[:, None, :]
            products = states @ lookup.dot_query.to(precision).transpose(-1, -2)
            s = s + products.expand(*s.shape[:3], lookup.index.n).gather(3, at)
        if lookup.dot_key is not None:
            at = _expand_rows(lookup.index.of(positions, device, rows, columns), s) if at is None else at
            s = s + (lookup.dot_key.to(precision) @ k.transpose(-1, -2)).gather(2, at)
    scale = plan.scale_of(q.shape[-1])
    if isinstance(scale, Tensor):
        scale = scale.to(precision)
        scale = scale[..., rows, :] if scale.dim() > 1 and scale.shape[-2] > 1 else scale
    s = s * scale
    for lookup in plan.lookups:
        if lookup.bias is not None:
            bias = lookup.bias.to(precision)[:, lookup.index.of(positions, device, rows, columns)]  # [H, (B,) Lq, Lk]
            s = s + (bias if bias.dim() == 3 else bias.transpose(0, 1))
    if plan.slopes is not None:
        distance = positions.distance(device, rows=rows, columns=columns).abs().to(precision)
        distance = distance if distance.dim() == 2 else distance[:, None]
        s = s - plan.slopes.to(precision)[:, None, None] * distance
    decay = plan.decay_in(precision)
    if decay is not None:
        c_q, c_k = decay
        s = s + (c_q[..., rows, None] - c_k[..., None, columns]).to(precision)
    if plan.pair is not None:
        s = s + pair_block(plan, device, rows, columns).to(precision)
    return s


def pair_block(plan: Plan, device: torch.device, rows: slice, columns: slice) -> Tensor:
    """What the plan's function of both positions adds to a block."""
    positions, pair = plan.positions, plan.pair
    assert pair is not None
    if plan.pair_axes:
        return pair(positions.every_axis(0, device)[..., rows, :], positions.every_axis(1, device)[..., columns, :])
    return pair(positions.q_positions(device)[..., rows], positions.k_positions(device)[..., columns])


def masked(
    s: Tensor, mask: Mask, rows: slice = ALL, columns: slice = ALL, positions: Positions | None = None
) -> Tensor:
    """s plus the additive mask, -inf where a key is masked. s holds `rows` and `columns` of the scores for `positions`."""
    added = mask.added(rows, columns)
    if added is not None:
        s = s + added.to(s.dtype)
    lengths = (s.shape[2], s.shape[3]) if positions is None else (positions.q_length, positions.k_length)
    allowed = mask.allowed(*lengths, s.device, rows, columns)
    return s if allowed is None else s.masked_fill(~allowed, float("-inf"))


def softmax_lse(s: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and the log-sum-exp. A fully masked row gives zeros and -inf, and zero gradients."""
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], float("-inf"))
    m_i = s.detach().amax(-1, keepdim=True)
    m_i = m_i.masked_fill(m_i == float("-inf"), 0.0)
    probabilities = (s - m_i).exp()
    l_i = probabilities.sum(-1, keepdim=True)
    is_fully_masked = l_i == 0.0
    l_i = l_i.masked_fill(is_fully_masked, 1.0)
    return probabilities / l_i, (l_i.log() + m_i).masked_fill(is_fully_masked, float("-inf")).squeeze(-1)


def weigh_values(probabilities: Tensor, v: Tensor, allowed: Callable[[], Tensor | None]) -> Tensor:
    """probabilities [.., Lq, Lk] v [.., Lk, D]. A masked value does not count, even if it is NaN or inf."""
    out = probabilities @ v
    # values are read on a CPU only: elsewhere it would cost a synchronisation
    if not out.is_cpu or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return out
    if not holds_nan(out):
        return out
    visible = allowed()  # 0 times NaN is NaN, so values that are not finite are counted instead of multiplied
    if visible is None:
        return out
    out = probabilities @ v.masked_fill(~v.isfinite(), 0.0)
    for fault, held in ((INF, v == INF), (-INF, v == -INF), (NAN, v.isnan())):
        count = visible.to(v.dtype) @ held.to(v.dtype)
        out = out + torch.zeros_like(count).masked_fill_(count > 0, fault)
    return out


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key heads [B, Hkv, L, D] as query heads [B, H, L, D]: head h reads h // (H / Hkv)."""
    if x.shape[1] == heads:
        return x
    group = heads // x.shape[1]
    if is_exporting():  # views of symbolic lengths become conditions that torch.export cannot decide
        return x.index_select(1, torch.arange(heads, device=x.device) // group)
    return x.repeat_interleave(group, dim=1)


def _expand_rows(rows: Tensor, s: Tensor) -> Tensor:
    """Rows [Lq, Lk] or [B, Lq, Lk] for every head and batch row of s."""
    rows = rows if rows.dim() == 2 else rows[:, None]
    return rows.expand(s.shape)
