"""attend(): check the arguments, do the pre-pass, choose an engine, run it. scores(): the dense logits, for study."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .core.errors import UnsupportedPlan
from .core.mask import Mask, make_mask
from .core.plan import Plan
from .core.positions import Positions
from .core.precision import autocast_is_on, no_autocast
from .engines import cpu as sdpa
from .engines import reference, triton

ENGINES = {"triton": triton, "sdpa": sdpa, "reference": reference}
"""Every engine by name, fastest first where `auto` chooses."""


Ready = tuple[Tensor, Tensor, Tensor, Plan]
"""What an engine gets: q, k, v, plan."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    engine: str = "auto",
) -> Tensor:
    """Attention with positions: q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] -> [B, H, Lq, Dv].

    plan       from `encoding.plan(where)`; None: no positions
    causal     a query sees no later slot; the last query is aligned with the last key
    window     see at most this many slots back and ahead: n, or (left, right) with None for no limit
    key_mask   bool [B, Lk], True for real keys, False for padding
    documents  int ids [B, L], or (query ids, key ids): a query sees keys of its own document only (packing)
    mask       bool (True: may be seen) or float (added to the scores), broadcasting to [B, H, Lq, Lk]
    dropout    on the weights, before both sums
    engine     "auto", or a name of `posenc.ENGINES`: it runs or raises UnsupportedPlan with the reason

    A query with nothing to see gives zeros. What it may not see does not reach it, NaN included; see DESIGN.md for the limits.
    Inside torch.func and for second derivatives use "reference"; "auto" does so inside torch.func by itself.
    """
    ready, seen = _ready(q, k, v, plan, causal, window, key_mask, documents, mask, dropout)
    run = _engine(engine, ready, seen, dropout).run
    if not autocast_is_on(q.device):
        return run(*ready, seen, dropout)
    with no_autocast(q.device):
        return run(*ready, seen, dropout)


def attend_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    engine: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`attend`, and the log of each query's sum of exp(score), [B, H, Lq], float32 or better; -inf where it sees nothing.

    With both, attention over several sets of keys becomes attention over all of them: see `merge`.
    """
    ready, seen = _ready(q, k, v, plan, causal, window, key_mask, documents, mask, dropout)
    run = _engine(engine, ready, seen, dropout).run
    with no_autocast(q.device):
        return run(*ready, seen, dropout, with_lse=True)


def _engine(engine: str, ready: Ready, seen: Mask, dropout: float):
    if engine == "auto":
        name, reasons = _choose(ready, seen, dropout)
        if name == "reference" and ready[0].is_cuda:
            _warn_slow("; ".join(reasons))
        return ENGINES[name]
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; use 'auto' or one of {', '.join(map(repr, ENGINES))}")
    reason = ENGINES[engine].refuses(*ready, seen, dropout)
    if reason is not None:
        raise UnsupportedPlan(f"engine {engine!r} cannot run this: {reason}; engine='auto' tries the others")
    return ENGINES[engine]


def engine_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> str:
    """The engine that `attend(..., engine="auto")` would run on these arguments."""
    return _choose(*_ready(q, k, v, plan, causal, window, key_mask, documents, mask, dropout), dropout)[0]


def _ready(q, k, v, plan, causal, window, key_mask, documents, mask, dropout) -> tuple[Ready, Mask]:
    """Check `attend`'s arguments and do the pre-pass."""
    _check(q, k, v)
    plan = _plan_of(plan, q, k)
    plan.check(q, k, v)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
    seen = make_mask(q, k, causal=causal, window=window, key_mask=key_mask, documents=documents, mask=mask)
    if causal:
        _check_alignment(plan)
    return prepass(q, k, v, plan), seen


def _plan_of(plan: Plan | None, q: Tensor, k: Tensor) -> Plan:
    if plan is None:
        return Plan(Positions(q.shape[2], k.shape[2]))
    if not isinstance(plan, Plan):
        kind = type(plan).__name__
        if hasattr(plan, "plan"):
            lengths = f"q={q.shape[2]}, k={k.shape[2]}"
            raise TypeError(
                f"plan must be a Plan, got the encoding {kind}; give plan=encoding.plan(Positions({lengths}))"
            )
        raise TypeError(f"plan must be a Plan, as encoding.plan(Positions(...)) makes it, got {kind}")
    return plan


