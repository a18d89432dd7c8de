"""LoweredPlan -> the kernels' arguments: at most one bias, one row term, one column term and one value term.

bias       [H, span]             float32, added after the scale
table      [H or 1, span, E]     row term: states . table for each query, before the scale; states: q, or [B, H, Lq, E]
key_table  [H or 1, span, D]     column term: k . key_table for each key and by -r, before the scale
value      [H or 1, span, Dv]    out += mass @ value, mass being the attention per distance
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.dropout import kernel_numbers
from ...core.mask import Mask
from ...core.plan import Plan
from ...core.positions import Positions
from .. import gluon
from ..lowering import Facts, LoweredPlan, Span
from . import schedule
from .launcher import Launch
from .padding import find_bounds, find_documents

FAR = 1 << 28  # a distance beyond every position: a span at FAR makes every tile far
LONGEST = 2048  # distances: with more, a row term is made for some queries at a time, as it takes memory for each token
MASK_UNITS = {True: 16, False: 4}  # numbers of a dense mask that a thread loads at a time; True: of a boolean one
MARGIN = 192  # distances, see _band_span: queries and keys of a tile of gluon/content_backward.py
QUERIES = 1024  # at least that many at a time,
ROWS = 1 << 15  # or so many that all heads and batch rows together have this many, to fill a device


class Numbers(NamedTuple):
    """The integers of a call, one list for the operator's schema; left and right are -1 for no limit."""

    offset: int = 0
    left: int = -1
    right: int = -1
    lo: int = FAR
    hi: int = FAR
    bias_lo: int = 0
    bias_hi: int = 0
    rows_lo: int = 0
    rows_hi: int = 0
    cols_lo: int = 0
    cols_hi: int = 0
    mass_lo: int = 0
    mass_hi: int = 0
    queries: int = 0  # computed at a time; 0: all
    wide: int = 0  # 1 where whole tiles lie within the bands, if texts are long enough


