"""Learned attention sinks: one more logit for each head, without a value."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.encoding import Encoding, Host
from ..core.options import WIDEST, require_int, require_number
from ..core.plan import Plan
from ..core.positions import Positions
from .wrapper import Wrapper


class Sinks(Wrapper):
    """One learned logit per head beside the scores of the keys, so that a head may attend to nothing (gpt-oss).

        a_ij = exp(s_ij) / (exp(sink_h) + Σ_j exp(s_ij))        o_i = Σ_j a_ij v_j

    The sink has no position, no key and no value: it is never masked, and a query with one visible key may still ignore
    it. It combines with any other encoding, `encoding` (a name, or an Encoding): gpt-oss has rotary positions. The sinks
    [heads] start at N(0, std).

    Raises OptionError for an encoding that it cannot be combined with.

        >>> posenc.Sinks(heads=4, head_dim=16, encoding="rope").sinks.shape
        torch.Size([4])
    """

    def __init__(
        self, *, heads: int, encoding: Encoding | str | None = None, d_model: int | None = None,
        head_dim: int | None = None, std: float = 0.02,
    ):  # fmt: skip
        super().__init__(encoding, d_model=d_model, heads=heads, head_dim=head_dim)
        require_int("heads", heads, least=1, most=WIDEST)
        self.std = require_number("std", std, least=0.0)
        self.sinks = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.sinks, std=self.std)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, **kept) -> Plan:
        return replace(super().terms(positions, x=x, host=host, **kept), sinks=self.sinks)
