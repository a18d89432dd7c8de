"""Rotary positions along several axes: images, video, and text among them. Positions are [B, L, axes].

Every pair of channels belongs to one axis and is rotated by that axis' position × its own frequency, so all of these are
one rotation with an (axis, frequency) for each pair; the conventions differ only in these lists.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ...core.constants import constant
from ...core.encoding import Encoding
from ...core.errors import OptionError
from ...core.formulas import inverse_frequencies
from ...core.memo import Memo, may_keep
from ...core.options import WIDEST, require_bool, require_choice, require_int, require_number
from ...core.phases import compute_phases, split_frequencies, split_frequency_tensor
from ...core.plan import Plan
from ...core.positions import Positions, Run, Side
from ...core.rotation import Layout, Phases, Rotation
from .rope import (
    FrequencyDigits,
    check_rotary,
    digits_of_last_tokens,
    digits_on_device,
    length_dependent_digits,
    phases_at,
    positions_of,
    scale_phases,
)
from .scaling import Scaling

_rotations = Memo(most=32, numbers=1 << 22)
"""Of consecutive patches or tokens, for the layers and steps that ask again."""

Convention = Literal["pixtral", "dinov3", "qwen2_vl", "llama4", "blocks"]


class ManyAxes(Encoding):
    """Rotary positions on any number of axes: for each pair of channels its axis and its frequency.

        pair c is rotated by  p[axis_of[c]] · frequencies[c]

        axis_of=(0, 0, 1, 1)         rows, then columns           axis_of=(0, 1, 0, 1)    dealt out in turn
        axis_of=(0, 0, 0, 1, 1, 2)   unequal shares, any order

    Without `frequencies` each axis has frequencies base^(-c/n), c = 0 .. n - 1, n its pairs, in the order of its
    pairs. Positions are [B, L, axes]; with `text`, positions with a single axis are used for all axes. The first
    2 len(axis_of) channels of a head are rotated, the others pass. mrope and axial are such encodings, with the
    conventions of published models.

    Raises OptionError for an axis_of that does not fit head_dim or frequencies.

        >>> at = torch.zeros(1, 5, 3, dtype=torch.long)  # [B, L, axes]
        >>> posenc.ManyAxes(head_dim=8, axis_of=(0, 0, 1, 2)).plan(posenc.Positions(at)).rotate.q[0].shape  # [B, L, D/2]
        torch.Size([1, 5, 4])
    """

    columns: int | None = None
    """The columns of the grid whose patches positions with a single axis number, row by row."""

    def __init__(
        self,
        *,
        axis_of: tuple[int, ...],
        frequencies: tuple[float, ...] | None = None,
        head_dim: int | None = None,
        base: float = 10000.0,
        layout: Layout = "half",
        factor: float = 1.0,
        text: bool | None = None,
    ):
        super().__init__()
        if not isinstance(axis_of, (tuple, list)) or not axis_of:
            raise OptionError(f"axis_of={axis_of!r} must name the axis of each pair, such as (0, 0, 1, 1)")
        for axis in axis_of:
            require_int("an axis", axis, most=255)
        require_choice("layout", layout, ("half", "interleaved"))
        base = require_number("base", base, above=0.0)
        if frequencies is None:
            ladders = {axis: iter(inverse_frequencies(2 * axis_of.count(axis), base)) for axis in set(axis_of)}
            frequencies = tuple(next(ladders[axis]) for axis in axis_of)
        if not isinstance(frequencies, (tuple, list)) or len(frequencies) != len(axis_of):
            raise OptionError(f"frequencies must be {len(axis_of)} numbers, one for each pair of axis_of")
        for frequency in frequencies:
            require_number("a frequency", frequency)
        if head_dim is not None and 2 * len(axis_of) > require_int("head_dim", head_dim, least=1, most=WIDEST):
            raise OptionError(f"axis_of has {len(axis_of)} pairs; head_dim={head_dim} has {head_dim // 2}")
        if text is not None:
            self.text = require_bool("text", text)
        self.axis_of, self.pair_frequencies = tuple(axis_of), tuple(map(float, frequencies))
        self.layout: Layout = layout
        self.attention_factor = require_number("factor", factor)
        self.axes: int = max(axis_of) + 1
        self._digits = split_frequencies(self.pair_frequencies)

    def rotation(self, positions: Positions) -> Rotation:
        """The rotation of consecutive patches or tokens is the same in each layer and call, and kept."""
        device = self.device_of(positions)
        sides = (*positions.q_axes, *positions.k_axes)
        fixed = all(isinstance(side, Run) and isinstance(side.start, int) for side in sides)
        if not fixed or self.length_dependent or not may_keep(device):
            return self._rotation(positions, device)
        key = (
            *[(side.start, side.length) for side in sides if isinstance(side, Run)], self._digits, self.attention_factor,
            self.axis_of, self.columns, self.text, self.offset, self.layout, device, self._device_marker.dtype,
        )  # fmt: skip
        found = _rotations.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._rotation(positions, device)
            assert found.k is not None
            _rotations.put(key, found, 4 * found.k[0].numel())
        return found

    def _rotation(self, positions: Positions, device: torch.device) -> Rotation:
        queries, keys = positions.q_axes, positions.k_axes
        digits, factor = self._frequency_digits(positions, device)
        both = self._phases(keys, digits, factor, device)
        if digits[0].dim() == 3:
            of_queries = digits_of_last_tokens(digits, factor, positions.q_length)
            return Rotation(self._phases(queries, *of_queries, device), both, self.layout)
        if all(q is k for q, k in zip(queries, keys, strict=True)):
            return Rotation(both, both, self.layout)
        return Rotation(self._phases(queries, digits, factor, device), both, self.layout)

    def _frequency_digits(self, positions: Positions, device: torch.device) -> tuple[FrequencyDigits, float | Tensor]:
        return digits_on_device(self._digits, device), self.attention_factor

    def _phases(
        self, sides: tuple[Side, ...], digits: FrequencyDigits, factor: float | Tensor, device: torch.device
    ) -> Phases:
        if len(sides) < self.axes and not (len(sides) == 1 and (self.text or self.columns is not None)):
            raise ValueError(
                f"{type(self).__name__} reads {self.axes} axes of positions, got {len(sides)}; give [B, L, {self.axes}] "
                "(posenc.rope.grid_positions and clip_positions build them)"
                + (", or columns=, for patches that are numbered row by row" if self.axes == 2 else "")
            )
        columns = [positions_of(side, device) for side in sides]
        if len(columns) == 1 and self.columns is not None:
            columns = list(row_and_column(columns[0], self.columns))
        rows = max(column.shape[0] for column in columns)
        p = torch.stack([column.expand(rows, -1) for column in columns], dim=-1)
        p = p if len(columns) == 1 else p.index_select(-1, constant(self.axis_of, device, torch.int64))
        dtype = torch.promote_types(self._device_marker.dtype, torch.float32)
        return scale_phases(phases_at(p + self.offset, digits, dtype), factor)

    length_dependent = False
    """Whether frequencies depend on the sequence's length."""
    text = False
    """Whether positions with a single axis are used for all axes."""
    offset = 0
    """A number that is added to every position."""


