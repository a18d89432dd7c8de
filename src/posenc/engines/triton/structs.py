"""Tuples of pointers, strides and bounds that the kernels take. A field is None where a plan or a mask has no such part."""

from __future__ import annotations

from typing import Any, NamedTuple

NOT_SPECIALISED = frozenset(
    ("lo", "hi", "first", "origin", "q_row", "k_row", "keys_row", "doc_q_row", "doc_k_row", "doc_q_keys_row", "doc_k_queries_row",
     "extra_b", "extra_h", "extra_q", "extra_k", "heads", "group", "length", "blocks", "nodes", "levels", "rows_q", "rows_k")
)  # fmt: skip
"""Fields whose values are of no use to the compiler (launcher.py): lengths and bounds."""

UNSPECIALISED = [
    "batch", "batch_heads", "bias_hi", "bias_lo", "bias_row", "bits_row", "blocks", "chunks", "cols_hi", "cols_lo", "cols_origin",
    "cols_pitch", "cols_shift", "cols_size", "count", "doc_k_row", "doc_keys_row", "doc_q_row", "doc_queries_row", "ends_row", "first",
    "group", "heads", "hi", "k_length", "key_ends_row", "kv_heads", "left", "length", "lo", "mass_hi", "mass_lo", "mass_origin", "mass_pitch",
    "mass_shift", "mass_size", "offset", "order_row", "origin", "other_length", "pitch", "programs", "q_first", "q_last", "q_length",
    "real_row", "right", "row", "rows_hi", "rows_lo", "rows_origin", "rows_pitch", "rows_shift", "rows_size", "scale", "scale2",
    "section", "side", "size", "span", "splits", "spread", "table_heads", "tiles_row", "width", "zero_count",
]  # fmt: skip
"""The same of arguments, in the kernels of attention: numbers that change from call to call, and of which the compiler gains nothing from
knowing that one is divisible by 16."""


class View(NamedTuple):
    """A tensor [B, heads, L, D] whose last stride is 1."""

    ptr: Any
    b: Any
    h: Any
    l: Any


def view(x) -> View:
    return View(x, *x.stride()[:3])


class Table(NamedTuple):
    """One number per head and distance, [H, hi - lo + 1], float32."""

    ptr: Any
    h: Any
    lo: Any
    hi: Any


class Terms(NamedTuple):
    """The plan's terms. slopes to decay_k are contiguous float32."""

    bias: Any  # Table
    rows: Any  # Band over queries (band_layout.py): states_i . table[r]
    cols: Any  # Band over keys: k_j . key_table[r], by -r
    mass: Any  # Band over queries: attention per distance; in the backward pass its gradient
    slopes: Any  # [H]
    scale: Any  # [B, H, Lq]
    decay_q: Any  # [B, H, Lq]
    decay_k: Any  # [B, H, Lk]
    identity: Any  # [257] in q's dtype: a one at 128, zeros around it (scores.load_identity)
    ones: Any  # bfloat16 [67]: ones at 32, 33 and 34, zeros around them (bf16x3.load_ones)


class PositionArgs(NamedTuple):
    """r = j - i + offset for consecutive positions (starts: one more offset per batch row), else token positions."""

    starts: Any  # int32 [B]
    q: Any  # int32 [B or 1, Lq]
    k: Any  # int32 [B or 1, Lk]
    q_row: Any  # stride over B
    k_row: Any


class Masks(NamedTuple):
    """Masks beyond causality and windows, and the seed of dropout. *_row: strides over B."""

    keys: Any  # uint8 [B or 1, Lk]: padding
    keys_row: Any
    key_bounds: Any  # int32 [B, 3], see padding.py
    doc_q: Any  # int32 [B or 1, Lq]: document ids
    doc_k: Any
    doc_q_row: Any
    doc_k_row: Any
    doc_q_keys: Any  # int32 [B or 1, Lq, 2]: first key of the query's document and last + 1; first -1: unknown
    doc_k_queries: Any  # int32 [B or 1, Lk, 2]: the same for keys, over queries
    doc_q_keys_row: Any
    doc_k_queries_row: Any
    extra: Any  # uint8 (1: visible) or float (added to scores)
    extra_b: Any  # strides, in units of extra_unit
    extra_h: Any
    extra_q: Any
    extra_k: Any  # numbers; None: 1
    seed: Any  # int64 [8], for dropout: see core/dropout.py
    extra_is_bool: Any  # constexpr
    extra_unit: Any  # constexpr: so many numbers are one load (arguments.MASK_UNITS)


class Grads(NamedTuple):
    """Gradients that backward_q and backward_k write, next to dq, dk and dv; None where not wanted."""

    rows: Any  # Band over queries
    cols: Any  # Band over keys
    bias: Any  # float32: a Table per batch row, head and query block; with token positions a Band over queries
    slopes: Any  # [B, H, Lq], summed afterwards
    scale: Any  # [B, H, Lq]
    decay_k: Any  # [B, H, Lk]
    decay_q: Any  # [B, H, Lq]: sums of the same numbers, whose rounding cancels that of decay_k where both are accumulated (fox)