def _choose(ready: Ready, seen: Mask, dropout: float) -> tuple[str, list[str]]:
    """The first engine that does not refuse, and why those before it did."""
    reasons: list[str] = []
    for name, candidate in ENGINES.items():
        reason = candidate.refuses(*ready, seen, dropout)
        if reason is None:
            return name, reasons
        reasons.append(f"{name}: {reason}")
    raise UnsupportedPlan("no engine can run this: " + "; ".join(reasons))


def scores(
    q: Tensor,
    k: Tensor,
    plan: Plan | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The logits that `attend` feeds to its softmax, dense [B, H, Lq, Lk], float32 or better; -inf where masked."""
    _check(q, k, k)
    plan = _plan_of(plan, q, k)
    plan.check(q, k, None)
    seen = make_mask(q, k, causal=causal, window=window, key_mask=key_mask, documents=documents, mask=mask)
    q, k, _, plan = prepass(q, k, k, plan)
    with no_autocast(q.device):
        return reference.masked(reference.logits(q, k, plan), seen)


def prepass(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Ready:
    """q <- rotate(q + shift), k <- rotate(k), a bias for each query_shift: done once, before any engine."""
    if plan.shift is not None:
        q = q + plan.shift.to(q.dtype)[:, None, :]
    if plan.rotate is not None:
        if plan.rotate.values:
            v = plan.rotate.keys(v)
        q, k = plan.rotate.both(q, k)
    if plan.pair is not None:
        plan = replace(plan, pair=partial(_call_pair, plan.pair, q.shape[0], q.shape[1]))
    return q, k, v, plan.fold_query_shifts(q)


def _call_pair(pair: Callable, batch: int, heads: int, p_q: Tensor, p_k: Tensor) -> Tensor:
    """What `pair` returns, in the shape that it must have: broadcasting would hide a mistake."""
    added = pair(p_q, p_k)
    shape = [batch, heads, p_q.shape[-1], p_k.shape[-1]]
    wanted = f"pair must return [lq, lk] or [B or 1, H or 1, lq, lk] = {shape}"
    if not isinstance(added, Tensor):
        raise TypeError(f"{wanted}, got {type(added).__name__}")
    leading = [(1, batch), (1, heads)][4 - added.dim() :]
    if not 2 <= added.dim() <= 4 or list(added.shape[-2:]) != shape[2:]:
        raise ValueError(f"{wanted}, got {list(added.shape)}")
    if any(size not in sizes for size, sizes in zip(added.shape, leading, strict=False)):
        raise ValueError(f"{wanted}, got {list(added.shape)}")
    return added


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [B, heads, L, D], got {shape}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
        if x is q:
            dtype, device = x.dtype, x.device
        elif x.dtype != dtype:
            raise ValueError(f"q is {dtype} and {name} is {x.dtype}; give one dtype")
        elif x.device != device:
            raise ValueError(f"q is on {device} and {name} on {x.device}; move them to one device")
    q_rows, q_heads, _, q_size = q.shape
    k_rows, k_heads, k_length, k_size = k.shape
    v_rows, v_heads, v_length, _ = v.shape
    if q_rows != k_rows or q_rows != v_rows:
        raise ValueError(f"q, k and v have {q_rows}, {k_rows} and {v_rows} batch rows; give as many")
    if q_size != k_size:
        raise ValueError(f"q has head size {q_size} and k {k_size}; they must be equal")
    if k_heads != v_heads or k_length != v_length:
        raise ValueError(f"k and v must have the same heads and length, got {list(k.shape)} and {list(v.shape)}")
    if k_heads == 0 or q_heads % k_heads:
        raise ValueError(f"{q_heads} query heads cannot share {k_heads} key heads; make one a multiple")


def _check_alignment(plan: Plan) -> None:
    """The commonest porting error: a causal query that continues a cache, planned as if it stood at position 0."""
    positions = plan.positions
    if (
        positions.offset is None
        or torch.compiler.is_compiling()
        or positions.offset == positions.q_length - positions.k_length
    ):
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


_warned: set[str] = set()


def _warn_slow(reasons: str) -> None:
    if reasons not in _warned and not torch.compiler.is_compiling():
        _warned.add(reasons)
        warnings.warn(f"posenc runs the dense reference engine on a GPU, because {reasons}", stacklevel=5)
