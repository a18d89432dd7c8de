"""The backward pass where no table wants a gradient and no content enters: PyTorch's own kernel, tile by tile.

Given the whole row's log-sum (less what a far tile's constant added) the kernel's weights are the true ones,
and given the whole row's output so is everything it derives from them: tiles just add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .band import Band
from .forward import one_size
from .mask import hankel
from .slab import slabs
from .terms import Terms

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def applies(terms: Terms, wanted: list[bool]) -> bool:
    return not terms.content and not any(wanted)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, terms: Terms, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of q, k, v in float32 or better; None where padding lies between real keys."""
    precision = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=precision, device=x.device) for x in (q, k, v))
    v_size, size = v.shape[3], q.shape[3]
    grad, q, k, v, out = one_size(grad, q, k, v, out)
    for slab in slabs(q, k, terms, band, memory=1, rows=1, width=1, single=False):
        if slab.holes is not None:
            return None
        at = (slab.rows, slab.heads)
        kv = (slab.rows, slab.kv_heads)
        for i0, i1 in band.blocks():
            for tile in band.tiles(i0, i1, *slab.keys):
                rows, keys = slice(tile.i0, tile.i1), slice(tile.j0, tile.j1)
                sides = [x[at][:, :, rows] for x in (grad, q, out, sums)]
                mask, turned = None, False
                if tile.kind:
                    constant = slab.row_constant(0 if tile.kind < 0 else -1, q[:0], scale)
                    if constant is not None:
                        sides[3] = sides[3] - constant
                else:
                    mask = hankel(slab, band, tile, q)
                    turned = mask is not None and tile.i1 - tile.i0 > 1
                    if turned:
                        sides = [x.flip(2) for x in sides]
                g, q_, o, s = sides
                # the kernel reads log-sums in its own layout, heads innermost
                s = s.transpose(1, 2).contiguous().transpose(1, 2)
                a, b, c = flash(
                    g, q_, k[kv][:, :, keys], v[kv][:, :, keys], o, s, 0.0, False, attn_mask=mask, scale=scale
                )
                dq[at][:, :, rows] += (a.flip(2) if turned else a)[..., :size]
                dk[kv][:, :, keys] += b[..., :size]
                dv[kv][:, :, keys] += c[..., :v_size]
    return dq, dk, dv
