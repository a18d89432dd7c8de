"""Sandwich: the similarity of sinusoidal positions as a bias."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core import formulas, index
from ..core.constants import constant
from ..core.encoding import Encoding
from ..core.options import WIDEST, require_int, require_number
from ..core.plan import Lookup, Plan
from ..core.positions import Positions
from ..core.torch_modes import has_fake_tensors


class Sandwich(Encoding):
    """The inner product of two sinusoidal positions, added to the score (Chi et al. 2022, arXiv:2212.10356).

        s = q·k / sqrt(d) + (Σ_{c = 1 .. size/2} cos((i - j) base^(-2c/size)) - size/2) / (8h/H),   h = 1 .. H

    No parameters. The bias is 0 at distance 0 and falls about logarithmically; head 1 falls fastest. `size` is that of the
    sinusoids, 128 in the paper, and not the model's. Symmetric, so it serves bidirectional attention too.

    Raises OptionError for a size below 2.

        >>> posenc.Sandwich(heads=4).plan(posenc.Positions(8)).lookups[0].bias.shape  # [H, n]
        torch.Size([4, 15])
    """

    def __init__(self, *, heads: int, size: int = 128, base: float = 10000.0):
        super().__init__()
        self.heads = require_int("heads", heads, least=1, most=WIDEST)
        self.size = require_int("size", size, least=2, most=WIDEST)
        self.base = require_number("base", base, above=0.0)
        self.factors = formulas.sandwich_factors(heads)
        self.frequencies = formulas.sandwich_frequencies(size, self.base)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        rows, device = index.exact(positions), self.device_of(positions, x)
        distances = rows.distances_on(device).abs()
        if torch.compiler.is_compiling() or has_fake_tensors() or not isinstance(rows, index.Index):
            sums = _sums(distances, self.frequencies)
        else:
            # rounded up to a power of two and kept: decoding would otherwise recompute all of them at each step
            most = max(abs(rows.lo), abs(rows.hi))
            sums = _kept_sums(1 << most.bit_length(), self.frequencies, device)[distances]
        bias = constant(self.factors, device, torch.float64)[:, None] * sums
        dtype = torch.promote_types(self._device_marker.dtype, torch.float32)
        return Plan(positions, lookups=(Lookup(rows, bias=bias.to(dtype)),))


def _sums(distances: Tensor, frequencies: tuple[float, ...]) -> Tensor:
    """Of distances [n], float64."""
    return formulas.sandwich_sum(distances.double(), frequencies, torch)


@lru_cache(maxsize=16)
def _kept_sums(count: int, frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """Of distances 0 .. count - 1."""
    with torch.inference_mode(False), torch.no_grad():
        return _sums(torch.arange(count, device=device, dtype=torch.float64), frequencies)