def row_and_column(patches: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Of patches that are numbered row by row."""
    return patches.div(columns, rounding_mode="floor"), patches.remainder(columns)


def _checked(columns: int | None) -> int | None:
    if columns is not None and (isinstance(columns, bool) or not isinstance(columns, int) or columns < 1):
        raise OptionError(f"columns={columns!r} must be a whole number, 1 or more")
    return columns


class AxialRoPE(ManyAxes):
    """RoPE over the rows and columns of an image (or the axes of a clip), each pair reading one of them.

        convention    pairs (D/2 in all)                        frequencies             layout       positions
        "pixtral"     rows, then columns                        one ladder dealt out:   half         row, column
                                                                even ones to rows
        "qwen2_vl"    rows, then columns                        a ladder for each       half         row, column
        "llama4"      columns, then rows                        a ladder for each       interleaved  row, column;
                                                                                                     class token -1, -1
        "dinov3"      rows, then columns                        2π / (size · period)    half         2·row + 1 - rows,
                                                                of its grid                          likewise; prefix 0, 0
        "blocks"      axis by axis, `sections` pairs each       a ladder for each       half         any number of axes

    A ladder is base^(-2c/R), c = 0, 1, ..., R the channels it serves. DINOv3's angles are relative to the image's
    size, so it needs `grid=(rows, columns)`; its positions are patch centres in half steps
    (`grid_positions(rows, columns, centred=True, prefix=…)`). With `columns`, positions of one axis are patch numbers
    of a grid that wide: row p // columns, column p mod columns.

    DINOv3 trains with other coordinates at each step: ((row, column) + shift) · jitter · rescale, where 1 is half an
    image, shift is uniform within ±shift for each axis, jitter log-uniform within [1/jitter, jitter] for each axis and
    rescale likewise for both. Each plan is a new draw, in training mode only; layers share a draw by sharing a plan. The first `prefix` tokens (class and registers) are not rotated.

    Raises OptionError for options of another convention and for a head_dim that the axes cannot share.

        >>> at = posenc.rope.grid_positions(2, 3)  # [1, L, 2]
        >>> posenc.AxialRoPE(head_dim=32, convention="pixtral").plan(posenc.Positions(at)).rotate.q[0].shape  # [B, L, D/2]
        torch.Size([1, 6, 16])
    """

    def __init__(
        self,
        *,
        head_dim: int,
        convention: Convention = "qwen2_vl",
        base: float | None = None,
        grid: tuple[int, int] | None = None,
        sections: tuple[int, ...] | None = None,
        columns: int | None = None,
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = None,
        prefix: int = 0,
    ):
        require_choice("convention", convention, ("pixtral", "dinov3", "qwen2_vl", "llama4", "blocks"))
        require_int("head_dim", head_dim, least=1, most=WIDEST)
        if base is not None:
            require_number("base", base, above=0.0)
        if (grid is not None) != (convention == "dinov3"):
            raise OptionError("grid=(rows, columns) belongs to convention='dinov3', and it needs it")
        if (sections is not None) != (convention == "blocks"):
            raise OptionError("sections=(pairs of each axis) belongs to convention='blocks', and it needs it")
        if convention == "blocks":
            sections = _checked_sections(sections)
            if 2 * sum(sections) > head_dim:
                raise OptionError(
                    f"sections={sections} are {sum(sections)} pairs; head_dim={head_dim} has {head_dim // 2}"
                )
        elif head_dim % 4:
            raise OptionError(f"two axes share the pairs: head_dim={head_dim} must be a multiple of 4")
        base = float((100.0 if convention == "dinov3" else 10000.0) if base is None else base)
        each = head_dim // 4
        axis_of = (0,) * each + (1,) * each
        layout: Layout = "half"
        ladder = inverse_frequencies(head_dim // 2, base)
        if convention == "pixtral":
            ladder = inverse_frequencies(head_dim, base)
            frequencies = ladder[0::2] + ladder[1::2]
        elif convention == "dinov3":
            if not isinstance(grid, (tuple, list)) or len(grid) != 2:
                raise OptionError(f"grid={grid!r} must be (rows, columns)")
            for name, size in zip(("rows", "columns"), grid, strict=True):
                require_int(f"grid {name}", size, least=1)
            frequencies = tuple(math.tau * w / size for size in grid for w in ladder)
        elif convention == "blocks":
            assert sections is not None
            axis_of = tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))
            frequencies = tuple(w for pairs in sections for w in inverse_frequencies(2 * pairs, base))
        else:
            frequencies = ladder + ladder
            if convention == "llama4":
                axis_of, layout = axis_of[::-1], "interleaved"
        super().__init__(axis_of=axis_of, frequencies=frequencies, layout=layout)
        require_int("prefix", prefix)
        for name, value, least in (("shift", shift, 0.0), ("jitter", jitter, 1.0), ("rescale", rescale, 1.0)):
            if value is not None:
                require_number(name, value, least=least)
        self.shift, self.jitter, self.rescale, self.prefix = shift, jitter, rescale, prefix
        drawn = {"shift": shift, "jitter": jitter, "rescale": rescale}
        self._moving = any(value is not None for value in drawn.values())
        if (self._moving or prefix) and convention != "dinov3":
            raise OptionError(
                "shift, jitter, rescale and prefix belong to DINOv3's training; they need convention='dinov3'"
            )
        if columns is not None and (self.axes > 2 or convention == "dinov3"):
            raise OptionError("columns= numbers the patches of a plain grid with two axes; give positions instead")
        self.head_dim, self.convention, self.base, self.grid = head_dim, convention, base, grid
        self.columns = _checked(columns)
        self.absolute = columns is not None  # the next patch after the end of a row is not one column further
        # Llama 4 counts patches from 1, so that its class token at "-1" is not rotated.
        self.offset = 1 if convention == "llama4" else 0

    def rotation(self, positions: Positions) -> Rotation:
        if not (self.training and self._moving):
            return super().rotation(positions)
        device = self.device_of(positions)
        digits, start = self._drawn(torch.device("cpu") if device.type == "mps" else device)  # MPS has no float64
        first, second, third = (digit.to(device) for digit in digits)
        q, k = (
            self._from(start.to(device), self._phases(sides, (first, second, third), 1.0, device))
            for sides in (positions.q_axes, positions.k_axes)
        )
        return Rotation(q, k, self.layout)

    def _drawn(self, device: torch.device) -> tuple[FrequencyDigits, Tensor]:
        """(digits of this step's frequencies, the angle at the image's centre [pairs])."""
        assert self.grid is not None
        shift, stretch = torch.zeros(2, device=device), torch.ones(2, device=device)
        if self.shift is not None:
            shift = torch.empty(2, device=device).uniform_(-self.shift, self.shift)
        if self.jitter is not None:
            edge = math.log(self.jitter)
            stretch = torch.empty(2, device=device).uniform_(-edge, edge).exp()
        if self.rescale is not None:
            edge = math.log(self.rescale)
            stretch = stretch * torch.empty(1, device=device).uniform_(-edge, edge).exp()
        each = len(self.pair_frequencies) // 2
        frequencies = constant(self.pair_frequencies, device, torch.float64) * stretch.double().repeat_interleave(each)
        size = constant(tuple(float(n) for n in self.grid), device, torch.float64)
        return split_frequency_tensor(frequencies), frequencies * (size * shift.double()).repeat_interleave(each)

    def _from(self, start: Tensor, both: Phases) -> Phases:
        """Phases advanced by `start`, except those of the prefix."""
        if self.shift is None:
            return both
        (cos, sin), c, s = both, start.cos().to(both[0].dtype), start.sin().to(both[0].dtype)
        there = torch.arange(cos.shape[1], device=cos.device)[:, None] >= self.prefix
        return torch.where(there, cos * c - sin * s, cos), torch.where(there, sin * c + cos * s, sin)


class MRoPE(ManyAxes):
    """Multimodal RoPE: one ladder of frequencies, its pairs shared out among time, rows and columns.

        sections=(4, 2, 2)                     t t t t h h w w       Qwen2-VL: consecutive
        sections=(4, 2, 2), interleaved=True   t h w t h w t t       Qwen3-VL: round robin, time takes what is left

    Text has the same position on all three axes, and is then rotated exactly as by RoPE; positions with one axis are
    read that way. After an image text goes on (`posenc.rope.mixed_positions`). `sections` default to Qwen2-VL's shares,
    1/4, 3/8, 3/8 of the pairs. A scaling that follows the length takes the largest position of any axis + 1 for it.

    Raises OptionError for sections that do not add up to the pairs.

        >>> at = posenc.rope.mixed_positions([3, (2, 2)])  # three words, an image of 2 × 2: [1, L, 3]
        >>> posenc.MRoPE(head_dim=32).plan(posenc.Positions(at)).rotate.q[0].shape  # [B, L, D/2]
        torch.Size([1, 7, 16])
    """

    text = True

    def __init__(
        self,
        *,
        head_dim: int,
        sections: tuple[int, ...] | None = None,
        interleaved: bool = False,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        layout: Layout = "half",
        scaling: Scaling | None = None,
    ):
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_rotary(head_dim, rotary_dim, layout, scaling)
        require_bool("interleaved", interleaved)
        require_number("base", base, above=0.0)
        pairs = rotary_dim // 2
        if sections is None:
            part = 3 * pairs // 8
            sections = (pairs - 2 * part, part, part)
        sections = _checked_sections(sections)
        if sum(sections) != pairs:
            raise OptionError(f"sections={tuple(sections)} must add up to the {pairs} pairs of rotary_dim={rotary_dim}")
        plain = frequencies = inverse_frequencies(rotary_dim, float(base))
        if scaling is not None:
            frequencies = scaling.frequencies(frequencies, rotary_dim, float(base))
        axis_of = _dealt(sections) if interleaved else tuple(a for a, n in enumerate(sections) for _ in range(n))
        super().__init__(
            axis_of=axis_of,
            frequencies=frequencies,
            layout=layout,
            factor=1.0 if scaling is None else scaling.magnitude,
        )
        self.axes = len(sections)
        self.head_dim, self.rotary_dim, self.base, self.scaling = head_dim, rotary_dim, float(base), scaling
        self.sections, self.interleaved = tuple(sections), interleaved
        self.length_dependent = scaling is not None and scaling.length_dependent
        self._plain = plain

    def terms(self, positions: Positions, *, x=None, host=None) -> Plan:
        factor = 1.0 if self.scaling is None else self.scaling.score_factor
        return Plan(positions, scale=None if factor == 1.0 else factor * self.head_dim**-0.5)

    def _frequency_digits(self, positions: Positions, device: torch.device) -> tuple[FrequencyDigits, float | Tensor]:
        if not self.length_dependent:
            return super()._frequency_digits(positions, device)
        assert self.scaling is not None
        total = positions.total
        each_token = isinstance(total, Tensor) and total.dim() == 2  # of all axes already
        for axis in range(1, 1 if each_token else len(positions.q_axes)):
            other = positions.axis(axis).total
            if isinstance(total, Tensor) or isinstance(other, Tensor):
                total = torch.maximum(*(torch.as_tensor(x, device=device) for x in (total, other)))
            else:
                total = max(total, other)
        return length_dependent_digits(self.scaling, self._plain, self.rotary_dim, self.base, total, device)

    @classmethod
    def from_config(cls, config, dialect: str = "hf", **more) -> MRoPE:
        """From a configuration with `mrope_section`; see `posenc.scaling.from_config`."""
        from .configs import read

        setup = read(config, dialect)
        if setup.sections is None:
            raise ValueError("this configuration has no mrope_section; use posenc.RoPE.from_config")
        return cls(**{**setup.options(), "sections": setup.sections, "interleaved": setup.interleaved_sections, **more})


def _checked_sections(sections: tuple[int, ...] | None) -> tuple[int, ...]:
    if not isinstance(sections, (tuple, list)) or not sections:
        raise OptionError(f"sections={sections!r} must be the number of pairs of each axis, such as (16, 24, 24)")
    for pairs in sections:
        require_int("a section", pairs, most=WIDEST)
    return tuple(sections)


def _dealt(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Axis of each pair when axis a > 0 takes pairs a, a + n, a + 2n, ... until it has its number."""
    axis_of = [0] * sum(sections)
    for axis, pairs in enumerate(sections[1:], 1):
        last = axis + len(sections) * (pairs - 1)
        if pairs and last >= len(axis_of):
            raise OptionError(f"sections={sections} cannot be dealt round robin: axis {axis} has more than its share")
        for number in range(pairs):
            axis_of[axis + len(sections) * number] = axis
    return tuple(axis_of)


class Sinusoidal2D(Encoding):
    """Fixed sines and cosines of row and column, added to the input (MAE and other image models).

        x + [sin(r w), cos(r w), sin(c w), cos(c w)],   w_i = base^(-4i/d_model),  d_model/4 of each

    `first="columns"` puts the column's half first, as MAE's checkpoints do. Positions are [B, L, 2]: row, column.
    `prefix` tokens at the front (the class token) get nothing. With `columns`, positions of one axis are patch numbers
    of a grid that wide.

    Raises OptionError where d_model is not a multiple of 4.

        >>> posenc.Sinusoidal2D(d_model=64).embed(torch.zeros(1, 6, 64), posenc.Positions(posenc.rope.grid_positions(2, 3))).shape
        torch.Size([1, 6, 64])
    """

    absolute = True
    axes = 2

    def __init__(
        self,
        *,
        d_model: int,
        base: float = 10000.0,
        first: Literal["rows", "columns"] = "rows",
        prefix: int = 0,
        columns: int | None = None,
    ):
        super().__init__()
        require_int("d_model", d_model, least=4, most=WIDEST)
        require_number("base", base, above=0.0)
        require_int("prefix", prefix)
        if d_model % 4:
            raise OptionError(f"two axes of sines and cosines: d_model={d_model} must be a multiple of 4")
        require_choice("first", first, ("rows", "columns"))
        self.d_model, self.base, self.first, self.prefix = d_model, float(base), first, prefix
        self.embeds_whole = prefix > 0  # the first tokens of a later step are not the prefix
        self.columns = _checked(columns)
        self._digits = split_frequencies(inverse_frequencies(d_model // 2, float(base)))

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        side = positions.q_axes[0]
        if (
            len(positions.q_axes) > 1
            or not isinstance(side, Run)
            or type(side.start) is not int
            or not may_keep(x.device)
        ):
            return (x + self._vectors(positions, x.device, dtype)).to(x.dtype)
        key = (
            "2d", side.start, side.length, self._digits, self.first, self.prefix, self.columns, x.device, x.dtype
        )  # fmt: skip
        table = _rotations.get(key)
        if table is None:
            with torch.inference_mode(False), torch.no_grad():
                table = self._vectors(positions, x.device, dtype)
            _rotations.put(key, table, table.numel())
        return (x + table).to(x.dtype)

    def _vectors(self, positions: Positions, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[B or 1, L, d_model]"""
        at = tuple(positions_of(side, device) for side in positions.q_axes)
        if len(at) == 1 and self.columns is not None:
            at = row_and_column(at[0], self.columns)
        if len(at) != 2:
            raise ValueError(
                f"rows and columns are two axes, got {len(at)}; give positions [B, L, 2], "
                "or columns=, for patches that are numbered row by row"
            )
        digits = digits_on_device(self._digits, device)
        parts = []
        for axis in at if self.first == "rows" else at[::-1]:
            cos, sin = compute_phases(axis.unsqueeze(-1), digits, dtype)
            parts += [sin, cos]
        table = torch.cat(parts, dim=-1)
        if self.prefix:
            table = torch.cat((torch.zeros_like(table[:, : self.prefix]), table[:, self.prefix :]), dim=1)
        return table
