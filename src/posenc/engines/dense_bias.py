"""The biases of a plan as one dense tensor for PyTorch's attention: windows of images, whose tables lie over a grid.

    table [H, n]  ── rows [Lq, Lk] ──▶  bias [1, H, Lq, Lk]       row (i, j) of the index: the same for every window and layer

Which row a pair reads depends on the positions alone; it is worked out once for each tensor of positions and kept. So is which
pairs read each row: the table's gradient is a gather and a sum, in one order, where PyTorch's own would sort or add atomically.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.index import Grid, Index
from ..core.positions import Positions, Run, Side
from ..core.torch_modes import apply_function
from .lowering import LoweredPlan, add

LARGEST = 1 << 24  # numbers in a dense bias, of all heads
ALIGNED = 16  # rows of the bias begin at multiples of so many elements, as PyTorch's kernels need


def supports(lowered: LoweredPlan) -> str | None:
    """Why a plan's terms are no dense bias, or None."""
    facts, plan = lowered.facts, lowered.plan
    if facts.has_content or any(x.dot_query is not None or x.dot_key is not None for x in plan.lookups):
        return "the plan's terms depend on queries, keys or values"
    if any(x.add_value is not None or x.query_shift is not None for x in plan.lookups):
        return "the plan's terms depend on queries, keys or values"
    if facts.pair or facts.slopes or facts.scale == "tensor":
        return "only tables and decays become a dense bias"
    if plan.decay is not None and any(x.shape[0] > 1 or x.dtype != facts.dtype for x in plan.decay):
        return "decays differ between the rows of the batch, or would be rounded"
    if not facts.further_axes and not plan.positions.is_constant:
        return "positions may be others in the next call"
    if facts.heads * facts.q_length * facts.k_length > LARGEST:
        return f"a dense bias of {facts.heads} x {facts.q_length} x {facts.k_length} is larger than {LARGEST} numbers"
    exact = (facts.dtype, *((torch.bfloat16, torch.float16) if facts.dtype == torch.float32 else ()))
    if any(lookup.bias is not None and lookup.bias.dtype not in exact for lookup in plan.lookups):
        return f"a table would be rounded to {facts.dtype}"
    sides = [side for axis in _axes(plan.lookups) for side in _sides(plan.positions, axis)]
    if any((side.start.dim() if isinstance(side, Run) else side.dim() - 1) for side in sides if not _is_plain(side)):
        return "positions differ between the rows of the batch"
    if torch.compiler.is_compiling():
        return None
    if facts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        indices = {lookup.index for lookup in plan.lookups}
        if any(_kept.find(plan.positions, index, facts.device) is None for index in indices):
            return "the row of each pair must be computed before a CUDA graph is captured"
    return None


def make_bias(q: Tensor, lowered: LoweredPlan) -> Tensor:
    """[1, H or 1, Lq, Lk] in q's dtype."""
    positions, facts = lowered.plan.positions, lowered.facts
    total: Tensor | None = None
    for lookup in lowered.plan.lookups:
        assert lookup.bias is not None
        table = lookup.bias.to(q.dtype)
        if torch.compiler.is_compiling():
            total = add(total, table[:, lookup.index.of(positions, q.device)])
        else:
            pairs = _kept.pairs(positions, lookup.index, q.device)
            total = add(total, apply_function(_Gather, table, pairs, facts.q_length, facts.k_length))
    assert total is not None
    if lowered.plan.decay is not None:
        c_q, c_k = lowered.plan.decay
        return total[None] + (c_q[..., :, None] - c_k[..., None, :])
    return total[None]


class Pairs(NamedTuple):
    """rows: int64 [Lq · K], the table's row of each pair, K keys being padded to a multiple of 16;
    readers: int64 [n, most], the pairs that read each row, padded with the number of a pair whose gradient is zero."""

    rows: Tensor
    readers: Tensor


class _Gather(torch.autograd.Function):
    """table [H, n] -> [H, Lq, Lk], rows aligned in memory."""

    @staticmethod
    def forward(table: Tensor, pairs: Pairs, q_length: int, k_length: int) -> Tensor:
        return table.index_select(1, pairs.rows).view(table.shape[0], q_length, -1)[..., :k_length]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.pairs, _, _ = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        heads = grad.shape[0]
        precision = torch.promote_types(grad.dtype, torch.float32)
        flat = grad.new_zeros(heads, grad.shape[1] * grad.shape[2] + 1, dtype=precision)
        flat[:, :-1] = grad.reshape(heads, -1)
        n, most = ctx.pairs.readers.shape
        summed = flat.index_select(1, ctx.pairs.readers.view(-1)).view(heads, n, most).sum(2)
        return summed.to(grad.dtype), None, None, None


# ---- which pairs read which row ----------------------------------------------------------------------------------------
class _Kept:
    """Pairs by positions and index. An entry holds the tensors of positions, so that their memory is not reused."""

    def __init__(self, most: int):
        self.most, self.lock = most, Lock()
        self.entries: OrderedDict[tuple, tuple[Pairs, tuple]] = OrderedDict()

    def find(self, positions: Positions, index: Index | Grid, device: torch.device) -> Pairs | None:
        with self.lock:
            found = self.entries.get(self._key(positions, index, device))
        return None if found is None else found[0]

    def pairs(self, positions: Positions, index: Index | Grid, device: torch.device) -> Pairs:
        key = self._key(positions, index, device)
        with self.lock:
            found = self.entries.get(key)
            if found is not None:
                self.entries.move_to_end(key)
                return found[0]
        with torch.inference_mode(False), torch.no_grad():
            made = _make_pairs(positions, index, device)
        with self.lock:
            self.entries[key] = (made, tuple(side for axis in index.axes for side in _sides(positions, axis)))
            while len(self.entries) > self.most:
                self.entries.popitem(last=False)
        return made

    def _key(self, positions: Positions, index: Index | Grid, device: torch.device) -> tuple:
        sides = [_identity(side) for axis in index.axes for side in _sides(positions, axis)]
        return (device, index, *sides)


_kept = _Kept(most=64)


def _make_pairs(positions: Positions, index: Index | Grid, device: torch.device) -> Pairs:
    rows = index.of(positions, device)
    k_length = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -k_length % ALIGNED))
    flat = rows.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=index.n)
    most = max(1, int(counts.max()))
    place = torch.arange(flat.numel(), device=device) - (counts.cumsum(0) - counts)[flat[order]]
    readers = torch.full((index.n, most), flat.numel(), device=device)
    readers[flat[order], place] = order
    return Pairs(padded.flatten(), readers)


def _identity(side: Side):
    """Equal for sides with the same positions; tensors by their memory and version."""
    if isinstance(side, Run):
        return (side.length, _identity(side.start) if isinstance(side.start, Tensor) else side.start)
    return (side.data_ptr(), side._version, side.shape, side.stride(), side.dtype, side.device)


def _is_plain(side: Side) -> bool:
    return isinstance(side, Run) and not isinstance(side.start, Tensor)


def _sides(positions: Positions, axis: int) -> tuple[Side, Side]:
    return positions.q_axes[axis], positions.k_axes[axis]


def _axes(lookups) -> set[int]:
    return {axis for lookup in lookups for axis in lookup.index.axes}
