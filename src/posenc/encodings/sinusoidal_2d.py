"""Sinusoidal positions of rows and columns."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.encoding import Encoding
from ..core.errors import OptionError
from ..core.formulas import inverse_frequencies
from ..core.memo import Memo, may_keep
from ..core.options import WIDEST, require_choice, require_int, require_number
from ..core.phases import compute_phases, split_frequencies
from ..core.positions import Positions, Run
from .rope.many_axes import positions_on_axes
from .rope.rope import digits_on_device

_tables = Memo(most=32, numbers=1 << 22)
"""Of consecutive patches, for the steps that ask again."""


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
        self, *, d_model: int, base: float = 10000.0, first: Literal["rows", "columns"] = "rows", prefix: int = 0,
        columns: int | None = None,
    ):  # fmt: skip
        super().__init__()
        require_int("d_model", d_model, least=4, most=WIDEST)
        require_number("base", base, above=0.0)
        require_int("prefix", prefix)
        if d_model % 4:
            raise OptionError(f"two axes of sines and cosines: d_model={d_model} must be a multiple of 4")
        require_choice("first", first, ("rows", "columns"))
        self.d_model, self.base, self.first, self.prefix = d_model, float(base), first, prefix
        self.embeds_whole = prefix > 0  # the first tokens of a later step are not the prefix
        self.columns = None if columns is None else require_int("columns", columns, least=1)
        self._digits = split_frequencies(inverse_frequencies(d_model // 2, float(base)))

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        side = positions.q_axes[0]
        is_run = len(positions.q_axes) == 1 and isinstance(side, Run) and type(side.start) is int
        if not is_run or not may_keep(x.device):
            return (x + self._vectors(positions, x.device, dtype)).to(x.dtype)
        key = (side, self._digits, self.first, self.prefix, self.columns, x.device, x.dtype)
        table = _tables.find_or_make(key, lambda: self._vectors(positions, x.device, dtype), Tensor.numel)
        return (x + table).to(x.dtype)

    def _vectors(self, positions: Positions, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[B or 1, L, d_model]"""
        at = positions_on_axes(positions.q_axes, device, self.columns)
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
