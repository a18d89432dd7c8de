"""A learned bias for each difference of rows and columns: the windows of Swin, the patches of BEiT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.encoding import Encoding
from ...core.index import Index
from ...core.options import WIDEST, require_bool, require_int, require_number, require_table
from ...core.plan import Lookup, Plan
from ...core.positions import Positions
from .positions import Size, check_size, flatten, reach_of


class GridBias(Encoding):
    """A learned number for each head and each difference of rows and columns (Liu et al. 2021, arXiv:2103.14030).

        s = q·k / sqrt(d) + b[h, row_i - row_j, column_i - column_j]

        table row    (row_i - row_j + rows - 1) (2 columns - 1) + column_i - column_j + columns - 1

    The table is [(2 rows - 1)(2 columns - 1), heads], query minus key, as in the checkpoints of Swin, MaxViT and BEiT.
    With `class_token` three rows follow, as in BEiT: class token to patch (its query), patch to class token, class
    token to itself. Positions are [B, L, 2] (row, column; the class token at -1, -1), or numbers of tokens: the class
    token first, then the patches row by row. N(0, std) at the start.

    Raises ValueError for positions outside the window.

        >>> posenc.GridBias(window=(7, 7), heads=4).table.shape
        torch.Size([169, 4])
    """

    absolute = True  # tokens are numbered: the next one after the end of a row is not one column further
    axes = 2

    def __init__(self, *, heads: int, window: Size = (7, 7), class_token: bool = False, std: float = 0.02):
        super().__init__()
        require_int("heads", heads, least=1, most=WIDEST)
        self.window = check_size("window", window)
        self.class_token = require_bool("class_token", class_token)
        self.std = require_number("std", std, least=0.0)
        self.index = self._index()
        rows = require_table("the table", 2 * reach_of(self.window) + 1 + (3 if class_token else 0), heads)
        self.table = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        at = flatten(positions, self.window, self.device_of(positions, x), self.class_token)
        table = self.table.t()
        if not self.class_token:
            return Plan(at, lookups=(Lookup(self.index, bias=table.flip(1)),))
        patches, to_patch, to_class, alone = table.split([self.table.shape[0] - 3, 1, 1, 1], dim=1)
        # Both the class token and a patch are at distance 0 of themselves. What a whole row of scores gets in addition
        # makes up the difference: `more` to the class token's query, and that much less to each patch it sees.
        more = alone - patches[:, self.index.hi - 1 :][:, :1]
        lookup = Lookup(self.index, bias=torch.cat((to_class, patches.flip(1), to_patch - more), dim=1))
        is_class = at.q_positions(table.device) < 0
        rows = is_class if is_class.dim() == 2 else is_class[None]
        c_q = rows[:, None].to(table.dtype) * more
        return Plan(at, lookups=(lookup,), decay=(c_q, c_q.new_zeros(1, table.shape[0], at.k_length)))

    @torch.no_grad()
    def resize(self, window: Size) -> None:
        """Interpolate the table to another window, bicubically; the rows of the class token stay."""
        window = check_size("window", window)
        old = [2 * size - 1 for size in self.window]
        patches, rest = self.table[: old[0] * old[1]], self.table[old[0] * old[1] :]
        image = patches.t().reshape(1, -1, *old)
        new = [2 * size - 1 for size in window]
        image = nn.functional.interpolate(image, size=new, mode="bicubic", align_corners=False)
        self.window = window
        self.index = self._index()
        self.table = nn.Parameter(torch.cat((image.reshape(patches.shape[1], -1).t(), rest)))

    def _index(self) -> Index:
        reach = reach_of(self.window) + self.class_token
        return Index(-reach, reach)
