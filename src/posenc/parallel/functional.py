"""attend: attention over a sequence that several ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ..core.dropout import draw_seed
from ..core.encoding import Encoding
from ..core.errors import UnsupportedPlan
from ..core.mask import Mask, MaskOptions, make_mask
from ..core.options import require_number
from ..core.plan import Plan
from ..core.plan_checks import check_tensors
from ..core.positions import INTEGERS, Positions
from ..functional import shift_and_rotate
from . import plan_tensors
from .blocks import Call, Tokens, positions_of
from .collectives import broadcast, check_alike, sum_gradients
from .collectives import total as total_of
from .context import ContextParallel, Strategy, as_context
from .gather import attend_gather
from .plan_tensors import PlanSource, Values, cut_heads, put_together, take_apart, without_prepass
from .ring import attend_ring
from .tensor import Heads, own_heads
from .ulysses import attend_ulysses, heads_reason

Axes = Tensor | Sequence[Tensor | None] | None


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Encoding | Callable[[Positions], Plan] | None = None, *,
    context_parallel: Any, strategy: Strategy | None = None, positions: Axes = None, k_positions: Axes = None,
    total: int | Tensor | None = None, dropout: float = 0.0, engine: str = "auto", return_lse: Literal[False] = False,
    table_gradients: Literal["sum", "local"] = "sum", tensor_parallel: Any = None, **masks: Unpack[MaskOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Encoding | Callable[[Positions], Plan] | None = None, *,
    context_parallel: Any, strategy: Strategy | None = None, positions: Axes = None, k_positions: Axes = None,
    total: int | Tensor | None = None, dropout: float = 0.0, engine: str = "auto", return_lse: Literal[True],
    table_gradients: Literal["sum", "local"] = "sum", tensor_parallel: Any = None, **masks: Unpack[MaskOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    q, k, v, plan=None, *, context_parallel, strategy=None, positions=None, k_positions=None, total=None, dropout=0.0,
    engine="auto", return_lse=False, table_gradients="sum", tensor_parallel=None, **masks,
):  # fmt: skip
    """`posenc.attend` for a sequence of L tokens that N ranks share: the same numbers, each rank's own queries.

    q, k, v           this rank's tokens: [B, H, L/N, D], [B, Hkv, L/N, D], ..; as `split_sequence` cuts them
    plan              an encoding, or a function of positions that makes a plan: plans of other ranks' tokens are needed too
    context_parallel  mesh["cp"], a process group, or a ContextParallel, which also has the balance and a time limit
    strategy          "ulysses", "gather", "ring" or "auto": see ContextParallel
    positions         int [L/N], [B, L/N] or [B, L/N, axes] of this rank's queries (and keys); None: slots of the sequence.
                      A tuple gives axes one by one, None for slots
    k_positions       those of the keys, where they are other tokens (cross-attention)
    total             the length that rotations follow, where they depend on it; None: that of the sequence
    causal, window    as in `posenc.attend`, in slots of the whole sequence
    key_mask          bool [B, L/N]: this rank's keys
    documents         int ids [B, L/N], or (query ids, key ids): this rank's tokens
    mask              broadcasting to [B, H, L/N, L]: this rank's queries, all keys in the order of the sequence
    dropout           the mask that a single device draws with the seed of rank 0 (engines triton, blocked, reference)
    table_gradients   "sum": summed over the ranks, in one message, as if the tables were on one device; "local": this
                      rank's part, like that of any other weight, for FSDP or DDP to sum
    tensor_parallel   mesh["tp"], where q, k and v have only this rank's heads and the plan is for all of them; gradients of
                      tables are summed over it

    The gradients of q, k and v are those of this rank's tokens, from the losses of all ranks.

    Raises ValueError for shapes that do not fit, ParallelError where ranks disagree.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = posenc.parallel.ContextParallel(dist.group.WORLD)
        >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()
        >>> posenc.parallel.attend(q, k, v, posenc.create("alibi", heads=4), context_parallel=cp, causal=True).shape
        torch.Size([1, 4, 8, 16])
        >>> dist.destroy_process_group()
    """
    cp = as_context(context_parallel, strategy)
    check_tensors(q, k, v)
    cp.check_local(q.shape[2], "q")
    cp.check_local(k.shape[2], "k")
    if table_gradients not in ("sum", "local"):
        raise ValueError(f"table_gradients={table_gradients!r} is unknown; use 'sum' or 'local'")
    require_number("dropout", dropout, least=0.0, below=1.0)
    _check_ranks(cp, q, k, {"positions": positions, "k_positions": k_positions, "dropout": dropout or None, **masks})
    make, encoding = _maker(plan)
    if getattr(encoding, "_is_augmented", False) and encoding.training:
        raise UnsupportedPlan(
            f"{type(encoding).__name__} would draw different coordinates on every rank in training (shift, jitter, rescale); "
            "leave these options out in context parallelism"
        )
    mask = _check_masks(cp, q, k, masks)
    if encoding is not None and hasattr(encoding, "draw"):
        make, encoding, positions, k_positions = _draw(cp, plan, encoding, (q, k), positions, k_positions, total)
    queries, keys = _tokens(cp, q, k, positions, k_positions, mask)
    lengths = (q.shape[2] * cp.size, k.shape[2] * cp.size)
    total = lengths[1] if total is None else total
    meshes = [cp] if table_gradients == "sum" else []
    heads = None
    if tensor_parallel is not None:
        tp, heads = own_heads(tensor_parallel, q.shape[1])
        meshes.append(tp)
    prepare = _prepare_pairs if plan_tensors.depends_on_positions(make, encoding, len(queries.axes)) else _prepare_once
    q, k, v, source, terms = prepare(make, encoding, queries, keys, (q, k, v), total, meshes, heads)
    inputs = {"q": q, "k": k, "v": v, **terms}
    if mask.extra is not None:
        inputs["mask"] = mask.extra
    left, right = mask.limits
    seed = broadcast(cp, draw_seed(q.device)) if dropout else None
    call = Call(
        cp, source, queries, keys, left, right, lengths[1] - lengths[0], float(dropout), engine, seed,
        first_head=0 if heads is None else heads[0], all_heads=None if heads is None else heads[2],
        return_lse=return_lse, per_query=frozenset(take_apart(source.local, q.shape[2])[1]),
    )  # fmt: skip
    strategy = cp.strategy
    if strategy == "auto":
        divided = heads_reason(cp.size, q.shape[1], k.shape[1]) is None and k.shape[1] % cp.size == 0
        strategy = "ulysses" if divided else "ring"
    run = {"ulysses": attend_ulysses, "gather": attend_gather, "ring": attend_ring}[strategy]
    if run is attend_ring:
        _check_pair(source.local, q.device)
    out, lse = run(call, inputs)
    return (out, lse) if return_lse else out


SIZES = (
    "batch rows", "query heads", "key heads", "head sizes", "numbers of queries", "numbers of keys", "bytes a number",
)  # fmt: skip
OPTIONAL = ("positions", "k_positions", "dropout", "key_mask", "documents", "mask", "causal")


def _check_ranks(cp: ContextParallel, q: Tensor, k: Tensor, given: dict[str, Any]) -> None:
    """Raise where ranks have tensors of different sizes, or some of them an argument that others do not have."""
    sizes = [q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.shape[2], k.shape[2], q.element_size()]
    sizes += [int(given.get(name) is not None and given.get(name) is not False) for name in OPTIONAL]
    check_alike(cp, (*SIZES, *(f"answers to whether there is {name}" for name in OPTIONAL)), sizes, q.device)


def _maker(plan: Any) -> tuple[Callable[[Positions], Plan], Any]:
    if plan is None:
        return Plan, None
    if isinstance(plan, Encoding):
        return plan.plan, plan
    if isinstance(plan, Plan):
        raise TypeError(
            "plan must be an encoding or a function of positions, got a Plan, which is for one rank's tokens; "
            "give the encoding, or lambda positions: encoding.plan(positions, x=x, host=layer)"
        )
    if not callable(plan):
        raise TypeError(f"plan must be an encoding, a function positions -> Plan, or None, got {type(plan).__name__}")
    return plan, getattr(plan, "encoding", None)


# ---- plans ---------------------------------------------------------------------------------------------------------
Prepared = tuple[Tensor, Tensor, Tensor, PlanSource, Values]
"""Rotated q, k and v, the plans of pairs, and the tensors that these plans read."""


def _prepare_once(make, encoding, queries: Tokens, keys: Tokens, qkv, total, meshes, heads: Heads | None) -> Prepared:
    """One plan, of this rank's tokens, serves every pair of ranks."""
    q, k, v = qkv
    sides = (side.all_sides(q.device) for side in (queries, keys))
    plan = make(positions_of(*sides, total=total))
    tables, of_queries, of_keys = take_apart(plan, q.shape[2])
    if heads is not None:  # the tokens' own terms are the same on all ranks of the mesh, too
        each = _sum(meshes[-1:], {**of_queries, **of_keys})
        plan = put_together(plan, plan.positions, cut_heads(each, *heads))
        plan = plan if plan.pair is None else replace(plan, pair=plan_tensors.cut_pair(plan.pair, *heads))
    tables = _sum(meshes, tables)
    plan = put_together(plan, plan.positions, tables if heads is None else cut_heads(tables, *heads))
    plan.check(q, k, v)
    q, k, v = shift_and_rotate(q, k, v, plan)
    source = PlanSource(without_prepass(plan, q), heads=heads)
    tables, of_queries, of_keys = take_apart(source.local, q.shape[2])
    return q, k, v, source, {**tables, **of_queries, **of_keys}


