"""KERPLE: learned decays over distance from conditionally positive definite kernels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core import formulas, index
from ..core.encoding import Encoding
from ..core.options import WIDEST, require_choice, require_int, require_number
from ..core.plan import Lookup, Plan
from ..core.positions import Positions


class Kerple(Encoding):
    """A decay over distance with two learned numbers per head (Chi et al. 2022, arXiv:2205.09921).

        form="log"     s = q·k / sqrt(d) - p_h ln(1 + a_h |i - j|)
        form="power"   s = q·k / sqrt(d) - a_h |i - j|^p_h             p <= 2;  p = 1 is ALiBi with slopes a

    a and p are [heads], uniform in (0, 1) and (0, 2) at the start, and are read as at least `least`, as the authors clamp
    them. The authors share one instance among all layers. Symmetric, so it serves bidirectional attention too.

    Raises OptionError for an unknown form.

        >>> posenc.Kerple(heads=4).plan(posenc.Positions(8)).lookups[0].bias.shape  # [H, n]
        torch.Size([4, 15])
    """

    def __init__(self, *, heads: int, form: Literal["log", "power"] = "log", least: float = 0.01):
        super().__init__()
        require_int("heads", heads, least=1, most=WIDEST)
        require_choice("form", form, ("log", "power"))
        self.form, self.least = form, require_number("least", least, above=0.0, below=1.0)
        self.a = nn.Parameter(torch.empty(heads))
        self.p = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.a, 0.0, 1.0)
        nn.init.uniform_(self.p, 0.0, 2.0)

    def bias(self, distances: Tensor) -> Tensor:
        """[heads, n] of distances [n]."""
        dtype = torch.promote_types(self.a.dtype, torch.float32)
        a = self.a.to(dtype).clamp(min=self.least)[:, None]
        p = self.p.to(dtype).clamp(min=self.least, max=2.0 if self.form == "power" else None)[:, None]
        d = distances.abs().to(dtype)
        return formulas.kerple_bias(d, a, p, self.form, torch)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        rows = index.exact(positions)
        return Plan(positions, lookups=(Lookup(rows, bias=self.bias(rows.distances_on(self.a.device))),))
