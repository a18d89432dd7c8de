"""Rotary positions of images with learned frequencies: every pair reads all axes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...core.encoding import Encoding
from ...core.errors import OptionError
from ...core.options import WIDEST, require_choice, require_int, require_number
from ...core.positions import Positions, Side
from ...core.rotation import Layout, Phases, Rotation
from .many_axes import positions_on_axes


class MixedRoPE(Encoding):
    """RoPE whose frequencies on each axis are learned, for each head (Heo et al. 2024, arXiv:2403.13298).

        pair c of head h is rotated by    Σ_a p_a w[a, h, c]        a: axes (row, column)

    In axial RoPE a pair reads one axis, so it cannot express diagonals; here every pair has a direction. At initialisation
    head h has a random angle φ_h, and its pairs have lengths base^(-4c/d) along φ_h and across it. The frequencies are [axes, heads,
    head_dim / 2], with gradients; angles are computed in float32 or better. Positions are [B, L, axes]; with `columns`,
    positions of one axis number the patches of a grid that wide. Where queries share keys, the frequencies are those of
    the `kv_heads` key heads, since a query must be rotated as its key is.

    Raises OptionError for an odd head_dim and for heads that the key heads do not divide.

        >>> posenc.MixedRoPE(heads=4, head_dim=16).frequencies.shape
        torch.Size([2, 4, 8])
    """

    def __init__(
        self, *, head_dim: int, heads: int, axes: int = 2, base: float = 10.0, layout: Layout = "interleaved",
        columns: int | None = None, kv_heads: int | None = None,
    ):  # fmt: skip
        super().__init__()
        require_int("head_dim", head_dim, least=2, most=WIDEST)
        require_int("heads", heads, least=1, most=WIDEST)
        require_int("axes", axes, least=1, most=16)
        kv_heads = heads if kv_heads is None else require_int("kv_heads", kv_heads, least=1, most=heads)
        if head_dim % 2 or heads % kv_heads:
            raise OptionError(f"head_dim={head_dim} must be even, and heads={heads} a multiple of kv_heads={kv_heads}")
        require_choice("layout", layout, ("half", "interleaved"))
        if columns is not None:
            require_int("columns", columns, least=1)
        self.head_dim, self.heads, self.kv_heads, self.axes = head_dim, heads, kv_heads, axes
        self.base = require_number("base", base, above=0.0)
        self.layout: Layout = layout
        self.columns = columns
        self.absolute = columns is not None
        self.frequencies = nn.Parameter(torch.empty(axes, kv_heads, head_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Two axes: the authors' random angle for each head. Other numbers: random directions of the same lengths."""
        pairs, device = self.head_dim // 2, self.frequencies.device
        lengths = self.base ** (-4.0 * torch.arange((pairs + 1) // 2, device=device) / self.head_dim)
        if self.axes == 2:
            angle = torch.rand(self.kv_heads, 1, device=device) * math.tau
            across = angle + math.pi / 2
            both = [torch.cat((lengths * f(angle), lengths * f(across)), -1) for f in (torch.cos, torch.sin)]
            self.frequencies.copy_(torch.stack(both)[..., :pairs])
        else:
            directions = torch.randn(len(self.frequencies), self.kv_heads, 1, device=device)
            directions = nn.functional.normalize(directions, dim=0)
            self.frequencies.copy_(directions * torch.cat((lengths, lengths))[:pairs])

    def rotation(self, positions: Positions) -> Rotation:
        keys = self._phases(positions.k_axes)
        same = all(q is k for q, k in zip(positions.q_axes, positions.k_axes, strict=True))
        queries = keys if same else self._phases(positions.q_axes)
        if self.heads != self.kv_heads:
            group = self.heads // self.kv_heads
            queries = queries[0].repeat_interleave(group, 1), queries[1].repeat_interleave(group, 1)
        return Rotation(queries, keys, self.layout)

    def _phases(self, sides: tuple[Side, ...]) -> Phases:
        """cos and sin [B or 1, kv_heads, L, head_dim / 2]."""
        device = self.frequencies.device
        columns = positions_on_axes(sides, device, self.columns if self.axes == 2 else None)
        if len(columns) != self.axes:
            raise ValueError(
                f"MixedRoPE reads {self.axes} axes of positions, got {len(columns)}; give [B, L, {self.axes}] "
                "(posenc.rope.grid_positions), or columns=, for patches that are numbered row by row"
            )
        dtype = torch.promote_types(self.frequencies.dtype, torch.float32)
        angle: Tensor | float = 0.0
        for at, frequencies in zip(columns, self.frequencies.to(dtype), strict=True):
            angle = angle + at.to(dtype)[:, None, :, None] * frequencies[:, None, :]
        assert isinstance(angle, Tensor)
        return angle.cos(), angle.sin()
