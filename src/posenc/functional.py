"""The functional API: attend, scores, merge, apply_rotary, explain."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack, cast, overload

import torch
from torch import Tensor

from .core.dropout import draw_once
from .core.mask import MaskOptions, make_mask
from .core.options import require_number
from .core.plan import Plan
from .core.plan_checks import check_is_tensor, check_tensors
from .core.positions import Positions
from .core.precision import autocast_is_on, no_autocast
from .core.rotation import Layout, check_phases, normalise
from .core.rotation import apply_rotary as _apply_rotary
from .engines import known_calls, plain_call, reference
from .engines.choose import ENGINES, Choice, choose_engine, is_standard
from .engines.cpu.repeated_call import Text, Token
from .engines.known_layer import KnownText, KnownToken, Refused
from .engines.lowering import LoweredPlan, lower_plan

RepeatedCall = Token | Text | KnownText | KnownToken | Refused
__all__ = ["apply_rotary", "attend", "explain", "merge", "scores"]


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None = None, *, dropout: float = 0.0, engine: str = "auto",
    return_lse: Literal[False] = False, **masks: Unpack[MaskOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None = None, *, dropout: float = 0.0, engine: str = "auto",
    return_lse: Literal[True], **masks: Unpack[MaskOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(q, k, v, plan=None, *, dropout=0.0, engine="auto", return_lse=False, **masks):
    """Attention with positions: q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] -> [B, H, Lq, Dv].

    plan        from `encoding.plan(positions)`; None: no positions
    causal      a query sees no later slot; the last query is aligned with the last key
    window      see at most this many slots back and ahead: n, or (left, right) with None for no limit
    key_mask    bool [B, Lk], True for real keys, False for padding
    documents   int ids [B, L], or (query ids, key ids): a query sees keys of its own document only (packing)
    mask        bool (True: visible) or float (added to the scores), broadcasting to [B, H, Lq, Lk]
    dropout     on the probabilities, before both sums
    engine      "auto", or a name of `posenc.ENGINES`: it runs or raises UnsupportedPlan with the reason
    return_lse  also return the log of each query's sum of exp(score), [B, H, Lq], float32 or better, -inf for a fully
                masked query. With it, attention over several sets of keys becomes attention over all: see `merge`.

    A fully masked query gives zeros. The log-sum-exp includes the plan's sinks.

    Raises ValueError or TypeError for shapes, devices and masks that do not fit, UnsupportedPlan for a named
    engine that cannot run.

        >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()  # [B, H, L, D]
        >>> plan = posenc.create("alibi", heads=4).plan(posenc.Positions(8))
        >>> posenc.attend(q, k, v, plan, causal=True).shape
        torch.Size([1, 4, 8, 16])
    """
    described = None
    if (plan is None or type(plan) is Plan) and not torch.compiler.is_compiling() and is_standard():
        drops = False
        if engine == "auto" and isinstance(dropout, float) and dropout and isinstance(q, Tensor) and q.is_cpu:
            drops = 0.0 < dropout < 1.0
            dropout = draw_once(dropout, q.device) if drops else dropout
        is_plain = isinstance(dropout, (int, float)) and (drops or dropout == 0.0)
        if engine == "auto" and is_plain and not return_lse and isinstance(q, Tensor):
            causal = masks.get("causal", False)
            if causal is not True and causal is not False:
                out = None  # `make_mask` takes 0 and 1, and refuses what is no truth value
            elif len(masks) == ("causal" in masks) or all(masks[name] is None for name in masks if name != "causal"):
                out = None if plan is None or drops else known_calls.run_step(q, k, v, plan, causal)
                if out is None:
                    out = plain_call.run(q, k, v, plan, causal, None, dropout)
            else:
                out = plain_call.run(q, k, v, plan, causal, cast(MaskOptions, masks), dropout)
            if out is not None:
                return out
        if plan is not None:
            described = known_calls.describe(q, k, v, plan, dropout, engine, return_lse, masks)
        if plan is not None and described is not None:
            known = known_calls.find(described[0])
            if known is not None:
                out, lse = known.run(plan, dropout, masks, described[1])
                return (out, lse) if return_lse else out
    lowered = _lower(q, k, v, plan, dropout, return_lse, masks)
    chosen = ENGINES[choose_engine(lowered, engine).engine]
    if plan is not None and described is not None:
        known = known_calls.prepare_shifted(described[0], chosen, plan, lowered, described[1])
        if known is not None:
            out, lse = known.run(plan, dropout, masks, described[1])
            return (out, lse) if return_lse else out
    results = known_calls.run_with_shifts(chosen, engine, q, k, v, lowered)
    if results is not None:
        return results if return_lse else results[0]
    sinks = None
    if not getattr(chosen, "reads_raw_plan", False):
        q, k, v = shift_and_rotate(q, k, v, lowered.plan)
        lowered.fold_query_shifts(q)
        sinks = lowered.plan.sinks
        if sinks is not None:
            lowered.plan = replace(lowered.plan, sinks=None)
    if not autocast_is_on(q.device):
        out, lse = chosen.run(q, k, v, lowered)
    else:
        with no_autocast(q.device):
            out, lse = chosen.run(q, k, v, lowered)
    if described is not None:
        known_calls.keep(described[0], chosen, lowered, q, k, v)
    if sinks is not None:
        assert lse is not None  # the facts ask for it
        out, lse = join_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, causal: bool, masks: MaskOptions, dropout: float = 0.0
) -> Tensor | None:
    """`attend` for the most common calls of a layer, in eager code and without its checks; None: call `attend`. masks: other ones than
    causality; dropout: with its seed, on a CPU."""
    if not is_standard():
        return None
    if masks:
        return plain_call.run(q, k, v, plan, causal, {"causal": causal, **masks}, dropout)
    if plan is None and not dropout and not (causal and 1 != q.shape[2] != k.shape[2]):
        return plain_call.run_without_terms(q, k, v, causal)
    return plain_call.run(q, k, v, plan, causal, None, dropout)


def prepare_repeated(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool, masks: MaskOptions
) -> RepeatedCall | None:
    """What `run_repeated` needs for a layer's next calls like this one, without gradients, if they can be shortened. masks: a window, on a
    GPU, or none."""
    if not q.is_cpu:
        return KnownText.find(q, k, v, plan, {"causal": causal, **masks})
    if q.shape[2] == 1:
        return Token(q, k.shape[2], plan) if Token.supports(q, plan) else None
    return Text(q, k, plan, causal) if Text.supports(q, k, plan) else None


def run_repeated(
    known: RepeatedCall, q: Tensor, k: Tensor, v: Tensor, causal: bool, masks: MaskOptions
) -> Tensor | None:
    """`attend` for a call like the last one; None: call `attend`. masks: on a CPU, padding, and documents of several queries; on a GPU, the
    window that it was prepared with."""
    if not is_standard():
        return None
    if masks and isinstance(known, (Text, Token)):
        return known.run(q, k, v, {"causal": causal, **masks})
    return known.run(q, k, v)


def explain(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None = None, *, dropout: float = 0.0, engine: str = "auto",
    return_lse: bool = False, **masks: Unpack[MaskOptions],
) -> Choice:  # fmt: skip
    """Which engine `attend` would run on these arguments, and why not the others. Nothing is computed.

    Takes what `attend` takes, q [B, H, Lq, D] and so on, and raises what it raises.

        >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()
        >>> posenc.explain(q, k, v, causal=True).engine
        'sdpa'
    """
    return choose_engine(_lower(q, k, v, plan, dropout, return_lse, masks), engine)


def scores(q: Tensor, k: Tensor, plan: Plan | None = None, **masks: Unpack[MaskOptions]) -> Tensor:
    """The logits that `attend` feeds to its softmax, dense [B, H, Lq, Lk], float32 or better; -inf where masked.
    A plan's sinks, which belong to no key, are not among them.

    Raises what `attend` raises.

        >>> posenc.scores(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), causal=True)[0, 0]
        tensor([[2., -inf],
                [2., 2.]])
    """
    lowered = _lower(q, k, k, plan, 0.0, False, masks, values=False)
    with no_autocast(q.device):
        return reference.scores(q, k, lowered)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention out of several over disjoint sets of keys.

        near = attend(q, k, v, plan, window=127, return_lse=True)
        far = attend(q, summaries_k, summaries_v, other_plan, return_lse=True)
        out, lse = merge([near, far])                          what one softmax over all of these keys gives

    parts: (out [B, H, Lq, Dv], lse [B, H, Lq]) each. A key may be in one part only. Gradients pass through both.

    Raises ValueError for shapes that differ.

        >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()
        >>> parts = [posenc.attend(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 3), slice(3, 8))]
        >>> torch.allclose(posenc.merge(parts)[0], posenc.attend(q, k, v), atol=1e-5)
        True
    """
    for part in parts if isinstance(parts, Sequence) and len(parts) else (None,):
        if not isinstance(part, Sequence) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
            raise ValueError("merge needs at least one (out, lse), as attend(..., return_lse=True) gives them")
    for out, lse in parts:
        if out.shape[:-1] != lse.shape or out.shape != parts[0][0].shape:
            shapes = [(list(out.shape), list(lse.shape)) for out, lse in parts]
            raise ValueError(f"merge needs outputs [B, H, Lq, Dv] with lse [B, H, Lq], all alike, got {shapes}")
    every = torch.stack([lse for _, lse in parts])
    m_i = every.detach().amax(0)
    m_i = m_i.masked_fill(m_i == float("-inf"), 0.0)  # a query that is fully masked in every part
    weights = (every - m_i).exp()
    l_i = weights.sum(0)
    is_masked = l_i == 0.0
    weights = weights / l_i.masked_fill(is_masked, 1.0)
    total = sum(weight[..., None] * out.to(weight.dtype) for weight, (out, _) in zip(weights, parts, strict=True))
    assert isinstance(total, Tensor)
    lse = (l_i.masked_fill(is_masked, 1.0).log() + m_i).masked_fill(is_masked, float("-inf"))
    return total.to(parts[0][0].dtype), lse


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half") -> Tensor:
    """Rotate the first R channels of x [B, H, L, D], in float32 or better; the result has x's dtype.

    cos, sin   [L, R/2], [B or 1, L, R/2] or [B or 1, H, L, R/2]: one number for each pair of channels
    layout     "half": pairs (c, c + R/2), as in Llama; "interleaved": pairs (2c, 2c + 1), as in GPT-J

    Raises ValueError for phases that do not fit x, and for an unknown layout.

        >>> cos, sin = torch.zeros(8, 2), torch.ones(8, 2)  # a quarter turn
        >>> posenc.apply_rotary(torch.eye(4)[:1].expand(1, 3, 8, 4), cos, sin)[0, 0, 0]
        tensor([0., 0., 1., 0.])
    """
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_is_tensor(name, tensor)
    if x.dim() != 4:
        raise ValueError(f"x must be [B, H, L, D], got {list(x.shape)}")
    if cos.dim() == sin.dim() == 2:
        cos, sin = cos[None], sin[None]
    check_phases("x", x, cos, sin, layout)
    return _apply_rotary(x, cos, sin, layout)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention whose softmax has one more logit for each query, the sink [H] of its head, without a value.

    exp(lse) is the sum over the keys, so the keys keep exp(lse) / (exp(lse) + exp(sink)) of the weight.
    """
    sink = sinks.to(lse.dtype)[:, None]
    kept = (lse.masked_fill(lse == float("-inf"), 0.0) - sink).sigmoid()  # fully masked: the output is zero already
    return (out.to(lse.dtype) * kept[..., None]).to(out.dtype), torch.logaddexp(lse, sink)


def shift_and_rotate(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """q <- rotate(q + shift), k <- rotate(k), and their norms: done once, before the engine."""
    if plan.shift is not None:
        q = q + plan.shift.to(q.dtype)[:, None, :]
    if plan.rotate is not None:
        q, k, v = plan.rotate.rotate_qkv(q, k, v)
    if plan.cosine is not None:
        q, k = normalise(q, plan.cosine), normalise(k)
    if plan.append is not None:
        q, k = (torch.cat((x, more.to(x.dtype).expand(*x.shape[:3], -1)), -1) for x, more in zip((q, k), plan.append))
    return q, k, v


def _lower(q, k, v, plan, dropout, return_lse, masks, values: bool = True) -> LoweredPlan:
    """Validate `attend`'s arguments and lower them."""
    check_tensors(q, k, v)
    plan = _check_plan(plan, q, k)
    plan.check(q, k, v if values else None)
    require_number("dropout", dropout, least=0.0, below=1.0)
    mask = make_mask(q, k, **masks)
    if mask.causal:
        _warn_alignment(plan)
    return lower_plan(q, k, v, plan, mask, dropout, return_lse or plan.sinks is not None)


