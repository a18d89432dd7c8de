"""The biases of a plan as one dense tensor for PyTorch's attention: windows of images, whose tables lie over a grid.

    table [H, n]  ── rows [Lq, Lk] ──▶  bias [1, H, Lq, Lk]       row (i, j) of the index: the same for every window and layer

Which row a pair reads depends on the positions alone; it is worked out once for each tensor of positions and kept. So is which
pairs read each row: the table's gradient is a gather and a sum, in one order, where PyTorch's own would sort or add atomically.
A row that many pairs read is summed in parts of 256, so that it makes the others no longer:

    pairs of row 0   0 1 2 3 | 4 5 6 .      parts 0, 1 ──▶ row 0         (parts of four)
    pairs of row 1   7 8 . .                part 2     ──▶ row 1
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core.index import Grid, Index
from ..core.memo import Memo
from ..core.plan import Plan
from ..core.positions import Positions, Run, Side
from ..core.tables import add
from ..core.torch_modes import apply_function, transform_reason
from .lowering import LoweredPlan

LARGEST = 1 << 26  # numbers in a dense bias, of all heads: 128 MiB in half precision
ON_CPU = 1 << 24
WIDTH = 256  # pairs of a partial sum of the table's gradient
LEAST = 1 << 15  # pairs from which tables in float32 are trained as a dense bias (`is_worth`)
ALIGNED = 16  # rows of the bias begin at multiples of so many elements, as PyTorch's kernels need


def supports(lowered: LoweredPlan) -> str | None:
    """Why a plan's terms are no dense bias in the dtype of the queries, or None."""
    facts, plan = lowered.facts, lowered.plan
    if plan.decay is not None and any(x.dtype != facts.dtype for x in plan.decay):
        return "decays would be rounded"
    exact = (facts.dtype, *((torch.bfloat16, torch.float16) if facts.dtype == torch.float32 else ()))
    if any(lookup.bias is not None and lookup.bias.dtype not in exact for lookup in plan.lookups):
        return f"a table would be rounded to {facts.dtype}"
    return _reason(lowered)


def is_worth(lowered: LoweredPlan) -> bool:
    """Whether tables over a grid in float32 are a dense bias for the fused kernels, whose queries have half its digits: where they are
    trained, the kernels would else add the gradient of each pair to its row one by one. On one H200, a step with 128 windows of 16 x 16
    takes 2.4 ms against 5.8, 4 x 2048 causal tokens 3.6 against 9.1; but 2048 windows of 7 x 7 5.9 against 3.3, and without gradients one by one is
    faster at every size (0.5 ms against 1.1 at 4 x 2048)."""
    facts, biases = lowered.facts, [x.bias for x in lowered.plan.lookups]
    if not torch.is_grad_enabled() or not any(bias is not None and bias.requires_grad for bias in biases):
        return False
    return (
        facts.positions == "tokens" and facts.bias_span is not None and facts.dtype.itemsize == 2
        and facts.q_length * facts.k_length >= LEAST and not (facts.padding or facts.documents or facts.has_dense_mask or facts.left is not None or facts.dropout)
        and facts.right in (None, 0) and (facts.right is None or facts.q_length <= facts.k_length)
        and 0 not in (facts.batch, facts.k_length) and not torch.compiler.is_compiling() and _reason(lowered) is None
        and transform_reason() is None
    )  # fmt: skip


def _reason(lowered: LoweredPlan) -> str | None:
    """Why a plan's terms are no dense bias at all, or None."""
    facts, plan = lowered.facts, lowered.plan
    if facts.has_content or any(name != "bias" for lookup in plan.lookups for name, _ in lookup.tensors()):
        return "the plan's terms depend on queries, keys or values"
    if facts.pair or facts.slopes or facts.scale == "tensor":
        return "only tables and decays become a dense bias"
    if plan.decay is not None and any(x.shape[0] > 1 for x in plan.decay):
        return "decays differ between the rows of the batch"
    if not facts.further_axes and not plan.positions.is_constant:
        return "positions may be others in the next call"
    largest = LARGEST if facts.device.type == "cuda" else ON_CPU
    if facts.heads * facts.q_length * facts.k_length > largest:
        return f"a dense bias of {facts.heads} x {facts.q_length} x {facts.k_length} is larger than {largest} numbers"
    sides = [side for lookup in plan.lookups for axis in lookup.index.axes for side in _sides(plan.positions, axis)]
    if any(isinstance(side.start, Tensor) if isinstance(side, Run) else side.dim() > 1 for side in sides):
        return "positions differ between the rows of the batch"
    if torch.compiler.is_compiling():
        return None
    if facts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        indices = {lookup.index for lookup in plan.lookups}
        if any(_find_pairs(plan.positions, index, facts.device) is None for index in indices):
            return "the row of each pair must be computed before a CUDA graph is captured"
    return None