def _prepare_pairs(make, encoding, queries: Tokens, keys: Tokens, qkv, total, meshes, heads: Heads | None) -> Prepared:
    """Tables depend on positions: each pair has its own plan, so that no rank holds the table of all distances."""
    _refuse_random(encoding)
    q, k, v = qkv
    parts: list = []
    leaves: Values = {}
    shift: Values = {}
    found: tuple[Tensor, ...] = ()
    for own, theirs in zip(queries.segments, keys.segments, strict=True):
        both = (queries, own), (keys, theirs)
        sides = (side.sides(segment, slice(0, segment.length), q.device) for side, segment in both)
        plan = make(positions_of(*sides, total=total))
        tables, of_queries, of_keys = take_apart(plan, own.length)
        if of_queries or of_keys:
            raise UnsupportedPlan(
                f"{type(encoding).__name__} has a row for each distance and terms for each token "
                f"({', '.join([*of_queries, *of_keys])}); context parallelism supports one or the other"
            )
        if not parts:
            found = plan_tensors.leaves_of(list(tables.values())) if torch.is_grad_enabled() else ()
            leaves = {f"leaf.{number}": x for number, x in enumerate(found)}
            leaves = _sum(meshes, ({} if plan.shift is None else {"shift": plan.shift}) | leaves)
            shift = {"shift": leaves.pop("shift")} if plan.shift is not None else {}
        plan = put_together(plan, plan.positions, {**tables, **shift})
        if heads is not None:
            plan = put_together(plan, plan.positions, cut_heads(take_apart(plan, 0)[0], *heads))
        part = q[:, :, own.rows], k[:, :, theirs.rows], v[:, :, theirs.rows]
        plan.check(*part)
        parts.append(shift_and_rotate(*part, plan))
    q, k, v = (torch.cat(x, 2) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
    kind = q.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return q, k, v, PlanSource(without_prepass(plan, q), make, found, heads, autocast), leaves


def _sum(meshes: Sequence[ContextParallel], values: Values) -> Values:
    """The same tensors; their gradients are summed over each mesh."""
    for mesh in meshes:
        values = dict(zip(values, sum_gradients(mesh, list(values.values())), strict=True))
    return values


def _refuse_random(encoding: Any) -> None:
    """Raise where a plan that is made for each pair of ranks would differ each time."""
    rate = getattr(encoding, "dropout", 0.0)
    if rate and getattr(encoding, "training", False):
        raise UnsupportedPlan(
            f"{type(encoding).__name__}(dropout={rate}) would drop different parts of its table for every pair of ranks; "
            "give the encoding dropout=0.0 in context parallelism"
        )


def _check_pair(plan: Plan, device: torch.device) -> None:
    if plan.pair is None or not torch.is_grad_enabled():
        return
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    if getattr(plan.pair(zero, zero), "requires_grad", False):
        raise UnsupportedPlan(
            "strategy 'ring' recomputes blocks in the backward pass and cannot reach the gradients of tensors that `pair` "
            "reads; use strategy='gather' or 'ulysses'"
        )


def _draw(cp: ContextParallel, plan: Any, encoding: Any, both: tuple[Tensor, Tensor], positions, k_positions, total):
    """Random positions: one draw for the whole sequence, rank 0's."""
    device = both[0].device
    count = cp.size * max(x.shape[2] for x in both)
    if isinstance(total, Tensor):
        count = int(total_of(cp, total.max(), "max"))
    table = broadcast(cp, encoding.draw(Positions(count)).q_positions(device))

    def look_up(given: Axes, local: int) -> Tensor:
        given = given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given
        if given is None:
            return table[cp.slots(local, device)]
        if not isinstance(given, Tensor):
            raise UnsupportedPlan(f"{type(encoding).__name__} draws positions of one axis; give a tensor or none")
        return table[given.long().clamp(min=0)]

    inner = encoding.encoding
    make = plan.with_encoding(inner) if hasattr(plan, "with_encoding") else inner.plan
    k_positions = positions if k_positions is None else k_positions
    return make, inner, look_up(positions, both[0].shape[2]), look_up(k_positions, both[1].shape[2])


# ---- tokens --------------------------------------------------------------------------------------------------------
def _check_masks(cp: ContextParallel, q: Tensor, k: Tensor, masks: dict[str, Any]) -> Mask:
    """The masks of this rank, validated; a dense mask has the columns of all ranks."""
    dense = masks.get("mask")
    mask = make_mask(q, k, **{**masks, "mask": None})
    if dense is None:
        return mask
    length = k.shape[2] * cp.size
    if isinstance(dense, Tensor) and dense.dim() and dense.shape[-1] not in (1, length):
        raise ValueError(
            f"mask must broadcast to [B, H, L/N, L] = {[*q.shape[:3], length]} (this rank's queries, all keys), "
            f"got {list(dense.shape)}"
        )
    every = k[:, :, :1].expand(-1, -1, length, -1)
    return replace(mask, extra=make_mask(q, every, mask=dense).extra)


def _tokens(
    cp: ContextParallel, q: Tensor, k: Tensor, positions: Axes, k_positions: Axes, mask: Mask
) -> tuple[Tokens, Tokens]:
    axes = _axes(positions, q, "positions")
    if k_positions is None and positions is not None and q.shape[2] != k.shape[2]:
        raise ValueError(f"there are {q.shape[2]} queries and {k.shape[2]} keys on this rank; give k_positions too")
    k_axes = axes if k_positions is None else _axes(k_positions, k, "k_positions")
    if len(axes) != len(k_axes):
        raise ValueError(f"positions have {len(axes)} axes and k_positions {len(k_axes)}; give both the same number")
    ids = (None, None) if mask.documents is None else mask.documents
    queries = Tokens(cp.segments(q.shape[2]), axes, None, ids[0])
    return queries, Tokens(cp.segments(k.shape[2]), k_axes, mask.key_mask, ids[1])


def _axes(given: Axes, x: Tensor, name: str) -> tuple[Tensor | None, ...]:
    if given is None:
        return (None,)
    if isinstance(given, Tensor) and given.dim() == 3:
        axes: tuple[Tensor | None, ...] = given.unbind(-1)
    else:
        axes = (given,) if isinstance(given, Tensor) else tuple(given)
    batch, _, length, _ = x.shape
    for axis in axes:
        if axis is None:
            continue
        if not isinstance(axis, Tensor) or axis.dtype not in INTEGERS:
            kind = axis.dtype if isinstance(axis, Tensor) else type(axis).__name__
            raise ValueError(f"{name} must be int tensors [L/N], [B, L/N] or [B, L/N, axes], got {kind}")
        if axis.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"{name} must be for this rank's tokens, [{length}] or [{batch}, {length}], got {list(axis.shape)}"
            )
    return axes
