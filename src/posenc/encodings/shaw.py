"""Relation-aware attention (Shaw et al. 2018)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..core import index
from ..core.encoding import Encoding
from ..core.errors import OptionError
from ..core.options import WIDEST, require_bool, require_choice, require_int, require_number, require_table
from ..core.plan import Lookup, Plan
from ..core.positions import Positions


class Shaw(Encoding):
    """Learned vectors for clipped distances, on keys, values or both (Shaw et al. 2018, arXiv:1803.02155).

        s = q·(k + a^K[c]) / sqrt(d),   o = Σ_j a_ij (v_j + a^V[c]),   c = clip(j - i, -left, right) + left

    max_distance clips both sides; `left` and `right` override it. Tables are [heads or 1, left + 1 + right, head_dim],
    shared by the heads unless per_head. outside="clip" gives distances past the window the row of its edge, "zero" a row
    of zeros.

    Raises OptionError without keys and values, and for per_head without heads.

        >>> posenc.Shaw(head_dim=16, max_distance=4).plan(posenc.Positions(8)).lookups[0].dot_query.shape
        torch.Size([1, 9, 16])
    """

    def __init__(
        self, *, head_dim: int, heads: int | None = None, max_distance: int = 16, left: int | None = None,
        right: int | None = None, keys: bool = True, values: bool = False, per_head: bool = False,
        outside: Literal["clip", "zero"] = "clip", std: float = 0.02,
    ):  # fmt: skip
        super().__init__()
        require_int("head_dim", head_dim, least=1, most=WIDEST)
        require_int("max_distance", max_distance)
        left = max_distance if left is None else left
        right = max_distance if right is None else right
        for name, distance in (("left", left), ("right", right)):
            require_int(name, distance)
        for name, flag in (("keys", keys), ("values", values), ("per_head", per_head)):
            require_bool(name, flag)
        if heads is not None:
            require_int("heads", heads, least=1, most=WIDEST)
        require_number("std", std, least=0.0)
        if not (keys or values):
            raise OptionError("shaw needs keys=True, values=True or both")
        tables = heads if per_head else 1
        if tables is None:
            raise OptionError("per_head=True needs heads")
        require_choice("outside", outside, ("clip", "zero"))
        self.left, self.right, self.outside, self.std = left, right, outside, std
        self.steady_terms = outside == "clip"  # otherwise tables are padded anew
        edge = int(outside == "zero")
        self.index = index.clip(left + edge, right + edge)
        shape = require_table("the table", tables, left + 1 + right, head_dim)
        self.keys = nn.Parameter(torch.empty(shape)) if keys else None
        self.values = nn.Parameter(torch.empty(shape)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.keys, self.values):
            if table is not None:
                nn.init.normal_(table, std=self.std)

    def terms(self, positions: Positions, *, x=None, host=None) -> Plan:
        return Plan(
            positions, lookups=(Lookup(self.index, dot_query=self._rows(self.keys), add_value=self._rows(self.values)),)
        )

    def _rows(self, table):
        """outside="zero": a row of zeros at each end, which all distances past the window read."""
        if table is None or self.outside == "clip":
            return table
        return nn.functional.pad(table, (0, 0, 1, 1))
