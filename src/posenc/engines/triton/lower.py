"""Plan and mask -> what the kernels see: at most one table, one row term, one column term and one value term.

    bias       [H, span]             float32; several lookups are summed over the union of their spans
    table      [H or 1, span, E]     rows = states . table inside the scale, for each query; states: q, or [B, H, Lq, E]
    key_table  [H or 1, span, D]     cols = k . table inside the scale, for each key and by -r
    value      [H or 1, span, Dv]    out += mass @ value, mass being the attention per distance

All of this is ordinary differentiable PyTorch, so autograd carries the kernels' gradients on to the plan's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.plan import Lookup, Plan
from ...core.positions import Positions
from . import tiles
from .expand import expand
from .spans import spans_of

FAR = 1 << 28  # a distance past every position: with it, every tile is far
LONGEST = 2048  # distances that a content term may tell apart for all tokens at once: they take memory for each token
MORE = 128  # distances, see _kept
QUERIES = 1024  # with more distances, that many queries at a time,
ROWS = 1 << 15  # or so many that there are this many for all heads and batch rows: to fill a device


@dataclass
class Lowered:
    """The operator's arguments, by name; `numbers` in the order of ops.Numbers."""

    bias: Tensor | None = None
    states: Tensor | None = None
    table: Tensor | None = None
    key_table: Tensor | None = None
    value: Tensor | None = None
    slopes: Tensor | None = None
    scales: Tensor | None = None
    decay_q: Tensor | None = None
    decay_k: Tensor | None = None
    starts: Tensor | None = None
    p_q: Tensor | None = None
    p_k: Tensor | None = None
    keys: Tensor | None = None
    spans: Tensor | None = None
    doc_q: Tensor | None = None
    doc_k: Tensor | None = None
    doc_q_sees: Tensor | None = None
    doc_k_sees: Tensor | None = None
    extra: Tensor | None = None
    seed: Tensor | None = None
    offset: int = 0
    left: int = -1
    right: int = -1
    lo: int = FAR
    hi: int = FAR
    bias_span: tuple[int, int] = (0, 0)
    rows_span: tuple[int, int] = (0, 0)
    cols_span: tuple[int, int] = (0, 0)
    mass_span: tuple[int, int] = (0, 0)
    queries: int = 0
    scale: float = 1.0


