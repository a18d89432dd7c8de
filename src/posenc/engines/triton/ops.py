"""The PyTorch operators around the kernels: shapes, allocation, launches, autograd.

Registered with fake kernels, so torch.compile sees one opaque node forward and one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .backward import Grads, backward_k, backward_q, prepare
from .forward import forward
from .terms import Band, Masks, Places, Slots, Table, View


class Numbers(NamedTuple):
    """The integers of a call, one list for the operator's schema; left and right are -1 for no limit."""

    offset: int
    left: int
    right: int
    lo: int
    hi: int
    bias_lo: int
    bias_hi: int
    rows_lo: int
    rows_hi: int
    cols_lo: int
    cols_hi: int
    mass_lo: int
    mass_hi: int
    width: int


INPUTS = (
    "q", "k", "v", "bias", "rows", "cols", "slopes", "scales", "decay_q", "decay_k",
    "starts", "p_q", "p_k", "keys", "spans", "doc_q", "doc_k", "extra", "seed",
)  # fmt: skip
"""The operators' tensors, in order; the first ten may have gradients."""


@torch.library.custom_op("posenc::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    cols: Tensor | None,
    slopes: Tensor | None,
    scales: Tensor | None,
    decay_q: Tensor | None,
    decay_k: Tensor | None,
    starts: Tensor | None,
    p_q: Tensor | None,
    p_k: Tensor | None,
    keys: Tensor | None,
    spans: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    extra: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[int],
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv], lse [B, H, Lq rounded up to 64] (base 2), mass [B, H, Lq, width] or empty."""
    q, k, v = (_rowed(x) for x in (q, k, v))
    num = Numbers(*numbers)
    batch, heads, q_length, size = q.shape
    out = q.new_empty(batch, heads, q_length, v.shape[3])
    lse = q.new_empty(batch, heads, _padded(q_length), dtype=torch.float32)
    mass = _mass(q, num, p_q is not None)
    if out.numel() == 0:
        return out, lse, mass
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("inf")), mass
    content = rows is not None or cols is not None or num.width > 0
    tile = tiles.choose("forward", max(size, v.shape[3]), q.dtype, q.device, q_length, content)
    blocks = triton.cdiv(q_length, tile.queries)
    programs = batch * heads * blocks
    shares = tiles.splits(programs, k.shape[2], tile, q.device) if blocks == 1 and num.width == 0 else 1
    tensors = (bias, rows, cols, slopes, scales, decay_q, decay_k)
    common = _common(q, k, v, tensors, starts, p_q, p_k, keys, spans, doc_q, doc_k, extra, seed, num, scale, dropout)
    slots = common.slots._replace(mass=_band(mass, num.mass_lo, num.mass_hi) if num.width else None)
    parts, part_lse = out, lse
    if shares > 1:
        parts = out.new_empty(batch, heads, shares, q_length, v.shape[3], dtype=torch.float32)
        part_lse = lse.new_empty(batch, heads, shares, _padded(q_length))
    with _on(q):
        forward[(programs * shares,)](
            _view(q), _view(k), _view(v), View(parts, *out.stride()[:3]), View(part_lse, 0, 0, 0),
            slots, common.places, common.masks,
            *common.sizes, shares, scale, dropout, *_dims(size, v.shape[3]), tile.queries, tile.keys,
            RAW=common.raw, DROPOUT=dropout > 0, SPLIT=shares > 1, PRECISION="ieee", BAND_STAGES=tile.band_stages,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if shares > 1:
        top = part_lse.amax(2, keepdim=True)
        weight = torch.exp2(part_lse - top.masked_fill(top == float("-inf"), 0.0))
        total = weight.sum(2)
        lse = (top.squeeze(2) + total.log2()).masked_fill(total == 0.0, float("inf"))
        weight = weight / total.masked_fill(total == 0.0, 1.0)[:, :, None]
        out = (weight[..., :q_length, None] * parts).sum(2).to(q.dtype)
    return out, lse, mass


@attend.register_fake
def _(q, k, v, *rest):
    num = Numbers(*rest[-3])
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(*q.shape[:2], _padded(q.shape[2]), dtype=torch.float32), _mass(q, num, rest[8] is not None)


@torch.library.custom_op("posenc::attend_backward", mutates_args=())
def attend_backward(
    d_out: Tensor,
    d_mass: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    cols: Tensor | None,
    slopes: Tensor | None,
    scales: Tensor | None,
    decay_q: Tensor | None,
    decay_k: Tensor | None,
    starts: Tensor | None,
    p_q: Tensor | None,
    p_k: Tensor | None,
    keys: Tensor | None,
    spans: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    extra: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[int],
    scale: float,
    dropout: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first ten inputs; empty where not wanted (`wanted`: bias, rows, cols, slopes, scales, decay)."""
    q, k, v, d_out = (_rowed(x) for x in (q, k, v, d_out))
    num = Numbers(*numbers)
    batch, heads, q_length, size = q.shape
    k_length, v_size = k.shape[2], v.shape[3]
    for_bias, for_rows, for_cols, for_slopes, for_scales, for_decay = wanted
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    none = q.new_empty(0)
    shared = p_q is not None  # token positions: distances may repeat, so bands are added to, in float32
    grow = torch.float32 if shared else q.dtype
    d_rows = q.new_zeros(rows.shape, dtype=grow) if rows is not None and for_rows else None
    d_cols = q.new_zeros(cols.shape, dtype=grow) if cols is not None and for_cols else None
    content = rows is not None or cols is not None or num.width > 0
    q_tile = tiles.choose("backward_q", max(size, v_size), q.dtype, q.device, q_length, content)
    k_tile = tiles.choose("backward_k", max(size, v_size), q.dtype, q.device, q_length, content)
    blocks = triton.cdiv(q_length, q_tile.queries)
    d_bias = None
    if bias is not None and for_bias:
        d_bias = bias.new_zeros(batch, heads, q_length if shared else blocks, bias.shape[1])
    d_slopes = lse.new_zeros(q.shape[:3]) if slopes is not None and for_slopes else None
    d_scales = lse.new_zeros(q.shape[:3]) if scales is not None and for_scales else None
    d_decay = lse.new_zeros(batch, heads, k_length) if decay_k is not None and for_decay else None
    if q.numel() == 0 or k.numel() == 0:
        dq.zero_(), dk.zero_(), dv.zero_()
    else:
        tensors = (bias, rows, cols, slopes, scales, decay_q, decay_k)
        common = _common(
            q, k, v, tensors, starts, p_q, p_k, keys, spans, doc_q, doc_k, extra, seed, num, scale, dropout
        )
        slots, held = common.slots, None
        if num.width:
            assert d_mass is not None
            d_mass = _rowed(d_mass)
            slots = slots._replace(mass=_band(d_mass, num.mass_lo, num.mass_hi))
            held = _band(mass, num.mass_lo, num.mass_hi)
        delta = torch.empty_like(lse)
        ends = lse.new_empty(4, *lse.shape)
        total = batch * heads
        grads = Grads(
            None if d_rows is None else _band(d_rows, num.rows_lo, num.rows_hi),
            None if d_cols is None else _band(d_cols, num.cols_lo, num.cols_hi),
            None if d_bias is None else _band(d_bias, num.bias_lo, num.bias_hi),
            d_slopes, d_scales, d_decay,
        )  # fmt: skip
        dims = _dims(size, v_size)
        flags = {"RAW": common.raw, "DROPOUT": dropout > 0, "PRECISION": "ieee"}
        with _on(q):
            prepare[(batch * heads * triton.cdiv(q_length, 64),)](
                _view(out), _view(d_out), lse, delta, ends, held, slots, heads, q_length, total, scale,
                dims[1], dims[3], 64, 64,
            )  # fmt: skip
            backward_k[(batch * k.shape[1] * triton.cdiv(k_length, k_tile.keys),)](
                _view(q), _view(k), _view(v), _view(d_out), _view(dk), _view(dv), lse, delta, ends,
                slots, common.places, common.masks, grads,
                *common.sizes, total, scale, dropout, *dims, k_tile.queries, k_tile.keys, **flags,
                BAND_STAGES=k_tile.band_stages, num_warps=k_tile.warps, num_stages=k_tile.stages,
            )  # fmt: skip
            backward_q[(batch * heads * blocks,)](
                _view(q), _view(k), _view(v), _view(d_out), _view(dq), lse, delta, ends,
                slots, common.places, common.masks, grads,
                *common.sizes, total, scale, dropout, *dims, q_tile.queries, q_tile.keys, **flags,
                BAND_STAGES=q_tile.band_stages, num_warps=q_tile.warps, num_stages=q_tile.stages,
            )  # fmt: skip
    return (
        dq, dk, dv,
        none.clone() if d_bias is None else d_bias.sum((0, 2)),
        none.clone() if d_rows is None else d_rows.to(q.dtype),
        none.clone() if d_cols is None else d_cols.to(q.dtype),
        none.clone() if d_slopes is None else d_slopes.sum((0, 2)),
        none.clone() if d_scales is None else d_scales,
        none.clone() if d_decay is None else torch.zeros_like(decay_q),
        none.clone() if d_decay is None else d_decay,
    )  # fmt: skip


