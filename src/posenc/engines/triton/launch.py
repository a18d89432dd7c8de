"""From tensors to launches: buffers, tiles, and the loop over blocks of queries.

A content term that tells apart few distances is made for all queries at once; one that tells apart every distance
(`Numbers.queries` > 0) for so many queries at a time, [B, H, queries, queries + Lk], and again in the backward pass.
Memory then grows with queries · L, not with L². Blocks run in order, so sums over them have one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import torch
import triton.language as tl
from torch import Tensor

from ...core.constants import constant
from . import INTERPRETED, tiles
from .arguments import GRADIENTS, Inputs, Numbers
from .backward import Grads, backward_k, backward_q
from .forward import forward
from .prepare import prepare
from .spread import MARGIN, collect, gather, room, shape, spread, up
from .terms import Band, Masks, Places, Slots, Table, View

if INTERPRETED:
    from .interpreted import mend

    mend()


UNIT = (0.0,) * 128 + (1.0,) + (0.0,) * 128  # see Slots
THREE = (0.0,) * 32 + (1.0,) * 3 + (0.0,) * 32


def run_forward(x: Inputs, num: Numbers, scale: float, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    x = _rowed(x)
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length, v_size = k.shape[2], v.shape[3]
    out = q.new_empty(batch, heads, q_length, v_size)
    lse = q.new_empty(batch, heads, padded(q_length), dtype=torch.float32)
    mass = q.new_empty(0)
    if x.value is not None:
        mass = q.new_zeros(mass_size(q, num), dtype=torch.int64 if x.shared else q.dtype)
    if out.numel() == 0:
        return out, lse, mass
    if k_length == 0:
        return out.zero_(), lse.fill_(float("inf")), mass
    kind, amid = x.kind(num), x.wide(num)
    tile = tiles.choose("forward", max(size, v_size), q.dtype, q.device, q_length, kind)
    programs = batch * heads * tiles.cdiv(q_length, tile.queries)
    few = q_length <= tile.queries and x.value is None
    shares = tiles.splits(programs, k_length, tile, q.device) if few else 1
    parts, part_lse = out, lse
    if shares > 1:
        parts = out.new_empty(batch, heads, shares, q_length, v_size, dtype=torch.float32)
        part_lse = lse.new_empty(batch, heads, shares, padded(q_length))
    slots = _slots(x, num)
    if x.value is not None:
        slots = slots._replace(mass=_mass(x, num, mass))
    for first, last in _blocks(q_length, num):
        if x.table is not None:
            slots = slots._replace(rows=_rows(x, num, scale, first, last))
        grid = batch * heads * tiles.cdiv(last - first, tile.queries) * shares
        forward[(grid,)](
            _view(q), _view(k), _view(v), View(parts, *out.stride()[:3]), View(part_lse, 0, 0, 0),
            slots, _places(x), _masks(x), *_sizes(x, num, first, last),
            shares, scale, dropout, *_dims(size, v_size), tile.queries, tile.keys, tile.band or tile.keys,
            RAW=_raw(x), DROPOUT=dropout > 0, SPLIT=shares > 1, PRECISION="ieee", BAND_STAGES=tile.band_stages, AMIDST=_amid(amid, tile, tile.keys),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if shares > 1:
        top = part_lse.amax(2, keepdim=True)
        weight = torch.exp2(part_lse - top.masked_fill(top == float("-inf"), 0.0))
        total = weight.sum(2)
        lse = (top.squeeze(2) + total.log2()).masked_fill(total == 0.0, float("inf"))
        weight = weight / total.masked_fill(total == 0.0, 1.0)[:, :, None]
        out = (weight[..., :q_length, None] * parts).sum(2).to(q.dtype)
    if q_length < lse.shape[2]:
        lse[..., q_length:] = float("inf")  # the backward kernels load without masks: such a query has no weight
    if x.value is not None:
        gather(slots.mass, x.value.to(q.dtype), num.mass_lo, out, True)
    return out, lse, mass


def run_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, mass: Tensor, x: Inputs, num: Numbers, scale: float,
    dropout: float, asked: dict[str, bool],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of GRADIENTS. d_lse: like lse, in base 2 too."""
    if x.q.numel() == 0 or x.k.numel() == 0:  # no pair at all
        return [None if tensor is None else torch.zeros_like(tensor) for tensor in x[: len(GRADIENTS)]]
    x, d_out = _rowed(x), _straight(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length, v_size = k.shape[2], v.shape[3]
    blocks = list(_blocks(q_length, num))
    # Sums over blocks of queries are kept in float32.
    sums = torch.float32 if len(blocks) > 1 else k.dtype
    unit = _unit(x, d_out, d_lse, scale, dropout) if x.shared else None
    given: dict[str, Tensor | None] = dict.fromkeys(GRADIENTS)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape, dtype=sums), v.new_empty(v.shape, dtype=sums)
    given.update(q=dq, k=dk, v=dv)
    kind, amid = x.kind(num), x.wide(num)
    q_tile = tiles.choose("backward_q", max(size, v_size), q.dtype, q.device, q_length, kind)
    k_tile = tiles.choose("backward_k", max(size, v_size), q.dtype, q.device, q_length, kind)
    d_bias = d_cols = None
    # The columns of the row term's gradient sum up to the gradient of a bias that goes along with it.
    along = asked["bias"] and _along(x, num)
    if along:
        given["bias"] = torch.zeros_like(x.bias)
    elif asked["bias"]:
        if x.shared:
            d_bias = room(q, heads, num.bias_lo, num.bias_hi, num.offset, 0, q_length, unit=unit)
        else:
            parts = x.bias.new_zeros(batch, heads, tiles.cdiv(q_length, q_tile.queries), x.bias.shape[1])
            d_bias = Table(parts, parts.stride(2), num.bias_lo, num.bias_hi)
    if asked["table"] or asked["states"]:
        given["table"] = q.new_zeros(x.table.shape, dtype=torch.float32)
        given["states"] = None if x.states is None else x.states.new_empty(x.states.shape)
    if asked["slopes"]:
        given["slopes"] = lse.new_zeros(q.shape[:3])
    if asked["scales"]:
        given["scales"] = lse.new_zeros(q.shape[:3])
    if asked["decay_q"] or asked["decay_k"]:
        given["decay_k"] = torch.zeros_like(x.decay_k)
        # a query's own decay moves all its scores: the output does not change, the log-sum-exp does
        given["decay_q"] = torch.zeros_like(x.decay_q) if d_lse is None else d_lse[..., :q_length] / log(2.0)
    for_rows = along or (
        x.table is not None and (asked["table"] or asked["states"] or (x.states is None and asked["q"]))
    )
    table = x.table.to(q.dtype) if for_rows else None
    for_cols = x.key_table is not None and (asked["key_table"] or asked["k"])
    if for_cols:
        several = len(blocks) > 1
        d_cols = room(
            q, heads, num.cols_lo, num.cols_hi, -num.offset, 0, k_length,
            dtype=torch.float32 if several else None, zero=several, unit=unit,
        )  # fmt: skip
    delta = torch.empty_like(lse)
    ends = lse.new_empty(4, *lse.shape)
    sums = lse.new_empty(3, *lse.shape, 16, dtype=torch.bfloat16)
    total = batch * heads
    dims = _dims(size, v_size)
    flags = {"RAW": _raw(x), "DROPOUT": dropout > 0, "PRECISION": "ieee"}
    places, masks = _places(x), _masks(x)
    grads = Grads(None, d_cols, d_bias, given["slopes"], given["scales"], given["decay_k"])
    slots = _slots(x, num)
    if x.value is not None:
        slots = slots._replace(mass=spread(d_out, x.value, heads, num.mass_lo, num.mass_hi, num.offset, rounded=amid))
    for first, last in blocks:
        d_rows = None
        if x.table is not None:
            slots = slots._replace(rows=_rows(x, num, scale, first, last))
        if for_rows:
            lo, hi = slots.rows.lo, slots.rows.hi
            d_rows = room(q, heads, lo, hi, num.offset, first, last, unit=unit)
            grads = grads._replace(rows=d_rows)
        sizes = _sizes(x, num, first, last)
        prepare[(total * tiles.cdiv(last - first, 64),)](
            _view(out), _view(d_out), d_lse, lse, delta, ends, sums, slots, heads, q_length, first, last, total, scale,
            dims[1], dims[3], 64,
        )  # fmt: skip
        backward_k[(batch * k.shape[1] * tiles.cdiv(k_length, k_tile.keys),)](
            _view(q), _view(k), _view(v), _view(d_out), _view(dk), _view(dv), sums,
            slots, places, masks, grads, *sizes, total, scale, dropout, *dims, k_tile.queries, k_tile.keys,
            k_tile.band or k_tile.queries, **flags, BAND_STAGES=k_tile.band_stages, AMIDST=_amid(amid, k_tile, k_tile.queries), MORE=first > 0, ZERO=len(blocks) == 1 and not x.shared,
            num_warps=k_tile.warps, num_stages=k_tile.stages,
        )  # fmt: skip
        backward_q[(total * tiles.cdiv(last - first, q_tile.queries),)](
            _view(q), _view(k), _view(v), _view(d_out), _view(dq), lse, delta, ends,
            slots, places, masks, grads, *sizes, total, scale, dropout, *dims, q_tile.queries, q_tile.keys,
            q_tile.band or q_tile.keys, **flags, BAND_STAGES=q_tile.band_stages, AMIDST=_amid(amid, q_tile, q_tile.keys), num_warps=q_tile.warps, num_stages=q_tile.stages,
        )  # fmt: skip
        if d_rows is not None:
            _take_rows(d_rows, x, num, scale, table, given, first, last)
    if d_bias is not None:
        # After the blocks: a bias that is there before goes along with the row term.
        if x.shared:
            ones = q.new_ones(batch, heads, q_length, 1, dtype=torch.float32)
            given["bias"] = collect(d_bias, ones, heads, heads, x.bias.shape[1])[0][..., 0]
        else:
            given["bias"] = d_bias.ptr.sum((0, 2))
    if given["slopes"] is not None:
        given["slopes"] = given["slopes"].sum((0, 2))
    if d_cols is not None:
        gather(d_cols, x.key_table.to(q.dtype), num.cols_lo, dk, True)
        given["key_table"] = collect(d_cols, k, heads, *x.key_table.shape[:2])[0]
    if x.value is not None and asked["value"]:
        given["value"] = collect(_mass(x, num, mass), d_out, heads, *x.value.shape[:2])[0]
    return list(given.values())


