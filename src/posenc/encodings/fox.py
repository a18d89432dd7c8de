"""Forgetting gates: the score of a key decays by the gates of the tokens between it and the query."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..core.encoding import Encoding, Host, Kept
from ..core.errors import OptionError
from ..core.options import WIDEST, require_choice, require_int, require_number, require_table
from ..core.plan import Plan
from ..core.positions import Positions


class FoX(Encoding):
    """The Forgetting Transformer (Lin et al. 2025, arXiv:2503.02130): attention with a decay that depends on the tokens.

        s_ij = q·k / sqrt(d) + Σ_{t = j+1 .. i} log f_t,     f_t = sigmoid(w_h·x_t + b_h),     j <= i

        tokens        0     1     2     3
        query 3 sees  f1f2f3  f2f3  f3   1           times exp(q·k / sqrt(d)); no other position is needed

    gate="input"   w and b are learned (the paper); "bias": only b; "fixed": neither, and head h forgets over T_h tokens,
                   log-spaced in `timescales`: f = exp(-1/T_h), which is ALiBi with slopes 1/T_h.
    start          b at the start where w is learned: 0 in the paper, 5 (slow forgetting) in x-transformers

    Gates accumulate in float64, and engines subtract before they round, so that the sums keep their digits at any length.
    A cache stores log f with its keys. Padding does not decay; each document has its own sums. Causal only.

    Raises OptionError for bad timescales; so does a layer that is not causal.

        >>> layer = posenc.Attention(64, 4, encoding="fox", causal=True)
        >>> layer(torch.randn(1, 10, 64)).shape  # [B, L, d_model]
        torch.Size([1, 10, 64])
    """

    causal_only = True

    def __init__(
        self, *, d_model: int, heads: int, gate: Literal["input", "bias", "fixed"] = "input", start: float = 0.0,
        timescales: tuple[float, float] = (2.0, 1024.0), std: float = 0.02,
    ):  # fmt: skip
        super().__init__()
        require_int("d_model", d_model, least=1, most=WIDEST)
        require_int("heads", heads, least=1, most=WIDEST)
        require_table("the projection", d_model, heads)
        require_choice("gate", gate, ("input", "bias", "fixed"))
        if not isinstance(timescales, (tuple, list)) or len(timescales) != 2:
            raise OptionError(f"timescales={timescales!r} must be (shortest, longest), in tokens")
        short, long = (require_number("a timescale", each, above=0.0) for each in timescales)
        self.heads, self.gate, self.timescales = heads, gate, (short, long)
        self.start, self.std = require_number("start", start), require_number("std", std, least=0.0)
        steps = max(heads - 1, 1)
        self.log_gates = tuple(-1.0 / (short * (long / short) ** (h / steps)) for h in range(heads))
        if gate != "fixed":
            self.bias = nn.Parameter(torch.empty(heads))
        if gate == "input":
            self.weight = nn.Parameter(torch.empty(heads, d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.gate == "input":
            nn.init.normal_(self.weight, std=self.std)
            nn.init.constant_(self.bias, self.start)
        elif self.gate == "bias":  # log sigmoid(b) = -1/T
            start = [-math.log(math.expm1(-each)) for each in self.log_gates]
            self.bias.copy_(torch.tensor(start, device=self.bias.device))

    def keep(self, x: Tensor) -> Tensor:
        """log f of each token, [B, L, heads], float32 or better."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.gate == "fixed":
            return x.new_tensor(self.log_gates, dtype=dtype).expand(*x.shape[:2], -1)
        bias = self.bias.to(dtype)
        if self.gate == "bias":
            return logsigmoid(bias).expand(*x.shape[:2], -1)
        return logsigmoid(nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias))

    def terms(
        self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, kept: Kept | None = None
    ) -> Plan:
        if kept is None:
            if x is None or x.shape[1] != positions.k_length:
                raise ValueError(
                    "fox has a gate for each key's token: give plan(positions, x=input) with as many keys as inputs, or "
                    "kept=Kept(gates), the gates of all keys"
                )
            kept = Kept(self.keep(x))
        total = accumulate(kept)
        return Plan(positions, decay=(total[..., total.shape[2] - positions.q_length :], total))


def accumulate(kept: Kept) -> Tensor:
    """Sums of log f up to each token, in its document, without padding: [B, heads, L], float64."""
    gates = kept.numbers.transpose(1, 2).double()
    if kept.key_mask is not None:
        gates = gates.masked_fill(~kept.key_mask[:, None], 0.0)
    if kept.documents is None:
        return gates.cumsum(-1)
    # one document after the other, so that the sum between two tokens of one document has no token of another
    order = kept.documents.expand(gates.shape[0], -1).argsort(dim=-1, stable=True)[:, None].expand_as(gates)
    return torch.zeros_like(gates).scatter(-1, order, gates.gather(-1, order).cumsum(-1))
