"""The backward pass where no term has content: PyTorch's own kernel, tile by tile.

With the log-sum-exp of whole rows (less the constant that a far tile added) the kernel recomputes the true probabilities,
and with the output of whole rows the true dS: the gradients of the tiles add up.

The kernel has no gradient for the bias. bias_gradient.py sums dS by distance near the diagonal; the two far fields follow
from known sums:

    every row of dS sums to 0                      ->  band + far left + far right = 0
    far left, where there is a far right too       ->  Σ P dP = Σ_j v_j·dv_j of its tiles, less Σ_i (dO·O)_i p_i
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_sizes
from .band import BandGeometry
from .band_mask import hankel_mask
from .bias_gradient import BiasGradient
from .forward import pad_head_sizes
from .head_block import split_heads
from .terms import Terms

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def applies(q: Tensor, k: Tensor, terms: Terms, band: BandGeometry, needs_grad: list[bool]) -> bool:
    """needs_grad: which of the terms need a gradient."""
    bias, *others = needs_grad
    if terms.has_content or any(others):
        return False
    if not bias:
        return True
    if q.dtype != torch.promote_types(q.dtype, torch.float32):
        return False  # with a rounded output the rows of dS do not sum to 0
    if q.shape[1] != k.shape[1] and all(band.has_far_fields):
        return False  # dv is a sum over several heads
    # a wide band is computed twice, which pays off only for short sequences: the whole batch shares their calls
    return (band.hi - band.lo) * 3 <= band.k_length or band.k_length <= block_sizes.SHORT_BIAS_KEYS


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, left: Tensor, terms: Terms,
    band: BandGeometry, scale: float, with_bias: bool,
) -> list[Tensor] | None:  # fmt: skip
    """Gradients of q, k, v and, with_bias, of the bias; None where there is padding between real keys."""
    precision = torch.promote_types(q.dtype, torch.float32)
    dtype, size, v_size = q.dtype, q.shape[3], v.shape[3]
    dq, dk, dv = (torch.zeros(x.shape, dtype=precision, device=x.device) for x in (q, k, v))
    dbias = torch.zeros_like(terms.bias) if with_bias and terms.bias is not None else None
    grad, q, k, v, out = pad_head_sizes(grad, q, k, v, out)
    split = dbias is not None and all(band.has_far_fields)
    every = (2 * k.shape[2] + 5 * min(block_sizes.QUERY_BLOCK, q.shape[2])) * q.shape[3]
    if dbias is not None:
        every += BiasGradient.memory(band)
    for head_block in split_heads(
        q, k, terms, memory=block_sizes.FUSED_MEMORY, every=every, least=torch.get_num_threads()
    ):
        if head_block.padding is not None:
            return None
        at, kv = (head_block.batch, head_block.heads), (head_block.batch, head_block.kv_heads)
        keys, values = k[kv], v[kv]
        bias_gradient = None if dbias is None else BiasGradient(keys, values, head_block, band, scale)
        for i0, i1 in band.blocks():
            tiles = band.tiles(i0, i1, *head_block.keys, far=split)
            # in reverse order, as Hankel views need them
            g, q_, o, s = (x[at][:, :, i0:i1].flip(2) for x in (grad, q, out, lse))
            dq_ = dq.new_zeros(q_.shape)
            if bias_gradient is not None:
                delta = (g * o).sum(-1)
                bias_gradient.add_block(i0, i1, g, q_, delta, s, covers_left=split)
            for tile in tiles:
                rows, cols = slice(i1 - tile.i1, i1 - tile.i0), slice(tile.j0, tile.j1)
                mask, own = None, s[:, :, rows]
                if tile.kind:
                    constant = head_block.row_constant(0 if tile.kind < 0 else -1, q_, scale)
                    own = own if constant is None else own - constant
                else:
                    mask = hankel_mask(head_block, band, tile, q)
                a, b, c = flash(
                    *(g[:, :, rows], q_[:, :, rows], keys[:, :, cols], values[:, :, cols], o[:, :, rows]),
                    # the kernel's layout of the log-sum-exp has heads innermost
                    *(own.transpose(1, 2).contiguous().transpose(1, 2), 0.0, False),
                    attn_mask=mask,
                    scale=scale,
                )
                dq_[:, :, rows] += a
                dk[kv][:, :, cols] += b[..., :size]
                dv[kv][:, :, cols] += c[..., :v_size]
                if bias_gradient is not None and tile.kind < 0:
                    weight = (left[at][:, :, i0:i1].flip(2) - s).exp_()
                    bias_gradient.add_far_left((values[:, :, cols] * c).sum((0, 2, 3)) - (delta * weight).sum((0, 2)))
            dq[at][:, :, i0:i1] = dq_.flip(2)[..., :size]
        if bias_gradient is not None and dbias is not None:
            sum_ = bias_gradient.finish()
            if dbias.shape[0] == 1:
                dbias[0] += sum_.sum(0)
            else:
                dbias[head_block.heads] += sum_
    return [x.to(dtype) for x in (dq, dk, dv)] + ([] if dbias is None else [dbias])