@attend_backward.register_fake
def _(d_out, d_mass, out, lse, mass, q, k, v, bias, rows, cols, slopes, scales, decay_q, decay_k, *rest):
    for_bias, for_rows, for_cols, for_slopes, for_scales, for_decay = rest[-1]
    pairs = (
        (bias, for_bias), (rows, for_rows), (cols, for_cols), (slopes, for_slopes), (scales, for_scales),
        (decay_q, for_decay), (decay_k, for_decay),
    )  # fmt: skip
    rest = [x.new_empty(x.shape) if x is not None and wanted else q.new_empty(0) for x, wanted in pairs]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *rest


def _setup(ctx, inputs, output):
    *tensors, ctx.numbers, ctx.scale, ctx.dropout = inputs
    out, lse, mass = output
    ctx.save_for_backward(out, lse, mass, *tensors)


def _backward(ctx, d_out, d_lse, d_mass):
    out, lse, mass, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [bool(needs[place]) for place in range(3, 8)] + [bool(needs[8] or needs[9])]
    grads = attend_backward(d_out, d_mass, out, lse, mass, *tensors, ctx.numbers, ctx.scale, ctx.dropout, wanted)
    given = [grad if tensor is not None and need else None for grad, tensor, need in zip(grads, tensors, needs)]
    return *given, *(None,) * (len(needs) - len(given))


