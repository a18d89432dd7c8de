"""A plan for users of FlexAttention: score_mod, mask_mod and the tensors that they read.

    flex = posenc.to_flex(q, k, v, encoding.plan(positions), causal=True)
    block_mask = create_block_mask(flex.mask_mod, B, H, Lq, Lk)              None where flex.mask_mod is None
    out = flex_attention(flex.q, flex.k, flex.v, score_mod=flex.score_mod, block_mask=block_mask, scale=flex.scale)

Everything that reads queries or keys is a product that is made here, one number for each token and table row; the
functions only look numbers up. Gradients go through FlexAttention's captured tensors, where it supports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .core.errors import UnsupportedPlan
from .core.index import Grid, Index, Sparse
from .core.mask import Mask, MaskOptions, make_mask
from .core.plan import Lookup, Plan
from .core.plan_checks import check_tensors
from .engines.reference import pair_block, repeat_heads
from .functional import join_sinks, shift_and_rotate

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Term = MaskMod
Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(batch row, query, key) -> table row."""


class Flex(NamedTuple):
    """The arguments of `flex_attention`. q, k and v are shifted and rotated; give enable_gqa where heads are shared."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod
    mask_mod: MaskMod | None
    scale: float
    tensors: dict[str, Tensor]
    """What the functions read, by name."""
    sinks: Tensor | None = None

    def finish(self, out: Tensor, lse: Tensor) -> Tensor:
        """The output with the plan's sinks; lse: FlexAttention's log-sum-exp, [B, H, Lq]."""
        return out if self.sinks is None else join_sinks(out, lse, self.sinks)[0]


def to_flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan, **masks: Unpack[MaskOptions]) -> Flex:
    """FlexAttention's arguments for a plan and masks, as `attend` takes them.

    `pair`, a function of blocks of positions, is captured as what it returns for all of them: [B or 1, H, Lq, Lk]. Positional
    values (`add_value`), which are not part of a score, raise UnsupportedPlan.

    q [B, H, Lq, D] and so on, as in `attend`.

        >>> q, k, v = torch.randn(3, 1, 4, 16, 16).unbind()
        >>> plan = posenc.create("alibi", heads=4).plan(posenc.Positions(16))
        >>> posenc.to_flex(q, k, v, plan, causal=True).q.shape
        torch.Size([1, 4, 16, 16])
    """
    check_tensors(q, k, v)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, as encoding.plan(Positions(...)) makes it, got {type(plan).__name__}")
    plan.check(q, k, v)
    mask = make_mask(q, k, **masks)
    if any(lookup.add_value is not None for lookup in plan.lookups):
        raise UnsupportedPlan("add_value adds to values, and a score_mod changes scores alone; use attend")
    q, k, v = shift_and_rotate(q, k, v, plan)
    scale = plan.scale_of(q.shape[3])
    plan = plan.fold_query_shifts(q)
    precision = torch.promote_types(q.dtype, torch.float32)
    captured: dict[str, Tensor] = {}
    added: list[Term] = []
    for number, lookup in enumerate(plan.lookups):
        added += _lookup(f"lookups[{number}]", lookup, plan, q, k, scale, captured)
    by_query = None
    if isinstance(scale, Tensor):
        by_query = captured["scale"] = scale.squeeze(-1).expand(*q.shape[:3]).contiguous()
        scale = 1.0
    if plan.slopes is not None:
        slopes = captured["slopes"] = plan.slopes.to(precision)
        distance = _distance(plan, 0, q.device, captured)
        added.append(lambda b, h, i, j: -slopes[h] * distance(b, i, j).abs())
    if plan.decay is not None:
        shapes = q.shape[:3], (*q.shape[:2], k.shape[2])
        c_q, c_k = (c.to(precision).expand(shape).contiguous() for c, shape in zip(plan.decay, shapes))
        captured["decay[0]"], captured["decay[1]"] = c_q, c_k
        added.append(lambda b, h, i, j: c_q[b, h, i] - c_k[b, h, j])
    pair = None if plan.pair is None else pair_block(plan, q.device, slice(None), slice(None))
    for name, dense in (("pair", pair), ("mask", mask.added())):
        if dense is not None:
            captured[name] = dense.expand(*q.shape[:3], k.shape[2])
            added.append(_read(captured[name]))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if by_query is not None:
            score = score * by_query[b, h, i]
        for term in added:
            score = score + term(b, h, i, j)
        return score

    return Flex(q, k, v, score_mod, _mask_mod(mask, q, k, captured), scale, captured, plan.sinks)


def _read(dense: Tensor) -> Term:
    return lambda b, h, i, j: dense[b, h, i, j]


def _lookup(
    name: str, lookup: Lookup, plan: Plan, q: Tensor, k: Tensor, scale: float | Tensor, captured: dict[str, Tensor]
) -> list[Term]:
    rows = _rows(name, lookup.index, plan, q.device, captured)
    terms: list[Term] = []
    precision = torch.promote_types(q.dtype, torch.float32)
    if lookup.bias is not None:
        bias = captured[f"{name}.bias"] = lookup.bias.to(precision).expand(q.shape[1], -1).contiguous()
        terms.append(lambda b, h, i, j: bias[h, rows(b, i, j)])
    if lookup.dot_query is not None:
        states = q if lookup.states is None else lookup.states
        dots = states.to(precision) @ lookup.dot_query.to(precision).mT * scale
        of_query = captured[f"{name}.dot_query"] = dots.expand(*q.shape[:3], -1).contiguous()
        terms.append(lambda b, h, i, j: of_query[b, h, i, rows(b, i, j)])
    if lookup.dot_key is not None:
        if isinstance(scale, Tensor):
            raise UnsupportedPlan("dot_key is not supported with a scale for each query; give a number as scale")
        keys = repeat_heads(k, q.shape[1]).to(precision)
        of_key = captured[f"{name}.dot_key"] = (lookup.dot_key.to(precision) @ keys.mT * scale).contiguous()
        terms.append(lambda b, h, i, j: of_key[b, h, rows(b, i, j), j])
    return terms


def _distance(plan: Plan, axis: int, device: torch.device, captured: dict[str, Tensor]) -> Rows:
    """p_k - p_q on an axis: arithmetic of runs, otherwise captured positions."""
    positions = plan.positions.axis(axis)
    offset = positions.offset
    if offset is not None:
        return lambda b, i, j: j - i + offset
    p_q, p_k = positions.q_positions(device), positions.k_positions(device)
    captured[f"positions[{axis}].q"], captured[f"positions[{axis}].k"] = p_q, p_k
    first = (lambda b, i: p_q[i]) if p_q.dim() == 1 else (lambda b, i: p_q[b % p_q.shape[0], i])
    second = (lambda b, j: p_k[j]) if p_k.dim() == 1 else (lambda b, j: p_k[b % p_k.shape[0], j])
    return lambda b, i, j: second(b, j) - first(b, i)


def _rows(name: str, index: Index | Grid, plan: Plan, device: torch.device, captured: dict[str, Tensor]) -> Rows:
    if isinstance(index, Sparse):
        raise UnsupportedPlan("positions that lie far apart are found by a search, which no score_mod should do")
    if isinstance(index, Grid):
        parts = [(_rows(f"{name}.{n}", part, plan, device, captured), part.n) for n, part in enumerate(index.parts)]

        def of_grid(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = parts[0][0](b, i, j)
            for rows, n in parts[1:]:
                row = row * n + rows(b, i, j)
            return row

        return of_grid
    distance, lo, hi = _distance(plan, index.axis, device, captured), index.lo, index.hi
    table = index.rows_on(device)
    if table is None:
        return lambda b, i, j: distance(b, i, j).clamp(lo, hi) - lo
    captured[f"{name}.rows"] = table
    return lambda b, i, j: table[distance(b, i, j).clamp(lo, hi) - lo]


def _mask_mod(mask: Mask, q: Tensor, k: Tensor, captured: dict[str, Tensor]) -> MaskMod | None:
    """Slots are aligned at the bottom right."""
    parts: list[MaskMod] = []
    left, right = mask.limits
    offset = k.shape[2] - q.shape[2]
    if right is not None:
        parts.append(lambda b, h, i, j: j - i - offset <= right)
    if left is not None:
        parts.append(lambda b, h, i, j: j - i - offset >= -left)
    if mask.key_mask is not None:
        real = captured["key_mask"] = mask.key_mask.expand(q.shape[0], -1)
        parts.append(lambda b, h, i, j: real[b, j])
    if mask.documents is not None:
        ours, theirs = (ids.expand(q.shape[0], -1) for ids in mask.documents)
        captured["documents[0]"], captured["documents[1]"] = ours, theirs
        parts.append(lambda b, h, i, j: ours[b, i] == theirs[b, j])
    if mask.extra is not None and mask.extra.dtype == torch.bool:
        captured["mask"] = mask.extra.expand(*q.shape[:3], k.shape[2])
        parts.append(_read(captured["mask"]))
    if not parts:
        return None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = parts[0](b, h, i, j)
        for part in parts[1:]:
            allowed = allowed & part(b, h, i, j)
        return allowed

    return mask_mod
