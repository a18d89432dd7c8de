"""RoPE: rotate pairs of channels of queries and keys by position × frequency."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.constants import constant
from ...core.encoding import Encoding
from ...core.errors import OptionError
from ...core.formulas import inverse_frequencies
from ...core.memo import Memo, may_keep
from ...core.options import WIDEST, require_bool, require_choice, require_int, require_number
from ...core.phases import (
    LIMIT,
    FrequencyDigits,
    compute_phases,
    phases_of_run,
    split_frequencies,
    split_frequency_tensor,
)
from ...core.plan import Plan
from ...core.positions import Positions, Run, Side
from ...core.rotation import Layout, Phases, Rotation, apply_rotary
from ...core.torch_modes import has_fake_tensors
from .scaling import Scaling

RANGE = f"the range of rotary phases, -{LIMIT} < position < {LIMIT}"


_rotations = Memo(most=32, numbers=1 << 23)


class RoPE(Encoding):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864).

        pair c of q and of k at position p is rotated by p · w_c,  w_c = base^(-2c/R);  scores depend on p_k - p_q

        layout="half"          pairs (c, c + R/2)    GPT-NeoX, Llama and most models of Hugging Face
        layout="interleaved"   pairs (2c, 2c + 1)    RoFormer, GPT-J, Meta's Llama, Cohere, GLM

    R = rotary_dim, by default all of head_dim; channels past R pass through. `scaling` is an object of
    `posenc.scaling` that extends the context. `values` rotates the values too. Phases are computed from integer
    positions, exactly, in float32 (float64 after `.double()`); nothing is stored.

    Raises OptionError for an odd or too large rotary_dim and for unknown layouts.

        >>> rope = posenc.RoPE(head_dim=64, base=500000.0)
        >>> rope.rotate(torch.randn(2, 8, 10, 64), (0, 10)).shape  # [B, H, L, D]
        torch.Size([2, 8, 10, 64])
    """

    def __init__(
        self, *, head_dim: int, base: float = 10000.0, rotary_dim: int | None = None, layout: Layout = "half",
        scaling: Scaling | None = None, values: bool = False,
    ):  # fmt: skip
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_rotary(head_dim, rotary_dim, layout, scaling)
        require_bool("values", values)
        self.head_dim, self.rotary_dim = head_dim, rotary_dim
        self.base = require_number("base", base, above=0.0)
        self.layout: Layout = layout
        self.scaling, self.values = scaling, values
        self.length_dependent = scaling is not None and scaling.length_dependent
        self.rotates_by_rows = not self.length_dependent and type(self).rotation is RoPE.rotation
        if type(self).terms is RoPE.terms and type(self).plan is Encoding.plan:
            self.adds_terms = scaling is not None and scaling.score_factor != 1.0
        # Python numbers, computed here: compiled code must not trace a memoised function
        self._plain = inverse_frequencies(rotary_dim, self.base)
        self._digits = split_frequencies(self.frequencies())

    @classmethod
    def from_config(
        cls, config: Any, dialect: str = "hf", *, layer_type: str | None = None, length: int | None = None,
        head_dim: int | None = None, layout: Layout | None = None,
    ) -> RoPE:  # fmt: skip
        """The RoPE of a model's configuration: base, sizes, layout and scaling.

        The arguments are those of `posenc.scaling.from_config`; head_dim and layout complete or override the
        configuration. DeepSeek's keys are [content | position] channels; here the rotated channels come first, so
        concatenate them as [position | content] (the scores are the same).

        Raises OptionError for unknown, missing and contradictory keys.

            >>> config = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0}
            >>> posenc.RoPE.from_config(config).base
            500000.0
        """
        from .configs import read
        from .fields import validate

        setup, head_dim = read(config, dialect, layer_type=layer_type, length=length), validate("head_dim", head_dim)
        if setup.sections is not None:
            raise OptionError("this configuration has mrope_section: use posenc.MRoPE.from_config")
        if head_dim is not None:
            part = setup.rotary_dim if setup.head_dim is not None and setup.rotary_dim != setup.head_dim else None
            setup = replace(setup, head_dim=head_dim, rotary_dim=part)
        if layout is not None:
            setup = replace(setup, layout=layout)
        return cls(**setup.options())

    def frequencies(self, total: int | None = None) -> tuple[float, ...]:
        """The inverse frequencies of a sequence of `total` tokens (None: no longer than the original length)."""
        if self.scaling is None:
            return self._plain
        return self.scaling.frequencies(self._plain, self.rotary_dim, self.base, total)

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def rotation(self, positions: Positions) -> Rotation:
        runs = positions.runs
        if runs is not None and not self.length_dependent:
            q, k = runs
            if type(q.start) is int and type(k.start) is int:
                return self._rotation_of_runs(q, k)
        device = self.device_of(positions)
        digits, factor = self._frequency_digits(positions.total if self.length_dependent else 0, device)
        if digits[0].dim() == 3:
            of_queries = digits_of_last_tokens(digits, factor, positions.q_length)
            queries = self._phases(positions.q, *of_queries, device)
            return Rotation(queries, self._phases(positions.k, digits, factor, device), self.layout, self.values)
        return rotation_of(positions, self.layout, self.values, lambda side: self._phases(side, digits, factor, device))

    def _rotation_of_runs(self, q: Run, k: Run) -> Rotation:
        """The same object for all layers that rotate these positions."""
        marker, factor = self._device_marker, self.attention_factor
        device, may = marker.device, may_keep(marker.device)
        key = q.start, q.length, k.start, k.length, self._digits, factor, self.layout, self.values, device, marker.dtype
        found = _rotations.get(key) if may else None
        if found is not None:
            return found
        dtype = torch.promote_types(marker.dtype, torch.float32)

        def phases(side: Run) -> Phases:
            check_range(side, 1 - LIMIT, LIMIT - 1, RANGE)
            assert isinstance(side.start, int)
            return phases_of_run(side.start, side.length, self._digits, factor, device, dtype)

        if not may:
            return rotation_of(Positions(q, k), self.layout, self.values, phases)
        with torch.inference_mode(False), torch.no_grad():
            found = rotation_of(Positions(q, k), self.layout, self.values, phases)
        _rotations.put(key, found, 0 if found.k is None else 2 * found.k[0].numel())
        return found

    def rotate(self, x: Tensor, positions: int | tuple | Tensor, total: int | Tensor | None = None) -> Tensor:
        """Rotate x [B, heads, L, D] alone, outside of attention. positions: (start, L), or an int tensor [L] or [B, L];
        `total` is the sequence's length where it is more than the last position + 1.
        """
        own = Positions(positions, total=total)
        digits, factor = self._frequency_digits(own.total if self.length_dependent else 0, x.device)
        return apply_rotary(x, *self._phases(own.q, digits, factor, x.device), self.layout)

    def terms(self, positions: Positions, *, x=None, host=None) -> Plan:
        return Plan(positions, scale=scale_of(self.scaling, self.head_dim))

    def _frequency_digits(self, total: int | Tensor, device: torch.device) -> tuple[FrequencyDigits, float | Tensor]:
        if not self.length_dependent:
            return digits_on_device(self._digits, device), self.attention_factor
        assert self.scaling is not None
        return length_dependent_digits(self.scaling, self._plain, self.rotary_dim, self.base, total, device)

    def _phases(self, side: Side, digits: FrequencyDigits, factor: float | Tensor, device: torch.device) -> Phases:
        dtype = torch.promote_types(self._device_marker.dtype, torch.float32)
        return scale_phases(phases_at(positions_of(side, device).unsqueeze(-1), digits, dtype), factor)


