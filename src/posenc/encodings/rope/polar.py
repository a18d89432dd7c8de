"""PoPE: positions as phases, contents as magnitudes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...core.encoding import Encoding
from ...core.formulas import inverse_frequencies
from ...core.options import WIDEST, require_bool, require_int, require_number
from ...core.phases import split_frequencies
from ...core.plan import Plan
from ...core.positions import Positions
from ...core.rotation import Phases, Rotation
from .rope import digits_on_device, phases_at, positions_of


class PoPE(Encoding):
    """Polar coordinate positions (Gopalakrishnan et al. 2025, arXiv:2509.10534).

        s = Σ_c μ(q_c) μ(k_c) cos((p_k - p_q) w_c + δ[h, c]) / sqrt(d),    μ = softplus,    w_c = base^(-c/d)

    In RoPE the content of a pair (x, y) has a phase too, which mixes with the position's; here each channel is a magnitude, and
    its phase is the position's only. Every channel has a frequency, so d_head of them; scores have 2 d_head channels. δ is
    clamped to [-2π, 0], and starts at zero, or uniform with `spread`. Keys are cached unrotated, and rotated at each step.

    Raises OptionError for options out of range.

        >>> layer = posenc.Attention(64, 4, encoding="pope", causal=True)
        >>> layer(torch.randn(1, 10, 64)).shape  # [B, L, d_model]
        torch.Size([1, 10, 64])
    """

    length_dependent = True  # rotated keys are twice as wide as keys: caches hold the latter

    def __init__(
        self, *, head_dim: int, heads: int, base: float = 10000.0, spread: bool = False, kv_heads: int | None = None
    ):  # fmt: skip
        super().__init__()
        self.head_dim = require_int("head_dim", head_dim, least=1, most=WIDEST)
        require_int("heads", heads, least=1, most=WIDEST)
        kv_heads = heads if kv_heads is None else require_int("kv_heads", kv_heads, least=1, most=heads)
        self.base, self.spread = require_number("base", base, above=0.0), require_bool("spread", spread)
        self.bias = nn.Parameter(torch.empty(kv_heads, 1, head_dim))
        self._digits = split_frequencies(inverse_frequencies(2 * head_dim, self.base))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.bias, -math.tau, 0.0) if self.spread else nn.init.zeros_(self.bias)

    def rotation(self, positions: Positions) -> Rotation:
        cos, sin = self._phases(positions.k)
        delta = self.bias.to(cos.dtype).clamp(-math.tau, 0.0)
        c, s = delta.cos(), delta.sin()
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        keys = cos * c - sin * s, sin * c + cos * s
        return Rotation(self._phases(positions.q), keys, "half", polar=True)

    def _phases(self, side) -> Phases:
        device = self.bias.device
        dtype = torch.promote_types(self.bias.dtype, torch.float32)
        return phases_at(positions_of(side, device).unsqueeze(-1), digits_on_device(self._digits, device), dtype)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        return Plan(positions, scale=self.head_dim**-0.5)
