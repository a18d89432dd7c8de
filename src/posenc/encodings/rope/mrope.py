"""Multimodal RoPE: text, images and video in one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import OptionError
from ...core.formulas import inverse_frequencies
from ...core.options import require_bool, require_number
from ...core.plan import Plan
from ...core.positions import Positions
from ...core.rotation import Layout
from .many_axes import ManyAxes, check_sections
from .rope import FrequencyDigits, check_rotary, length_dependent_digits, scale_of
from .scaling import Scaling


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
        self, *, head_dim: int, sections: tuple[int, ...] | None = None, interleaved: bool = False,
        base: float = 10000.0, rotary_dim: int | None = None, layout: Layout = "half", scaling: Scaling | None = None,
    ):  # fmt: skip
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_rotary(head_dim, rotary_dim, layout, scaling)
        require_bool("interleaved", interleaved)
        require_number("base", base, above=0.0)
        pairs = rotary_dim // 2
        if sections is None:
            part = 3 * pairs // 8
            sections = (pairs - 2 * part, part, part)
        sections = check_sections(sections)
        if sum(sections) != pairs:
            raise OptionError(f"sections={tuple(sections)} must add up to the {pairs} pairs of rotary_dim={rotary_dim}")
        plain = frequencies = inverse_frequencies(rotary_dim, float(base))
        if scaling is not None:
            frequencies = scaling.frequencies(frequencies, rotary_dim, float(base))
        axis_of = _round_robin(sections) if interleaved else tuple(a for a, n in enumerate(sections) for _ in range(n))
        factor = 1.0 if scaling is None else scaling.magnitude
        super().__init__(axis_of=axis_of, frequencies=frequencies, layout=layout, factor=factor)
        self.axes = len(sections)
        self.head_dim, self.rotary_dim, self.base, self.scaling = head_dim, rotary_dim, float(base), scaling
        self.sections, self.interleaved = tuple(sections), interleaved
        self.length_dependent = scaling is not None and scaling.length_dependent
        self._plain = plain

    def terms(self, positions: Positions, *, x=None, host=None) -> Plan:
        return Plan(positions, scale=scale_of(self.scaling, self.head_dim))

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


def _round_robin(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Axis of each pair when axis a > 0 takes pairs a, a + n, a + 2n, ... until it has its number."""
    axis_of = [0] * sum(sections)
    for axis, pairs in enumerate(sections[1:], 1):
        own = range(axis, axis + len(sections) * pairs, len(sections))
        if own and own[-1] >= len(axis_of):
            raise OptionError(
                f"sections={sections} cannot be interleaved: axis {axis} has more than its share of the pairs"
            )
        for pair in own:
            axis_of[pair] = axis
    return tuple(axis_of)
