"""One token after others, again: what a layer's steps of decoding have in common is worked out once.

    step 1   plan, checks, the choice of an engine      ─▶  out, and a Token with the terms of one query
    step 2 .. Token.run(q, k, v)                        ─▶  out, or None: take the way of step 1 again

A query is the last of its text, so its distances to L keys are 1 - L .. 0, whatever the step: a bias is the end of one row, which
grows to the left, and products with a table are read at the end of one run of rows. A Token holds the tables themselves, which
the caller vouches for, and copies of them: where their numbers differ (a parameter that was changed, by whichever way, or NaN)
it returns None.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core.index import Index
from ...core.plan import Plan
from ..lowering import add
from ..sdpa import VECTOR, fused_attention
from . import decode, dense


class Token:
    """The terms of one query on a CPU, without gradients: biases, slopes, and at most one table that multiplies the query."""

    __slots__ = ("content", "dtype", "first", "index", "pairs", "row", "scale", "shape")

    def __init__(self, q: Tensor, keys: int, plan: Plan):
        """q [B, H, 1, D] and a plan that `plain_call.run` has just run."""
        precision = torch.float64 if q.dtype == torch.float64 else torch.float32
        tables = [lookup.bias for lookup in plan.lookups if lookup.bias is not None]
        indices = [lookup.index for lookup in plan.lookups if lookup.bias is not None]
        if plan.slopes is not None:
            tables.append(plan.slopes)
        self.shape, self.dtype, self.scale = q.shape, q.dtype, None if plan.scale is None else float(plan.scale)
        self.row, self.first = None, -sys.maxsize
        if tables:
            self.row = dense.whole_row(tuple(tables), tuple(indices), 1 - keys, keys, precision)
            self.first = dense.first_of_row(1 - keys)
        self.index, self.content = None, None
        for lookup in plan.lookups:
            if lookup.dot_query is not None:
                tables.append(lookup.dot_query)
                scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
                self.index = lookup.index
                with torch.inference_mode(False), torch.no_grad():
                    self.content = (lookup.dot_query.to(precision) * scale).transpose(1, 2).contiguous()
        with torch.inference_mode(False), torch.no_grad():
            self.pairs = [(table, table.clone()) for table in tables]

    @staticmethod
    def supports(q: Tensor, plan: Plan) -> bool:
        """Of plans that `plain_call.run` takes, for one query without a gradient."""
        if plan.shift is not None or plan.rotate is not None or q.shape[2] != 1 or not q.is_cpu:
            return False
        return all(lookup.states is None and lookup.query_shift is None for lookup in plan.lookups)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """k and v [B, Hkv, L, D]: those of the step before, and one more."""
        keys = k.shape[2]
        start = 1 - keys - self.first
        if (
            q.shape != self.shape or q.dtype != self.dtype or start < 0 or keys < VECTOR or torch.is_grad_enabled()
            or type(q) is not Tensor or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
            or torch.is_autocast_enabled("cpu")
        ):  # fmt: skip
            return None
        for table, copy in self.pairs:
            if not copy.equal(table):
                return None
        mask = None if self.row is None else self.row.narrow(3, start, keys)
        if self.content is not None:
            mask = add(mask, self._products(q, keys))
        return fused_attention(q, k, v, mask, 0.0, False, self.scale)

    def _products(self, q: Tensor, keys: int) -> Tensor:
        """scale q·table by key, [B, H, 1, L]."""
        table, index = self.content, self.index
        assert table is not None
        assert isinstance(index, Index)
        batch, heads, _, size = q.shape
        if q.dtype != table.dtype:
            q = q.to(table.dtype)
        dots = q.view(batch * heads, size) @ table[0] if table.shape[0] == 1 else (q @ table).view(batch * heads, -1)
        return decode.expand_by_distance(dots, batch, index, 1 - keys, keys)
