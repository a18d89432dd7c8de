"""Content-conditioned relative logits, the positions of 2026's rotary-free models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core import index
from ..core.encoding import Encoding
from ..core.errors import OptionError
from ..core.formulas import head_size
from ..core.index import Index, restrict
from ..core.options import WIDEST, require_int, require_number, require_table
from ..core.plan import Lookup, Plan
from ..core.positions import Positions
from .tempered import temperatures


class RelativeLogits(Encoding):
    """Each token mixes a bank of bias-against-distance profiles.

        s = τ_i ( scale q_i·k_j + r_i·bank[:, i - j] ),   r = W_r x,   0 <= i - j < max_distance, else 0
        τ_i = 1 + alpha log(max((i + 1) / floor, 1))      where `temper` = (alpha, floor); otherwise 1

    bank [d_rel, max_distance] is shared by the heads; r has d_rel numbers per token and head. scale=None is 1/sqrt(d).
    `plan` needs x, the layer's input, or `states` [B, heads, Lq, d_rel] made elsewhere.

    Raises ValueError where neither x nor states are given.

        >>> layer = posenc.Attention(64, 4, encoding="relative_logits", causal=True)
        >>> layer.encoding.bank.shape  # [d_rel, max_distance]
        torch.Size([16, 1024])
    """

    causal_only = True

    def __init__(
        self, *, d_model: int, heads: int, head_dim: int, d_rel: int = 16, max_distance: int = 1024,
        scale: float | None = None, temper: tuple[float, float] | None = None, std: float = 0.02,
    ):  # fmt: skip
        super().__init__()
        head_dim = head_size(d_model, heads, head_dim)
        require_int("d_rel", d_rel, least=1, most=WIDEST)
        require_int("max_distance", max_distance, least=1)
        require_table("the bank", d_rel, max_distance)
        require_table("the projection", d_model, heads * d_rel)
        require_number("std", std, least=0.0)
        if scale is not None:
            require_number("scale", scale, above=0.0)
        if temper is not None:
            if not isinstance(temper, (tuple, list)) or len(temper) != 2:
                raise OptionError(f"temper={temper!r} must be (alpha, floor) with floor > 0")
            require_number("temper's alpha", temper[0])
            require_number("temper's floor", temper[1], above=0.0)
        self.heads, self.d_rel, self.max_distance, self.std = heads, d_rel, max_distance, std
        self.scale = head_dim**-0.5 if scale is None else scale
        self.temper = temper
        self.absolute = temper is not None
        # one row of zeros on each side of the bank: nothing past max_distance, nothing ahead
        self.index = index.clip(max_distance, 1)
        self.r_proj = nn.Linear(d_model, heads * d_rel, bias=False)
        self.bank = nn.Parameter(torch.empty(d_rel, max_distance))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bank, std=self.std)
        nn.init.normal_(self.r_proj.weight, std=self.std)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        if x is None:
            raise ValueError("relative_logits conditions on the input; give plan(positions, x=input)")
        states = self.r_proj(x).view(*x.shape[:2], self.heads, self.d_rel).transpose(1, 2)
        return self.plan_states(positions, states)

    def plan_states(self, positions: Positions, states: Tensor) -> Plan:
        """The plan for states [B, heads, Lq, d_rel] that were made elsewhere."""
        return plan_bank(positions, self.index, states, self.bank, self.scale, self.temper)


def plan_bank(
    positions: Positions, index: Index, states: Tensor, bank: Tensor, scale: float, temper: tuple[float, float] | None
) -> Plan:
    """RelativeLogits' plan for any states [B, H, Lq, d_rel] and bank [d_rel, n]; index: clip(n, 1)."""
    index, rows = restrict(index, positions, bank)
    first, last, _ = rows.indices(bank.shape[1] + 2)
    # rows run from the far past to 0, with one of zeros on either side; only those that occur are made
    zeros = int(first == 0), int(last == bank.shape[1] + 2)
    start, stop = bank.shape[1] + 1 - (last - zeros[1]), bank.shape[1] + 1 - (first + zeros[0])
    table = (bank if (start, stop) == (0, bank.shape[1]) else bank[:, start:stop]).flip(1).t()
    if any(zeros):
        table = nn.functional.pad(table, (0, 0, *zeros))
    table = table[None]
    # r·bank is added unscaled, while a plan's dots stand inside the scale
    lookup = Lookup(index, dot_query=table, states=states / scale)
    if temper is None:
        return Plan(positions, lookups=(lookup,), scale=scale)
    factor = temperatures(positions, states.device, bank.dtype, *temper, form="log")
    return Plan(positions, lookups=(lookup,), scale=scale * factor)
