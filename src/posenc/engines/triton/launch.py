"""From tensors to launches: buffers, schedules, and the loop over blocks of queries.

    run_forward     bands of the content terms -> forward -> merge splits -> add the value term
    run_backward    bands again -> preprocess -> backward_k -> backward_q -> products of the gradients' bands with tables

A content term over few distances is made for all queries at once. One over every distance (`Numbers.queries` > 0) is made for
that many queries at a time, [B, H, queries, queries + Lk], and again in the backward pass: memory grows with queries · L,
not with L². Blocks of queries run in order, so sums over them have a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from ...core.constants import constant
from ...core.launches import is_recording
from .. import gluon
from . import schedule
from .alignment import align_rows
from .arguments import GRADIENTS, Inputs, Numbers, mask_unit
from .backward_k import backward_k
from .backward_q import backward_q
from .band_layout import MARGIN, Band, band_shape, make_band, round_up
from .band_products import band_from_states, states_from_band, table_from_band
from .forward import forward
from .launcher import Launch
from .preprocess import preprocess
from .structs import Grads, Masks, PositionArgs, Table, Terms, View, view
from .tables import Parts, sum_parts

IDENTITY = (0.0,) * 128 + (1.0,) + (0.0,) * 128  # Terms.identity
ONES = (0.0,) * 32 + (1.0,) * 3 + (0.0,) * 32  # Terms.ones
MASS_FIXED_POINT = 2.0**50  # attention per distance sums up to 1 (with dropout to more, but not to a thousand)


def run_forward(
    launch: Launch, x: Inputs, num: Numbers, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out [B, H, Lq, Dv], lse [B, H, Lq rounded up to 64] (base 2), and attention per distance (a band's buffer) or None."""
    x = _with_aligned_rows(x)
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length, v_size = k.shape[2], v.shape[3]
    out = empty_in_order(q, v_size)
    lse = q.new_empty(batch, heads, padded(q_length), dtype=torch.float32)
    if out.numel() == 0 or k_length == 0:
        return out.zero_(), lse.fill_(float("inf")), _zero_mass(x, num)
    if is_recording():  # and so nothing is computed: what texts of other lengths would launch is compiled with this one
        if gluon.refuse_any_size(x, num, scale, dropout) is None:
            from ..gluon.launch import record_forward

            record_forward(launch, x, num, scale, out, lse)
    elif gluon.refuse(x, num, scale, dropout) is None:
        from ..gluon.launch import run_forward as run_gluon

        return run_gluon(launch, x, num, scale, out, lse)
    kind = x.kind(num)
    content = _without_joined_bias(x, num)
    if gluon.refuse_rolling(content, num, scale, dropout) is None:
        from ..gluon.rolling_launch import run_forward as run_rolling

        return run_rolling(launch, x, num, scale, out, lse)
    if gluon.refuse_window(content, num, scale, dropout) is None:
        from ..gluon.window_launch import run_forward as run_window

        cols = None if x.key_table is None else _make_cols(launch, x, num, kind, False)
        return run_window(launch, x, num, scale, out, lse, cols=cols)

    tile = schedule.choose_tile("forward", max(size, v_size), q.dtype, q.device, q_length, kind)
    splits = 1
    if q_length <= tile.queries and x.value is None:
        programs = batch * heads * schedule.cdiv(q_length, tile.queries)
        splits = schedule.choose_splits(programs, k_length, tile, q.device)
    split_out, split_sums = out, lse
    if splits > 1:
        split_out = out.new_empty(batch, heads, splits, q_length, v_size, dtype=torch.float32)
        split_sums = lse.new_empty(batch, heads, splits, 2, padded(q_length))

    terms = _make_terms(launch, x, num, kind)
    mass = _zero_mass(x, num)
    if mass is not None:
        terms = terms._replace(mass=_mass_band(x, num, mass))
    for first, last in _query_blocks(q_length, num):
        if x.table is not None:
            terms = terms._replace(rows=_make_rows(launch, x, num, scale, kind, first, last))
        grid = batch * heads * schedule.cdiv(last - first, tile.queries) * splits
        launch(
            forward, grid, view(q), view(k), view(v), view(out) if splits == 1 else View(split_out, 0, 0, 0), View(split_sums, 0, 0, 0),
            terms, position_args(x), make_masks(x), *_sizes(x, num, first, last),
            splits, scale, dropout, *_head_sizes(size, v_size), tile.queries, tile.keys, tile.general or tile.keys,
            SCALE_LAST=_scales_last(x), DROPOUT=dropout > 0, SPLIT=splits > 1, BAND_STAGES=tile.band_stages,
            INNER=_has_inner_tiles(kind, tile), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    if splits > 1:
        lse = _merge_splits(split_out, split_sums, out)
    if x.value is not None:
        states_from_band(launch, terms.mass, x.value.to(q.dtype), num.mass_lo, out, True)
    return out, lse, mass


def _merge_splits(split_out: Tensor, split_sums: Tensor, out: Tensor) -> Tensor:
    """Outputs [B, H, splits, Lq, Dv] of shares of the keys, with their maxima m_i and sums l_i [B, H, splits, 2, L] -> the
    output, into out, and the log-sum-exp of all keys."""
    m_i, l_i = split_sums.unbind(3)
    m = m_i.amax(2, keepdim=True)
    weight = torch.exp2(m_i - m.masked_fill(m == float("-inf"), 0.0)) * l_i
    total = weight.sum(2)
    lse = (m.squeeze(2) + total.log2()).masked_fill(total == 0.0, float("inf"))
    weight = weight / total.masked_fill(total == 0.0, 1.0)[:, :, None]
    out.copy_((weight[..., : out.shape[2], None] * split_out).sum(2))
    return lse


def empty_in_order(x: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B, H, L, size] for x [B, H, L, D], in memory as x is where the heads of a token lie side by side, as projections put
    them: what follows, and the projections' gradients, then need no copy."""
    batch, heads, length, _ = x.shape
    if x.stride(3) == 1 and x.stride(1) < x.stride(2):
        strides = (length * heads * size, size, heads * size, 1)
        return torch.empty_strided((batch, heads, length, size), strides, dtype=dtype or x.dtype, device=x.device)
    return x.new_empty(batch, heads, length, size, dtype=dtype)


def run_backward(
    launch: Launch, do: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, mass: Tensor | None, x: Inputs, num: Numbers, scale: float,
    dropout: float, wanted: dict[str, bool],
) -> list[Tensor | Parts | None]:  # fmt: skip
    """The gradients of GRADIENTS; those of tables are still to be summed (sum_parts). d_lse: like lse, of the log-sum-exp in base 2."""
    if x.q.numel() == 0 or x.k.numel() == 0:  # no pair at all
        return [None if tensor is None else torch.zeros_like(tensor) for tensor in x[: len(GRADIENTS)]]
    x, do = _with_aligned_rows(x), align_rows(do)
    d_lse = None if d_lse is None else d_lse.contiguous()
    if gluon.refuse_backward(x, num, scale, dropout, do) is None:
        from ..gluon.backward_launch import run_backward as run_gluon

        grads = _allocate_gradients(x, lse, {**wanted, "slopes": False}, False, 1)
        with gluon.attempt():
            d_bias, d_slopes = run_gluon(
                launch, do, d_lse, out, lse, x, num, scale, grads["q"], grads["k"], grads["v"], wanted["bias"], wanted["slopes"]
            )  # fmt: skip
            grads["bias"] = None if d_bias is None else Parts(d_bias, 1)
            grads["slopes"] = None if d_slopes is None else d_slopes.sum((0, 2, 3))
            return list(grads.values())
    if gluon.refuse_rolling_backward(_without_joined_bias(x, num), num, scale, dropout, do) is None:
        from ..gluon.rolling_backward_launch import run_backward as run_rolling

        grads = _allocate_gradients(x, lse, wanted, False, 1)
        with gluon.attempt():
            grads["table"], grads["bias"] = run_rolling(
                launch, do, d_lse, out, lse, x, num, scale, grads["q"], grads["k"], grads["v"]
            )
            return list(grads.values())
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length, v_size = k.shape[2], v.shape[3]
    kind = x.kind(num)
    q_tile = schedule.choose_tile("backward_q", max(size, v_size), q.dtype, q.device, q_length, kind)
    k_tile = schedule.choose_tile("backward_k", max(size, v_size), q.dtype, q.device, q_length, kind)
    blocks = list(_query_blocks(q_length, num))

    # ---- memory for the gradients
    bias_in_rows = wanted["bias"] and _is_bias_in_rows(x, num)
    needs_rows = bias_in_rows or (
        x.table is not None and (wanted["table"] or wanted["states"] or (x.states is None and wanted["q"]))
    )
    needs_cols = x.key_table is not None and (wanted["key_table"] or wanted["k"])
    runs_gluon = gluon.refuse_content_backward(_without_joined_bias(x, num), num, scale, dropout, do) is None
    grads = _allocate_gradients(x, lse, wanted, bias_in_rows, len(blocks))
    fixed_point = _fixed_point(x, do, d_lse, scale, dropout) if x.has_token_positions else None
    d_bias = d_cols = zeros = None
    if wanted["bias"] and not bias_in_rows:
        if x.has_token_positions:
            d_bias = make_band(q, heads, num.bias_lo, num.bias_hi, num.offset, 0, q_length, fixed_point=fixed_point)
        else:
            parts = zeros = x.bias.new_empty(batch, heads, schedule.cdiv(q_length, q_tile.queries), x.bias.shape[1])
            d_bias = Table(parts, parts.stride(2), num.bias_lo, num.bias_hi)
    if needs_cols:
        several = len(blocks) > 1
        d_cols = make_band(
            q, heads, num.cols_lo, num.cols_hi, -num.offset, 0, k_length,
            dtype=torch.float32 if several else None, zero=several, fixed_point=fixed_point,
        )  # fmt: skip
    delta = torch.empty_like(lse)
    ends = lse.new_empty(4, *lse.shape)
    row_parts = lse.new_empty(3, *lse.shape, 16, dtype=torch.bfloat16)

    # ---- the kernels
    terms = _make_terms(launch, x, num, kind)
    if x.value is not None:
        d_mass = band_from_states(
            launch, do, x.value, heads, num.mass_lo, num.mass_hi, num.offset, rounded=kind.startswith("wide"),
            wide=kind.startswith("wide"),
        )  # fmt: skip
        terms = terms._replace(mass=d_mass)
    table = x.table.to(q.dtype) if needs_rows else None
    d_terms = Grads(None, d_cols, d_bias, grads["slopes"], grads["scales"], grads["decay_k"], grads["decay_q"])
    positions, masks, head_sizes = position_args(x), make_masks(x), _head_sizes(size, v_size)
    flags = {"SCALE_LAST": _scales_last(x), "DROPOUT": dropout > 0}
    for first, last in blocks:
        if x.table is not None:
            terms = terms._replace(rows=_make_rows(launch, x, num, scale, kind, first, last))
        if needs_rows:
            lo, hi = terms.rows.lo, terms.rows.hi
            d_rows = make_band(q, heads, lo, hi, num.offset, first, last, fixed_point=fixed_point)
            d_terms = d_terms._replace(rows=d_rows)
        is_done = False
        if runs_gluon:
            from ..gluon.content_launch import run_backward as run_content

            with gluon.attempt():
                run_content(
                    launch, do, d_lse, out, lse, x, num, scale, grads["q"], grads["k"], grads["v"], terms.rows, terms.cols, terms.mass,
                    d_terms.rows, d_terms.cols,
                )  # fmt: skip
                is_done = True
        factor = scale if is_done else 1.0  # of the gradients' bands
        if not is_done:
            sizes = _sizes(x, num, first, last)
            launch(
                preprocess, batch * heads * schedule.cdiv(last - first, 64), view(out), view(do), d_lse, lse, delta, ends, row_parts, terms, heads, q_length, first, last, batch * heads,
                scale, zeros, 0 if zeros is None else zeros.numel(), head_sizes[1], head_sizes[3], 64, num_warps=4,
            )  # fmt: skip
            zeros = None  # cleared once
            launch(
                backward_k, batch * k.shape[1] * schedule.cdiv(k_length, k_tile.keys), view(q), view(k), view(v), view(do), view(grads["k"]), view(grads["v"]), row_parts,
                terms, positions, masks, d_terms, *sizes, batch * heads, scale, dropout, *head_sizes,
                k_tile.queries, k_tile.keys, k_tile.general or k_tile.queries, **flags, BAND_STAGES=k_tile.band_stages,
                INNER=_has_inner_tiles(kind, k_tile), ACCUMULATE=first > 0,
                ZERO_REST=len(blocks) == 1 and not x.has_token_positions, num_warps=k_tile.warps, num_stages=k_tile.stages,
            )  # fmt: skip
            launch(
                backward_q, batch * heads * schedule.cdiv(last - first, q_tile.queries), view(q), view(k), view(v), view(do), view(grads["q"]), lse, delta, ends,
                terms, positions, masks, d_terms, *sizes, batch * heads, scale, dropout, *head_sizes,
                q_tile.queries, q_tile.keys, q_tile.general or q_tile.keys, **flags, BAND_STAGES=q_tile.band_stages,
                INNER=_has_inner_tiles(kind, q_tile), num_warps=q_tile.warps, num_stages=q_tile.stages,
            )  # fmt: skip
        if needs_rows:
            _reduce_rows(
                launch, d_rows, x, num, scale, table, grads, first, last,
                wanted["table"] or wanted["states"], bias_in_rows, factor,
            )  # fmt: skip

    # ---- sums over programs, and products with tables
    if d_bias is not None:  # after the loop: _reduce_rows adds to a bias that is there
        if x.has_token_positions:
            ones = q.new_ones(batch, heads, q_length, 1, dtype=torch.float32)
            grads["bias"] = table_from_band(launch, d_bias, ones, heads)[0]
        else:
            grads["bias"] = Parts(d_bias.ptr, 1)
    if grads["slopes"] is not None:
        grads["slopes"] = grads["slopes"].sum((0, 2))
    if d_cols is not None:
        states_from_band(launch, d_cols, x.key_table.to(q.dtype), num.cols_lo, grads["k"], True, factor=factor)
        grads["key_table"] = table_from_band(launch, d_cols, k, heads)[0]._replace(factor=factor)
    if x.value is not None and wanted["value"]:
        grads["value"] = table_from_band(launch, _mass_band(x, num, mass), do, heads)[0]
    return list(grads.values())


def _allocate_gradients(
    x: Inputs, lse: Tensor, wanted: dict[str, bool], bias_in_rows: bool, blocks: int
) -> dict[str, Tensor | None]:
    """By name, in the order of GRADIENTS; None where not wanted, or made after the kernels."""
    q, k, v = x.q, x.k, x.v
    grads: dict[str, Tensor | None] = dict.fromkeys(GRADIENTS)
    sums = torch.float32 if blocks > 1 else k.dtype  # sums over blocks of queries are kept in float32
    grads["q"] = empty_in_order(q, q.shape[3])
    grads["k"], grads["v"] = (empty_in_order(one, one.shape[3], sums) for one in (k, v))
    if blocks > 1 and bias_in_rows:
        grads["bias"] = torch.zeros_like(x.bias)
    if wanted["table"] or wanted["states"]:
        grads["table"] = q.new_zeros(x.table.shape, dtype=torch.float32) if blocks > 1 else None
        grads["states"] = None if x.states is None else empty_in_order(x.states, x.states.shape[3])
    for name in ("slopes", "scales"):
        if wanted[name]:
            grads[name] = lse.new_zeros(q.shape[:3])
    if wanted["decay_q"] or wanted["decay_k"]:
        grads["decay_k"] = torch.zeros_like(x.decay_k, dtype=torch.float32)
        # The decay of a query shifts all of its scores, so its gradient is that of the log-sum-exp plus the rounding error of delta.
        # Where decays are sums of gates (fox) this error cancels that of decay_k; with zeros instead, all of it would remain.
        grads["decay_q"] = torch.zeros_like(x.decay_q, dtype=torch.float32)
    return grads


def _reduce_rows(
    launch: Launch, d_rows: Band, x: Inputs, num: Numbers, scale: float, table: Tensor, grads: dict, first: int, last: int,
    wants_table: bool, wants_bias: bool, factor: float,
) -> None:  # fmt: skip
    """The gradient of the row term -> those of its states, of its table, and of a bias that is part of it. factor: of the band."""
    states = (x.q if x.states is None else x.states)[:, :, first:last]
    k_length = _row_distances(x, num, first, last)[2]
    if x.states is None:
        states_from_band(launch, d_rows, table, num.rows_lo, grads["q"][:, :, first:last], True, k_length, factor)
    elif grads["states"] is not None:
        states_from_band(launch, d_rows, table, num.rows_lo, grads["states"][:, :, first:last], False, k_length, factor)
    if not (wants_table or wants_bias):
        return
    d_table, sums = table_from_band(launch, d_rows, states, x.q.shape[1], wants_bias)
    parts = {
        "table": d_table._replace(factor=factor) if wants_table else None,
        "bias": None if sums is None else sums._replace(factor=factor / scale),
    }  # fmt: skip
    for name, part in parts.items():
        if part is not None and grads[name] is None:  # one block of queries: the whole span
            grads[name] = part
        elif part is not None:
            some = grads[name][:, d_rows.lo - num.rows_lo : d_rows.hi - num.rows_lo + 1]
            some.add_(sum_parts(launch, part, some.new_empty(some.shape)))


# ---- bands ------------------------------------------------------------------------------------------------------------
def _query_blocks(q_length: int, num: Numbers) -> Iterator[tuple[int, int]]:
    """(first, last) of the queries that are computed at a time."""
    step = num.queries or max(q_length, 1)
    for first in range(0, q_length, step):
        yield first, min(first + step, q_length)


def _make_terms(launch: Launch, x: Inputs, num: Numbers, kind: str) -> Terms:
    """All terms but the row term and the mass."""
    cols = bias = None
    if x.key_table is not None:
        cols = _make_cols(launch, x, num, kind, True)
    if x.bias is not None and not _is_bias_in_rows(x, num):
        bias = Table(x.bias, x.bias.stride(0), num.bias_lo, num.bias_hi)
    identity, ones = constant(IDENTITY, x.q.device, x.q.dtype), constant(ONES, x.q.device, torch.bfloat16)
    return Terms(bias, None, cols, None, x.slopes, x.scales, x.decay_q, x.decay_k, identity, ones)


def _make_cols(launch: Launch, x: Inputs, num: Numbers, kind: str, with_bf16x3: bool) -> Band:
    """The column term."""
    return band_from_states(
        launch, x.k, x.key_table, x.q.shape[1], num.cols_lo, num.cols_hi, -num.offset,
        with_bf16x3=with_bf16x3, rounded=kind.startswith("wide"), wide=kind.startswith("wide"),
    )  # fmt: skip


def _make_rows(launch: Launch, x: Inputs, num: Numbers, scale: float, kind: str, first: int, last: int) -> Band:
    """The row term of the queries first .. last, over the distances that they may need. In half precision its ends are rounded like the
    rest, as in the Gluon kernels, so that both passes have the same scores."""
    lo, hi, k_length = _row_distances(x, num, first, last)
    states = x.q if x.states is None else x.states
    span = slice(lo - num.rows_lo, hi - num.rows_lo + 1)
    bias = x.bias[:, span] if _is_bias_in_rows(x, num) else None
    return band_from_states(
        launch, states, x.table[:, span], x.q.shape[1], lo, hi, num.offset, first, last, bias, 1.0 / scale,
        rounded=states.dtype != torch.float32, wide=kind.startswith("wide"), other_length=k_length,
    )  # fmt: skip


def _is_bias_in_rows(x: Inputs, num: Numbers) -> bool:
    """Whether the bias is added into the row term, which has the same distances: one load for both, and the gradient's
    columns sum up to the gradient of the bias."""
    same = (num.rows_lo, num.rows_hi) == (num.bias_lo, num.bias_hi)
    return x.bias is not None and x.table is not None and x.table.shape[0] == x.q.shape[1] and x.scales is None and same


def _without_joined_bias(x: Inputs, num: Numbers) -> Inputs:
    return x._replace(bias=None) if _is_bias_in_rows(x, num) else x


def _row_distances(x: Inputs, num: Numbers, first: int, last: int) -> tuple[int, int, int | None]:
    """lo, hi: the row term's distances that the queries first .. last may need; and the number of keys, if every visible
    distance lies within the span, so that each entry belongs to one key."""
    lo, hi = num.rows_lo, num.rows_hi
    if not num.queries or x.has_token_positions or x.starts is not None:
        return lo, hi, None
    k_length = x.k.shape[2]
    low, high = gluon.visible_range(first, last, x.q.shape[2], k_length, num.left, num.right)
    is_covered = lo <= low + num.offset and high + num.offset <= hi
    lo, hi = min(max(lo, low + num.offset), hi), max(min(hi, high + num.offset), lo)
    return lo, max(hi, lo), k_length if is_covered else None


def mass_size(q: Tensor, num: Numbers) -> int:
    _, _, one = band_shape(num.mass_lo, num.mass_hi, num.offset, q.shape[2])
    return 2 * MARGIN + q.shape[0] * q.shape[1] * one


def _zero_mass(x: Inputs, num: Numbers) -> Tensor | None:
    dtype = torch.int64 if x.has_token_positions else x.q.dtype
    return None if x.value is None else x.q.new_zeros(mass_size(x.q, num), dtype=dtype)


def _mass_band(x: Inputs, num: Numbers, buffer: Tensor) -> Band:
    fixed_point = x.q.new_full((1,), MASS_FIXED_POINT, dtype=torch.float32) if x.has_token_positions else None
    return make_band(
        x.q, x.q.shape[1], num.mass_lo, num.mass_hi, num.offset, 0, x.q.shape[2], buffer=buffer, fixed_point=fixed_point
    )  # fmt: skip


def _fixed_point(x: Inputs, do: Tensor, d_lse: Tensor | None, scale: float, dropout: float) -> Tensor:
    """float32 [1]: a power of two that takes every sum of ds to at most 2^61 (band_layout.py).

    |ds| <= 2 max |do| (max |v| + max |value|) Dv + 2 max |dlse|, and a key's sum has a term for each query. Where the bound is
    infinite or NaN, gradients become NaN.
    """
    if x.v.numel() == 0 or do.numel() == 0:
        return x.v.new_ones(1, dtype=torch.float32)
    most = x.v.abs().amax().float()
    if x.value is not None:
        most = most + x.value.abs().amax().float()
    most = most * do.abs().amax().float() * x.v.shape[3] / (1.0 - dropout)
    if d_lse is not None:
        most = most + 2 * d_lse.abs().amax()
    if x.scales is not None:
        most = most * x.scales.abs().amax().clamp(min=1.0)
    most = most * (2 * max(x.q.shape[2], 1) * max(scale, 1.0))
    return torch.exp2((60.0 - most.clamp(min=2.0**-60).log2()).floor()).reshape(1)


# ---- kernel arguments -------------------------------------------------------------------------------------------------
def position_args(x: Inputs) -> PositionArgs:
    return PositionArgs(x.starts, x.p_q, x.p_k, _batch_stride(x.p_q), _batch_stride(x.p_k))


def make_masks(x: Inputs) -> Masks:
    extra, is_bool, unit, strides = x.extra, False, 1, (0, 0, 0)
    if extra is not None:
        is_bool, unit = extra.dtype == torch.uint8, mask_unit(extra)
        strides = tuple([stride // unit for stride in extra.stride()[:3]])
    return Masks(
        x.key_mask, _batch_stride(x.key_mask), x.key_bounds, x.doc_q, x.doc_k, _batch_stride(x.doc_q), _batch_stride(x.doc_k),
        x.doc_q_keys, x.doc_k_queries, _batch_stride(x.doc_q_keys), _batch_stride(x.doc_k_queries),
        extra, *strides, None, x.seed, tl.constexpr(is_bool), tl.constexpr(unit),
    )  # fmt: skip


def _sizes(x: Inputs, num: Numbers, first: int, last: int) -> tuple:
    return (
        x.q.shape[1], x.q.shape[1] // x.k.shape[1], x.q.shape[2], x.k.shape[2], first, last, num.offset,
        None if num.left < 0 else num.left, None if num.right < 0 else num.right, num.lo, num.hi,
    )  # fmt: skip


def _scales_last(x: Inputs) -> bool:
    """Whether far scores need nothing per key, so that the scale is applied within the exponential."""
    return x.slopes is None and x.scales is None and x.decay_k is None


def _has_inner_tiles(kind: str, tile: schedule.Tile) -> bool:
    """Whether tiles within the bands have a loop of their own. Without a pipeline it is no faster, and an earlier version of
    it, compiled without one, read outside its memory."""
    return kind.startswith("wide") and tile.band_stages > 1


def padded(length: int) -> int:
    return round_up(length, 64)


def _head_sizes(size: int, v_size: int) -> tuple[int, int, int, int]:
    """D, Dv, and both as sizes of blocks."""
    return size, v_size, max(16, schedule.next_power_of_2(size)), max(16, schedule.next_power_of_2(v_size))


def _batch_stride(x: Tensor | None) -> int:
    """0 where one row serves the whole batch."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _with_aligned_rows(x: Inputs) -> Inputs:
    return x._replace(q=align_rows(x.q), k=align_rows(x.k), v=align_rows(x.v))
