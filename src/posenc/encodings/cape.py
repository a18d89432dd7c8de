"""CAPE: sinusoidal positions that training shifts and stretches at random."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.options import WIDEST, require_bool, require_int, require_number
from .absolute import Absolute, sinusoid


class Cape(Absolute):
    """Continuous augmented positions (Likhomanenko et al. 2021, arXiv:2106.03143).

        x_p + [sin(p' w_0), cos(p' w_0), sin(p' w_1), ...],   w_c = base^(-2c / d_model)
        training     p' = (p + Δ + δ_p) λ        evaluation   p' = p

    Δ is uniform within ±shift for each sequence, δ within ±jitter/2 for each token, λ log-uniform within
    [1/rescale, rescale] for each sequence. Absolute positions that look shifted and stretched teach a model to use their
    differences. `centre` subtracts the mean position first, so that lengths grow to both sides; it needs the whole input.

    Raises OptionError for options out of range.

        >>> posenc.Cape(d_model=64).eval().embed(torch.zeros(1, 8, 64), posenc.Positions(8)).shape  # [B, L, d_model]
        torch.Size([1, 8, 64])
    """

    def __init__(
        self, *, d_model: int, shift: float = 5.0, jitter: float = 0.5, rescale: float = 1.0, centre: bool = False,
        base: float = 10000.0,
    ):  # fmt: skip
        super().__init__()
        self.d_model = require_int("d_model", d_model, least=2, most=WIDEST)
        self.shift, self.jitter = require_number("shift", shift, least=0.0), require_number("jitter", jitter, least=0.0)
        self.rescale = require_number("rescale", rescale, least=1.0)
        self.centre, self.base = require_bool("centre", centre), require_number("base", base, above=0.0)
        self.embeds_whole = centre

    def encode(self, positions: Tensor) -> Tensor:
        precision = torch.float32 if positions.device.type == "mps" else torch.float64
        p = positions.to(precision)
        if self.centre:
            p = p - p.mean(-1, keepdim=True)
        if self.training:
            rows = p[..., :1]
            p = p + torch.empty_like(rows).uniform_(-self.shift, self.shift)
            p = p + torch.empty_like(p).uniform_(-self.jitter / 2, self.jitter / 2)
            edge = math.log(self.rescale)
            p = p * torch.empty_like(rows).uniform_(-edge, edge).exp()
        return sinusoid(p, self.d_model, base=self.base)