attend.register_autograd(_backward, setup_context=_setup)


class _Common(NamedTuple):
    slots: Slots
    places: Places
    masks: Masks
    sizes: tuple
    raw: bool


def _common(q, k, v, tensors, starts, p_q, p_k, keys, spans, doc_q, doc_k, extra, seed, num, scale, dropout) -> _Common:
    """The arguments that all kernels share."""
    bias, rows, cols, slopes, scales, decay_q, decay_k = tensors
    slots = Slots(
        None if bias is None else Table(bias, bias.stride(0), num.bias_lo, num.bias_hi),
        None if rows is None else _band(rows, num.rows_lo, num.rows_hi),
        None if cols is None else _band(cols, num.cols_lo, num.cols_hi),
        None, slopes, scales, decay_q, decay_k,
    )  # fmt: skip
    places = Places(starts, p_q, p_k, _row(p_q), _row(p_k))
    seen = extra is not None and extra.dtype == torch.uint8
    masks = Masks(
        keys, _row(keys), spans, doc_q, doc_k, _row(doc_q), _row(doc_k),
        extra, *((0, 0, 0, 0) if extra is None else extra.stride()), seed, tl.constexpr(seen),
    )  # fmt: skip
    sizes = (
        q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], num.offset,
        None if num.left < 0 else num.left, None if num.right < 0 else num.right, num.lo, num.hi,
    )  # fmt: skip
    raw = cols is None and slopes is None and scales is None and decay_k is None
    return _Common(slots, places, masks, sizes, raw)


def _mass(q: Tensor, num: Numbers, shared: bool) -> Tensor:
    if num.width == 0:
        return q.new_empty(0)
    return q.new_zeros(*q.shape[:3], num.width, dtype=torch.float32 if shared else q.dtype)


def _padded(length: int) -> int:
    return (length + 63) // 64 * 64


def _dims(size: int, v_size: int) -> tuple[int, int, int, int]:
    return size, v_size, max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(v_size))


def _view(x: Tensor) -> View:
    return View(x, *x.stride()[:3])


def _band(x: Tensor, lo: int, hi: int) -> Band:
    return Band(x, *x.stride()[:3], lo, hi)


def _row(x: Tensor | None) -> int:
    """The stride over batch rows; one row serves all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _rowed(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()