def scale_of(scaling: Scaling | None, head_dim: int) -> float | None:
    """The plan's scale: None, 1 / sqrt(D), where the scaling leaves the scores as they are."""
    factor = 1.0 if scaling is None else scaling.score_factor
    return None if factor == 1.0 else factor * head_dim**-0.5


def check_rotary(head_dim: int, rotary_dim: int, layout: Layout, scaling: Scaling | None) -> None:
    """Validate the options that all rotary encodings share."""
    require_int("head_dim", head_dim, most=WIDEST)
    require_int("rotary_dim", rotary_dim, most=WIDEST)
    if rotary_dim % 2:
        raise OptionError(f"RoPE rotates pairs of channels: rotary_dim={rotary_dim} must be even")
    if rotary_dim > head_dim:
        raise OptionError(f"rotary_dim={rotary_dim} exceeds head_dim={head_dim}")
    require_choice("layout", layout, ("half", "interleaved"))
    if scaling is not None and not isinstance(scaling, Scaling):
        raise OptionError(
            f"scaling={scaling!r} is not a scaling; use an object of posenc.scaling, such as Linear(factor=2), "
            "or posenc.scaling.from_config for a configuration"
        )


def digits_on_device(digits: tuple[tuple[int, ...], ...], device: torch.device) -> FrequencyDigits:
    """Digits as tensors."""
    first, second, third = (constant(digit, device, torch.int64) for digit in digits)
    return first, second, third