def lower(q: Tensor, k: Tensor, plan: Plan, mask: Mask, dropout: float) -> Lowered:
    """q [B, H, Lq, D] and k [B, Hkv, Lk, D], shifted and rotated already."""
    batch, heads, q_length, size = q.shape
    k_length = k.shape[2]
    low = Lowered()
    spans = _tables(low, q, k, plan, mask)
    if plan.slopes is not None:
        low.slopes = plan.slopes.float().contiguous()
        spans.append((0, 0))
    if spans:
        low.lo, low.hi = min(lo for lo, _ in spans), max(hi for _, hi in spans)
        _places(low, plan.positions, batch, q.device)
    scale = plan.scale_of(size)
    if isinstance(scale, float) and scale <= 0:
        scale = q.new_full((1, 1), scale, dtype=torch.float32)
    if isinstance(scale, Tensor):
        low.scales = scale.squeeze(-1).float().expand(batch, heads, q_length).contiguous()
    else:
        low.scale = scale
    if plan.decay is not None:
        low.decay_q = plan.decay[0].float().expand(batch, heads, q_length).contiguous()
        low.decay_k = plan.decay[1].float().expand(batch, heads, k_length).contiguous()
    _masks(low, mask, batch, heads, q_length, k_length)
    if low.table is not None and low.table.shape[1] > LONGEST:
        low.queries = max(QUERIES, ROWS // (batch * heads) // 64 * 64)
    if dropout > 0.0:
        low.seed = torch.randint(0, 2**62, (1,), device=q.device)
    return low


def _tables(low: Lowered, q: Tensor, k: Tensor, plan: Plan, mask: Mask) -> list[tuple[int, int]]:
    """Returns the spans of the distances that the tables tell apart; content terms may be kept for more."""
    heads = q.shape[1]
    seen = _seen(q, k, plan.positions, mask)
    queries, low.rows_span = _with("dot_query", plan)
    keys, (lo, hi) = _with("dot_key", plan)
    values, low.mass_span = _with("add_value", plan)
    picked, low.bias_span = _with("bias", plan)
    found = ((picked, low.bias_span), (queries, low.rows_span), (keys, (lo, hi)), (values, low.mass_span))
    spans = [span for given, span in found if given]
    if low.bias_span == low.rows_span:  # the same distances: kept together, see launch._along
        low.bias_span = _kept(low.bias_span, seen) if queries else low.bias_span
    low.rows_span, (lo, hi), low.mass_span = (_kept(span, seen) for span in (low.rows_span, (lo, hi), low.mass_span))
    for lookup in picked:
        assert lookup.bias is not None
        table = expand(lookup.bias.float(), lookup.index, *low.bias_span, 1).expand(heads, -1)
        low.bias = table if low.bias is None else low.bias + table
    parts = [(lookup.states, expand(lookup.dot_query, lookup.index, *low.rows_span, 1)) for lookup in queries]
    own = [table for states, table in parts if states is None]
    if own and len(own) < len(parts):  # q and other states: one wider product
        parts = [(q, sum(own[1:], own[0]))] + [part for part in parts if part[0] is not None]
    elif own:
        parts = [(None, sum(own[1:], own[0]))]
    if parts:
        low.states, low.table = parts[0]
    if len(parts) > 1:
        low.states = torch.cat([states.expand(q.shape[0], -1, -1, -1).to(q.dtype) for states, _ in parts], -1)
        most = max(table.shape[0] for _, table in parts)
        low.table = torch.cat([table.expand(most, -1, -1) for _, table in parts], -1)
    elif low.states is not None:
        low.states = low.states.expand(q.shape[0], -1, -1, -1).to(q.dtype)
    low.cols_span = -hi, -lo
    for lookup in keys:
        table = expand(lookup.dot_key, lookup.index, lo, hi, 1).flip(1)
        low.key_table = table if low.key_table is None else low.key_table + table
    for lookup in values:
        table = expand(lookup.add_value, lookup.index, *low.mass_span, 1)
        low.value = table if low.value is None else low.value + table
    return spans


def _seen(q: Tensor, k: Tensor, positions: Positions, mask: Mask) -> tuple[int, int] | None:
    """The smallest and the largest distance that some query sees, for runs of positions; None where that is not known."""
    runs = positions.runs
    if runs is None or not (isinstance(runs[0].start, int) and isinstance(runs[1].start, int)):
        return None
    q_length, k_length = q.shape[2], k.shape[2]
    offset, (left, right) = runs[1].start - runs[0].start, mask.limits
    first, last = 1 - q_length, k_length - 1
    first = first if left is None else max(first, k_length - q_length - left)
    last = last if right is None else min(last, k_length - q_length + right)
    return first + offset, last + offset


def _kept(span: tuple[int, int], seen: tuple[int, int] | None) -> tuple[int, int]:
    """The distances for which a content term is kept: not those that nobody sees; and of a wide span two tiles more on each
    side, as far as that is seen, so that a tile at its end lies within the band."""
    if seen is None:
        return span
    more = MORE if span[1] - span[0] >= tiles.WIDE else 0
    lo = min(max(span[0] - more, seen[0]), span[1])
    return lo, max(min(span[1] + more, seen[1]), lo)


def _with(slot: str, plan: Plan) -> tuple[list[Lookup], tuple[int, int]]:
    """The lookups that have this table, and the union of their spans."""
    picked = [lookup for lookup in plan.lookups if getattr(lookup, slot) is not None]
    if not picked:
        return picked, (0, 0)
    indices = [lookup.index for lookup in picked]
    return picked, (min(index.lo for index in indices), max(index.hi for index in indices))


def _places(low: Lowered, positions: Positions, batch: int, device: torch.device) -> None:
    runs = positions.runs
    if runs is None:
        low.p_q = _two(positions.q_positions(device)).to(torch.int32).contiguous()
        low.p_k = _two(positions.k_positions(device)).to(torch.int32).contiguous()
        return
    q, k = runs
    if q.start is k.start:
        return
    if isinstance(q.start, Tensor) or isinstance(k.start, Tensor):
        low.starts = torch.as_tensor(k.start - q.start, device=device).to(torch.int32).expand(batch).contiguous()
    else:
        low.offset = k.start - q.start


def _two(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]


def _masks(low: Lowered, mask: Mask, batch: int, heads: int, q_length: int, k_length: int) -> None:
    left, right = mask.limits
    low.left, low.right = -1 if left is None else left, -1 if right is None else right
    if mask.key_mask is not None:
        low.keys = _bytes(mask.key_mask.contiguous())
        low.spans = spans_of(low.keys, batch)
    if mask.documents is not None:
        low.doc_q, low.doc_k = ours, theirs = tuple(ids.contiguous() for ids in mask.documents)
        low.doc_q_sees, low.doc_k_sees = _sees(ours, theirs), _sees(theirs, ours)
    if mask.extra is not None:
        extra = _bytes(mask.extra) if mask.extra.dtype == torch.bool else mask.extra
        low.extra = extra.expand(batch, heads, q_length, k_length)


def _bytes(truths: Tensor) -> Tensor:
    """The same memory, but for Inductor, which (in torch 2.11) takes no such view of truths."""
    return truths.to(torch.uint8) if torch.compiler.is_compiling() else truths.view(torch.uint8)


def _sees(own: Tensor, other: Tensor) -> Tensor:
    """int32 [B or 1, L, 2]: where each token's document begins and ends on the other side, if ids only grow there, as in packed
    texts; else from -1, "not known", to the end."""
    rows, length = max(own.shape[0], other.shape[0]), other.shape[1]
    grows = (other[:, 1:] >= other[:, :-1]).all(-1, keepdim=True)
    own, other = own.expand(rows, -1).contiguous(), other.expand(rows, -1).contiguous()
    first, last = torch.searchsorted(other, own), torch.searchsorted(other, own, right=True)
    return torch.stack((first.where(grows, -1), last.where(grows, length)), -1).to(torch.int32)