class Inputs(NamedTuple):
    """All tensors of a call. Those before `starts` may have gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
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
    key_mask: Tensor | None = None
    key_bounds: Tensor | None = None
    doc_q: Tensor | None = None
    doc_k: Tensor | None = None
    doc_q_keys: Tensor | None = None
    doc_k_queries: Tensor | None = None
    extra: Tensor | None = None
    seed: Tensor | None = None

    def kind(self, num: Numbers) -> str:
        """Which tiles schedule.py chooses: "plain", "bias" or "masked bias"; "dense" (a mask of all pairs) or "dense bias"; "content" (row or value
        terms) or "keys" (a column term), with "wide " before them where whole tiles lie within the bands."""
        if self.table is None and self.key_table is None and self.value is None:
            if self.extra is not None:
                return "dense" if self.bias is None else "dense bias"
            masks = (self.p_q, self.key_mask, self.doc_q, self.extra, self.seed)
            masked = "" if all(mask is None for mask in masks) else "masked "
            return "plain" if self.bias is None else masked + "bias"
        return ("wide " if num.wide else "") + ("content" if self.key_table is None else "keys")

    @property
    def has_token_positions(self) -> bool:
        """A position for each token: distances may repeat within a row, so that entries of a band are sums."""
        return self.p_q is not None


INPUTS = Inputs._fields
GRADIENTS = INPUTS[: INPUTS.index("starts")]


class Tables:
    """A row for each distance lo .. hi, by operations that autograd and torch.compile see."""

    def __init__(self, lowered: LoweredPlan):
        self.lowered = lowered

    def bias(self, lo: int, hi: int) -> Tensor | None:
        return self.lowered.bias_table(lo, hi)

    def query(self, q: Tensor, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
        """And the states."""
        return self.lowered.query_table(q, lo, hi)

    def key(self, lo: int, hi: int) -> Tensor | None:
        """By -r: from hi down to lo."""
        table = self.lowered.key_table(lo, hi)
        return None if table is None else table.flip(1)

    def value(self, lo: int, hi: int) -> Tensor | None:
        return self.lowered.value_table(lo, hi)


def kernel_arguments(
    q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, tables: Tables | None = None, launch: Launch | None = None
) -> tuple[Inputs, Numbers, float]:
    """Tensors, integers and the scale (1 where it is a tensor). launch: None where the operator prepares its masks itself."""
    facts, plan = lowered.facts, lowered.plan
    tensors, numbers = _tables(q, lowered, Tables(lowered) if tables is None else tables)
    spans = [span for span in facts.spans if span is not None]
    if plan.slopes is not None:
        spans.append((0, 0))
    if spans:
        numbers["lo"], numbers["hi"] = min(lo for lo, _ in spans), max(hi for _, hi in spans)
        _add_positions(tensors, numbers, plan.positions, facts)
    scale = lowered.scale
    if isinstance(scale, float) and scale <= 0:
        scale = q.new_full((1, 1), scale, dtype=torch.float32)
    tensors.update(row_tensors(plan, facts, scale))
    numbers["left"], numbers["right"] = (-1 if limit is None else limit for limit in (facts.left, facts.right))
    _add_masks(tensors, lowered.mask, facts, launch)
    content = [hi - lo for span in facts.spans[1:] if span is not None for lo, hi in (span,)]
    # by the plan's own spans, not by what a text reaches of them: lengths must not multiply the kernels
    if content and min(content) >= schedule.WIDE and facts.dtype != torch.float32 and "p_q" not in tensors:
        numbers["wide"] = 1
    if "table" in tensors and tensors["table"].shape[1] > LONGEST:
        numbers["queries"] = max(QUERIES, ROWS // (facts.batch * facts.heads) // 64 * 64)
    if facts.dropout:
        tensors["seed"] = kernel_numbers(lowered.dropout, facts.heads, q.device)
    return Inputs(q, k, v, **tensors), Numbers(**numbers), 1.0 if isinstance(scale, Tensor) else scale


def row_tensors(plan: Plan, facts: Facts, scale: float | Tensor) -> dict[str, Tensor]:
    """The slopes, the scale where it is a tensor, and the decay, as kernels take them."""
    made = {} if plan.slopes is None else {"slopes": plan.slopes.float().contiguous()}
    if isinstance(scale, Tensor):
        made["scales"] = scale.squeeze(-1).float().expand(facts.batch, facts.heads, facts.q_length).contiguous()
    if plan.decay is not None:
        for name, decay, length in zip(("decay_q", "decay_k"), plan.decay, (facts.q_length, facts.k_length)):
            made[name] = as_single(decay).expand(facts.batch, facts.heads, length).contiguous()
    return made


def as_single(decay: Tensor) -> Tensor:
    """float32, unless it is float64: sums over long texts, of which kernels subtract two before they round."""
    return decay if decay.dtype == torch.float64 else decay.float()


def _tables(q: Tensor, lowered: LoweredPlan, tables: Tables) -> tuple[dict[str, Tensor], dict[str, int]]:
    facts = lowered.facts
    bias_span, query_span, key_span, value_span = facts.spans
    visible = _visible_distances(lowered)
    whole = gluon.reads_bands(facts) and _can_be_whole(query_span, key_span, visible)
    if query_span is not None and bias_span == query_span:  # launch._is_bias_in_rows: the bias may join the row term
        bias_span = _band_span(bias_span, visible, whole)
    tensors: dict[str, Tensor | None] = {}
    numbers: dict[str, int] = {}
    if bias_span is not None:
        numbers["bias_lo"], numbers["bias_hi"] = bias_span
        bias = tables.bias(*bias_span)
        tensors["bias"] = bias if bias is None or bias.shape[0] == facts.heads else bias.expand(facts.heads, -1)
    if query_span is not None:
        span = _band_span(query_span, visible, whole)
        numbers["rows_lo"], numbers["rows_hi"] = span
        tensors["table"], tensors["states"] = tables.query(q, *span)
    if key_span is not None:
        lo, hi = _band_span(key_span, visible, whole)
        numbers["cols_lo"], numbers["cols_hi"] = -hi, -lo
        tensors["key_table"] = tables.key(lo, hi)
    if value_span is not None:
        span = _band_span(value_span, visible, whole)
        numbers["mass_lo"], numbers["mass_hi"] = span
        tensors["value"] = tables.value(*span)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}, numbers


def _visible_distances(lowered: LoweredPlan) -> Span | None:
    """The smallest and the largest visible distance, for consecutive positions; None where that is not known."""
    facts, runs = lowered.facts, lowered.plan.positions.runs
    if runs is None or not (isinstance(runs[0].start, int) and isinstance(runs[1].start, int)):
        return None
    offset = runs[1].start - runs[0].start
    left, right = (-1 if limit is None else limit for limit in (facts.left, facts.right))
    low, high = gluon.visible_range(0, facts.q_length, facts.q_length, facts.k_length, left, right)
    return low + offset, high + offset


def _can_be_whole(query_span: Span | None, key_span: Span | None, visible: Span | None) -> bool:
    """Whether wider bands are of use: not for a term of the queries over every visible distance (gluon/rolling.py), or over too many of them."""
    if query_span is None or visible is None:
        return True
    lo, hi = max(query_span[0], visible[0]), min(query_span[1], visible[1])
    return hi - lo + 2 * MARGIN < LONGEST and (key_span is not None or (lo, hi) != visible)


def _band_span(span: Span, visible: Span | None, whole: bool) -> Span:
    """The distances of a content term's band: only visible ones; for a wide span two tiles more on each side, as far as they are visible, so
    that tiles at its ends lie within the band. whole: so do all of which any pair does, as gluon/content_launch.holds_near_tiles needs it."""
    if visible is None:
        return span
    margin, over = (MARGIN, MARGIN) if whole else (128, 0)
    if span[1] - span[0] < schedule.WIDE:
        margin = over = 0
    lo = min(max(span[0] - margin, visible[0] - over), span[1])
    return lo, max(min(span[1] + margin, visible[1] + over), lo)


def _add_positions(tensors: dict[str, Tensor], numbers: dict[str, int], positions: Positions, facts: Facts) -> None:
    device, runs = facts.device, positions.runs
    if runs is None:
        tensors["p_q"] = _two_axes(positions.q_positions(device)).to(torch.int32).contiguous()
        tensors["p_k"] = _two_axes(positions.k_positions(device)).to(torch.int32).contiguous()
        return
    q, k = runs
    if q.start is k.start:
        return
    if isinstance(q.start, Tensor) or isinstance(k.start, Tensor):
        starts = torch.as_tensor(k.start - q.start, device=device)
        tensors["starts"] = starts.to(torch.int32).expand(facts.batch).contiguous()
    else:
        numbers["offset"] = k.start - q.start


def _two_axes(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]


def _add_masks(tensors: dict[str, Tensor], mask: Mask, facts: Facts, launch: Launch | None) -> None:
    if mask.key_mask is not None:
        tensors["key_mask"] = mask.key_mask.contiguous()
    if mask.documents is not None:
        tensors["doc_q"], tensors["doc_k"] = (ids.contiguous() for ids in mask.documents)
    if mask.extra is not None:
        tensors["extra"] = mask.extra.expand(facts.batch, facts.heads, facts.q_length, facts.k_length)
    if launch is not None:
        masks = (tensors.get(name) for name in ("key_mask", "extra", "doc_q", "doc_k"))
        tensors.update(prepare_masks(launch, facts.batch, *masks))


def prepare_masks(
    launch: Launch, batch: int, key_mask: Tensor | None, extra: Tensor | None, doc_q: Tensor | None, doc_k: Tensor | None
) -> dict[str, Tensor]:  # fmt: skip
    """Masks as the kernels take them, bytes for booleans, and the bounds of real keys and of documents. Inside an operator: Inductor (in
    torch 2.11) cannot view a boolean tensor as bytes."""
    made: dict[str, Tensor] = {}
    if key_mask is not None:
        made["key_mask"] = key_mask.view(torch.uint8) if key_mask.dtype == torch.bool else key_mask
        made["key_bounds"] = find_bounds(launch, made["key_mask"], batch)
    if extra is not None:
        made["extra"] = with_whole_rows(extra.view(torch.uint8) if extra.dtype == torch.bool else extra)
    if doc_q is not None and doc_k is not None:
        made["doc_q_keys"], made["doc_k_queries"] = find_documents(launch, doc_q, doc_k)
    return made


def mask_unit(extra: Tensor) -> int:
    return MASK_UNITS[extra.dtype == torch.uint8]


def with_whole_rows(extra: Tensor) -> Tensor:
    """A dense mask whose rows begin at multiples of its unit, so that one kernel serves all lengths; a copy where they do not."""
    unit = mask_unit(extra)
    *steps, last = extra.stride()
    if last == 1 and not any(step % unit for step in steps):
        return extra
    shared = extra[tuple([slice(0, 1) if step == 0 else slice(None) for step in steps])]
    rows = pad(shared, (0, -extra.shape[3] % unit)).contiguous()
    return rows[..., : extra.shape[3]].expand(extra.shape)
