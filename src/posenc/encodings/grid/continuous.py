"""A bias over a grid from a small network of log-spaced coordinates, and cosine attention: Swin Transformer v2."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...core import formulas
from ...core.encoding import Encoding
from ...core.index import Index
from ...core.options import WIDEST, require_bool, require_int, require_number
from ...core.plan import Lookup, Plan
from ...core.positions import Positions
from .positions import Size, check_size, flatten, reach_of


class ContinuousBias(Encoding):
    """A bias that a network computes from the difference of rows and columns (Liu et al. 2021, arXiv:2111.09883).

        s = τ_h cos(q, k) + 16 sigmoid(MLP(g(row_i - row_j), g(column_i - column_j)))_h
        g(x) = sign(x) log2(1 + 8 |x| / (W - 1)) / log2(8)            W: rows or columns of `pretrained`, or of `window`

    MLP: 2 -> hidden, ReLU, hidden -> heads without bias. τ = exp(min(logit_scale, ln 100)), from 10; cosine=False leaves
    q·k / sqrt(d). Another window needs no new table: give `pretrained`, the window of the checkpoint. Positions as
    those of grid_bias, without a class token.

    Raises ValueError for positions outside the window.

        >>> posenc.ContinuousBias(window=(4, 4), heads=2).plan(posenc.Positions(16)).lookups[0].bias.shape  # [H, n]
        torch.Size([2, 49])
    """

    absolute = True
    axes = 2

    def __init__(
        self, *, heads: int, window: Size = (8, 8), pretrained: Size | None = None, hidden: int = 512,
        cosine: bool = True, bound: float = 16.0,
    ):  # fmt: skip
        super().__init__()
        require_int("heads", heads, least=1, most=WIDEST)
        require_int("hidden", hidden, least=1, most=WIDEST)
        self.window = check_size("window", window)
        self.pretrained = None if pretrained is None else check_size("pretrained", pretrained)
        self.cosine = require_bool("cosine", cosine)
        self.bound = require_number("bound", bound, above=0.0)
        self.mlp = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, heads, bias=False))
        if cosine:
            self.logit_scale = nn.Parameter(torch.empty(heads, 1, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cosine:
            nn.init.constant_(self.logit_scale, math.log(10.0))
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def coordinates(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """g of every difference query - key, rows first: [(2 rows - 1)(2 columns - 1), 2]."""
        axes = []
        for size, trained in zip(self.window, self.pretrained or self.window, strict=True):
            x = torch.arange(1 - size, size, device=device, dtype=dtype)
            axes.append(formulas.log_coordinate(x / max(trained - 1, 1), torch))
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)

    def table(self) -> Tensor:
        """The bias of every difference query - key, [heads, (2 rows - 1)(2 columns - 1)]."""
        weight = next(self.mlp.parameters())
        return (self.bound * self.mlp(self.coordinates(weight.device, weight.dtype)).sigmoid()).t()

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        at = flatten(positions, self.window, self.device_of(positions, x))
        reach = reach_of(self.window)
        lookup = Lookup(Index(-reach, reach), bias=self.table().flip(1))
        tau = self.logit_scale.clamp(max=math.log(100.0)).exp().flatten() if self.cosine else None
        return Plan(at, lookups=(lookup,), cosine=tau)