def _amid(wide: bool, tile: tiles.Tile, width: int) -> int:
    """How wide tiles within the bands are; 0: they are general ones. Without a pipeline they are no faster, and an earlier
    version of that loop, compiled so, read outside its memory."""
    return (tile.amid or width) if wide and tile.band_stages > 1 else 0


def _along(x: Inputs, num: Numbers) -> bool:
    """Whether the bias goes along with the row term, being over the same distances: one look-up instead of two."""
    same = (num.rows_lo, num.rows_hi) == (num.bias_lo, num.bias_hi)
    return x.bias is not None and x.table is not None and x.table.shape[0] == x.q.shape[1] and x.scales is None and same


def _take_rows(
    d_rows: Band, x: Inputs, num: Numbers, scale: float, table: Tensor | None, given: dict, first: int, last: int
) -> None:
    """What the gradient of a row term gives to its states, to its table, and to a bias along with it."""
    lo, hi = d_rows.lo, d_rows.hi
    near = slice(lo - num.rows_lo, hi - num.rows_lo + 1)
    states = (x.q if x.states is None else x.states)[:, :, first:last]
    others = _distances(x, num, first, last)[2]
    if x.states is None:
        gather(d_rows, table, num.rows_lo, given["q"][:, :, first:last], True, others)
    elif given["states"] is not None:
        gather(d_rows, table, num.rows_lo, given["states"][:, :, first:last], False, others)
    if given["table"] is None and given["bias"] is None:
        return
    share, sums = collect(d_rows, states, x.q.shape[1], x.table.shape[0], hi - lo + 1, given["bias"] is not None)
    if sums is not None:
        given["bias"][:, near] += sums / scale
    if given["table"] is not None:
        given["table"][:, near] += share


