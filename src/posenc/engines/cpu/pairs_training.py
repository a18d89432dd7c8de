"""Functions of positions that may want gradients: what they add to a block of queries is made under autograd, and is the mask of one call.

A function may read any tensors, so autograd alone finds their gradients. Long texts keep neither what it computed nor the mask: a block is
checkpointed, and made again for the gradients. That ends as soon as everything that was saved is there again, so the node that saves comes
before the one that computes:

    forward       pair ── mask ──▶ _Keep ── place ──▶ _Compute ──▶ out       _Keep saves q, k, v and the mask, _Compute nothing
    made again    pair ── mask ──▶ _Keep                                     attention itself does not run again
    backward      d_pair ◀── d_mask ── _Keep ◀────── _Compute ◀── d_out
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.torch_modes import direct_apply, first_derivatives_only
from .. import blocked
from .dense import all_gradients, without_gradients
from .pair_blocks import Blocks, make_terms


def attend(
    blocks: Blocks, scale: float, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, decay_q: Tensor | None,
    decay_k: Tensor | None, *tables: Tensor,
) -> Tensor | None:  # fmt: skip
    """The output; None: no query sees a key. All texts share each block, as a function of positions is called for all of them at once."""
    found = {block.rows.start: (texts, block) for texts, block in blocks}
    if all(block.sees_none for _, block in found.values()):
        return None
    heads, size = q.shape[1], v.shape[3]

    def one(q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], rows: slice, columns: slice) -> tuple[Tensor]:
        texts, block = found[rows.start]
        if block.sees_none:
            return (q.new_zeros(*q.shape[:3], size),)
        terms = make_terms(blocks.precision, slopes, decay_q, decay_k, tables, blocks.pair)
        given = q.to(blocks.precision), blocked.join(k), blocked.join(v), block.mask(terms, texts, slice(0, heads))
        out = _compute(_keep(*given, scale), *(x.detach() for x in given), scale).to(q.dtype)
        return (out if block.empty is None else out.masked_fill(block.empty, 0.0),)

    pairs = [block.shape for _, block in found.values()]
    is_large = q.shape[0] * heads * sum(count * keys for count, keys in pairs) > blocked.SCORES
    attention: blocked.BlockAttention = one
    if is_large:
        read = (q, k, v, slopes, decay_q, decay_k, *tables, *blocks.given())
        attention = blocked.refuse_changes(one, [x for x in read if x is not None])
    rows, columns = zip(*((block.rows, block.columns) for _, block in found.values()), strict=True)
    return blocked.run_blocks(q, k, v, list(rows), list(columns), attention, is_large)[0]


class _Keep(torch.autograd.Function):
    """A tensor of no numbers, whose gradient is the output's."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return q.new_empty(()).expand(*q.shape[:3], v.shape[3])

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, mask = ctx.saved_tensors
        return *all_gradients(q, k, v, mask, grad, ctx.scale, mask.shape if ctx.needs_input_grad[3] else None), None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, place: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return without_gradients(q, k, v, mask, scale)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None, None, None, None


_keep, _compute = direct_apply(_Keep), direct_apply(_Compute)
