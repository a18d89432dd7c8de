"""Which way a call of an accelerated model runs on a CPU: measured rules over plain facts.

An engine needs O(L) memory and some hundred microseconds of bookkeeping, which short texts do not earn back. There a call keeps
its dense mask or bias, or the original runs. Elsewhere than on a CPU, in compiled code, with a named engine and where ranks share
a sequence, none of these rules acts. Figures: float32, one core, milliseconds; `pairs` are the scores of a head, Lq · Lk.
"""

from __future__ import annotations

MASKED = 384 * 384
"""Pairs up to which PyTorch's attention with a dense mask is faster than an engine: with padding, 8 heads and two rows, 3.8
against 5.5 at 256 tokens, 15.7 against 13.3 at 512, 71 against 35 at 1024."""
DOCUMENTS = 1 << 26
"""Numbers of a dense mask of packed texts, whose only engine on a CPU is `blocked`: 65 against 118 at 1024 tokens."""
BIASED = 160 * 160
"""Pairs up to which the originals are faster with their dense biases: BLOOM with padding, two tiny layers, 2.2 against 4.5 at 64
tokens, 7.7 against 7.0 at 128 (a training step: 14 against 21)."""
TABLE = 512 * 512
"""Pairs up to which T5's table is read into a dense bias: 12 heads of 64, PyTorch's attention against the tiles, 9.2 and 9.8 at
2 × 296 tokens, 12.1 and 12.9 at 512, 50 and 45 at 1000."""
TABLE_STEP = 384 * 384
"""The same in a training step, by the plain formula: 33 and 49 at 2 × 296 tokens (the original 42), 50 and 60 at 512 (the
original 73; with padding 56, 36 and 74), 306 and 229 at 1000."""
DROPPED = 1 << 24
"""Pairs up to which dropout, which no kernel of a CPU has, runs by the plain formula: 64 against 92 at 2 × 296 tokens (the
original 66), 494 against 646 at 1000 (the original 591). Beyond them memory counts for more."""

NUMBERS = ("MASKED", "DOCUMENTS", "BIASED", "TABLE", "TABLE_STEP", "DROPPED")


def keeps_dense_mask(batch: int, pairs: int, has_documents: bool) -> bool:
    """Whether a call without terms is faster with its mask dense, which is made once for all layers."""
    return pairs <= MASKED or (has_documents and batch * pairs <= DOCUMENTS)


def keeps_dense_bias(pairs: int, wants_gradient: bool, drops: bool) -> bool:
    """Whether a bias by distance is faster dense, which is made once for all layers that share it."""
    if drops:
        return pairs <= DROPPED
    return pairs <= (TABLE_STEP if wants_gradient else TABLE)