def _check_plan(plan: Plan | None, q: Tensor, k: Tensor) -> Plan:
    if plan is None:
        return Plan(Positions(q.shape[2], k.shape[2]))
    if not isinstance(plan, Plan):
        kind, lengths = type(plan).__name__, f"q={q.shape[2]}, k={k.shape[2]}"
        if hasattr(plan, "plan"):
            raise TypeError(
                f"plan must be a Plan, got the encoding {kind}; give plan=encoding.plan(Positions({lengths}))"
            )
        raise TypeError(f"plan must be a Plan, as encoding.plan(Positions(...)) makes it, got {kind}")
    return plan


def _warn_alignment(plan: Plan) -> None:
    """The most common porting mistake: a causal query that continues a cache, planned as if it started at position 0."""
    positions = plan.positions
    aligned = positions.q_length - positions.k_length
    if positions.offset is None or torch.compiler.is_compiling() or positions.offset == aligned:
        return
    assert positions.runs is not None  # they have an offset
    q, k = positions.runs
    positional = plan.lookups or plan.rotate or plan.pair or plan.slopes is not None
    if positional and isinstance(q.start, int) and isinstance(k.start, int) and q.length and k.length:
        warnings.warn(
            "causal aligns the last query with the last key, but the plan puts them at positions "
            f"{q.start + q.length - 1} and {k.start + k.length - 1}; a query that continues a cache starts there: "
            f"Positions(q=({k.start + k.length - q.length}, {q.length}), k=({k.start}, {k.length}))",
            stacklevel=4,
        )