def _blocks(q_length: int, num: Numbers) -> Iterator[tuple[int, int]]:
    """(first, last) of the queries that are worked on at a time."""
    step = num.queries or max(q_length, 1)
    for first in range(0, q_length, step):
        yield first, min(first + step, q_length)


def _distances(x: Inputs, num: Numbers, first: int, last: int) -> tuple[int, int, int | None]:
    """lo, hi: the distances of the row term that some queries may see; and how many keys there are, if no query sees one
    from farther away, so that every number has a key of its own."""
    lo, hi = num.rows_lo, num.rows_hi
    if not num.queries or x.p_q is not None or x.starts is not None:
        return lo, hi, None
    k_length = x.k.shape[2]
    diff = k_length - x.q.shape[2]
    low, high = -(last - 1), k_length - 1 - first
    low = low if num.left < 0 else max(low, diff - num.left)
    high = high if num.right < 0 else min(high, diff + num.right)
    own = lo <= low + num.offset and high + num.offset <= hi
    lo, hi = min(max(lo, low + num.offset), hi), max(min(hi, high + num.offset), lo)
    return lo, max(hi, lo), k_length if own else None


def _rows(x: Inputs, num: Numbers, scale: float, first: int, last: int):
    """The row term of some queries, over the distances that these may see."""
    lo, hi, others = _distances(x, num, first, last)
    states = x.q if x.states is None else x.states
    near = slice(lo - num.rows_lo, hi - num.rows_lo + 1)
    bias = x.bias[:, near] if _along(x, num) else None
    return spread(
        states,
        x.table[:, near],
        x.q.shape[1],
        lo,
        hi,
        num.offset,
        first,
        last,
        bias,
        1.0 / scale,
        rounded=x.wide(num),
        others=others,
    )


