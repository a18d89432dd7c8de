"""Which form of the `cpu` engine runs a call: measured rules over plain facts.

    posenc bench --suite uses --only layer/      with and without DENSE_NUMBERS = CONTENT_NUMBERS = 0: both forms

`dense` writes all terms into one mask [B or 1, H, Lq, Lk] and calls PyTorch's attention once; `tiles` (forward.py, backward.py)
need O(L) memory and some hundred microseconds of bookkeeping, which short texts do not earn back.
"""

from __future__ import annotations

from typing import Literal

from .lowering import Facts

DENSE_NUMBERS = 1 << 21
"""Numbers of a mask up to which it may be made whole: 8 MiB of float32."""
CONTENT_NUMBERS = 1 << 20
"""The same where a mask differs from text to text (content terms), and where it needs a gradient."""


def cpu_form(facts: Facts) -> Literal["dense", "tiles"]:
    """dense: short texts whose terms PyTorch's attention takes as one mask. tiles: everything else."""
    _, query, key, value = facts.spans
    if value is not None or facts.decay or facts.return_lse or facts.further_axes:
        return "tiles"
    if key is not None and facts.heads != facts.kv_heads:
        return "tiles"
    pairs = facts.heads * facts.q_length * facts.k_length
    if query is None and key is None and not facts.padding and not facts.gradient:
        return "dense" if pairs <= DENSE_NUMBERS else "tiles"
    return "dense" if facts.batch * pairs <= CONTENT_NUMBERS else "tiles"
