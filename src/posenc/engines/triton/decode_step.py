"""Decoding steps like earlier ones: the output's allocation and one launch, or two where the keys are shared out.

    first step     validate, lower, choose ─▶ run_decode: compile, launch                    hundreds of microseconds
    next steps     known_calls.find_step ─▶ Step.run: addresses, strides, number of keys     a dictionary lookup, a launch

The steps of a text differ in addresses, in strides of the cache and in the number of keys alone; everything else is worked out when
a Step is made. Served are one lookup (biases, or a table that is multiplied with the queries) and slopes, with no masks but
causality and a window. Other steps, and those whose strides ask for another variant of the kernel, go through run_decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.index import Index
from ...core.plan import Plan
from ..lowering import LoweredPlan
from . import decode_launch, decode_schedule
from .arguments import FAR
from .decode_launch import MERGED_AT_ONCE, MOST_OWN_ROWS, NO_ROWS, SCANNED, block_size, row_blocks
from .device import launch_on
from .launcher import INTERPRETED, current_stream, find_known
from .schedule import cdiv

WIDE = 1 << 31
"""Strides from here on take 64 bits, and another variant of the kernel."""


class Step:
    def __init__(self, q: Tensor, v: Tensor, lowered: LoweredPlan):
        facts, plan = lowered.facts, lowered.plan
        lookup = plan.lookups[0] if plan.lookups else None
        size, v_size, group = facts.head_dim, facts.value_dim, facts.heads // facts.kv_heads
        bias_rows, blocks, table = None, NO_ROWS, None if lookup is None else lookup.dot_query
        if lookup is not None and lookup.bias is not None:
            assert isinstance(lookup.index, Index)
            if lookup.index.rows is not None:
                bias_rows = decode_launch.bias_rows_of(lookup.index, facts.device)
        if table is not None:
            blocks = row_blocks(size, q.dtype, table.shape[0] == 1)
        self.shape, self.dtype, self.device = (facts.batch, facts.heads, facts.q_length, v_size), q.dtype, q.device
        self.merged = facts.batch * facts.heads * facts.q_length
        self.tile = decode_schedule.choose_decode_tile(
            group * facts.q_length, max(size, v_size), q.dtype, q.device, facts.batch * facts.kv_heads
        )
        self.programs = facts.batch * facts.kv_heads * cdiv(group * facts.q_length, self.tile.rows)
        left = FAR if facts.left is None else facts.left
        right = FAR if facts.right is None else facts.right
        self.most = left + facts.q_length + right
        self.shares: dict[int, int] = {}  # by the number of tiles of keys
        self.share = self.merged * (v_size + 2)
        lo, hi = facts.spans[1] or (0, 0)
        self.row_count = self.merged * (hi - lo + 1)
        self.reads_distance = facts.reads_distance
        # the kernel's arguments that stay
        self.at_rows = 0 if bias_rows is None else bias_rows.data_ptr()
        self.bias_span = (self.at_rows or None, *(facts.spans[0] or (0, 0)))
        self.no_rows = (None, 0, 0, None, 0, 0, 0, None, 0, 0)
        self.row_span = lo, hi
        self.masks = (None, None, None, None, None, 0, None, 0, 0, 0, 0, facts.heads, group, facts.q_length)
        self.limits = left, right
        self.constants = (
            lowered.scale, size, v_size, block_size(size), block_size(v_size), self.tile.rows, self.tile.keys, False, SCANNED, *blocks,
        )  # fmt: skip
        self.merging = v_size, block_size(v_size), MERGED_AT_ONCE
        # which variants run_decode has launched for such steps, with shares and without
        single, given = torch.float32, [self.dtype] * 4
        bias = None if lookup is None or lookup.bias is None else lookup.bias.dtype
        own = [None] * 3 if table is None else [single, self.dtype, table.dtype]
        rest = [bias, torch.int32 if self.at_rows else None, *own, None if plan.slopes is None else single, *[None] * 6]
        self.variants = {
            shared: ("decode", self.device, self.tile, size, v_size, blocks, (*given, None, single if shared else None, *rest), True)
            for shared in (False, True)
        }  # fmt: skip
        self.merge_variant = "merge_shares", self.device, self.dtype, False, v_size, True
        self.launches: dict[bool, tuple] = {}

    @staticmethod
    def supports(lowered: LoweredPlan) -> bool:
        facts, plan = lowered.facts, lowered.plan
        if INTERPRETED or plan.rotate is not None or facts.return_lse or facts.decay or not lowered.mask.plain:
            return False
        if facts.scale != "number" or facts.positions != "run" or facts.k_length == 0 or len(plan.lookups) > 1:
            return False
        if plan.slopes is not None and (plan.slopes.dtype != torch.float32 or not plan.slopes.is_contiguous()):
            return False
        for lookup in plan.lookups:
            if not isinstance(lookup.index, Index):
                return False
            table, rows = lookup.dot_query, lookup.index.rows
            if table is not None and (rows is not None or lookup.index.span > MOST_OWN_ROWS):
                return False  # its rows are made by a launch of their own
            if table is not None and (lookup.states is not None or table.dtype != facts.dtype):
                return False
        return True

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor | None:
        """The output; None where this step is not like the one that came before."""
        q0, q1, q2, q3 = q.stride()
        k0, k1, k2, k3 = k.stride()
        v0, v1, v2, v3 = v.stride()
        if not q3 == k3 == v3 == 1:
            return None
        k_length = k.shape[2]
        tiles = (min(k_length, self.most) - 1) // self.tile.keys + 1
        splits = self.shares.get(tiles)
        if splits is None:
            splits = self.shares[tiles] = decode_schedule.choose_decode_shares(
                self.programs, min(k_length, self.most), self.tile, self.device
            )
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        steps = q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2
        odd = at_q | at_k | at_v | self.at_rows
        bias = table = at_bias = at_slopes = at_shares = None
        bias_h = bias_n = 0
        slopes = plan.slopes
        if plan.lookups:
            lookup = plan.lookups[0]
            bias, table = lookup.bias, lookup.dot_query
            if bias is not None:
                bias_h, bias_n = bias.stride()
                bias_h = 0 if bias.shape[0] == 1 else bias_h
                at_bias = bias.data_ptr()
                odd |= at_bias
        if slopes is not None:
            if not slopes.is_contiguous():
                return None
            at_slopes = slopes.data_ptr()
            odd |= at_slopes
        rows: tuple = self.no_rows
        if table is not None:
            table_h, table_n, table_e = table.stride()
            if table_e != 1:
                return None
            at_table = table.data_ptr()
            steps |= table_h | table_n
            odd |= at_table
            made = torch.empty((self.row_count * splits,), dtype=torch.float32, device=self.device)
            rows = (made.data_ptr(), *self.row_span, at_q, q0, q1, q2, at_table, table_h, table_n)
        if (steps | odd) & 15 or steps >= WIDE:
            return None
        launch = self.launches.get(splits > 1)
        if launch is None:
            launch = self._find_launches(splits > 1)
            if launch is None:
                return None
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if splits > 1:
            shares = torch.empty((self.share * splits,), dtype=torch.float32, device=self.device)
            at_shares = shares.data_ptr()
        at_out = out.data_ptr()
        (decode, between), merge = launch
        with launch_on(q):
            stream = current_stream(self.device.index)
            decode(
                self.programs * splits, 1, 1, stream, *between, at_q, q0, q1, q2, at_k, k0, k1, k2, at_v, v0, v1, v2, at_out, None,
                at_shares, at_bias, bias_h, bias_n, *self.bias_span, *rows, at_slopes, *self.masks, k_length,
                plan.positions.offset if self.reads_distance else 0, *self.limits, splits, *self.constants,
            )  # fmt: skip
            if splits > 1:
                merge_shares, between = merge
                merge_shares(self.merged, 1, 1, stream, *between, at_shares, at_out, None, splits, *self.merging)
        return out

    def _find_launches(self, shared: bool) -> tuple | None:
        """What run_decode has launched for such a step: the kernel, and the one that merges shares."""
        found, merge = find_known(self.variants[shared]), find_known(self.merge_variant) if shared else None
        if found is None or (shared and merge is None):
            return None
        self.launches[shared] = found, merge
        return self.launches[shared]
