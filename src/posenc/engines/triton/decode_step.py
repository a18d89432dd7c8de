"""Decoding steps like earlier ones: the output's allocation and one launch, or two where the keys are shared out.

    first step     validate, lower, choose ─▶ run_decode: compile, launch                    hundreds of microseconds
    next steps     known_calls.run_step ─▶ Step.run: addresses, strides, number of keys      a dictionary lookup, a launch

The steps of a text differ in addresses, in strides of the cache, in the number of keys and, where a table has a row for each distance,
in the number of its rows alone; everything else is worked out when a Step is made. Served are one lookup (biases, or a table that is
multiplied with the queries, with shifts or without, or with other states) and slopes; causality, a window and padding. Other steps, and
those whose strides ask for another variant of the kernel, go through run_decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.index import Index
from ...core.launches import find_allocation
from ...core.plan import Plan
from ..lowering import LoweredPlan
from . import decode_launch, decode_schedule
from .arguments import FAR
from .decode_launch import (
    MERGED_AT_ONCE,
    MOST_OWN_ROWS,
    NO_ROWS,
    SCANNED,
    block_size,
    out_strides,
    row_blocks,
    row_tiles,
)
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
        bias_rows, table = None, None if lookup is None else lookup.dot_query
        width = size if table is None else table.shape[2]
        if lookup is not None and lookup.bias is not None:
            assert isinstance(lookup.index, Index)
            if lookup.index.rows is not None:
                bias_rows = decode_launch.bias_rows_of(lookup.index, facts.device)
        self.shape, self.dtype, self.device = (facts.batch, facts.heads, facts.q_length, v_size), q.dtype, q.device
        self.strides = {
            side_by_side: out_strides(facts.heads, facts.q_length, v_size, 0, int(side_by_side))
            for side_by_side in (False, True)
        }
        self.allocate = find_allocation(q.device) or _allocate_plainly(q.device)
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
        self.reads_distance = facts.reads_distance
        self.adds_shifts = decode_launch.adds_shifts(lowered)
        # the kernel's arguments that stay
        self.at_rows = 0 if bias_rows is None else bias_rows.data_ptr()
        self.kept = bias_rows
        self.has_padding = lowered.mask.key_mask is not None
        self.sizes = (None, 0, 0, 0, 0, facts.heads, group, facts.q_length)
        self.limits = left, right
        shared = table is not None and table.shape[0] == 1
        blocks = {False: NO_ROWS, True: NO_ROWS if table is None else row_blocks(width, q.dtype, shared)}
        sizes = (
            lowered.scale, size, v_size, block_size(size), block_size(v_size), self.tile.rows, self.tile.keys, False, SCANNED
        )  # fmt: skip
        self.constants = {own: (*sizes, *blocks[own]) for own in (False, True)}
        self.merging = v_size, block_size(v_size), MERGED_AT_ONCE
        self.row_programs, self.row_constants = row_tiles(
            facts.batch, facts.heads, facts.q_length, width, q.dtype, shared
        )
        self.row_sizes = facts.batch, facts.heads, facts.q_length
        # which variants run_decode has launched for such steps: with shares or without, own rows or made by a launch of their own
        single, given = torch.float32, [self.dtype] * 4
        bias = None if lookup is None or lookup.bias is None else lookup.bias.dtype
        shifts: list = [None, None]
        if self.adds_shifts:
            assert lookup is not None
            shifts = [None if x is None else x.dtype for x in (plan.shift, lookup.query_shift)]
        own_rows = {
            False: [single, None, None],
            True: [None] * 3 if table is None else [single, self.dtype, table.dtype],
        }
        slopes = None if plan.slopes is None else single
        padding = torch.uint8 if self.has_padding else None
        ends = [bias, torch.int32 if self.at_rows else None], [slopes, *[None] * 4, padding, None, *shifts]
        self.variants = {
            (has_shares, own): (
                "decode", self.device, self.tile, size, v_size, blocks[own],
                (*given, None, single if has_shares else None, *ends[0], *own_rows[own], *ends[1]), True,
            )
            for has_shares in (False, True) for own in (False, True)
        }  # fmt: skip
        self.merge_variant = "merge_shares", self.device, self.dtype, False, v_size, True
        self.rows_variant = None
        if table is not None:
            self.rows_variant = (
                "query_rows", self.device, (self.dtype, *shifts, table.dtype), self.row_constants, True
            )  # fmt: skip
        self.launches: dict[tuple[bool, bool], tuple] = {}

    @staticmethod
    def supports(lowered: LoweredPlan) -> bool:
        facts, plan = lowered.facts, lowered.plan
        if INTERPRETED or plan.rotate is not None or facts.return_lse or facts.decay:
            return False
        if facts.documents or facts.has_dense_mask:
            return False
        if facts.scale != "number" or facts.positions != "run" or facts.k_length == 0 or len(plan.lookups) > 1:
            return False
        if plan.slopes is not None and (plan.slopes.dtype != torch.float32 or not plan.slopes.is_contiguous()):
            return False
        for lookup in plan.lookups:
            if not isinstance(lookup.index, Index):
                return False
            table = lookup.dot_query
            if table is not None and lookup.index.rows is not None:
                return False  # rows by distance would be made first
            if table is not None and table.dtype != facts.dtype:
                return False
            shape = (facts.batch, facts.heads, facts.q_length)
            if lookup.states is not None and (lookup.states.dtype != facts.dtype or lookup.states.shape[:3] != shape):
                return False
        return True

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, offset: int | None, key_mask: Tensor | None = None
    ) -> Tensor | None:
        """The output; None where this step is not like the one that came before. offset: of its positions, which need not be the plan's."""
        q0, q1, q2, q3 = q.stride()
        k0, k1, k2, k3 = k.stride()
        v0, v1, v2, v3 = v.stride()
        if not q3 == k3 == v3 == 1:
            return None
        k_length = k.shape[2]
        at_mask, mask_b = None, 0
        if self.has_padding:
            if key_mask is None or key_mask.dtype is not torch.bool or key_mask.get_device() != q.get_device():
                return None
            if key_mask.shape != (self.shape[0], k_length) or key_mask.stride(1) != 1:
                return None
            at_mask, mask_b = key_mask.data_ptr(), key_mask.stride(0)
        tiles = (min(k_length, self.most) - 1) // self.tile.keys + 1
        splits = self.shares.get(tiles)
        if splits is None:
            splits = self.shares[tiles] = decode_schedule.choose_decode_shares(
                self.programs, min(k_length, self.most), self.tile, self.device
            )
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        steps = q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2
        odd = at_q | at_k | at_v | self.at_rows | (at_mask or 0)
        table = at_bias = at_slopes = at_shift = at_row_shift = None
        bias_h = bias_n = bias_lo = bias_hi = lo = hi = 0
        own = True
        slopes = plan.slopes
        if plan.lookups:
            lookup = plan.lookups[0]
            index, bias, table = lookup.index, lookup.bias, lookup.dot_query
            lo, hi = index.lo, index.hi
            if bias is not None:
                bias_h, bias_n = bias.stride()
                bias_h = 0 if bias.shape[0] == 1 else bias_h
                at_bias, bias_lo, bias_hi = bias.data_ptr(), lo, hi
                odd |= at_bias
            if self.adds_shifts:
                shift, row_shift = plan.shift, lookup.query_shift
                if shift is not None:
                    at_shift = shift.data_ptr()
                    odd |= at_shift
                if row_shift is not None:
                    at_row_shift = row_shift.data_ptr()
                    odd |= at_row_shift
        if slopes is not None:
            if not slopes.is_contiguous():
                return None
            at_slopes = slopes.data_ptr()
            odd |= at_slopes
        numbers = share = self.share * splits if splits > 1 else 0
        if table is not None:
            table_h, table_n, table_e = table.stride()
            if table_e != 1:
                return None
            at_table, at_states, s0, s1, s2 = table.data_ptr(), at_q, q0, q1, q2
            if lookup.states is not None:
                at_states = lookup.states.data_ptr()
                s0, s1, s2, s3 = lookup.states.stride()
                if s3 != 1:
                    return None
            steps |= table_h | table_n | s0 | s1 | s2
            odd |= at_table | at_states
            own = hi - lo < MOST_OWN_ROWS
            share = -(-share // 4) * 4  # addresses are multiples of 16
            numbers = share + self.merged * (hi - lo + 1) * (splits if own else 1)
        if (steps | odd) & 15 or steps >= WIDE:
            return None
        launch = self.launches.get((splits > 1, own))
        if launch is None:
            launch = self._find_launches(splits > 1, own)
            if launch is None:
                return None
        allocate = self.allocate
        with launch_on(q):
            stride = self.strides[q1 < q2]
            out = allocate(self.shape, stride, self.dtype)
            at_out, at_shares = out.data_ptr(), None
            if numbers:  # shares and rows
                buffer = allocate((numbers,), (1,), torch.float32)
                at_shares = buffer.data_ptr()
            (decode, between), merge, query_rows = launch
            stream = current_stream(self.device.index)
            rows: tuple = NO_ROW_TERM
            if table is not None:
                assert at_shares is not None
                at_made = at_shares + 4 * share
                if own:
                    rows = (at_made, lo, hi, at_states, s0, s1, s2, at_table, table_h, table_n)
                else:
                    rows = (at_made, lo, hi, None, 0, 0, 0, None, 0, 0)
                    n = hi - lo + 1
                    run, middle = query_rows
                    run(
                        self.row_programs * cdiv(n, self.row_constants[3]), 1, 1, stream, *middle, at_states, s0, s1, s2, at_shift, at_row_shift,
                        at_table, table_h, table_n, at_made, *self.row_sizes, n, *self.row_constants,
                    )  # fmt: skip
            decode(
                self.programs * splits, 1, 1, stream, *between, at_q, q0, q1, q2, at_k, k0, k1, k2, at_v, v0, v1, v2, at_out, *stride[:3], None,
                at_shares if splits > 1 else None, at_bias, bias_h, bias_n, self.at_rows or None, bias_lo, bias_hi, *rows, at_shift, at_row_shift,
                at_slopes, None, None, None, None, at_mask, mask_b, *self.sizes, k_length, offset if self.reads_distance else 0, *self.limits, splits,
                *self.constants[own],
            )  # fmt: skip
            if splits > 1:
                merge_shares, between = merge
                merge_shares(
                    self.merged, 1, 1, stream, *between, at_shares, at_out, *stride[:3], None, *self.row_sizes[1:], splits, *self.merging
                )  # fmt: skip
        return out

    def _find_launches(self, shared: bool, own: bool) -> tuple | None:
        """What run_decode has launched for such a step: the kernel, the one that merges shares, and the one that makes rows."""
        found, merge = find_known(self.variants[shared, own]), find_known(self.merge_variant) if shared else None
        rows = None if own else find_known(self.rows_variant)
        if found is None or (shared and merge is None) or (rows is None and not own):
            return None
        self.launches[shared, own] = found, merge, rows
        return self.launches[shared, own]


NO_ROW_TERM = (None, 0, 0, None, 0, 0, 0, None, 0, 0)
"""rows to t_l of the kernel."""


def _allocate_plainly(device: torch.device):
    def allocate(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate
