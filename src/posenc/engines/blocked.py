"""Any plan, a block of queries at a time: the reference formula in O(block · visible keys) memory, forward and backward.

    keys ──▶                      a block of queries reads only the keys that causality and the window leave visible;
    queries  . ╲▒▒▒▒╲ . . . .     padding, documents and dense masks are applied within them
             . . . ╲▒▒▒▒╲ . .

Each block is checkpointed: nothing of size [block, keys] outlives it, and autograd recomputes it for the gradients,
including those of tensors that `pair` closes over. It runs the plans that the fast engines refuse: arbitrary position
tensors, documents, dense masks, dropout, a scale for each query, grids, `pair`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.dropout import as_dropout
from ..core.mask import Mask, Window
from ..core.plan import Lookup, Plan
from ..core.torch_modes import transform_reason
from . import reference
from .lowering import LoweredPlan

BlockAttention = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], slice, slice], tuple[Tensor, ...]]
"""Of queries, pieces of keys and of values, rows and columns: the output, and the log-sum-exp where it is wanted."""
SCORES = 1 << 22
"""Scores of one block: 16 MiB of float32 ..."""
FEWEST = 64
"""... but at least this many query rows."""
PARTS = 8
"""Blocks under a limit on one side (causal): n blocks compute 1 + 1/n times the visible scores. Under limits on both sides, a
block has half as many rows as a query has visible keys, and computes 1.5 times the visible scores ..."""
LEAST = 1 << 17
"""... but at least this many scores: a smaller block costs more overhead than it saves."""
FUNCTION_PAIRS = 1 << 17
"""Pairs of a block on a CPU where a function of positions makes what is added: its own tensors have many numbers for each pair (FIRE's 32), and large
ones cost more time to allocate than to fill (a training step of FIRE at 2,048 tokens 0.7 to 0.9 s instead of 1.5)."""


def supports(lowered: LoweredPlan) -> str | None:
    return transform_reason()


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor]:
    """q and k are rotated already."""
    plan, mask, dropout = lowered.plan, lowered.mask, lowered.dropout
    heads, q_length, k_length = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    block = block_rows(heads, q_length, k_length, mask.limits)
    # a compiled graph has a part for each block
    if plan.pair is not None and q.is_cpu and not torch.compiler.is_compiling():
        block = min(block, function_rows(k_length))
    rows = [slice(start, min(start + block, q_length)) for start in range(0, max(1, q_length), block)]
    columns = [visible_keys(one, k_length - q_length, k_length, mask.limits) for one in rows]
    if len(rows) == 1:
        (visible,) = columns
        return reference.attention(q, k[:, :, visible], v[:, :, visible], plan, mask, dropout, columns=visible)
    if dropout and not torch.compiler.is_compiling():
        dropout = as_dropout(dropout, q.device)  # one draw for all blocks
    precision = torch.promote_types(q.dtype, torch.float32)
    plan = _cast_tensors(plan, precision)
    if mask.extra is not None and mask.extra.is_floating_point():
        mask = replace(mask, extra=mask.extra.to(precision))
    is_large = heads * sum((i.stop - i.start) * (j.stop - j.start) for i, j in zip(rows, columns, strict=True)) > SCORES
    attention: BlockAttention = partial(_attention, plan=plan, mask=mask, dropout=dropout)
    if is_large and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        terms = [tensor for _, tensor in plan.tensors()]
        attention = refuse_changes(attention, [q, k, v, *terms, *mask.tensors(), *plan.positions.tensors()])
    out, lse = run_blocks(q, k, v, rows, columns, attention, is_large)
    return out, lse


def run_blocks(
    q: Tensor, k: Tensor, v: Tensor, rows: list[slice], columns: list[slice], attention: BlockAttention, is_large: bool
) -> tuple[Tensor, ...]:
    """attention(queries, pieces of keys, pieces of values, rows, columns) of each block; is_large: recompute it in backward."""
    parts = []
    if not torch.is_grad_enabled():
        parts = [attention(q[:, :, i], [k[:, :, j]], [v[:, :, j]], i, j) for i, j in zip(rows, columns, strict=True)]
    else:
        # in float32 here, so that the blocks' gradients are summed in float32
        precision = torch.promote_types(q.dtype, torch.float32)
        k, v = k.to(precision), v.to(precision)
        # the gradient of a slice is as large as the whole, that of a split is one copy: blocks share the pieces between cuts
        cuts = sorted({0, k.shape[2], *(one.start for one in columns), *(one.stop for one in columns)})
        sizes = [stop - start for start, stop in pairwise(cuts)]
        pieces = k.split(sizes, dim=2), v.split(sizes, dim=2)
        for i, j in zip(rows, columns, strict=True):
            own = slice(cuts.index(j.start), cuts.index(j.stop))
            arguments = (q[:, :, i], pieces[0][own], pieces[1][own], i, j)
            parts.append(checkpoint(attention, *arguments, use_reentrant=False) if is_large else attention(*arguments))
    if len(parts) == 1:
        return parts[0]
    return tuple([torch.cat(some, 2) for some in zip(*parts, strict=True)])


def refuse_changes(attention: BlockAttention, tensors: list[Tensor]) -> BlockAttention:
    """The same, which raises where one of the tensors was changed in place since now. Autograd refuses that for what it saves; what is
    recomputed would have other gradients, in silence."""
    given = [(x, x._version) for x in tensors if not x.is_inference()]

    def call(*arguments):
        if any(x._version != version for x, version in given):
            raise RuntimeError(
                "q, k, v, a term, a mask or positions of attention have been modified by an inplace operation before the backward pass, "
                "which reads them again; give attention a copy: x.clone()"
            )
        return attention(*arguments)

    return call


def block_rows(heads: int, q_length: int, k_length: int, limits: Window) -> int:
    """Queries of a block."""
    if k_length == 0:
        return max(1, q_length)
    left, right = limits
    row = max(1, heads * k_length)
    block = max(FEWEST, SCORES // row)
    if left is not None and right is not None:
        visible = left + right + 1
        # a block of visible // 2 rows has fewer than 2 visible keys
        block = max(block, SCORES // max(1, heads * 2 * visible))
        block = min(block, max(FEWEST, visible // 2, LEAST // row))
    elif left is not None or right is not None:
        block = min(block, max(FEWEST, q_length // PARTS, LEAST // row))
    return -(-q_length // max(1, -(-q_length // block))) or 1  # blocks of about the same size


def function_rows(k_length: int) -> int:
    """Queries of a block on a CPU, at most, where a function of positions makes what is added."""
    return max(16, FUNCTION_PAIRS // max(1, k_length))


def visible_keys(rows: slice, offset: int, k_length: int, limits: Window) -> slice:
    """The keys that causality and the window leave visible to these queries; at least one, because `pair` may need positions."""
    left, right = limits
    start = 0 if left is None else min(max(rows.start + offset - left, 0), max(k_length - 1, 0))
    stop = k_length if right is None else min(rows.stop + offset + right, k_length)
    return slice(start, max(stop, min(start + 1, k_length)))


def _attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], rows: slice, columns: slice, *, plan: Plan, mask: Mask, dropout: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return reference.attention(q, join(k), join(v), plan, mask, dropout, rows, columns)


def join(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate pieces of keys or values; within a block, where checkpointing does not save the result."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 2)


def _cast_tensors(plan: Plan, precision: torch.dtype) -> Plan:
    lookups = tuple(Lookup(x.index, **{name: table.to(precision) for name, table in x.tensors()}) for x in plan.lookups)
    scale = plan.scale.to(precision) if isinstance(plan.scale, Tensor) else plan.scale
    slopes = None if plan.slopes is None else plan.slopes.to(precision)
    return replace(plan, lookups=lookups, slopes=slopes, decay=plan.decay_in(precision), scale=scale)
