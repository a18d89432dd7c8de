"""Launch the Gluon backward kernel with content terms, over bands that the triton engine makes and reduces (triton/launch.py)."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import Inputs, Numbers
from ..triton.band_layout import Band
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from ..triton.structs import view
from . import visible_distances
from .backward_launch import Schedule, _describe_sums, order_keys
from .backward_prepare import clear_rest, finish, finish_rows, prepare_content
from .backward_tiles import KEYS, OWN
from .bands import COPY, can_copy, describe_band, describe_ends
from .content_backward import backward_content
from .kernel import NUMBERS
from .launch import LOG2E, NO_LIMIT, _describe, _rows

SCHEDULES = {64: Schedule(), 128: Schedule(queries=32, add=3, registers=(200, 88, 24))}


def is_one_sided(x: Inputs, num: Numbers) -> bool:
    """Whether no block of keys has visible distances beyond both ends of the row term's span, for one query."""
    return _find_side(x, num) is not None


def _find_side(x: Inputs, num: Numbers) -> int | None:
    """A block whose first distance is smaller than this counts as beyond the left end; None: a block may be beyond both."""
    first, last = visible_distances(x, num)
    lo, hi = num.rows_lo, num.rows_hi
    if first >= lo:
        return -NO_LIMIT
    if last <= hi:
        return NO_LIMIT
    return lo if hi - lo >= KEYS.value - 2 else None


def holds_near_tiles(x: Inputs, num: Numbers) -> bool:
    """Whether all distances of near tiles lie between the ends of the bands (triton/arguments._band_span), so that the copy engine may write them."""
    first, last = visible_distances(x, num)
    over = SCHEDULES[x.q.shape[3]].queries + KEYS.value - 2  # how far a tile reaches beyond one of its distances
    lo, hi = max(num.lo + 1, first) - over, min(num.hi - 1, last) + over
    rows = x.table is None or (num.rows_lo < lo and hi < num.rows_hi)
    return rows and (x.key_table is None or (-num.cols_hi < lo and hi < -num.cols_lo))


