"""Error budgets from the arithmetic: how far a correct computation may be from the exact result, element by element.

    expected, allowed = budget.expect(q, k, v, plan, g, causal=True)       exact numbers and their budgets, by name
    budget.assert_within(out, expected["out"], allowed["out"], "out")

`expect` computes the formula of `Plan` densely in float64 (written here once more, with no code of an engine) and, next
to it, the same sums over the absolute values of their terms. A rounding changes a sum by a fraction of the size of what
was summed, not of its result: a gradient that cancels to nothing keeps the error of its terms. So the budget of each
number is a count of roundings times such a size, and holds for any seed, processor and order of summation. It depends
on no measured error.

    u       unit roundoff of sums: 2^-24, 2^-53 for float64              w   of q's dtype: 2^-8 bfloat16, 2^-11 float16
    c(n)    4 + 2 sqrt(n): roundings of a sum of n terms. Errors of either sign add up as a random walk, whose
            steps are at most u times the sum of absolute values; 2 is more than three of its standard deviations

    scores  E_s  = u c(D + n) |dot products| + u c(n) |the n terms that are added to them| + w^2 |bias| + w (operands that
                   are rounded to q's dtype: rotated q and k and shifted q once, a shift of another dtype once more;
                   tables, states and their product with q or k twice; a query_shift with a scale for each query, and
                   its sum with the states, once). |x|: x with every factor and term made positive
            A table may be counted from one of its rows (a base, with differences to it): its size is |t| + max |t|
    p       log(p'/p) = -log(p_j + sum_{k != j} p_k exp(d_k - d_j)), |d| <= E_s. This is exact, so one probability of
            1 cannot move, however large its score; it is computed in logarithms. To it come the roundings of exp (EXP), of the sum, and of a stored
            log-sum-exp, of which no more than log-sum-exp - max s can be lost where it is the score itself. A backward
            pass that computes scores a second time, in another order, has twice the u of E_s more (`recomputed`)
    out     sum_j (E_p + (w + u c(Lk)) p) |v_j|                          p is rounded to q's dtype before the product
    dp      E_dp = (u c(Dv) + w) |g| . |v|,   E_D likewise for D = sum_j p dp, plus sum_j E_p |dp|
    ds      E_ds = E_p |dp - D| + p (E_dp + E_D)
    grads   the formula's own linear maps, with positive factors, of E_ds + (3 w + u c(n)) p (|dp| + |D|) (for what the
            scores read) and of E_p + (3 w + u c(n)) p (for what the values read); n terms are summed

Numbers that vanish (float16 below 2^-25, probabilities and terms of a sum below float32's normal numbers, which some
processors take for 0) are budgeted as absolute errors; PyTorch's attention rounds the gradient of a shared key for each
query head, and then their sum. A number may be infinite where the exact one and its budget
together are more than its dtype holds.

The names are those of `Plan.tensors`, and out, lse, q, k, v, shift, mask, pair.weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

EXP = 24
"""Roundings of exp: PyTorch's fused attention on a CPU takes one that is right to 20."""
HALF_EXP = 2.0**-12
"""The relative error of the cheaper exp that PyTorch's fused attention on a CPU takes for bfloat16 and float16."""
SMALLEST = 2.0**-125
"""Smaller numbers of float32 and bfloat16 may be taken for 0: matrix products of some processors do so below 2^-126, and PyTorch's
exp, which doubles 2^(n - 1), below 2^-125."""

TABLES = ("bias", "dot_query", "dot_key", "add_value")
CHANNELS = ("q", "k", "v", "shift", "states", "dot_query", "dot_key", "add_value", "query_shift")
"""Tensors whose last size is one of channels."""


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def c(n: float) -> float:
    """Roundings of a sum of n terms."""
    return 4 + 2 * sqrt(n)


def expect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan=None,
    g: Tensor | None = None,
    g_lse: Tensor | None = None,
    *,
    causal: bool = False,
    window=None,
    key_mask: Tensor | None = None,
    documents=None,
    mask: Tensor | None = None,
    dots: float | None = None,
    kept: Tensor | None = None,
    recomputed: bool = False,
    exp: float = 0.0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exact results in float64 and their budgets for a computation in the inputs' own dtypes.

    g and g_lse are the gradients of the output and of the log-sum-exp; without either, only "out" and "lse" come back.
    `dots` is the unit roundoff of products where it is not that of q's dtype (TensorFloat-32: 2^-11). `kept` [B, H, Lq,
    Lk] is what dropout multiplied the probabilities with: 0 or 1 / (1 - rate). `recomputed`: see above; without it a
    backward pass must have the forward pass's probabilities. `exp` is the relative error of a kernel's exp beyond EXP.
    """
    given = _tensors(q, k, v, plan, mask)
    geometry = _geometry(q, k, plan, causal, window, key_mask, documents, mask)
    units = _units(q, plan, geometry, dots)
    return _compute(given, geometry, units, g, g_lse, kept, recomputed, exp)


def bounds(*arguments, **options) -> dict[str, Tensor]:
    """`expect`'s budgets alone."""
    return expect(*arguments, **options)[1]


def excess(actual: Tensor | None, expected: Tensor, bound: Tensor) -> float:
    """The largest error as a multiple of its budget: at most 1 is right; infinite where a number is not finite."""
    if actual is None:
        actual = torch.zeros_like(expected)
    if actual.shape != expected.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    ratio = _ratio(actual, expected, bound)
    return float("inf") if ratio.isnan().any() else ratio.max().item()


