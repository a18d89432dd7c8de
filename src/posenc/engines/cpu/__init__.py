"""PyTorch's own fused attention plus O(L) views: position at the price of attention without it, on a CPU first.

    no terms, no mask but causality  ->  PyTorch's attention as it is, on any device
    contiguous, some queries         ->  few.py   (a mask of their own, one call)
    contiguous positions             ->  terms.py (one table of each sort)  ->  op.py: forward.py, backward.py
    few places on further axes       ->  ../axes.py (more channels), then as above
    anything else                    ->  rows.py  (the reference formula in blocks of queries)

band.py says where the terms vary, slab.py which heads share a call, skew.py and mask.py make the masks.
Where terms hold content, pairs.py has the scores of a block in memory, for backward.py and for short.py (the forward
pass of short sequences), with the matrix products of products.py. Where they do not, fused.py is the backward pass on
PyTorch's own kernel, and diagonals.py adds the bias's gradient. sizes.py holds every block size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from ...core.mask import Mask
from ...core.plan import Plan, holds_nan
from .. import further_axes as axes
from . import few, op, rows
from .terms import terms_of, unstructured

WIDEST = 256  # heads with channels for further axes


def refuses(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> str | None:
    bare = _bare(q, k, plan, mask)
    reason = _transforms(bare)
    if reason is not None or q.is_cpu or bare:
        return reason
    return (
        f"on {q.device.type} it runs plans without terms in the scores or values, with causality as the only mask; "
        "the rest is built on PyTorch's fused CPU attention"
    )


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float, with_lse: bool = False):
    if with_lse:  # PyTorch's attention keeps it to itself
        return rows.run(q, k, v, plan, mask, dropout, with_lse)
    eager = not torch.compiler.is_compiling()
    # PyTorch's CPU kernel takes a query of NaN for one that sees nothing and gives zeros: a fault would go unseen
    if eager and q.is_cpu and holds_nan(q):
        return rows.run(q, k, v, plan, mask, dropout)
    scale = plan.scale_of(q.shape[3])
    if _bare(q, k, plan, mask):
        assert isinstance(scale, float)
        # branches: where torch.compile leaves sizes open, a comparison alone is no bool
        causal = grouped = False
        if mask.causal and q.shape[2] > 1:
            causal = True
        if q.shape[1] != k.shape[1]:
            grouped = True
        return scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if any(map(axes.further, plan.lookups)) and _few_places(q, k, v, plan, mask, dropout):
        q, k, v, plan, finish = axes.widen(q, k, v, plan)
        return finish(run(q, k, v, plan, mask, dropout))
    if q.numel() == 0 or k.numel() == 0 or unstructured(q, plan, mask, dropout) is not None:
        return rows.run(q, k, v, plan, mask, dropout)
    assert isinstance(scale, float)  # `unstructured` said so
    if eager and few.applies(q, k, v, plan, mask):
        out = few.run(q, k, v, plan, mask, scale)
        hidden = mask.key_mask is not None or (q.shape[2] > 1 and mask.limits != (None, None))
        if not (hidden and holds_nan(out)):  # else the operator finds out whose it is
            return out
    terms, band = terms_of(q, plan, mask)
    return op.attend(q, k, v, terms, band, scale)


def _few_places(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> bool:
    """Whether further axes are worth channels: tokens share few places on them, and the rest of the plan has a structure."""
    first = replace(plan, lookups=tuple(lookup for lookup in plan.lookups if not axes.further(lookup)))
    if unstructured(q, first, mask, dropout) is not None or axes.refuses(q, v, plan, WIDEST) is not None:
        return False
    return sum(axes.sizes(q.dtype, plan)) * 4 <= k.shape[2]


def _transforms(bare: bool) -> str | None:
    """Why a call inside torch.func or forward-mode differentiation is not for this engine, or None.

    PyTorch's attention has a first gradient in reverse mode; the operators have that outside of torch.func alone.
    """
    eager = not torch.compiler.is_compiling()
    forward_mode = eager and forward_ad._current_level >= 0
    if not forward_mode and not torch._C._are_functorch_transforms_active():
        return None
    if eager and bare and not forward_mode:
        if [x.key().name for x in torch._C._functorch.get_interpreter_stack() or ()] == ["Grad"]:
            return None
    return (
        "fused attention has no rules for torch.func (vmap, grad, jvp, jacrev, ...) and forward-mode differentiation; "
        "the reference engine has them"
    )


def _bare(q: Tensor, k: Tensor, plan: Plan, mask: Mask) -> bool:
    """Whether nothing is left but what PyTorch's attention has arguments for (rotations are done by now)."""
    if plan.lookups or plan.slopes is not None or plan.decay is not None or plan.pair is not None:
        return False
    if isinstance(plan.scale, Tensor) or not mask.plain or mask.window is not None or q.numel() == 0 or k.numel() == 0:
        return False
    # PyTorch aligns causality at the top left, posenc at the bottom right: the same only for a square, or one query
    return not mask.causal or q.shape[2] in (1, k.shape[2])
