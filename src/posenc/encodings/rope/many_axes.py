"""Rotary positions along several axes: images, video, and text among them. Positions are [B, L, axes].

Every pair of channels belongs to one axis and is rotated by that axis' position × its own frequency, so axial.py and mrope.py are
this rotation with an (axis, frequency) for each pair; their conventions differ only in these lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.constants import constant
from ...core.encoding import Encoding
from ...core.errors import OptionError
from ...core.formulas import inverse_frequencies
from ...core.memo import Memo, may_keep
from ...core.options import WIDEST, require_bool, require_choice, require_int, require_number
from ...core.phases import split_frequencies
from ...core.positions import Positions, Run, Side
from ...core.rotation import Layout, Phases, Rotation
from .rope import FrequencyDigits, digits_of_last_tokens, digits_on_device, phases_at, positions_of, scale_phases

_rotations = Memo(most=32, numbers=1 << 22)
"""Of consecutive patches or tokens, for the layers and steps that ask again."""


class ManyAxes(Encoding):
    """Rotary positions on any number of axes: for each pair of channels its axis and its frequency.

        pair c is rotated by  p[axis_of[c]] · frequencies[c]

        axis_of=(0, 0, 1, 1)         rows, then columns           axis_of=(0, 1, 0, 1)    the axes in turn
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
        self, *, axis_of: tuple[int, ...], frequencies: tuple[float, ...] | None = None, head_dim: int | None = None,
        base: float = 10000.0, layout: Layout = "half", factor: float = 1.0, text: bool | None = None,
    ):  # fmt: skip
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
        return _rotations.find_or_make(key, lambda: self._rotation(positions, device), lambda x: 4 * x.k[0].numel())

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
        columns = positions_on_axes(sides, device, self.columns)
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


def positions_on_axes(sides: tuple[Side, ...], device: torch.device, columns: int | None) -> list[Tensor]:
    """[B or 1, L] on each axis; with `columns`, a single axis numbers the patches of a grid that wide, row by row."""
    at = [positions_of(side, device) for side in sides]
    if len(at) > 1 or columns is None:
        return at
    return [at[0].div(columns, rounding_mode="floor"), at[0].remainder(columns)]


def check_sections(sections: tuple[int, ...] | None) -> tuple[int, ...]:
    if not isinstance(sections, (tuple, list)) or not sections:
        raise OptionError(f"sections={sections!r} must be the number of pairs of each axis, such as (16, 24, 24)")
    for pairs in sections:
        require_int("a section", pairs, most=WIDEST)
    return tuple(sections)