def make_bias(q: Tensor, lowered: LoweredPlan, dtype: torch.dtype | None = None) -> Tensor:
    """[1, H or 1, Lq, Lk] in a dtype, q's by default; -inf where causality hides a key."""
    positions, facts = lowered.plan.positions, lowered.facts
    total: Tensor | None = None
    for lookup in lowered.plan.lookups:
        assert lookup.bias is not None
        table = lookup.bias.to(q.dtype if dtype is None else dtype)
        if torch.compiler.is_compiling():
            total = add(total, table[:, lookup.index.of(positions, q.device)])
        else:
            pairs = _pairs_of(positions, lookup.index, q.device)
            total = add(total, apply_function(_Gather, table, pairs, facts.q_length, facts.k_length))
    assert total is not None
    bias = total[None]
    if lowered.plan.decay is not None:
        c_q, c_k = lowered.plan.decay
        bias = bias + (c_q[..., :, None] - c_k[..., None, :])
    if lowered.mask.causal:
        allowed = lowered.mask.allowed(facts.q_length, facts.k_length, q.device)
        bias = bias if allowed is None else torch.where(allowed, bias, float("-inf"))
    return bias


def find_bias(q: Tensor, k: Tensor, plan: Plan) -> Tensor | None:
    """`make_bias` for a call like an earlier one that nothing else is added to or masked: one table over the same positions, in the
    dtype of the queries; else None."""
    if len(plan.lookups) != 1 or plan.positions.offset is not None:
        return None
    if not (
        plan.shift is None and plan.rotate is None and plan.cosine is None and plan.append is None and plan.slopes is None
        and plan.decay is None and plan.pair is None and plan.sinks is None and not isinstance(plan.scale, Tensor)
    ):  # fmt: skip
        return None
    lookup, positions = plan.lookups[0], plan.positions
    table, (_, heads, q_length, _), k_length = lookup.bias, q.shape, k.shape[2]
    if table is None or table.dtype is not q.dtype or table.shape != (heads, lookup.index.n):
        return None
    if not (lookup.dot_query is None and lookup.dot_key is None and lookup.add_value is None):
        return None
    if positions.q_length != q_length or positions.k_length != k_length or table.get_device() != q.get_device():
        return None
    if heads * q_length * k_length > LARGEST or (len(positions.q_axes) == 1 and not positions.is_constant):
        return None
    pairs = _find_pairs(positions, lookup.index, q.device)  # of positions that `supports` has looked at
    if pairs is None:
        return None
    return apply_function(_Gather, table, pairs, q_length, k_length)[None]


class Pairs(NamedTuple):
    """rows: int32 [Lq · K], the table's row of each pair, K keys being padded to a multiple of 16;
    readers: int64 [parts, up to WIDTH], the pairs of each partial sum, filled up with a pair that counts nothing;
    parts: int64 [n, most], the partial sums of each row, filled up with one of nothing; None: each row is one."""

    rows: Tensor
    readers: Tensor
    parts: Tensor | None


class _Gather(torch.autograd.Function):
    """table [H, n] -> [H, Lq, Lk], rows aligned in memory."""

    @staticmethod
    def forward(table: Tensor, pairs: Pairs, q_length: int, k_length: int) -> Tensor:
        return _gather(table, pairs.rows).view(table.shape[0], q_length, -1)[..., :k_length]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.pairs, _, _ = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        precision = torch.promote_types(grad.dtype, torch.float32)
        summed = _sum_read(grad.flatten(1), ctx.pairs.readers, precision)
        if ctx.pairs.parts is not None:
            summed = _sum_read(summed, ctx.pairs.parts, precision)
        return summed.to(grad.dtype), None, None, None


