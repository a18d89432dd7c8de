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
from math import isnan

import torch
from torch import Tensor

from .index import Grid, Index
from .positions import Positions
from .precision import no_autocast
from .printing import short_repr
from .rotation import Rotation
from .torch_modes import has_fake_tensors


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
        if self.dot_query is None and (self.states is not None or self.query_shift is not None):
            name = "query_shift" if self.states is None else "states"
            raise ValueError(f"{name} goes with dot_query, which it is multiplied with; give dot_query too")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are given, by name."""
        for name in ("bias", "dot_query", "states", "dot_key", "add_value", "query_shift"):
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
        check_tensor = partial(_check_tensor, q, readable)
        for number, lookup in enumerate(self.lookups):
            index = lookup.index
            for part in index.parts if isinstance(index, Grid) else (index,):
                if part.axis >= len(positions.q_axes):
                    raise ValueError(
                        f"lookups[{number}] reads axis {part.axis}, but the positions have {len(positions.q_axes)} axes; "
                        "give them to Positions ([B, L, axes], or more=[(q, k)])"
                    )
            width = size if lookup.states is None else lookup.states.shape[-1]
            shapes = {
                "bias": (heads, index.n), "dot_query": (heads, index.n, width), "dot_key": (heads, index.n, size),
                "states": (batch, heads, q_length, width), "add_value": (heads, index.n, v_size), "query_shift": (heads, width),
            }  # fmt: skip
            for name, tensor in lookup.tensors():
                check_tensor(name, tensor, shapes[name], number)
        if self.shift is not None:
            _check_heads("shift", self.shift, q)
            _check_shape("shift", self.shift, [(1, heads), size])
        if self.append is not None:
            self._check_append(q, k, check_tensor)
        for name, numbers in (("slopes", self.slopes), ("cosine", self.cosine), ("sinks", self.sinks)):
            if numbers is not None:
                _check_heads(name, numbers, q)
                _check_shape(name, numbers, [heads])
                check_tensor(name, numbers)
        if isinstance(self.scale, Tensor):
            target, shape = [batch, heads, q_length], list(self.scale.shape)
            if len(shape) > 3 or any(a not in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False)):
                raise ValueError(f"scale must broadcast to [B, H, Lq] = {target}, got shape {shape}")
            check_tensor("scale", self.scale)
        if self.decay is not None:
            check_tensor("decay[0]", self.decay[0], (batch, heads, q_length))
            check_tensor("decay[1]", self.decay[1], (batch, heads, k_length))

    def _check_append(self, q: Tensor, k: Tensor, check_tensor: Callable) -> None:
        assert self.append is not None
        for name, more, x in (("append[0]", self.append[0], q), ("append[1]", self.append[1], k)):
            check_tensor(name, more)
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


def _check_tensor(
    q: Tensor, readable: bool, name: str, tensor: Tensor, shape: tuple[int, ...] | None = None, number: int | None = None
) -> None:  # fmt: skip
    """Raise where the shape, device or dtype of a plan's tensor does not fit q, or where it holds NaN.

    readable   values may be read without a synchronisation
    shape      the first size may also be 1
    number     of the lookup that has the tensor
    """
    fits = shape is None or tensor.shape == shape or tensor.shape == (1, *shape[1:])
    if fits and tensor.device == q.device and tensor.is_floating_point() and not (readable and holds_nan(tensor)):
        return
    of_heads = number is not None and name != "states"
    name = name if number is None else f"lookups[{number}].{name}"
    if shape is not None and not fits:
        if of_heads:
            _check_heads(name, tensor, q)
        _check_shape(name, tensor, [(1, shape[0]), *shape[1:]])
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; move the encoding: .to(q.device)")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    raise ValueError(f"{name} holds NaN; find out how it was loaded or trained")


def _check_heads(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise where a table is for another number of heads: its first size."""
    heads = q.shape[1]
    if tensor.dim() and tensor.shape[0] not in (1, heads):
        swapped = ""
        if tensor.shape[0] == q.shape[2]:
            swapped = f" If q {list(q.shape)} is [B, L, H, D], give [B, H, L, D]: q.transpose(1, 2)."
        raise ValueError(
            f"the encoding was made for {tensor.shape[0]} heads ({name} is {list(tensor.shape)}), q has {heads}; "
            f"make it with heads={heads}.{swapped}"
        )


def _check_shape(name: str, tensor: Tensor, shape: list) -> None:
    allowed = [size if isinstance(size, tuple) else (size,) for size in shape]
    if tensor.dim() != len(shape) or any(a not in b for a, b in zip(tensor.shape, allowed, strict=True)):
        wanted = ", ".join(" or ".join(map(str, sorted(set(size)))) for size in allowed)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")


FEW = 1 << 12
"""Values up to which one elementwise comparison is fastest; larger tensors are summed first."""


def holds_nan(tensor: Tensor) -> bool:
    if has_fake_tensors():
        return False
    if tensor.numel() <= FEW:
        return not tensor.equal(tensor)  # NaN does not equal itself
    if torch.is_grad_enabled():
        tensor = tensor.detach()
    return isnan(tensor.sum().item()) and bool(torch.isnan(tensor).any())


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q [B, H, Lq, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv] are tensors that attention takes."""
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
        raise ValueError(f"q, k and v have {q_rows}, {k_rows} and {v_rows} batch rows; give the same number")
    if q_size != k_size:
        raise ValueError(f"q has head size {q_size} and k {k_size}; they must be equal")
    if k_heads != v_heads or k_length != v_length:
        raise ValueError(f"k and v must have the same heads and length, got {list(k.shape)} and {list(v.shape)}")
    if k_heads == 0 or q_heads % k_heads:
        raise ValueError(
            f"q has {q_heads} heads and k has {k_heads}; the number of query heads must be a multiple of that of key heads"
        )
