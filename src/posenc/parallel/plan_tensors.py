"""The tensors of a plan by what they belong to, so that each can be cut, sent or kept.

    table   bias, dot_query, dot_key, add_value, slopes, a scale for all     the same on every rank; cut by heads in ulysses
    query   states, decay_q, a scale for each query                          stay with their queries
    key     decay_k                                                          travel with their keys

Encodings whose table has a row for each distance (transformer_xl, xlnet) make a new plan for each pair of ranks; for all others
the plan of the rank's own tokens serves every pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.encoding import Encoding
from ..core.plan import Lookup, Plan
from ..core.positions import Positions
from ..core.torch_modes import first_derivatives_only

MakePlan = Callable[[Positions], Plan]
Values = dict[str, Tensor]
FIELDS = ("bias", "dot_query", "states", "dot_key", "add_value", "query_shift")


def take_apart(plan: Plan, q_length: int) -> tuple[Values, Values, Values]:
    """Tables, tensors of queries and tensors of keys, by name."""
    tables: Values = {}
    queries: Values = {}
    keys: Values = {}
    for number, lookup in enumerate(plan.lookups):
        for name, tensor in lookup.tensors():
            (queries if name == "states" else tables)[f"{name}.{number}"] = tensor
    if isinstance(plan.scale, Tensor):
        of_queries = plan.scale.dim() > 0 and plan.scale.shape[-1] == q_length
        (queries if of_queries else tables)["scale"] = plan.scale
    if plan.slopes is not None:
        tables["slopes"] = plan.slopes
    if plan.shift is not None:
        tables["shift"] = plan.shift
    if plan.decay is not None:
        queries["decay_q"], keys["decay_k"] = plan.decay
    return tables, queries, keys


def put_together(plan: Plan, positions: Positions, values: Values) -> Plan:
    """The plan with these positions and with the tensors that are given."""

    def lookup_of(number: int, lookup: Lookup) -> Lookup:
        given = {name: values[f"{name}.{number}"] for name in FIELDS if f"{name}.{number}" in values}
        return replace(lookup, **given)  # type: ignore[arg-type]

    decay = plan.decay
    if decay is not None:
        decay = values.get("decay_q", decay[0]), values.get("decay_k", decay[1])
    return replace(
        plan, positions=positions, lookups=tuple(lookup_of(*pair) for pair in enumerate(plan.lookups)),
        scale=values.get("scale", plan.scale), slopes=values.get("slopes", plan.slopes), decay=decay,
        shift=values.get("shift", plan.shift),
    )  # fmt: skip


def without_prepass(plan: Plan, q: Tensor) -> Plan:
    """What is left of a plan when q [B, H, Lq, D] and k are shifted and rotated."""
    return replace(plan, shift=None, rotate=None).fold_query_shifts(q)


def cut_heads(values: Values, first: int, count: int, heads: int) -> Values:
    """The tensors of `count` heads out of `heads`; what the heads share stays whole."""

    def cut(name: str, x: Tensor) -> Tensor:
        dim = x.dim() - 2 if name == "scale" else 1 if name.startswith(("states", "decay")) else 0
        if dim < 0 or x.shape[dim] != heads or heads == 1:
            return x
        return x.narrow(dim, first, count)

    return {name: cut(name, x) for name, x in values.items()}


def cut_pair(pair: Callable, first: int, count: int, heads: int) -> Callable:
    def cut(p_q: Tensor, p_k: Tensor) -> Tensor:
        added = pair(p_q, p_k)
        if isinstance(added, Tensor) and added.dim() > 2 and added.shape[-3] == heads:
            return added.narrow(-3, first, count)
        return added

    return cut


@dataclass(frozen=True)
class PlanSource:
    """The plan of any pair of token ranges.

    local    the plan of the rank's own queries and keys, its pre-pass done
    make     where tables depend on positions: makes the plan of a pair (None: `local` serves every pair)
    leaves   the parameters that `make` reads; gradients go to the tensors "leaf.0", ... that stand for them
    heads    (first, count, all) where the plan is for some heads only
    autocast the autocast dtype of the forward pass, with which the backward pass calls `make` again; None: off
    """

    local: Plan
    make: MakePlan | None = None
    leaves: tuple[Tensor, ...] = ()
    heads: tuple[int, int, int] | None = None
    autocast: torch.dtype | None = None

    def plan(self, positions: Positions, q: Tensor, values: Values) -> Plan:
        """values: the plan's tensors, cut to the pair and to the heads."""
        if self.make is None:
            return put_together(self.local, positions, values)
        with torch.no_grad():
            made = self._made(positions, q)
        tables, _, _ = take_apart(made, positions.q_length)
        inputs = [x for name, x in values.items() if name.startswith("leaf.")]
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            remake = lambda: list(take_apart(self._made(positions, q), positions.q_length)[0].values())  # noqa: E731
            found = _Tables.apply(remake, self.leaves, len(tables), *tables.values(), *inputs)
            tables = dict(zip(tables, found, strict=True))
        if self.heads is not None:
            tables = cut_heads(tables, *self.heads)
        return put_together(made, positions, tables)

    def _made(self, positions: Positions, q: Tensor) -> Plan:
        assert self.make is not None
        with torch.autocast(q.device.type, self.autocast, enabled=self.autocast is not None):
            made = self.make(positions)
        return without_prepass(made, q.detach())


class _Tables(torch.autograd.Function):
    """Tables that are recomputed for their gradients: the table of a pair's distances is not saved."""

    @staticmethod
    def forward(ctx, remake: Callable[[], list[Tensor]], leaves: tuple[Tensor, ...], count: int, *tensors: Tensor):  # type: ignore[override]
        ctx.remake, ctx.leaves, ctx.count = remake, leaves, count
        ctx.more = leaves
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    @first_derivatives_only
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        with torch.enable_grad():
            tables = ctx.remake()
        pairs = [(x, g) for x, g in zip(tables, grads, strict=True) if g is not None and x.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(ctx.leaves)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, ctx.leaves, given, allow_unused=True)
        return None, None, None, *(None,) * ctx.count, *found


_known: WeakKeyDictionary[Encoding, bool] = WeakKeyDictionary()


class FixedPlan(partial):
    """A maker of plans, FixedPlan(make), whose indices are known to be the same for all positions."""


def depends_on_positions(make: MakePlan, encoding: object, axes: int) -> bool:
    """Whether the plan has other indices for other positions: found by making two small ones."""
    if isinstance(make, FixedPlan):
        return False
    if isinstance(encoding, Encoding) and encoding in _known:
        return _known[encoding]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        one, two = (make(Positions(n, more=[(n, n)] * (axes - 1), total=n)) for n in (1, 2))
    depends = [lookup.index for lookup in one.lookups] != [lookup.index for lookup in two.lookups]
    if isinstance(encoding, Encoding):
        _known[encoding] = depends
    return depends


def leaves_of(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """The leaf tensors that gradients of these reach."""
    found = {id(x): x for x in tensors if x.is_leaf and x.requires_grad}
    waiting = [x.grad_fn for x in tensors if x.grad_fn is not None]
    visited = set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        waiting += [following for following, _ in node.next_functions if following is not None]
    return tuple(found.values())
