"""A layer's next call, without gradients: what calls like the last one have in common is computed once.

    call 1   plan, checks, the choice of an engine      ─▶  out, and a Token (one query) or a Text (several)
    call 2 .. Token.run(q, k, v), Text.run(q, k, v)     ─▶  out, or None: run like call 1

A query is the last of its text, so its distances to L keys are 1 - L .. 0, whatever the step: a bias is the end of one row, which
grows to the left, and products with a table are read at the end of one run of rows. Both hold the tables themselves, which the
caller vouches for, and copies of them: where their numbers differ (a parameter that was changed, by whichever way, or NaN) they
return None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core.index import Index
from ...core.mask import MaskOptions
from ...core.memo import STEP
from ...core.plan import Plan
from ...core.plan_checks import holds_nan
from ...core.tables import add
from ..sdpa import fused_attention, hides_nan
from . import decode, dense, dense_terms, joined_masks


class Token:
    """The terms of one query on a CPU, without gradients: biases, slopes, and at most one table that multiplies the query."""

    __slots__ = ("content", "dtype", "first", "index", "pairs", "row", "scale", "shape")
    is_final = False

    def __init__(self, q: Tensor, keys: int, plan: Plan):
        """q [B, H, 1, D] and a plan that `plain_call.run` has just run."""
        precision = torch.float64 if q.dtype == torch.float64 else torch.float32
        biases, indices = bias_tables(plan)
        tables = list(biases)
        self.shape, self.dtype, self.scale = q.shape, q.dtype, None if plan.scale is None else float(plan.scale)
        self.row, self.first = None, -sys.maxsize
        if tables:
            self.row = dense.whole_row(biases, indices, 1 - keys, keys, precision)
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
        return q.shape[2] == 1 and _has_only_tables(q, plan)

    def run(self, q: Tensor, k: Tensor, v: Tensor, masks: MaskOptions | None = None) -> Tensor | None:
        """k and v [B, Hkv, L, D]: those of the step before, and one more. masks: padding [B, L] alone."""
        keys = k.shape[2]
        start = 1 - keys - self.first
        if q.shape != self.shape or q.dtype != self.dtype or start < 0 or not _is_plain(q) or hides_nan(q, keys):
            return None
        for table, copy in self.pairs:
            if not copy.equal(table):
                return None
        mask = None if self.row is None else self.row.narrow(3, start, keys)
        if self.content is not None:
            mask = add(mask, self._products(q, keys))
        if not masks:
            return fused_attention(q, k, v, mask, 0.0, False, self.scale)
        real = masks["key_mask"]
        assert real is not None
        precision = torch.float64 if q.dtype == torch.float64 else torch.float32
        mask = add(mask, dense_terms.hide(None, real[:, None, None], None, precision))
        out = fused_attention(q, k, v, mask, 0.0, False, self.scale)
        return None if holds_nan(out) else out  # a masked key or value may hold NaN

    def _products(self, q: Tensor, keys: int) -> Tensor:
        """scale q·table by key, [B, H, 1, L]."""
        table, index = self.content, self.index
        assert table is not None and isinstance(index, Index)
        batch, heads, _, size = q.shape
        if q.dtype != table.dtype:
            q = q.to(table.dtype)
        dots = q.view(batch * heads, size) @ table[0] if table.shape[0] == 1 else (q @ table).view(batch * heads, -1)
        return decode.expand_by_distance(dots, batch, index, 1 - keys, keys)


class Text:
    """The terms of a text, or of the last tokens of one, on a CPU, without gradients: biases, slopes, and, of as many queries as keys, at
    most one table that multiplies the queries; with padding and documents that `joined_masks` keeps."""

    __slots__ = ("causal", "content", "dtype", "facts", "fewest", "kv_heads", "mask", "pairs", "scale", "shape")
    is_final = False

    def __init__(self, q: Tensor, k: Tensor, plan: Plan, causal: bool):
        """What `plain_call.run` has just run."""
        precision = torch.float64 if q.dtype == torch.float64 else torch.float32
        length, keys = q.shape[2], dense_terms.kept_width(q.shape[2], k.shape[2])
        self.shape, self.kv_heads, self.dtype, self.causal = q.shape, k.shape[1], q.dtype, causal
        self.fewest = length if length == keys else max(length, keys - STEP) + 1
        self.scale = None if plan.scale is None else float(plan.scale)
        tables, indices = bias_tables(plan)
        self.facts = length, keys, None, 0 if causal else None, precision
        self.mask: Callable[[], Tensor | None] | None = None
        self.pairs: list[tuple[Tensor, Tensor]] = []
        if tables:  # `dense` owns the mask, and drops it where it keeps too much
            mask = dense.find_bias(tables, indices, length - keys, *self.facts)
            self.mask = _nothing if mask is None else ref(mask)
            with torch.inference_mode(False), torch.no_grad():
                self.pairs = [(table, table.clone()) for table in tables]
        self.content: tuple[Tensor, Tensor, tuple[Tensor, int, int]] | None = None
        for lookup in plan.lookups:
            if lookup.dot_query is not None:
                scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
                index = lookup.index
                assert isinstance(index, Index)
                with torch.inference_mode(False), torch.no_grad():
                    copy = lookup.dot_query.clone()
                    rows = dense_terms.scaled_rows(copy, index, 1 - length, length, length, scale, precision)
                self.content = lookup.dot_query, copy, rows

    @staticmethod
    def supports(q: Tensor, k: Tensor, plan: Plan) -> bool:
        """Of plans that `plain_call.run` takes, without a gradient."""
        queries, keys = q.shape[2], k.shape[2]
        if plan.positions.offset != queries - keys or not _has_only_tables(q, plan):
            return False
        return queries == keys or all(lookup.dot_query is None for lookup in plan.lookups)

    def run(self, q: Tensor, k: Tensor, v: Tensor, masks: MaskOptions | None = None) -> Tensor | None:
        (_, kv_heads, keys, _), length = k.shape, q.shape[2]
        if (
            q.shape != self.shape
            or kv_heads != self.kv_heads
            or q.dtype != self.dtype
            or not _is_plain(q)
            or hides_nan(q, keys)
        ):
            return None
        most, mask, joined = self.facts[1], None, None
        if not self.fewest <= keys <= most:
            return None
        if masks:
            joined = joined_masks.find(joined_masks.key_of(q, keys, masks), masks)
            if joined is None:
                return None
        if self.mask is not None:
            mask = self.mask()
            if mask is None:
                return None
            for table, copy in self.pairs:
                if not copy.equal(table):
                    return None
            if keys != most:
                mask = mask.narrow(3, most - keys, keys)
        elif self.causal and joined is None:
            mask = dense_terms.limits_of(*self.facts[2:4], length, keys, self.facts[4])
        if joined is not None:
            mask = add(mask, joined.hidden)
        if self.content is not None:
            table, copy, rows = self.content
            if not copy.equal(table):
                return None
            mask = add(mask, dense_terms.multiply_scaled(q, *rows, length))
        out = fused_attention(q, k, v, mask, 0.0, False, self.scale)
        if joined is not None and joined.is_empty is not None:
            out = out.masked_fill(joined.is_empty, 0.0)
        hides = self.causal or joined is not None
        return None if hides and holds_nan(out) else out  # a masked key or value may hold NaN


def _nothing() -> None:
    """A mask that was not kept."""


def _has_only_tables(q: Tensor, plan: Plan) -> bool:
    if plan.shift is not None or plan.rotate is not None or not q.is_cpu:
        return False
    return all(lookup.states is None and lookup.query_shift is None for lookup in plan.lookups)


def bias_tables(plan: Plan) -> tuple[tuple[Tensor, ...], tuple[Index, ...]]:
    """The biases by distance and their indices, then the slopes: as `dense` takes them."""
    found = [(lookup.bias, lookup.index) for lookup in plan.lookups if lookup.bias is not None]
    tables = tuple([table for table, _ in found])
    return tables if plan.slopes is None else (*tables, plan.slopes), tuple([index for _, index in found])  # type: ignore[misc]


def _is_plain(q: Tensor) -> bool:
    """Whether a call is made without gradients, transforms and autocast."""
    return (
        type(q) is Tensor and not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0 and not torch.is_autocast_enabled("cpu")
    )  # fmt: skip
