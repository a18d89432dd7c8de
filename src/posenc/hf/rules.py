"""How a call of an accelerated model runs: measured rules over plain facts, most of them for CPUs.

An engine needs O(L) memory and some hundred microseconds of bookkeeping, which do not pay off for short texts. There a call keeps
its dense mask or bias, or the original runs. The rules do not apply in compiled code, with a named engine, or where ranks share
a sequence; on a GPU only `ON_GPU` and `DENSE_ON_GPU` do. Figures: float32, one core, milliseconds; `pairs` are the scores of a head, Lq · Lk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MASKED = 512 * 512
"""Pairs up to which PyTorch's attention with a dense mask is faster than an engine: with padding, 8 heads and two rows, 3.8
against 5.5 at 256 tokens; causal, one row, 7.9 against 11.7 at 512 (a training step 28 against 32), 19 against 12 at 768. A window
of 128 at 512 tokens: 7.8 against 6.3, with heads of 16 1.4 against 1.6 (a step 5.6 against 6.2)."""
DOCUMENTS = 1 << 26
"""Numbers of a dense mask of packed texts, whose only engine on a CPU is `blocked`: 65 against 118 at 1024 tokens."""
BIASED = 160 * 160
"""Pairs up to which the originals are faster with their dense biases: two layers of 4 heads of 16, 6.0 against 6.2 at 8 × 64 tokens
(DeBERTa), 3.5 against 4.0 (MPNet)."""
PADDED = 384 * 384
"""The same for BLOOM with padding, whose positions count real tokens: 10.0 against 12.2 at 2 × 296 tokens, a training step 24 against
32. A single query too: 0.8 against 1.1 (MPT 0.85 against 1.2)."""
LEARNED = {"disentangled": 512 * 512, "xlnet": 384 * 384, "window": 512 * 512, "transformer_xl": 640 * 640}
"""The same in training steps, by kind of term: DeBERTa-v3 at 2 × 296 tokens with padding 1.03 of the original's time, at base width
1.04 at 2 × 384, 1.11 at 2 × 512, 0.89 at 2 × 640 and 0.88 at 2 × 768; XLNet 1.13,
LongT5's local layers at 512 1.5, Seamless v1 1.04 and at 512 1.11; at 1000 tokens 1.00, 0.40, 0.98 and 0.44. Without gradients Transformer-XL's terms are 1.06 to 1.08 at
2 × 296 tokens (MASKED bounds them), the others 0.8."""
BLOCK = 64
"""Tokens of LongT5's blocks from which an engine is faster: with blocks of 16 a forward pass takes 1.4 to 2.5 times as long as the
original's, which cuts the text, a step 1.8 to 3.6; with 128 0.6 to 0.8, and 0.8 to 1.0."""
TABLE = 512 * 512
"""Pairs up to which T5's table is read into a dense bias: 12 heads of 64, PyTorch's attention against the tiles, 9.2 and 9.8 at
2 × 296 tokens, 12.1 and 12.9 at 512, 50 and 45 at 1000."""
TABLE_STEP = 384 * 384
"""The same in a training step, by the plain formula: 33 and 49 at 2 × 296 tokens (the original 42), 50 and 60 at 512 (the
original 73; with padding 56, 36 and 74), 306 and 229 at 1000."""
DROPPED = 1 << 24
"""Pairs up to which dropout, which no kernel of a CPU has, runs by the plain formula: 64 against 92 at 2 × 296 tokens (the
original 66), 494 against 646 at 1000 (the original 591). Beyond them memory counts for more."""

ON_GPU = {"falcon": 512 * 512}
"""Pairs up to which the originals are faster on a GPU, by kind of term: H200, bfloat16, milliseconds of a forward pass and of a training
step (`python -m posenc.bench.accelerated --device cuda`): Falcon 8 × 512 tokens 1.9 and 4.1 against 2.4 and 4.7."""
DENSE_ON_GPU = {"xlnet": 1024 * 1024}
"""Pairs up to which PyTorch's attention with a dense bias is faster on a GPU than an engine: XLNet 16 × 512 tokens, two layers, takes 2.9 and
7.9 ms, with posenc's kernels 6.2 and 15, the original 3.4 and 8.6; 16 × 128
tokens 4.0 and 8.6, the original 4.0 and 9.2. Between 512 and 1024 tokens it does less than the original too; that was not measured."""

NUMBERS = (
    "ON_GPU", "DENSE_ON_GPU", "LEARNED", "MASKED", "DOCUMENTS", "BIASED", "PADDED", "TABLE", "TABLE_STEP", "DROPPED", "BLOCK"
)  # fmt: skip

_here = threading.local()


@contextmanager
def suspended() -> Iterator[None]:
    """In this thread posenc's engines run, whatever is faster: a comparison of short texts shall test them, not the original twice."""
    _here.suspended = True
    try:
        yield
    finally:
        _here.suspended = False


def are_suspended() -> bool:
    return getattr(_here, "suspended", False)


def keeps_original(kind: str, queries: int, keys: int, wants_gradient: bool, drops: bool, padded: bool) -> bool:
    """Whether the original is faster with its dense bias than an engine. kind: of LEARNED, or any other."""
    pairs = queries * keys
    if queries == 1:
        return kind == "alibi" and padded and pairs <= PADDED
    if drops and pairs <= DROPPED:
        return True
    most = max(BIASED, LEARNED.get(kind, 0)) if wants_gradient else BIASED
    if kind == "transformer_xl":
        most = max(most, MASKED)
    return pairs <= (max(most, PADDED) if kind == "alibi" and padded else most)


def keeps_dense_mask(batch: int, pairs: int, has_documents: bool) -> bool:
    """Whether a call without terms is faster with its mask dense, which is made once for all layers."""
    if are_suspended():
        return False
    return pairs <= MASKED or (has_documents and batch * pairs <= DOCUMENTS)


def keeps_dense_bias(pairs: int, wants_gradient: bool, drops: bool) -> bool:
    """Whether a bias by distance is faster dense, which is made once for all layers that share it."""
    if drops:
        return pairs <= DROPPED
    return pairs <= (TABLE_STEP if wants_gradient else TABLE)


def keeps_original_on_gpu(kind: str, pairs: int) -> bool:
    """Whether the original is faster on a GPU. kind: of ON_GPU, or any other."""
    return pairs <= ON_GPU.get(kind, 0)


def is_dense_on_gpu(kind: str, pairs: int) -> bool:
    """Whether PyTorch's attention with a dense bias is faster on a GPU than an engine. kind: of DENSE_ON_GPU, or any other."""
    return pairs <= DENSE_ON_GPU.get(kind, 0)