def _gather(table: Tensor, rows: Tensor) -> Tensor:
    """table [H, n] at rows [m]: [H, m]."""
    if not _has_kernel(table):
        return table.index_select(1, rows)
    from .triton.tables import gather

    return gather(table, rows)


def _has_kernel(table: Tensor) -> bool:
    """Whether a kernel gathers from this table: not where Triton is missing or a mode of PyTorch must meet operators."""
    if not table.is_cuda or type(table) not in (Tensor, nn.Parameter):
        return False
    from . import triton

    if not triton.INSTALLED or triton.VERSION < triton.OLDEST or table.dtype not in triton.DTYPES:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return torch.version.hip is not None or triton.capability(table.device) >= (8, 0)


def _sum_read(x: Tensor, readers: Tensor, precision: torch.dtype) -> Tensor:
    """x [H, m], a zero after it, at readers [n, most], summed: [H, n]."""
    n, most = readers.shape
    return pad(x, (0, 1)).index_select(1, readers.view(-1)).view(-1, n, most).sum(2, dtype=precision)


# ---- which pairs read which row ----------------------------------------------------------------------------------------
_kept = Memo(most=64, numbers=64)
"""Pairs by positions and index, with the tensors of positions, so that their memory is not reused."""


def _find_pairs(positions: Positions, index: Index | Grid, device: torch.device) -> Pairs | None:
    found = _kept.get(_key(positions, index, device))
    return None if found is None else found[0]


def _pairs_of(positions: Positions, index: Index | Grid, device: torch.device) -> Pairs:
    def make() -> tuple:
        sides = tuple(side for axis in index.axes for side in _sides(positions, axis))
        return _make_pairs(positions, index, device), sides

    return _kept.find_or_make(_key(positions, index, device), make, lambda _: 1)[0]


def _key(positions: Positions, index: Index | Grid, device: torch.device) -> tuple:
    return (device, index, *[identity(side) for axis in index.axes for side in _sides(positions, axis)])


def _make_pairs(positions: Positions, index: Index | Grid, device: torch.device) -> Pairs:
    rows = index.of(positions, device)
    padded = pad(rows, (0, -rows.shape[1] % ALIGNED))
    flat = rows.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=index.n)
    rank = _ranks(counts, flat[order])
    if int(counts.max()) <= WIDTH:
        return Pairs(padded.flatten().int(), _table(flat[order], rank, order, index.n), None)
    each = (counts + WIDTH - 1) // WIDTH  # partial sums of a row
    first = each.cumsum(0) - each
    part = first[flat[order]] + rank // WIDTH
    number = int(each.sum())
    owner = torch.repeat_interleave(torch.arange(index.n, device=device), each)
    parts = _table(owner, _ranks(each, owner), torch.arange(number, device=device), index.n)
    return Pairs(padded.flatten().int(), _table(part, rank % WIDTH, order, number), parts)


def _ranks(counts: Tensor, rows: Tensor) -> Tensor:
    """The number of each entry within its row; rows are in order."""
    return torch.arange(rows.numel(), device=rows.device) - (counts.cumsum(0) - counts)[rows]


def _table(rows: Tensor, ranks: Tensor, entries: Tensor, n: int) -> Tensor:
    """[n, most]: the entries of each row at their ranks; elsewhere their number, which counts nothing."""
    most = int(ranks.max()) + 1 if ranks.numel() else 1
    made = torch.full((n, most), entries.numel(), device=rows.device)
    made[rows, ranks] = entries
    return made


def identity(side: Side):
    """Equal for sides with the same positions; tensors by their memory and version."""
    if isinstance(side, Run):
        return (side.length, identity(side.start) if isinstance(side.start, Tensor) else side.start)
    return (side.data_ptr(), side._version, side.shape, side.stride(), side.dtype, side.device)


def _sides(positions: Positions, axis: int) -> tuple[Side, Side]:
    return positions.q_axes[axis], positions.k_axes[axis]
