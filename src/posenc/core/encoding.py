"""Encoding: the base class of every positional encoding. It makes plans and does not depend on engines."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .errors import OptionError
from .memo import STEP, may_keep
from .plan import Plan
from .positions import Positions, consecutive
from .rotation import Rotation
from .torch_modes import has_fake_tensors

_prepared: WeakKeyDictionary[Encoding, dict[Hashable, Any]] = WeakKeyDictionary()
"""What was prepared for the next call of an encoding that lives, by kind: outside of it, since it is no part of its state."""


class Host(Protocol):
    """The parts of an attention layer that an encoding may use."""

    d_model: int
    heads: int
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class Kept(NamedTuple):
    """The numbers that an encoding keeps for each key (`Encoding.keep`), and the masks of those keys."""

    numbers: Tensor  # [B, Lk, n], as `keep` returned them
    documents: Tensor | None = None  # int ids [B, Lk]
    key_mask: Tensor | None = None  # bool [B, Lk], True for real tokens


class _Recorded(nn.Module):
    """Records the options of the constructor for `repr`: not every option stays an attribute.

    A separate class, so that `inspect.signature` of an encoding is that of its __init__.
    """

    _options: dict[str, Any]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        self = super().__new__(cls)  # copies and unpickled objects come here without options and restore theirs later
        object.__setattr__(self, "_options", {name: value for name, value in options.items() if _is_plain(value)})
        return self


class Encoding(_Recorded):
    """A positional encoding. A subclass overrides the methods of the stages of attention that it changes:

    embed      1. the input:        x + P[p]                  absolute encodings
    rotation   2. queries and keys: R(p) q, R(p) k            rotary encodings
    terms      3. scores, 4. values: lookups, slopes, ...     relative encodings

    One instance serves one layer or several; layers that share a table share the module.

    `plan` raises ValueError where an encoding needs x or host and gets none.

        >>> posenc.create("clipped", heads=2).plan(posenc.Positions(4)).lookups[0].bias.shape  # [H, n]
        torch.Size([2, 33])
    """

    absolute = False
    """Whether results depend on absolute positions, so that rows with left padding need their true positions."""
    length_dependent = False
    """Whether the rotation depends on the total length, so that keys must be cached unrotated."""
    axes: int | None = 1
    """How many axes of positions it reads at most; None: any number. Positions with more axes are an error."""
    embeds_whole = False
    """Whether `embed` needs the whole input at once, so that it cannot continue a cache."""
    embeds = False
    """Whether the class overrides `embed`; set automatically, like the next ones."""
    rotates = False
    """Whether the class overrides `rotation`."""
    rotates_by_rows = False
    """Whether the phases of a run are a slice of those of a longer run."""
    adds_terms = False
    """Whether there are terms in scores or values, or another scale: set for each class that has its own."""
    acts_inside = False
    """Whether there is a rotation or a term. Set for each class."""
    rotates_or_plans = False
    """Whether `plan` is more than `terms`: a rotation, or a plan of its own. Set for each class."""
    keeps = False
    """Whether a cache must keep more of a token than its key and value: set for each class that has its own `keep`."""
    steady_terms = False
    """Whether the tables and slopes of `terms` are the encoding's own parameters or constants, or views of them, the same for all
    runs: steps of decoding then use those of the step before. A subclass with other `terms` says so again."""
    causal_only = False
    """Whether it is defined for past keys only, so that it needs a causal layer."""
    _device_marker: Tensor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.embeds = cls.embed is not Encoding.embed
        cls.rotates = cls.rotation is not Encoding.rotation
        cls.adds_terms = cls.terms is not Encoding.terms or cls.plan is not Encoding.plan
        cls.acts_inside = cls.rotates or cls.adds_terms
        cls.rotates_or_plans = cls.rotates or cls.plan is not Encoding.plan
        cls.keeps = cls.keep is not Encoding.keep
        if ("terms" in cls.__dict__ or "plan" in cls.__dict__) and "steady_terms" not in cls.__dict__:
            cls.steady_terms = False

    def __init__(self) -> None:
        super().__init__()
        # Follows .to(device) for encodings without parameters; empty, so construction on the meta device loses nothing.
        self.register_buffer("_device_marker", torch.empty(0), persistent=False)

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        """Add the positions (the queries' side of `positions`) to x [B, L, d_model]."""
        return x

    def embed_run(self, x: Tensor, start: int) -> Tensor:
        """`embed` of consecutive tokens from position `start` on; subclasses may override it with something faster."""
        return self.embed(x, consecutive(start, x.shape[1], start, x.shape[1]))

    def rows_below(self, x: Tensor, most: int) -> Tensor | None:
        """Vectors [n, d_model] that `embed` adds at the positions 0, 1, 2, .., n >= most, where they lie in memory; else None."""
        return None

    def embed_below(self, x: Tensor, positions: Tensor, most: int) -> Tensor:
        """`embed` at positions [B, L] that are known to be 0 or more and below `most`; subclasses may override it with something
        faster."""
        return self.embed(x, Positions(positions))

    def rotation(self, positions: Positions) -> Rotation | None:
        """The rotation of queries and keys."""
        return None

    def rotate_run(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, H, L, D] of L consecutive tokens from position `start` on, rotated where there is a rotation."""
        length = q.shape[2]
        if self.rotates_by_rows and q.is_cpu and may_keep(q.device) and not torch.is_grad_enabled():
            row = start % STEP
            if row + length <= STEP:  # the phases of all these steps are made once, and found at once
                whole = self._rotation_of_steps(start - row)
                rotated = None if whole is None or whole.values else whole.rotate_rows(q, k, row)
                if rotated is not None:
                    return *rotated, v
        rotation = self.rotation(consecutive(start, length, start, length))
        if rotation is None:
            return q, k, v
        if q.is_cuda and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            again = rotation.rotate_again(q, k)
            if again is not None:
                return again[0], again[1], v
        rotation.check(q, k, v)
        return rotation.rotate_qkv(q, k, v)

    def _rotation_of_steps(self, first: int) -> Rotation | None:
        """`rotation` of the STEP positions from `first` on. The last one is kept: a text's next tokens ask for it again."""
        marker = self._buffers["_device_marker"]  # another one where the module was moved
        prepared = self.prepared()
        known = prepared.get("phases")
        if known is not None and known[0] == first and known[1] is marker:
            return known[2]
        whole = self.rotation(consecutive(first, STEP, first, STEP))
        if not self._parameters:
            prepared["phases"] = first, marker, whole
        return whole

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        """The terms added to scores and values. x: the queries' input [B, Lq, d_model]; host: the attention layer."""
        return Plan(positions)

    def keep(self, x: Tensor) -> Tensor | None:
        """Numbers [B, L, n] for each token of x [B, L, d_model] that later queries need too; a cache stores them with its
        keys. An encoding that overrides this gets those of all keys in `terms(..., kept=)`."""
        return None

    def plan(
        self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, kept: Kept | None = None
    ) -> Plan:
        """Everything this encoding does inside attention, for these positions."""
        self.check_axes(positions)
        rotation = self.rotation(positions)
        more: dict[str, Any] = {} if kept is None else {"kept": kept}
        plan = self.terms(positions, x=x, host=host, **more)
        return plan if rotation is None else plan.with_rotation(rotation)

    # ---- what is prepared for the next call -------------------------------------------------------------------------------
    def prepared(self) -> dict[Hashable, Any]:
        """What was prepared for the next call, by kind: to read, and to write to. Assigning an attribute begins a new dict, so
        a thread that has asked for the old one does not write what is outdated into the new."""
        found = _prepared.get(self)
        return _prepared.setdefault(self, {}) if found is None else found

    def prepared_terms(self) -> dict[Hashable, Any] | None:
        """`prepared`, for what is made of the terms: a new dict also where a parameter was replaced or moved; None where the terms
        are not steady. Parameters may hold other numbers than before."""
        own = self.__dict__
        if not self.steady_terms or own["_modules"] or "terms" in own:  # parametrizations are modules
            return None
        if has_fake_tensors() or torch._C._are_functorch_transforms_active():  # a table of vmap has no address
            return None
        prepared, tables = self.prepared(), own["_parameters"]
        addresses = prepared.get("addresses")
        if addresses is not None and len(addresses) == len(tables):
            for table, (known, address) in zip(tables.values(), addresses):
                if table is not known or (table is not None and table.data_ptr() != address):
                    break
            else:
                return prepared
        addresses = [(table, None if table is None else table.data_ptr()) for table in tables.values()]
        prepared = _prepared[self] = {"addresses": addresses}
        return prepared

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _prepared.pop(self, None)

    def reset_host(self, host: Host) -> None:
        """Initialise the layer's projections as the original model did, where the encoding needs that."""

    def check_axes(self, positions: Positions) -> None:
        """Raise where the positions have an axis that this encoding does not read."""
        given = len(positions.q_axes)
        if self.axes is not None and given > self.axes:
            allowed = "1 axis" if self.axes == 1 else f"{self.axes} axes"
            raise ValueError(
                f"positions have {given} axes, and {type(self).__name__} reads {allowed}; give one axis "
                "(ids[..., 0], positions.axis(n)), or use an encoding that reads them all (mrope, axial, xlnet)"
            )

    def check_causal(self, causal: bool) -> str | None:
        """Raise where a layer with this `causal` cannot use the encoding; return the text of a warning where it can but
        probably should not.
        """
        if self.causal_only and not causal:
            raise OptionError(
                f"{type(self).__name__} is defined for past keys only, and this layer is not causal; "
                "give causal=True, or use an encoding for both directions (rope, t5, alibi)"
            )
        return None

    def extra_repr(self) -> str:
        """The options in the order of the constructor, except those that are None by default and in use."""
        options = []
        for option in inspect.signature(type(self).__init__).parameters.values():
            value = self._options.get(option.name, option.default)
            current = self.__dict__.get(option.name)
            if current is not None and _is_plain(current):  # resolved defaults; Learned.resize changes max_length
                value = current
            if option.name != "self" and _is_plain(value) and not (value is None and option.default is None):
                options.append(f"{option.name}={value!r}")
        return ", ".join(options)

    def device_of(self, positions: Positions, x: Tensor | None = None) -> torch.device:
        """The device for new tensors: the input's, a position tensor's, or the module's."""
        for candidate in (x, positions.q, positions.k):
            if isinstance(candidate, Tensor):
                return candidate.device
        return self._device_marker.device


def follow_assigned(layer: nn.Module, incompatible_keys: Any = None) -> None:
    """A hook of `load_state_dict`, which with assign=True replaces the parameters of a layer that was made on the meta device: its
    encodings follow them, those without parameters too."""
    parameter = next(layer.parameters(), None)
    if parameter is None or parameter.is_meta:
        return
    for module in layer.modules():
        marker = module._buffers.get("_device_marker")
        if marker is not None and marker.is_meta:
            module._buffers["_device_marker"] = torch.empty_like(marker, device=parameter.device)


def _is_plain(value: Any) -> bool:
    """Whether a value is an option (a number, a name, a scaling) and not a tensor or a module."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str)) or is_dataclass(value)
