"""The backward pass where no content enters the terms: PyTorch's own kernel, tile by tile.

Given the whole row's log-sum (less what a far tile's constant added) the kernel's weights are the true ones,
and given the whole row's output so is everything it derives from them: tiles just add up.

The kernel gives no gradient of the bias. Near the diagonal diagonals.py sums dS by distance; the two far fields
follow from what is known anyway:

    every row of dS sums to 0                     ->  near + far left + far right = 0
    far left, where there is a far right too      ->  Σ P dP = Σ_j v_j·dv_j of its tiles, less Σ_i (dO·O)_i weight_i
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes
from .band import Band
from .diagonals import Diagonals
from .forward import one_size
from .mask import hankel
from .slab import slabs
from .terms import Terms

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def applies(q: Tensor, k: Tensor, terms: Terms, band: Band, wanted: list[bool]) -> bool:
    """wanted: which of the terms want a gradient."""
    bias, *others = wanted
    if terms.content or any(others):
        return False
    if not bias:
        return True
    if q.dtype != torch.promote_types(q.dtype, torch.float32):
        return False  # with a rounded output the rows of dS do not sum to 0
    if q.shape[1] != k.shape[1] and all(band.far):
        return False  # dv is of several heads
    # a wide band is computed twice, which only short sequences get back: all of a batch shares their calls
    return (band.hi - band.lo) * 3 <= band.k_length or band.k_length <= sizes.SHORT


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    left: Tensor,
    terms: Terms,
    band: Band,
    scale: float,
    with_bias: bool,
) -> list[Tensor] | None:
    """Gradients of q, k, v and, where wanted, of the bias; None where padding lies between real keys."""
    precision = torch.promote_types(q.dtype, torch.float32)
    dtype, size, v_size = q.dtype, q.shape[3], v.shape[3]
    dq, dk, dv = (torch.zeros(x.shape, dtype=precision, device=x.device) for x in (q, k, v))
    dbias = torch.zeros_like(terms.bias) if with_bias and terms.bias is not None else None
    grad, q, k, v, out = one_size(grad, q, k, v, out)
    split = dbias is not None and all(band.far)
    every = (2 * k.shape[2] + 5 * min(sizes.BLOCK, q.shape[2])) * q.shape[3]
    if dbias is not None:
        every += Diagonals.memory(band)
    for slab in slabs(q, k, terms, memory=sizes.FUSED, every=every, least=torch.get_num_threads()):
        if slab.holes is not None:
            return None
        at, kv = (slab.rows, slab.heads), (slab.rows, slab.kv_heads)
        keys, values = k[kv], v[kv]
        near = None if dbias is None else Diagonals(keys, values, slab, band, scale)
        for i0, i1 in band.blocks():
            tiles = band.tiles(i0, i1, *slab.keys, far=split)
            # in reverse order, as Hankel views want them
            g, q_, o, s = (x[at][:, :, i0:i1].flip(2) for x in (grad, q, out, sums))
            dq_ = dq.new_zeros(q_.shape)
            if near is not None:
                delta = (g * o).sum(-1)
                near.block(i0, i1, g, q_, delta, s, whole=split)
            for tile in tiles:
                rows, cols = slice(i1 - tile.i1, i1 - tile.i0), slice(tile.j0, tile.j1)
                mask, own = None, s[:, :, rows]
                if tile.kind:
                    constant = slab.row_constant(0 if tile.kind < 0 else -1, q_, scale)
                    own = own if constant is None else own - constant
                else:
                    mask = hankel(slab, band, tile, q)
                a, b, c = flash(
                    *(g[:, :, rows], q_[:, :, rows], keys[:, :, cols], values[:, :, cols], o[:, :, rows]),
                    # the kernel reads log-sums in its own layout, heads innermost
                    *(own.transpose(1, 2).contiguous().transpose(1, 2), 0.0, False),
                    attn_mask=mask,
                    scale=scale,
                )
                dq_[:, :, rows] += a
                dk[kv][:, :, cols] += b[..., :size]
                dv[kv][:, :, cols] += c[..., :v_size]
                if near is not None and tile.kind < 0:
                    weight = (left[at][:, :, i0:i1].flip(2) - s).exp_()
                    near.far_left((values[:, :, cols] * c).sum((0, 2, 3)) - (delta * weight).sum((0, 2)))
            dq[at][:, :, i0:i1] = dq_.flip(2)[..., :size]
        if near is not None and dbias is not None:
            sum_ = near.bias()
            if dbias.shape[0] == 1:
                dbias[0] += sum_.sum(0)
            else:
                dbias[slab.heads] += sum_
    return [x.to(dtype) for x in (dq, dk, dv)] + ([] if dbias is None else [dbias])
