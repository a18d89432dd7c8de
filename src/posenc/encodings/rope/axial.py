"""Rotary positions of patches by row and column, in the conventions of published models."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ...core.constants import constant
from ...core.errors import OptionError
from ...core.formulas import inverse_frequencies
from ...core.options import WIDEST, require_choice, require_int, require_number
from ...core.phases import split_frequency_tensor
from ...core.positions import Positions
from ...core.rotation import Layout, Phases, Rotation
from .many_axes import ManyAxes, check_sections
from .rope import FrequencyDigits

Convention = Literal["pixtral", "dinov3", "qwen2_vl", "llama4", "blocks"]


class AxialRoPE(ManyAxes):
    """RoPE over the rows and columns of an image (or the axes of a clip), each pair reading one of them.

        convention    pairs (D/2 in all)                        frequencies             layout       positions
        "pixtral"     rows, then columns                        one ladder shared:      half         row, column
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
        self, *, head_dim: int, convention: Convention = "qwen2_vl", base: float | None = None,
        grid: tuple[int, int] | None = None, sections: tuple[int, ...] | None = None, columns: int | None = None,
        shift: float | None = None, jitter: float | None = None, rescale: float | None = None, prefix: int = 0,
    ):  # fmt: skip
        require_choice("convention", convention, ("pixtral", "dinov3", "qwen2_vl", "llama4", "blocks"))
        require_int("head_dim", head_dim, least=1, most=WIDEST)
        if base is not None:
            require_number("base", base, above=0.0)
        if (grid is not None) != (convention == "dinov3"):
            raise OptionError("grid=(rows, columns) belongs to convention='dinov3', and it needs it")
        if (sections is not None) != (convention == "blocks"):
            raise OptionError("sections=(pairs of each axis) belongs to convention='blocks', and it needs it")
        if convention == "blocks":
            sections = check_sections(sections)
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
        self._is_augmented = any(value is not None for value in (shift, jitter, rescale))
        if (self._is_augmented or prefix) and convention != "dinov3":
            raise OptionError(
                "shift, jitter, rescale and prefix belong to DINOv3's training; they need convention='dinov3'"
            )
        if columns is not None and (self.axes > 2 or convention == "dinov3"):
            raise OptionError("columns= numbers the patches of a plain grid with two axes; give positions instead")
        self.head_dim, self.convention, self.base, self.grid = head_dim, convention, base, grid
        self.columns = None if columns is None else require_int("columns", columns, least=1)
        self.absolute = columns is not None  # the next patch after the end of a row is not one column further
        # Llama 4 counts patches from 1, so that its class token at "-1" is not rotated.
        self.offset = 1 if convention == "llama4" else 0

    def rotation(self, positions: Positions) -> Rotation:
        if not (self.training and self._is_augmented):
            return super().rotation(positions)
        device = self.device_of(positions)
        digits, start = self._drawn(torch.device("cpu") if device.type == "mps" else device)  # MPS has no float64
        first, second, third = (digit.to(device) for digit in digits)
        q, k = (
            self._advance(start.to(device), self._phases(sides, (first, second, third), 1.0, device))
            for sides in (positions.q_axes, positions.k_axes)
        )
        return Rotation(q, k, self.layout)

    def _drawn(self, device: torch.device) -> tuple[FrequencyDigits, Tensor]:
        """(digits of this step's frequencies, the angle at the image's centre [pairs])."""
        assert self.grid is not None
        shift, stretch = torch.zeros(2, device=device), torch.ones(2, device=device)
        if self.shift is not None:
            shift.uniform_(-self.shift, self.shift)
        for most, axes in ((self.jitter, 2), (self.rescale, 1)):
            if most is not None:
                edge = math.log(most)
                stretch = stretch * torch.empty(axes, device=device).uniform_(-edge, edge).exp()
        each = len(self.pair_frequencies) // 2
        frequencies = constant(self.pair_frequencies, device, torch.float64) * stretch.double().repeat_interleave(each)
        size = constant(tuple(float(n) for n in self.grid), device, torch.float64)
        return split_frequency_tensor(frequencies), frequencies * (size * shift.double()).repeat_interleave(each)

    def _advance(self, start: Tensor, both: Phases) -> Phases:
        """Phases advanced by `start`, except those of the prefix."""
        if self.shift is None:
            return both
        (cos, sin), c, s = both, start.cos().to(both[0].dtype), start.sin().to(both[0].dtype)
        is_patch = torch.arange(cos.shape[1], device=cos.device)[:, None] >= self.prefix
        return torch.where(is_patch, cos * c - sin * s, cos), torch.where(is_patch, sin * c + cos * s, sin)