def _slots(x: Inputs, num: Numbers) -> Slots:
    """All slots but the row term."""
    cols, wide = None, x.wide(num)
    if x.key_table is not None:
        cols = spread(
            x.k, x.key_table, x.q.shape[1], num.cols_lo, num.cols_hi, -num.offset, in_thirds=True, rounded=wide
        )
    bias = None
    if x.bias is not None and not _along(x, num):
        bias = Table(x.bias, x.bias.stride(0), num.bias_lo, num.bias_hi)
    units = constant(UNIT, x.q.device, x.q.dtype), constant(THREE, x.q.device, torch.bfloat16)
    return Slots(bias, None, cols, None, x.slopes, x.scales, x.decay_q, x.decay_k, *units)


def _places(x: Inputs) -> Places:
    return Places(x.starts, x.p_q, x.p_k, _row(x.p_q), _row(x.p_k))


def _masks(x: Inputs) -> Masks:
    extra = x.extra
    seen = extra is not None and extra.dtype == torch.uint8
    return Masks(
        x.keys, _row(x.keys), x.spans, x.doc_q, x.doc_k, _row(x.doc_q), _row(x.doc_k),
        x.doc_q_sees, x.doc_k_sees, _row(x.doc_q_sees), _row(x.doc_k_sees),
        extra, *((0, 0, 0, 0) if extra is None else extra.stride()), x.seed, tl.constexpr(seen),
    )  # fmt: skip


def _sizes(x: Inputs, num: Numbers, first: int, last: int) -> tuple:
    return (
        x.q.shape[1], x.q.shape[1] // x.k.shape[1], x.q.shape[2], x.k.shape[2], first, last, num.offset,
        None if num.left < 0 else num.left, None if num.right < 0 else num.right, num.lo, num.hi,
    )  # fmt: skip


def _raw(x: Inputs) -> bool:
    """Far scores need nothing per key, so that they are scaled last."""
    return x.slopes is None and x.scales is None and x.decay_k is None


def mass_size(q: Tensor, num: Numbers) -> int:
    _, _, one = shape(num.mass_lo, num.mass_hi, num.offset, q.shape[2])
    return 2 * MARGIN + q.shape[0] * q.shape[1] * one


def _mass(x: Inputs, num: Numbers, buffer: Tensor) -> Band:
    """Attention per distance sums up to 1 (more with dropout, but not a thousand times)."""
    unit = x.q.new_full((1,), 2.0**50, dtype=torch.float32) if x.shared else None
    return room(x.q, x.q.shape[1], num.mass_lo, num.mass_hi, num.offset, 0, x.q.shape[2], buffer=buffer, unit=unit)


def _unit(x: Inputs, d_out: Tensor, d_lse: Tensor | None, scale: float, dropout: float) -> Tensor:
    """float32 [1]: a power of two that takes every sum of dS to at most 2^61. |dS| <= 2 max |do| (max |v| + max |value|) Dv
    + 2 max |dlse|; a key's sum has a term for each query. Infinities and NaN come out as NaN."""
    if x.v.numel() == 0 or d_out.numel() == 0:
        return x.v.new_ones(1, dtype=torch.float32)
    most = x.v.abs().amax().float()
    if x.value is not None:
        most = most + x.value.abs().amax().float()
    most = most * d_out.abs().amax().float() * x.v.shape[3] / (1.0 - dropout)
    if d_lse is not None:
        most = most + 2 * d_lse.abs().amax()
    if x.scales is not None:
        most = most * x.scales.abs().amax().clamp(min=1.0)
    most = most * (2 * max(x.q.shape[2], 1) * max(scale, 1.0))
    return torch.exp2((60.0 - most.clamp(min=2.0**-60).log2()).floor()).reshape(1)


def padded(length: int) -> int:
    return up(length, 64)


def _dims(size: int, v_size: int) -> tuple[int, int, int, int]:
    return size, v_size, max(16, tiles.power(size)), max(16, tiles.power(v_size))


def _view(x: Tensor) -> View:
    return View(x, *x.stride()[:3])


def _row(x: Tensor | None) -> int:
    """The stride over batch rows; one row serves all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _rowed(x: Inputs) -> Inputs:
    return x._replace(q=_straight(x.q), k=_straight(x.k), v=_straight(x.v))


def _straight(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