def run_backward(
    launch: Launch, do: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, x: Inputs, num: Numbers, scale: float,
    dq: Tensor, dk: Tensor, dv: Tensor, rows: Band | None, cols: Band | None, mass: Band | None, d_rows: Band | None, d_cols: Band | None,
    schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Fills dq, dk and dv without what rows and cols add to them, and d_rows and d_cols, which are still to be multiplied with the scale."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    kv_heads, k_length = k.shape[1:3]
    s = schedule or SCHEDULES[size]
    q_tiles, blocks = -(-q_length // s.queries), -(-k_length // KEYS.value)
    stats = lse.new_empty(3 * batch * heads * q_tiles, 2 * s.queries)
    sums = lse.new_empty(batch, heads, q_tiles, s.queries * size)
    batch_rows = 1 if x.key_mask is None and x.doc_q is None and x.starts is None else batch
    tiles = lse.new_empty(batch_rows, blocks, NUMBERS.value, dtype=torch.int32)
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    ends = [None if band is None else band.ends for band in (rows, mass)]
    ends_row = next((band.rows for band in (rows, mass) if band is not None), 0)
    bands = (rows, cols, mass, d_rows, d_cols)
    can = s.copied > 0 and all(band is None or can_copy(band, max(q_length, k_length)) for band in bands)
    can = can and (size == 64 or cols is mass is None)  # heads of 128 leave shared memory for the queries' term alone
    has_both = (rows is None) == (d_rows is None) and (cols is None) == (d_cols is None)
    copied = can and bool(num.wide) and mass is None and has_both and holds_near_tiles(x, num)
    loaded = can and s.copied > 1 and not copied and cols is None and rows is not None
    launch(
        prepare_content, batch * heads * q_tiles + batch_rows * blocks, view(out), view(do), d_lse, lse, stats, sums, tiles, batch_rows * blocks, blocks,
        position_args(x), make_masks(x), *ends, ends_row, heads, batch * heads, q_length, k_length, num.offset, left, right, num.lo, num.hi,
        scale * LOG2E, size, s.queries, KEYS.value, copied, num_warps=4,
    )  # fmt: skip

    tiles_row = 0 if batch_rows == 1 else blocks * NUMBERS.value
    for band, is_key, length, other_length in ((d_rows, False, q_length, k_length), (d_cols, True, k_length, q_length)):
        if band is not None:
            own = OWN.value if is_key else s.queries
            launch(
                clear_rest, batch * heads * -(-length // own), band.ptr, band.h, band.pitch, band.origin, band.lo, band.hi, tiles, tiles_row, heads,
                length, other_length, -num.offset if is_key else num.offset, s.queries, KEYS.value, own, is_key, num_warps=4,
            )  # fmt: skip

    order, order_row, programs = order_keys(x, num, KEYS.value, s.queries)
    outer = stats if d_rows is None else lse.new_zeros(batch * heads, blocks, q_tiles * s.queries)
    masks, mask_rows = zip(*(_rows(y, lse) for y in (x.key_mask, x.doc_q, x.doc_k, x.doc_k_queries)), strict=True)
    layout = gl.NVMMASharedLayout(0, 32, 2)
    by_query, by_key = (q_length, k_length, [s.queries, COPY.value]), (k_length, q_length, [COPY.value, s.queries])
    sides = (by_query, by_key, by_query, by_query, by_key)
    copies = [
        q if band is None or not (copied or loaded) else describe_band(band, *side) for band, side in zip(bands, sides, strict=True)
    ] + [q if band is None or not loaded else describe_ends(band, q_length, s.queries) for band in (rows, mass)]  # fmt: skip
    launch(
        backward_content, programs, _describe(k, KEYS.value), _describe(v, KEYS.value), _describe(q, s.queries),
        _describe(do, s.queries), _describe(dk, OWN.value), _describe(dv, OWN.value),
        TensorDescriptor(stats, list(stats.shape), [2 * s.queries, 1], [1, 2 * s.queries], layout), *copies,
        _describe_sums(sums, size, s.queries) if s.add == 3 else sums, tiles, order, *masks,
        lse if cols is None else cols.ends, outer, scale * LOG2E, 0 if cols is None else cols.rows, q_length, k_length, heads, heads // kv_heads, batch,
        s.spread, NO_LIMIT if left is None else left, NO_LIMIT if right is None else right, tiles_row, order_row, *mask_rows,
        *_flatten(rows, d_rows, q), *_flatten(cols, d_cols, q), *_flatten(mass, mass, q)[1:],
        0 if rows is None else rows.shift, 0 if cols is None else cols.shift, 0 if mass is None else mass.shift,
        STAGES=s.stages, SLOTS=s.slots, ADD=s.add, ROWS=rows is not None, COLS=cols is not None, MASS=mass is not None,
        D_ROWS=d_rows is not None, D_COLS=d_cols is not None, WINDOW=left is not None, PADDED=x.key_mask is not None, DOCS=x.doc_q is not None, COPIED=copied, LOADED=loaded,
        CONSUMER_REGISTERS=s.registers[0], ADDER_REGISTERS=s.registers[1], REGISTERS=s.registers[2], num_warps=4,
    )  # fmt: skip
    launch(
        finish, batch * heads * q_tiles, sums, view(dq), heads, q_length, scale, size, s.queries, s.add == 3, num_warps=4
    )  # fmt: skip
    if d_rows is not None:
        launch(
            finish_rows, batch * heads * -(-q_length // 64), outer, d_rows.ptr, outer.shape[2], blocks, q_length, num.offset, d_rows.h,
            d_rows.pitch, d_rows.origin, d_rows.lo, d_rows.hi, _find_side(x, num), 64, KEYS.value, num_warps=2,
        )  # fmt: skip


def _flatten(band: Band | None, gradient: Band | None, unused: Tensor) -> tuple:
    """Both pointers, and what they share: elements of a head, pitch, origin, lo and hi."""
    if band is None:
        return unused, unused, 0, 0, 0, 0, 0
    return band.ptr, unused if gradient is None else gradient.ptr, band.h, band.pitch, band.origin, band.lo, band.hi
