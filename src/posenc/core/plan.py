"""Plan: the positional terms of one attention call, in a form that every engine can run.

    q <- rotate(q + shift),  k <- rotate(k)                                   (pre-pass, once, by attend)
    q <- cosine q / |q|,     k <- k / |k|                                     (where `cosine` is given)
    q <- [q, append_q],      k <- [k, append_k]                               (where `append` is given)
    s = scale [ q.k + sum (q + query_shift).dot_query + sum dot_key ] + sum bias - slopes |r| + decay + pair
    o = sum_j softmax([s + mask, sinks])_ij ( v_j + sum add_value )           r = p_k - p_q

A sink is one more logit of each query that has no value; attend merges it into the output of any engine.

Letters, everywhere: B batch, H query heads, Hkv key heads, Lq and Lk lengths, D head size, n table rows.
Dots run in q's dtype with float32 accumulation; the rest is float32 (float64 where q is).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .index import Grid, Index
from .plan_checks import check_heads, check_lookup, check_plan, check_shape, check_term
from .positions import Positions
from .precision import no_autocast
from .printing import short_repr
from .rotation import Rotation

LOOKUP_TENSORS = ("bias", "dot_query", "states", "dot_key", "add_value", "query_shift")


@dataclass(frozen=True)
class Lookup:
    """Tables that one distance index reads: bias, dot_query, dot_key, add_value, in any combination.

    bias [H, n], dot_query and dot_key [H, n, D], add_value [H, n, D]. `attend` raises
    ValueError for tables that do not fit the index.

        >>> posenc.Lookup(posenc.index.clip(1, 1), bias=torch.zeros(4, 3)).bias.shape
        torch.Size([4, 3])
    """

    index: Index | Grid
    bias: Tensor | None = None  # [H or 1, n], added after scale
    dot_query: Tensor | None = None  # [H or 1, n, E]: states_i . t[row], inside scale
    states: Tensor | None = None  # [B, H, Lq, E]; None: the (shifted, rotated) q
    dot_key: Tensor | None = None  # [H or 1, n, D]: k_j . t[row], inside scale
    add_value: Tensor | None = None  # [H or 1, n, Dv]: a_ij t[row], after dropout
    query_shift: Tensor | None = None  # [H or 1, E], added to the states (or q) of dot_query; the pre-pass folds it
    __repr__ = short_repr

    def __post_init__(self):
        check_lookup(self, (Index, Grid), LOOKUP_TENSORS)
        if self.dot_query is None and (self.states is not None or self.query_shift is not None):
            name = "query_shift" if self.states is None else "states"
            raise ValueError(f"{name} goes with dot_query, which it is multiplied with; give dot_query too")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are given, by name."""
        for name in LOOKUP_TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