def length_dependent_digits(
    scaling: Scaling, plain: tuple[float, ...], size: int, base: float, total: int | Tensor, device: torch.device
) -> tuple[FrequencyDigits, float | Tensor]:
    """Digits and magnitude of a scaling whose frequencies depend on the length: [n] for one total, [B, n] for one
    per row, [B, L, n] for one per token (packed documents of different lengths).
    """
    on = torch.device("cpu" if device.type == "mps" else device)  # MPS has no float64
    if isinstance(total, Tensor):
        each_token = total.dim() == 2
        total = total.to(on, torch.float64).reshape(*total.shape if each_token else (-1,), 1)
    elif torch.compiler.is_compiling():
        each_token = False
        total = torch.scalar_tensor(total, dtype=torch.float64, device=on).reshape(1, 1)
    else:
        digits = split_frequencies(scaling.frequencies(plain, size, base, total))
        return digits_on_device(digits, device), scaling.magnitude_at(total)
    first, second, third = split_frequency_tensor(scaling.frequencies_of(plain, size, base, total))
    factor = scaling.magnitude_at(total)
    if isinstance(factor, Tensor):
        factor = (factor if each_token else factor.unsqueeze(-1)).to(device)  # [B, L or 1, 1]
    return (first.to(device), second.to(device), third.to(device)), factor


def digits_of_last_tokens(
    digits: FrequencyDigits, factor: float | Tensor, count: int
) -> tuple[FrequencyDigits, float | Tensor]:
    """Digits and magnitude of the last `count` tokens, where each token has its own."""
    first, second, third = (digit[:, digit.shape[1] - count :] for digit in digits)
    return (first, second, third), factor[:, factor.shape[1] - count :] if isinstance(factor, Tensor) else factor


def phases_at(positions: Tensor, digits: FrequencyDigits, dtype: torch.dtype) -> Phases:
    """`compute_phases` of positions [B, L, 1 or n] for digits [n], [B, n], or [B, L, n]."""
    if digits[0].dim() < 3:
        return compute_phases(positions, digits, dtype)
    cos, sin = compute_phases(positions.unsqueeze(-2), digits, dtype)
    return cos.squeeze(-2), sin.squeeze(-2)


def scale_phases(both: Phases, factor: float | Tensor) -> Phases:
    """cos and sin times the magnitude."""
    if isinstance(factor, Tensor):
        factor = factor.to(both[0].dtype)
    elif factor == 1.0:
        return both
    return both[0] * factor, both[1] * factor


def positions_of(side: Side, device: torch.device) -> Tensor:
    """[B or 1, L] int64, checked against the range in which phases are exact."""
    check_range(side, 1 - LIMIT, LIMIT - 1, RANGE)
    positions = side.positions(device) if isinstance(side, Run) else side.to(device=device, dtype=torch.int64)
    return positions if positions.dim() == 2 else positions.unsqueeze(0)


def check_range(side: Side, low: int, high: int, name: str, more: str = "") -> None:
    """Raise where a position is not in [low, high]. On a GPU, and in compiled code, the check is asynchronous: the error
    comes with a later call, and nothing waits for it.
    """
    start = side.start if isinstance(side, Run) else side
    last = (side.length if isinstance(side, Run) else 1) - 1
    if not isinstance(start, Tensor):
        if torch.compiler.is_compiling():
            return  # lengths and starts are symbols: a comparison would specialise them
        bounds = (start, start + last)
    elif start.numel() == 0 or start.device.type not in ("cpu", "cuda") or last < 0:
        return
    elif start.device.type == "cuda" or torch.compiler.is_compiling():
        if start.dtype == torch.int64 or low >= 0:
            inside = (start >= low) & (start <= high - last)
            torch._assert_async(inside.all(), f"positions leave {name}")
        return
    elif has_fake_tensors():
        return
    else:
        least, most = torch.aminmax(start)
        bounds = (int(least), int(most) + last)
    if bounds[0] < low or bounds[1] > high:
        raise ValueError(
            f"positions {bounds[0]} to {bounds[1]} leave {name}; {more}subtract a common start: only differences matter"
        )


def rotation_of(positions: Positions, layout: Layout, values: bool, phases_at) -> Rotation:
    """Phases of both sides, computed once where queries and keys share them (or queries are some of the keys)."""
    q, k = positions.q, positions.k
    both = phases_at(k)
    if q is k:
        return Rotation(both, both, layout, values)
    if isinstance(q, Run) and isinstance(k, Run) and isinstance(q.start, int) and isinstance(k.start, int):
        skip = q.start - k.start
        if skip >= 0 and skip + q.length <= k.length:
            rows = slice(skip, skip + q.length)
            queries = both if q == k else (both[0][:, rows], both[1][:, rows])
            return Rotation(queries, both, layout, values)
    return Rotation(phases_at(q), both, layout, values)
