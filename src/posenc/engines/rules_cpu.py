"""Which form of the `cpu` engine runs a call: measured rules over plain facts.

    posenc bench --suite uses --only layer/      with both numbers below as they are, and with both 0, measures both forms

`dense` writes all terms into one mask [B or 1, H, Lq, Lk] and calls PyTorch's attention once; `tiles` (forward.py, backward.py)
need O(L) memory and some hundred microseconds of bookkeeping, which do not pay off for short texts.
"""

from __future__ import annotations

from typing import Literal

from .lowering import Facts

CONSTANT_PAIRS = 1 << 20
"""Heads times pairs up to which a mask that is the same for all texts is made whole: 4 MiB. It serves every text, and, kept where
it needs no gradient, every layer and step; from 512 tokens on the tiles are faster."""
OPEN_PAIRS = 1 << 21
"""The same where every key is visible, so that tiles skip nothing: 8 heads of 512 tokens. A step with T5's table takes 0.72 to 0.99 of tiles, forward
0.94 to 1.02; with causality 1.27 to 1.49 and 1.09 to 1.32."""
VARIED_PAIRS = 1 << 21
"""The same, times the batch, where each text has its own mask (content terms, padding)."""
MASKED_PAIRS = 1 << 24
"""The same for documents and dense masks, which tiles do not take: 64 MiB. Without terms the heads share the mask, and PyTorch's
attention makes one of this size of a boolean mask. With terms and causality `blocked`, which computes half of the scores, is faster
from twice VARIED_PAIRS on (t5 over 1,024 tokens: 68 ms against 89)."""

DROPPED_PAIRS = 1 << 24
"""Heads times pairs of a text up to which dropout keeps its probabilities for backward: 64 MiB. Beyond them `blocked` makes them again: memory
stays small, and a step takes up to 1.6 times as long (a layer over 2,048 tokens with T5's table 1.25 s against 0.84) ..."""
DROPPED_BATCH = 1 << 26
"""... and those of a whole batch: 256 MiB, a third of what the dense formula keeps."""


def cpu_form(facts: Facts) -> Literal["dense", "tiles"]:
    """dense: short texts whose terms PyTorch's attention takes as one mask. tiles: everything else.

    The rule does not depend on whether a gradient is wanted, so that an output has the same bits either way: the two forms
    round differently."""
    _, query, key, value = facts.spans
    if value is not None or facts.decay or facts.return_lse or facts.further_axes:
        return "tiles"
    if key is not None and facts.heads != facts.kv_heads:
        return "tiles"
    if facts.dropout:  # which tiles do not take
        return "dense" if keeps_dropped(facts.batch, facts.heads, facts.q_length, facts.k_length) else "tiles"
    is_short = fits(
        facts.batch, facts.heads, facts.q_length, facts.k_length, terms=facts.reads_distance,
        content=query is not None or key is not None, padding=facts.padding, masked=facts.documents or facts.has_dense_mask,
        limited=facts.is_limited,
    )  # fmt: skip
    return "dense" if is_short else "tiles"


def keeps_dropped(batch: int, heads: int, q_length: int, k_length: int) -> bool:
    pairs = heads * q_length * k_length
    return pairs <= DROPPED_PAIRS and batch * pairs <= DROPPED_BATCH


def fits(
    batch: int, heads: int, q_length: int, k_length: int, *, terms: bool, content: bool, padding: bool, masked: bool,
    limited: bool,
) -> bool:  # fmt: skip
    """Whether one mask of all terms and masks is small enough. terms: anything by distance; content: terms that differ from text to text;
    masked: documents or a dense mask; limited: by causality or a window."""
    if masked:
        most = 2 * VARIED_PAIRS if terms and limited else MASKED_PAIRS
        return batch * (heads if terms else 1) * q_length * k_length <= most
    if not (terms or limited):
        return True  # a row for each text
    pairs = heads * q_length * k_length
    if content or padding:
        return batch * pairs <= VARIED_PAIRS
    return pairs <= (CONSTANT_PAIRS if limited else OPEN_PAIRS)