@dataclass(frozen=True, init=False)
class Plan:
    """One layer's positional terms; see the module's formula. Encodings make plans, engines run them.

    `attend` raises ValueError for tables, slopes or decays whose shapes do not fit.

        >>> plan = posenc.Plan(posenc.Positions(3), slopes=torch.ones(1))  # [H]
        >>> posenc.scores(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), plan)[0, 0, 2]
        tensor([-2., -1.,  0.])
    """

    positions: Positions
    # pre-pass
    shift: Tensor | None = None  # [H, D]
    rotate: Rotation | None = None
    cosine: Tensor | None = None  # [H]: cosine attention; the scale is then 1 where None
    append: tuple[Tensor, Tensor] | None = None  # [B or 1, H, Lq, E], [B or 1, H or 1, Lk, E]: more channels of q and k
    # core
    lookups: tuple[Lookup, ...] = ()
    scale: float | Tensor | None = None  # None: 1/sqrt(D), or 1 with cosine; a tensor broadcasts to [B, H, Lq]
    slopes: Tensor | None = None  # [H]
    decay: tuple[Tensor, Tensor] | None = None  # c_q [B, H, Lq], c_k [B, H, Lk]: + c_q - c_k
    pair: Callable[[Tensor, Tensor], Tensor] | None = None  # (p_q [.., lq], p_k [.., lk]) -> [B or 1, H, lq, lk]
    pair_axes: bool | None = None  # whether pair gets positions of every axis, [.., lq, axes] and [.., lk, axes]
    # after the engine
    sinks: Tensor | None = None  # [H]: one more logit of each query, without a value
    __repr__ = short_repr

    def __init__(
        self, positions: Positions, shift: Tensor | None = None, rotate: Rotation | None = None,
        cosine: Tensor | None = None, append: tuple[Tensor, Tensor] | None = None, lookups: tuple[Lookup, ...] = (),
        scale: float | Tensor | None = None, slopes: Tensor | None = None, decay: tuple[Tensor, Tensor] | None = None,
        pair: Callable[[Tensor, Tensor], Tensor] | None = None, pair_axes: bool | None = None, sinks: Tensor | None = None,
    ):  # fmt: skip
        check_plan(positions, shift, rotate, cosine, append, lookups, scale, slopes, decay, pair, sinks, Lookup)
        if type(lookups) is list:
            lookups = tuple(lookups)
        # its own __init__ would set the fields one by one, in twice the time, and every layer makes a plan in each step
        fields = dict(
            positions=positions, shift=shift, rotate=rotate, cosine=cosine, append=append, lookups=lookups, scale=scale,
            slopes=slopes, decay=decay, pair=pair, pair_axes=pair_axes, sinks=sinks,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            self.__dict__.update(fields)
            return
        for name, x in fields.items():  # compilers of PyTorch know this way alone; at another they begin a new graph
            object.__setattr__(self, name, x)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the core, named, in a fixed order."""
        for number, lookup in enumerate(self.lookups):
            for name, tensor in lookup.tensors():
                yield f"lookups[{number}].{name}", tensor
        if isinstance(self.scale, Tensor):
            yield "scale", self.scale
        if self.slopes is not None:
            yield "slopes", self.slopes
        if self.decay is not None:
            yield "decay[0]", self.decay[0]
            yield "decay[1]", self.decay[1]
        if self.sinks is not None:
            yield "sinks", self.sinks

    def scale_of(self, head_size: int) -> float | Tensor:
        """The factor of the scores: a float, or a tensor [.., H, Lq, 1] in float32 or better."""
        if self.scale is None:
            return head_size**-0.5 if self.cosine is None else 1.0
        if isinstance(self.scale, Tensor):
            return self.scale.to(torch.promote_types(self.scale.dtype, torch.float32)).unsqueeze(-1)
        return float(self.scale)

    def decay_in(self, precision: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """c_q and c_k in at least this precision. Only their difference may be rounded further: each of them grows with the
        length of the sequence."""
        if self.decay is None:
            return None
        c_q, c_k = self.decay
        exact = torch.promote_types(torch.promote_types(c_q.dtype, c_k.dtype), precision)
        return c_q.to(exact), c_k.to(exact)

    def with_rotation(self, rotation: Rotation) -> Plan:
        """The same plan with this rotation; called for every layer, and faster than `replace`."""
        if torch.compiler.is_compiling():
            return replace(self, rotate=rotation)
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, rotate=rotation)
        return new

    def at(self, positions: Positions) -> Plan:
        """The same terms at other positions."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, positions=positions)
        return new

    def take_shift(self, q: Tensor) -> tuple[Tensor, Plan]:
        """q + shift and the plan without it: for a q that is rotated before `attend`."""
        if self.shift is None:
            return q, self
        return q + self.shift.to(q.dtype)[:, None, :], replace(self, shift=None)

    def fold_query_shifts(self, q: Tensor) -> Plan:
        """The same plan without query_shift, for engines; q is shifted and rotated already."""
        if all(lookup.query_shift is None for lookup in self.lookups):
            return self
        scale = self.scale_of(q.shape[3])
        with no_autocast(q.device):
            return replace(self, lookups=tuple(_fold_query_shift(lookup, q, scale) for lookup in self.lookups))

    def check(self, q: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Raise a ValueError where the plan does not fit q [B, H, Lq, D] and k, v [B, Hkv, Lk, D]."""
        batch, heads, q_length, size = q.shape
        k_length = k.shape[2]
        v_size = size if v is None else v.shape[3]
        positions = self.positions
        if positions.q_length != q_length or positions.k_length != k_length:
            if (positions.q_length, positions.k_length) == (q.shape[1], k.shape[1]):
                raise ValueError(
                    f"the plan was made for {positions.q_length} queries and {positions.k_length} keys; q {list(q.shape)} and "
                    f"k {list(k.shape)} look like [B, L, H, D]: give [B, H, L, D], q.transpose(1, 2)"
                )
            raise ValueError(
                f"the plan was made for {positions.q_length} queries and {positions.k_length} keys, "
                f"got {q_length} and {k_length}; make it with Positions(q={q_length}, k={k_length}) or the true positions"
            )
        plain_runs = positions.offset is not None and len(positions.q_axes) == 1  # no row of a batch has its own
        for name, sides in () if plain_runs else (("query", positions.q_axes), ("key", positions.k_axes)):
            for side in sides:
                rows = side if isinstance(side, Tensor) else side.start
                by_row = isinstance(rows, Tensor) and (rows.dim() == 2 or not isinstance(side, Tensor))
                if by_row and rows.shape[0] not in (1, batch):
                    raise ValueError(f"{name} positions are for {rows.shape[0]} rows, the batch has {batch}")
        if self.rotate is not None:
            self.rotate.check(q, k, v)
        if (
            not self.lookups
            and self.slopes is None
            and self.shift is None
            and self.decay is None
            and self.sinks is None
        ):
            if not isinstance(self.scale, Tensor) and self.append is None and self.cosine is None:
                return
        # Values are read on a CPU, and elsewhere, where reading synchronises, in anomaly mode only. Inside torch.func
        # a tensor may stand for a batch of tensors, and has no values to read.
        readable = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
        readable = readable and (q.is_cpu or (torch.is_anomaly_enabled() and not q.is_meta))
        check = partial(check_term, q, readable)
        for number, lookup in enumerate(self.lookups):
            index = lookup.index
            for part in index.parts if isinstance(index, Grid) else (index,):
                if part.axis >= len(positions.q_axes):
                    raise ValueError(
                        f"lookups[{number}] reads axis {part.axis}, but the positions have {len(positions.q_axes)} axes; "
                        "give them to Positions ([B, L, axes], or more=[(q, k)])"
                    )
            width = size if lookup.states is None or not lookup.states.dim() else lookup.states.shape[-1]
            shapes = {
                "bias": (heads, index.n), "dot_query": (heads, index.n, width), "dot_key": (heads, index.n, size),
                "states": (batch, heads, q_length, width), "add_value": (heads, index.n, v_size), "query_shift": (heads, width),
            }  # fmt: skip
            for name, tensor in lookup.tensors():
                check(name, tensor, shapes[name], number)
        if self.shift is not None:
            check("shift", self.shift)
            check_heads("shift", self.shift, q)
            check_shape("shift", self.shift, [(1, heads), size])
        if self.append is not None:
            self._check_append(q, k, check)
        for name, numbers in (("slopes", self.slopes), ("cosine", self.cosine), ("sinks", self.sinks)):
            if numbers is not None:
                check(name, numbers)
                check_heads(name, numbers, q)
                check_shape(name, numbers, [heads])
        if isinstance(self.scale, Tensor):
            check("scale", self.scale)
            target, shape = [batch, heads, q_length], list(self.scale.shape)
            if len(shape) > 3 or any(a not in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False)):
                raise ValueError(f"scale must broadcast to [B, H, Lq] = {target}, got shape {shape}")
        if self.decay is not None:
            check("decay[0]", self.decay[0], (batch, heads, q_length))
            check("decay[1]", self.decay[1], (batch, heads, k_length))

    def _check_append(self, q: Tensor, k: Tensor, check: Callable) -> None:
        assert self.append is not None
        for name, more, x in (("append[0]", self.append[0], q), ("append[1]", self.append[1], k)):
            check(name, more)
            if more.dim() != 4 or any(a not in (1, b) for a, b in zip(more.shape[:3], x.shape)):
                raise ValueError(
                    f"{name} must be [B or 1, heads or 1, L, E] for {list(x.shape)}, got {list(more.shape)}"
                )
        if self.append[0].shape[3] != self.append[1].shape[3]:
            raise ValueError(f"append adds {self.append[0].shape[3]} channels to q and {self.append[1].shape[3]} to k")
        if self.scale is None:
            raise ValueError("append widens heads, so the default scale 1/sqrt(D) is ambiguous; give the plan a scale")
        if any((x.dot_query is not None and x.states is None) or x.dot_key is not None for x in self.lookups):
            raise ValueError(
                "append does not combine with tables that are multiplied with q or k; give states, or leave append out"
            )

    def width(self, head_size: int) -> int:
        """Channels of queries and keys after the pre-pass."""
        wide = 2 * head_size if self.rotate is not None and self.rotate.polar else head_size
        return wide if self.append is None else wide + self.append[0].shape[3]


def _fold_query_shift(lookup: Lookup, q: Tensor, scale: float | Tensor) -> Lookup:
    """query_shift · table is one number for each row: a bias, which engines run fast. With a scale for each query it is not,
    and the states carry the shift instead.
    """
    shift, table = lookup.query_shift, lookup.dot_query
    if shift is None or table is None:
        return lookup
    if isinstance(scale, Tensor):
        states = q if lookup.states is None else lookup.states
        return replace(lookup, states=states + shift.to(states.dtype)[:, None, :], query_shift=None)
    precision = torch.promote_types(torch.promote_types(table.dtype, q.dtype), torch.float32)
    bias = (table.to(precision) @ shift.to(precision)[:, :, None]).squeeze(-1) * scale
    return replace(lookup, bias=bias if lookup.bias is None else lookup.bias + bias, query_shift=None)