def _ratio(actual: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
    most = torch.finfo(actual.dtype).max
    actual = actual.detach().to(device=expected.device, dtype=torch.float64)
    right = actual == expected  # infinities may be equal
    right |= actual.isinf() & (expected * actual.sign() + bound > most)  # more than the dtype holds
    error = torch.where(right, 0.0, (actual - expected).abs())
    return torch.where(error == 0.0, 0.0, error / bound)


def assert_within(actual: Tensor | None, expected: Tensor, bound: Tensor, name: str) -> None:
    """Raise where an element of `actual` is further from `expected` than its budget. None counts as zeros."""
    worst = excess(actual, expected, bound)
    if worst <= 1.0:
        return
    if actual is not None and actual.shape != expected.shape:
        raise AssertionError(f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    found = torch.zeros_like(expected) if actual is None else actual.detach().to(expected.device)
    ratio = _ratio(found, expected, bound).nan_to_num(nan=float("inf"))
    at = torch.unravel_index(ratio.argmax(), ratio.shape)
    element = [int(x) for x in at]
    raise AssertionError(
        f"{name}{element} is {found[at].item():.9g}, expected {expected[at].item():.9g}: an error of {worst:.3g} times its "
        f"budget of {bound[at].item():.3g}; {int((ratio > 1).sum())} of {ratio.numel()} elements are off"
    )


# ---- what is given -------------------------------------------------------------------------------------------------
def _tensors(q, k, v, plan, mask) -> dict[str, Tensor]:
    """Every floating point tensor by name."""
    given = {"q": q, "k": k, "v": v}
    if plan is not None:
        given.update(plan.tensors())
        if plan.shift is not None:
            given["shift"] = plan.shift
        if plan.pair is not None:
            weight = getattr(plan.pair, "weight", None)
            if weight is None:
                raise TypeError("pair must have its weight as an attribute, like tests.plans.Pair")
            given["pair.weight"] = weight
    if mask is not None and mask.is_floating_point():
        given["mask"] = mask
    return given


@dataclass
class _Geometry:
    """Everything but floating point tensors: the mask, and the table rows of every query and key."""

    allowed: Tensor  # bool [B, H, Lq, Lk]
    plan: object
    head_size: int
    rows: list[Tensor] = field(default_factory=list)  # int64 [1 or B, 1, Lq, Lk] for each lookup
    distance: Tensor | None = None  # |r|, [1 or B, 1, Lq, Lk]


def _geometry(q, k, plan, causal, window, key_mask, documents, mask) -> _Geometry:
    batch, heads, lq, size = q.shape
    lk, device = k.shape[2], q.device
    offset = torch.arange(lk, device=device) - (torch.arange(lq, device=device)[:, None] + lk - lq)
    allowed = torch.ones(batch, heads, lq, lk, dtype=torch.bool, device=device)
    left, right = (window, window) if window is None or isinstance(window, int) else window
    if causal:
        allowed &= offset <= 0
    if left is not None:
        allowed &= offset >= -left
    if right is not None:
        allowed &= offset <= right
    if key_mask is not None:
        allowed &= key_mask.bool()[:, None, None, :]
    if documents is not None:
        ours, theirs = documents if isinstance(documents, (tuple, list)) else (documents, documents)
        allowed &= (ours[:, :, None] == theirs[:, None, :])[:, None]
    if mask is not None:
        allowed &= mask if mask.dtype == torch.bool else mask.detach() > float("-inf")
    geometry = _Geometry(allowed, plan, size)
    if plan is None:
        return geometry
    distances = {}

    def distance(axis):
        if axis not in distances:
            p_q, p_k = (
                _wide(p) for p in (plan.positions.q_positions(device, axis), plan.positions.k_positions(device, axis))
            )
            distances[axis] = p_k[:, None, :] - p_q[:, :, None]
        return distances[axis]

    for lookup in plan.lookups:
        row = torch.zeros((), dtype=torch.int64, device=device)
        for part in getattr(lookup.index, "parts", (lookup.index,)):
            step = distance(part.axis).clamp(part.lo, part.hi) - part.lo
            row = row * part.n + (step if part.rows is None else torch.tensor(part.rows, device=device)[step])
        geometry.rows.append(row[:, None])
    if plan.slopes is not None:
        geometry.distance = distance(0).abs()[:, None].double()
    return geometry


def _wide(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]


@dataclass
class _Units:
    sums: float  # u
    low: float  # w, 0 where q's dtype is that of sums
    products: float  # roundings, in units of 1, of q k: operands that were rounded
    tables: float
    values: float
    vanish: float  # numbers of q's dtype below this are 0
    flushed: float  # what each term of a gradient's sum loses where such numbers are taken for 0


def _units(q, plan, geometry, dots) -> _Units:
    sums = unit(torch.promote_types(q.dtype, torch.float32))
    low = unit(q.dtype) if unit(q.dtype) > sums else 0.0
    rotation = None if plan is None else plan.rotate
    shift = None if plan is None else plan.shift
    rounded = low * (
        (0 if shift is None else 1 + (shift.dtype != q.dtype))  # the shift itself, and its sum with q
        + (rotation is not None and rotation.q is not None)
        + (rotation is not None and rotation.k is not None)
        + (plan is not None and isinstance(plan.scale, Tensor))
    )
    extra = 0.0 if dots is None else 2 * dots
    beside = [] if plan is None or not isinstance(plan.scale, Tensor) else [x.query_shift for x in plan.lookups]
    tables = 2 * low + rounded + extra + 2 * low * any(shift is not None for shift in beside)  # it, and its sum
    rotated = rotation is not None and rotation.values and rotation.k is not None
    vanish = SMALLEST if q.dtype != torch.float16 else 2.0**-25
    return _Units(
        sums, max(low, extra), rounded + extra, tables, low * rotated + extra, vanish, _flushed(q, plan)
    )  # fmt: skip


def _flushed(q, plan) -> float:
    """The smallest normal number of sums, times what a sum over pairs is multiplied with after it: scale and rotation."""
    most = lambda *tensors: max([1.0] + [float(x.detach().abs().max()) for x in tensors if x.numel()])  # noqa: E731
    factor = 1.0
    if plan is not None and plan.scale is not None:
        factor = most(torch.as_tensor(plan.scale))
    if plan is not None and plan.rotate is not None:
        factor *= most(*(cos.abs() + sin.abs() for cos, sin in filter(None, (plan.rotate.q, plan.rotate.k))))
    return factor * torch.finfo(torch.promote_types(q.dtype, torch.float32)).tiny


# ---- the formula ---------------------------------------------------------------------------------------------------
class _Dense:
    """The formula in float64 over leaves; `positive`: the same over absolute values, with every sign a plus."""

    def __init__(self, given: dict[str, Tensor], geometry: _Geometry, positive: bool):
        self.leaves = {}
        for name, x in given.items():
            x = x.detach().double()
            if name == "mask":
                x = x.masked_fill(x == float("-inf"), 0.0)  # `allowed` knows
            self.leaves[name] = (x.abs() if positive else x).requires_grad_()
        self.given, self.geometry, self.positive, self.plan = given, geometry, positive, geometry.plan
        self.heads = given["q"].shape[1]
        with torch.enable_grad():
            self._prepass()
            self.parts = self._scores()

    def _table(self, name: str) -> Tensor:
        """A lookup's table; of its sizes, those of a table that is counted from any of its rows."""
        table = self.leaves[name]
        return table + table.detach().amax(1, keepdim=True) if self.positive and table.numel() else table

    def _prepass(self):
        q, k, v = (self.leaves[name] for name in "qkv")
        if "shift" in self.leaves:
            q = q + self.leaves["shift"][:, None, :]
        rotation = None if self.plan is None else self.plan.rotate
        if rotation is not None:
            q, k = self._rotate(q, rotation.q), self._rotate(k, rotation.k)
            v = self._rotate(v, rotation.k) if rotation.values else v
        group = self.heads // k.shape[1]
        self.q, self.k, self.v = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _rotate(self, x, phases):
        if phases is None:
            return x
        cos, sin = (p.detach().double()[:, None] for p in phases)
        minus = -1.0
        if self.positive:
            cos, sin, minus = cos.abs(), sin.abs(), 1.0
        half = cos.shape[-1]
        rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.plan.rotate.layout == "half":
            a, b = rotated[..., :half], rotated[..., half:]
            return torch.cat((a * cos + minus * b * sin, a * sin + b * cos, rest), -1)
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        return torch.cat((torch.stack((a * cos + minus * b * sin, a * sin + b * cos), -1).flatten(-2), rest), -1)

    def _at(self, number: int, shape) -> Tensor:
        return self.geometry.rows[number].expand(shape)

    def _scores(self) -> dict[str, Tensor]:
        """s as a sum of parts: products of q and k, of tables, of tables with a query_shift, biases, and all the rest."""
        leaves, plan = self.leaves, self.plan
        products = self.q @ self.k.mT
        shape = products.shape
        tables = biases = folded = rest = products.new_zeros(())
        for number, lookup in enumerate(() if plan is None else plan.lookups):
            name, at = f"lookups[{number}].", self._at(number, shape)
            if lookup.dot_query is not None:
                states = self.q if lookup.states is None else leaves[name + "states"]
                dots = states @ self._table(name + "dot_query").mT
                tables = tables + dots.expand(*shape[:3], -1).gather(3, at)
            if lookup.query_shift is not None:
                table, shift = self._table(name + "dot_query"), leaves[name + "query_shift"]
                dots = (table @ shift[:, :, None]).squeeze(-1)[None, :, None].expand(shape[0], self.heads, shape[2], -1)
                folded = folded + dots.gather(3, at)
            if lookup.dot_key is not None:
                dots = self._table(name + "dot_key") @ self.k.mT
                tables = tables + dots.expand(*shape[:2], -1, -1).gather(2, at)
            if lookup.bias is not None:
                table = self._table(name + "bias")[None, :, None, :].expand(shape[0], self.heads, shape[2], -1)
                biases = biases + table.gather(3, at)
        scale = self.geometry.head_size**-0.5
        if plan is not None and plan.scale is not None:
            scale = leaves["scale"][..., None] if "scale" in leaves else float(plan.scale)
            scale = abs(scale) if self.positive else scale
        minus = 1.0 if self.positive else -1.0
        if "slopes" in leaves:
            rest = rest + minus * leaves["slopes"][:, None, None] * self.geometry.distance
        if "decay[0]" in leaves:
            both = leaves["decay[0]"][..., :, None] + minus * leaves["decay[1]"][..., None, :]
            if (
                self.positive
            ):  # a difference of two given numbers has its own size; both gradients have coefficients of 1
                ours, theirs = (self.given[f"decay[{i}]"].detach().double() for i in (0, 1))
                both = both - both.detach() + (ours[..., :, None] - theirs[..., None, :]).abs()
            rest = rest + both
        if "pair.weight" in leaves:
            pair = type(plan.pair)(leaves["pair.weight"])
            rest = rest + pair(plan.positions.q_positions(self.q.device), plan.positions.k_positions(self.q.device))
        if "mask" in leaves:
            rest = rest + leaves["mask"]
        if "scale" in leaves:  # the states carry the shift
            tables, folded = tables + folded, products.new_zeros(())
        inside = {"products": products, "tables": tables, "folded": folded}
        return {**{name: x * scale for name, x in inside.items()}, "biases": biases, "rest": rest}

    @property
    def scores(self) -> Tensor:
        return sum(self.parts.values())

    def values(self, weights: Tensor) -> Tensor:
        """sum_j weights_ij (v_j + add_value), differentiable in v and the tables."""
        out = weights @ self.v
        for number, lookup in enumerate(() if self.plan is None else self.plan.lookups):
            if lookup.add_value is not None:
                table = self._table(f"lookups[{number}].add_value")
                bins = weights.new_zeros(*weights.shape[:3], lookup.index.n)
                out = out + bins.scatter_add(3, self._at(number, weights.shape), weights) @ table
        return out

    def of_weights(self, g: Tensor) -> Tensor:
        """dp_ij = g_i . (v_j + add_value)."""
        dp = g @ self.v.mT
        for number, lookup in enumerate(() if self.plan is None else self.plan.lookups):
            if lookup.add_value is not None:
                dots = g @ self._table(f"lookups[{number}].add_value").mT
                dp = dp + dots.expand(*dp.shape[:3], -1).gather(3, self._at(number, dp.shape))
        return dp.detach()

    def gradients(self, of: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Of every leaf; zeros for those that `of` does not read."""
        if not of.requires_grad:
            return {name: torch.zeros_like(x) for name, x in self.leaves.items()}
        found = torch.autograd.grad(of, list(self.leaves.values()), weight, retain_graph=True, allow_unused=True)
        return {
            name: torch.zeros_like(x) if one is None else one
            for (name, x), one in zip(self.leaves.items(), found, strict=True)
        }


# ---- the budget ----------------------------------------------------------------------------------------------------
@torch.enable_grad()
def _compute(given, geometry, units, g, g_lse, kept, recomputed, exp):
    true, size = _Dense(given, geometry, False), _Dense(given, geometry, True)
    soft = _softmax(true, geometry.allowed)
    kept = 1.0 if kept is None else kept.double()
    out = true.values(soft.p * kept)
    expected = {"out": out.detach(), "lse": soft.lse.detach()}
    errors = _Errors(given, units, soft, size, kept, exp)
    allowed = {"out": errors.of_output(), "lse": errors.of_lse()}
    if g is None and g_lse is None:
        return expected, allowed
    g = torch.zeros_like(out) if g is None else g.detach().double()
    g_lse = torch.zeros_like(soft.lse) if g_lse is None else g_lse.detach().double()
    g_lse = g_lse.masked_fill(soft.empty, 0.0)
    objective = (out * g).sum() + (soft.lse.masked_fill(soft.empty, 0.0) * g_lse).sum()
    expected.update(true.gradients(objective, torch.ones_like(objective)))
    allowed.update(errors.of_gradients(true, g, g_lse, recomputed))
    return expected, allowed


@dataclass
class _Soft:
    """The softmax of the scores over the visible keys."""

    p: Tensor
    log_p: Tensor  # -inf where hidden
    lse: Tensor  # [B, H, Lq], -inf for a fully masked query
    above: Tensor  # log-sum-exp - max s, [B, H, Lq, 1]
    empty: Tensor  # bool [B, H, Lq]
    hidden: Tensor


def _softmax(true: _Dense, allowed: Tensor) -> _Soft:
    s = true.scores.masked_fill(~allowed, float("-inf"))
    top = s.detach().amax(-1, keepdim=True) if s.shape[3] else s.new_zeros(*s.shape[:3], 1)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = (s - top).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total.detach() == 0.0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + top).masked_fill(empty, float("-inf")).squeeze(-1)
    log_p = (s - top - total.log()).detach()
    return _Soft(weights / total, log_p, lse, total.detach().log(), empty.squeeze(-1), ~allowed)


class _Errors:
    """The module's table, line by line."""

    def __init__(self, given: dict[str, Tensor], units: _Units, soft: _Soft, size: _Dense, kept, exp: float):
        self.given, self.units, self.size, self.kept, self.hidden = given, units, size, kept, soft.hidden
        self.p, self.lse = soft.p.detach(), soft.lse.detach().nan_to_num(neginf=0.0).abs()
        u, keys = units.sums, self.p.shape[3]
        self.wide = max([given["q"].shape[3]] + [x.shape[-1] for name, x in given.items() if name.endswith("states")])
        added = len(given) - 3  # every other tensor makes at most one term, and a table of biases is one itself
        sizes = {name: x.detach() for name, x in size.parts.items()}
        e_s = u * (c(self.wide + added) + 4) * (sizes["products"] + sizes["tables"] + sizes["folded"])
        e_s = e_s + u * (c(added) + 4) * (sizes["biases"] + sizes["rest"])
        self.again = 2 * e_s
        e_s = e_s + units.low**2 * (sizes["biases"] + sizes["folded"])
        e_s = e_s + units.products * sizes["products"] + units.tables * sizes["tables"]
        e_s = e_s.masked_fill(soft.hidden, 0.0)
        self.e_lse = (soft.log_p + e_s).logsumexp(-1).clamp(min=0.0) if keys else e_s.sum(-1)
        self.e_s, self.log_p = e_s, soft.log_p
        self.exp = (EXP + c(keys)) * u + exp
        self.stored = torch.minimum(4 * u * (self.lse[..., None] + 1), soft.above)
        self.sum = units.low + units.values + u * (c(keys) + 4)  # roundings of p and of its sums with values
        self.e_p = self._of_p(self.stored + self.exp)

    def _of_p(self, more) -> Tensor:
        return _of_probabilities(self.log_p, self.e_s, more).masked_fill(self.hidden, 0.0)

    def _weights(self, e_p: Tensor) -> Tensor:
        """Errors of the probabilities as the values' sums have them."""
        vanished = torch.full_like(e_p, self.units.vanish)
        return ((e_p + self.sum * self.p) * self.kept + vanished).masked_fill(self.hidden, 0.0)

    def of_lse(self) -> Tensor:
        return self.e_lse + self.exp + 4 * self.units.sums * self.lse

    def of_output(self) -> Tensor:
        low = self.units.low
        last = self.units.sums + 4 * low  # the output, its sum with values by distance, and these are rounded
        error = self.size.values(self._weights(self.e_p)) + last * self.size.values(self.p * self.kept)
        visible = (~self.hidden).any(-1, keepdim=True)  # a fully masked query gives zeros
        return error.detach() + visible * (self.units.vanish if low else 0.0)

    def of_gradients(self, true: _Dense, g: Tensor, g_lse: Tensor, recomputed: bool) -> dict[str, Tensor]:
        u, w, p, size = self.units.sums, self.units.low, self.p, self.size
        e_p = self.e_p
        if recomputed:
            e_p = self._of_p(self.stored + self.exp + self.again)
        dp, dp_size = true.of_weights(g) * self.kept, size.of_weights(g.abs()) * self.kept
        g, g_lse = g.abs(), g_lse.abs()[..., None]
        over_keys = lambda x: (p * x).sum(-1, keepdim=True)  # noqa: E731
        mean, mean_size = over_keys(dp), over_keys(dp_size)
        width = c(self.given["v"].shape[-1])
        e_dp = (u * (width + 4) + self.units.values + w) * dp_size
        e_mean = (e_p * dp.abs()).sum(-1, keepdim=True) + over_keys(e_dp)
        e_mean = e_mean + (3 * w + u * (c(p.shape[3]) + width)) * mean_size
        e_ds = e_p * ((dp - mean).abs() + g_lse) + p * (e_dp + e_mean + 4 * u * g_lse)
        ds_size = p * (dp_size + mean_size + g_lse)
        vanished = torch.full_like(p, self.units.vanish).masked_fill(self.hidden, 0.0) * (1 + dp_size if w else 1.0)
        scores, values = size.scores, size.values(p * self.kept)
        errors = _added(size.gradients(scores, e_ds + vanished), size.gradients(size.values(self._weights(e_p)), g))
        sums = _added(size.gradients(scores, ds_size), size.gradients(values, g))
        return {name: self._of_leaf(name, errors[name], sums[name]) for name in self.given}

    def _of_leaf(self, name: str, error: Tensor, summed: Tensor) -> Tensor:
        """What comes with the terms, and the roundings of their sum and of the result in the tensor's own dtype."""
        x, last, u = self.given[name], name.split(".")[-1], self.units.sums
        terms = max(1, self.p.numel() * (x.shape[-1] if last in CHANNELS else 1) // max(1, x.numel()))
        count = 3 * self.units.low + self.units.tables + 4 * unit(x.dtype) + u * (c(terms) + 4)
        if last == "scale":  # its terms are dot products
            count += u * c(self.wide)
        error = error + count * summed
        if last in TABLES and error.numel():
            error = error + error.amax(1, keepdim=True)  # a base is the whole less the others
        roundings = 1
        if last in ("k", "v") and self.p.shape[1] > x.shape[1]:  # of each query head's share, and of their sum
            roundings += self.p.shape[1] // x.shape[1]
        return error + terms * self.units.flushed + (roundings * 2.0**-25 if x.dtype == torch.float16 else 0.0)


def _added(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x + other[name] for name, x in one.items()}


def _of_probabilities(log_p: Tensor, e_s: Tensor, more: Tensor) -> Tensor:
    """The largest change of p where each score moves by at most e_s, and each probability by a factor e^more.

    In logarithms, and with sums over the other keys that subtract nothing: a key that is e^-70 of the best one still
    overtakes it where both scores move by 40.
    """
    if log_p.shape[-1] == 0:
        return log_p
    grown, shrunk = (_logsumexp_of_others(log_p + x) for x in (e_s, -e_s))
    down = torch.logaddexp(log_p, grown + e_s).clamp(min=0.0) + more
    up = more - torch.logaddexp(log_p, shrunk - e_s).clamp(max=0.0)
    p, most = log_p.exp(), (log_p + up).clamp(max=0.0).exp()
    rise = torch.where(up < 1.0, p * up.clamp(max=1.0).expm1(), most - p)
    return torch.minimum(torch.maximum(p * -(-down).expm1(), rise), torch.ones_like(p)) + SMALLEST


def _logsumexp_of_others(x: Tensor) -> Tensor:
    """log sum_{k != j} exp(x_k), along the last size."""
    none = torch.full_like(x[..., :1], float("-inf"))
    before = torch.cat((none, x[..., :-1].logcumsumexp(-1)), -1)
    after = torch.cat((none, x[..., 1:].flip(-1).logcumsumexp(-1)), -1).flip(-1)
    return torch.logaddexp(before, after)
