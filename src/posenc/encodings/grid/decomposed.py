"""One table for rows and one for columns, multiplied with the query: SAM, ViTDet, MViTv2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.encoding import Encoding
from ...core.index import Index
from ...core.options import WIDEST, require_int, require_number, require_table
from ...core.plan import Lookup, Plan
from ...core.positions import Positions
from .positions import Size, check_size, rows_and_columns


class Decomposed(Encoding):
    """Content-dependent positions, one axis after the other (Li et al. 2021, arXiv:2112.01526; Kirillov et al. 2023).

        s = q·k / sqrt(d) + q·R_rows[row_i - row_j] + q·R_columns[column_i - column_j]

    The positional terms are not divided by sqrt(d). Tables are [2 size - 1, d_head], query minus key, shared by the heads,
    as in SAM's checkpoints, zeros at the start unless `std` is given. `grid` is the image's size in patches, and may be
    changed at any time: tables of another size are interpolated linearly, as the models do. Positions as those of
    grid_bias, without a class token.

    Raises ValueError for positions outside the grid.

        >>> [list(p.shape) for p in posenc.Decomposed(grid=(4, 4), head_dim=16).parameters()]
        [[7, 16], [7, 16]]
    """

    absolute = True
    axes = 2

    def __init__(self, *, head_dim: int, grid: Size = (14, 14), std: float = 0.0):
        super().__init__()
        require_int("head_dim", head_dim, least=1, most=WIDEST)
        self.head_dim, self.grid = head_dim, check_size("grid", grid)
        self.std = require_number("std", std, least=0.0)
        rows, columns = (require_table("a table", 2 * size - 1, head_dim) for size in self.grid)
        self.rel_pos_h = nn.Parameter(torch.empty(rows))
        self.rel_pos_w = nn.Parameter(torch.empty(columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.rel_pos_h, self.rel_pos_w):
            nn.init.normal_(table, std=self.std) if self.std else nn.init.zeros_(table)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        grid = check_size("grid", self.grid)
        device = self.device_of(positions, x)
        queries, keys = rows_and_columns(positions, grid, device)
        axes = [(q, k, (0, size - 1)) for q, k, size in zip(queries, keys, grid, strict=True)]
        if device.type == "cpu":  # rows and columns are further axes, which become channels; nothing reads the first
            q_length, k_length = positions.q_length, positions.k_length
            at = Positions((k_length - q_length, q_length), k_length, more=axes)
        else:  # the kernels look rows up, and columns become channels
            at = Positions(queries[0], keys[0], reach=(1 - grid[0], grid[0] - 1), more=axes[1:])
        first = len(at.q_axes) - 2
        # a plan scales its dot products; this undoes it
        both = zip((self.rel_pos_h, self.rel_pos_w), grid)
        tables = (resized(table, size) * self.head_dim**0.5 for table, size in both)
        lookups = tuple(
            Lookup(Index(1 - size, size - 1, axis=axis), dot_query=table.flip(0)[None])
            for axis, (size, table) in enumerate(zip(grid, tables, strict=True), first)
        )
        return Plan(at, lookups=lookups)


def resized(table: Tensor, size: int) -> Tensor:
    """[2 size - 1, d] by linear interpolation of a table of another size."""
    if table.shape[0] == 2 * size - 1:
        return table
    return nn.functional.interpolate(table.t()[None], size=2 * size - 1, mode="linear")[0].t()
