"""TUPE: positions and words meet in separate products, and the class token has no position."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..core import formulas
from ..core.encoding import Encoding
from ..core.errors import OptionError
from ..core.formulas import head_size
from ..core.index import Index
from ..core.options import WIDEST, require_bool, require_int, require_number, require_table
from ..core.plan import Lookup, Plan
from ..core.positions import Positions
from ..core.torch_modes import has_fake_tensors


class TUPE(Encoding):
    """Untied positional encoding (Ke et al. 2020, arXiv:2006.15595).

        s = (q·k + (U_q p_i)·(U_k p_j)) / sqrt(2d) [+ b[bucket(j - i), h] where `relative` = (buckets, max_distance)]

    p is a learned table [max_length + 1, d_model] under a LayerNorm, U_q and U_k are one projection with bias. Words and
    positions are not added, so no product mixes them. With `class_token` position 0 is the class token's: its query gets
    one number for all keys, (U_q p_0)·(U_k p_0) / sqrt(2d), and all others one number for its key, that of p_1; token i
    has row i + 1. `relative` (TUPE-R, (32, 128) in the paper) adds T5's buckets, in a table [buckets + 1, heads] whose rows buckets / 2 and
    buckets are the class token's. One instance serves all layers: the paper computes it once.

    Raises OptionError for a bad `relative`, ValueError for a position past max_length.

        >>> posenc.TUPE(d_model=64, heads=4, max_length=128).plan(posenc.Positions(8)).append[0].shape  # [B or 1, H, L, E]
        torch.Size([1, 4, 8, 16])
    """

    absolute = True

    def __init__(
        self, *, d_model: int, heads: int, head_dim: int | None = None, max_length: int = 512,
        class_token: bool = False, relative: tuple[int, int] | None = None, std: float = 0.02,
    ):  # fmt: skip
        super().__init__()
        self.head_dim = head_size(d_model, heads, head_dim)
        require_int("max_length", max_length, least=1, most=formulas.FARTHEST)
        self.heads, self.max_length = heads, max_length
        self.class_token = require_bool("class_token", class_token)
        if relative is not None and (not isinstance(relative, (tuple, list)) or len(relative) != 2):
            raise OptionError(f"relative={relative!r} must be (buckets, max_distance), such as (32, 128)")
        self.relative = relative
        self.std = require_number("std", std, least=0.0)
        self.table = nn.Parameter(torch.empty(require_table("the table", max_length + 1, d_model)))
        self.norm = nn.LayerNorm(d_model)
        require_int("the projection", 2 * heads * self.head_dim, most=WIDEST)
        self.projection = nn.Linear(d_model, 2 * heads * self.head_dim)
        if self.relative is not None:
            buckets, max_distance = self.relative
            lo, hi, rows = formulas.t5_rows(buckets, max_distance, False)
            edge = max_length + max(-lo, hi)  # farther apart than any two tokens: the class token's own rows
            near = [rows[min(max(r, lo), hi) - lo] for r in range(-edge, edge + 1)]
            self.index = Index(-edge - 1, edge + 1, (buckets, *near, buckets // 2), buckets + 1)
            self.buckets = nn.Parameter(torch.empty(require_table("the buckets", buckets + 1, heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        for table in (self.table, self.projection.weight, *([self.buckets] if self.relative is not None else [])):
            nn.init.normal_(table, std=self.std)
        nn.init.zeros_(self.projection.bias)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        device, scale = self.table.device, (2 * self.head_dim) ** -0.5
        rows = self.projection(self.norm(self.table)).unflatten(-1, (2, self.heads, self.head_dim))
        of_queries, of_keys = rows.permute(1, 2, 0, 3)  # [heads, rows, head_dim] each
        at_q, at_k = positions.q_positions(device), positions.k_positions(device)
        self._check(at_q, at_k)
        step = int(self.class_token)
        q, k = (_pick(table, at + step) for table, at in ((of_queries, at_q), (of_keys, at_k)))
        if not self.class_token:
            return self._add_buckets(Plan(positions, append=(q, k), scale=scale), None)
        alone = (of_queries[:, :2] * of_keys[:, :2]).sum(-1)  # of p_0 and of p_1: [heads, 2]
        first_q, first_k = ((at == 0).to(q.dtype)[..., None, :, None] for at in (at_q, at_k))
        first_q, first_k = (each if each.dim() == 4 else each[None] for each in (first_q, first_k))
        ones = torch.ones_like(k[..., :1])
        # the class token's query reads the first of two more channels, all others the second
        q = torch.cat((q * (1 - first_q), *(each.expand(*q.shape[:3], 1) for each in (first_q, 1 - first_q))), -1)
        k = torch.cat((k * (1 - first_k), ones * alone[:, 0, None, None], ones * first_k * alone[:, 1, None, None]), -1)
        return self._add_buckets(Plan(positions, append=(q, k), scale=scale), first_q[..., 0])

    def _add_buckets(self, plan: Plan, first_q: Tensor | None) -> Plan:
        if self.relative is None:
            return plan
        table = self.buckets.t()
        if first_q is None:
            return replace(plan, lookups=(Lookup(self.index, bias=table),))
        apart = _place_class_token(plan.positions, self.index.hi, self.max_length, table.device)
        # the class token is at distance 0 of itself, where its row says otherwise: see GridBias
        own = self.buckets.shape[0] // 2
        more = table[:, own] - table[:, 0]
        shifted = torch.cat((table[:, :own], (table[:, own] - more)[:, None], table[:, own + 1 :]), 1)
        c_q = first_q * more[:, None]
        decay = c_q, c_q.new_zeros(1, self.heads, apart.k_length)
        return replace(plan, positions=apart, lookups=(Lookup(self.index, bias=shifted),), decay=decay)

    def _check(self, *sides: Tensor) -> None:
        for at in sides:
            if at.is_cpu and at.numel() and not torch.compiler.is_compiling() and not has_fake_tensors():
                low, high = torch.stack(torch.aminmax(at)).tolist()
                if low < 0 or high >= self.max_length:
                    raise ValueError(
                        f"positions go from {low} to {high}; TUPE's table is for 0 to {self.max_length - 1}: "
                        "give max_length, or shorten the input"
                    )


def _pick(table: Tensor, at: Tensor) -> Tensor:
    """Rows [H, n, d] at positions [L] or [B, L]: [B or 1, H, L, d]."""
    found = table[:, at]
    return found[None] if at.dim() == 1 else found.transpose(0, 1)


def _place_class_token(positions: Positions, away: int, longest: int, device: torch.device) -> Positions:
    """The same positions with the class token's further from all others than any two tokens are apart."""
    runs = positions.runs
    if runs is None or any(type(run.start) is not int for run in runs):
        return _apart(positions, away, longest, device)
    if torch.compiler.is_compiling() or has_fake_tensors():
        return _apart(positions, away, longest, device)
    return _kept_apart((runs[0].start, runs[0].length), (runs[1].start, runs[1].length), away, longest, device)


@lru_cache(maxsize=64)
def _kept_apart(q: tuple[int, int], k: tuple[int, int], away: int, longest: int, device: torch.device) -> Positions:
    with torch.inference_mode(False), torch.no_grad():
        apart = _apart(Positions(q, k), away, longest, device)
    apart.is_constant = True
    return apart


def _apart(positions: Positions, away: int, longest: int, device: torch.device) -> Positions:
    both = positions.q_positions(device), positions.k_positions(device)
    at_q, at_k = (torch.where(at == 0, -away, at) for at in both)
    return Positions(at_q, at_k, reach=(-away - longest, away + longest))
