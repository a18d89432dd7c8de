"""Bytes, seconds and memory of attention over ranks, by formula: `python -m docs.site.parallel_estimate` prints docs/parallel.md's
tables. The tests count the bytes that ranks send and hold against these formulas.

With N ranks, C = L/N tokens each, s bytes a number and f = max(s, 4) bytes of a sum:

    X = B C D s      bytes of one head of a rank's tokens         F = B C D f      the same of sums of gradients

                 forward                          backward
    ulysses      (N - 1)/N (2 H + 2 Hkv) X        the same                         Hkv: N, where fewer are repeated
    gather       (N - 1) 2 Hkv X                  (N - 1) 2 Hkv F
    ring         (N - 1) 2 Hkv X                  (N - 1) 2 Hkv X + N 2 Hkv F
    tables       -                                2 (N - 1)/N bytes of all tables' gradients, once
"""

from __future__ import annotations

from typing import NamedTuple

from . import markdown


class Traffic(NamedTuple):
    """Bytes that one rank sends to others."""

    forward: int
    backward: int


def traffic(
    strategy: str, ranks: int, *, batch: int, local: int, heads: int, kv_heads: int | None = None, head_dim: int,
    number: int = 2,
) -> Traffic:  # fmt: skip
    """Of one attention call; local: tokens of a rank; number: bytes of one (2: bfloat16). Tables not included."""
    kv_heads = heads if kv_heads is None else kv_heads
    head, sums = (batch * local * head_dim * size for size in (number, max(number, 4)))
    if strategy == "ulysses":
        sent = (ranks - 1) * (2 * heads + 2 * max(kv_heads, ranks if kv_heads % ranks else 0)) * head // ranks
        return Traffic(sent, sent)
    part = 2 * kv_heads
    if strategy == "gather":
        return Traffic((ranks - 1) * part * head, (ranks - 1) * part * sums)
    if strategy == "ring":
        return Traffic((ranks - 1) * part * head, (ranks - 1) * part * head + ranks * part * sums)
    raise ValueError(f"strategy={strategy!r} is unknown; use 'ulysses', 'gather' or 'ring'")


def ring_buffers(*, batch: int, local: int, heads: int, kv_heads: int | None = None, head_dim: int, number: int = 2) -> int:  # fmt: skip
    """Bytes that the ring holds beyond its own q, k and v and beyond the attention of one pair of parts. Of the queries'
    size: output and its gradient, the sum of dq, a pair's share of the gradient and its product with the pair's output. Of
    the keys and values two parts, and three sums of their gradients (one is made, one arrives, one leaves). Ten numbers
    a query and head: log-sum-exps and the like. It does not depend on the number of ranks."""
    kv_heads = heads if kv_heads is None else kv_heads
    head, sums = (batch * local * head_dim * size for size in (number, max(number, 4)))
    return heads * (2 * head + 3 * sums + 10 * batch * local * 4) + 2 * kv_heads * (2 * head + 3 * sums)


# ---- the plan of docs/parallel.md ----------------------------------------------------------------------------------
HEADS, HEAD_DIM, LAYERS, WIDTH = 16, 64, 24, 1024
PAIRS = HEADS * 16384**2  # of the measurement below: batch 1, 16384 tokens, not causal
FORWARD, BOTH = 2.791e-3 / PAIRS, 10.766e-3 / PAIRS
"""Seconds a pair of tokens and head: T5's bias on one H200 in bfloat16, bench/results/h200-triton.json."""
NVLINK, NETWORK = 360e9, 40e9
"""Bytes a second that a GPU sends: assumed four fifths of NVLink's 450 GB/s and of a 400 Gb/s network card."""
ACTIVATIONS = 40
"""Numbers of `WIDTH` that a layer keeps for each token in training, without checkpointing: an estimate."""


class Row(NamedTuple):
    length: int
    ranks: int
    strategy: str
    attention: float  # seconds a layer, forward and backward
    transfer: float  # seconds a layer
    hidden: bool
    memory: float  # bytes a rank: activations of all layers with checkpointing of each layer
    kept: float  # the same without checkpointing


def plan(length: int, ranks: int) -> Row:
    """Causal training of a sequence of one row on `ranks` GPUs, eight to a machine."""
    local = length // ranks
    pairs = length * local / 2 * HEADS
    bandwidth = NVLINK if ranks <= 8 else NETWORK
    strategy = "ulysses" if ranks <= HEADS else "ring"
    sent = traffic(strategy, ranks, batch=1, local=local, heads=HEADS, head_dim=HEAD_DIM)
    # the ring computes the forward pass of each pair of parts again in its backward pass
    attention = pairs * (BOTH + (FORWARD if strategy == "ring" else 0.0))
    transfer = sum(sent) / bandwidth
    tokens = local * WIDTH * 2
    return Row(
        length, ranks, strategy, attention, transfer, strategy == "ring" and transfer < attention,
        tokens * (LAYERS + ACTIVATIONS), tokens * LAYERS * ACTIVATIONS,
    )  # fmt: skip


LENGTHS = {"128 k": 2**17, "512 k": 2**19, "1 M": 2**20, "4 M": 2**22, "10 M": 10 * 2**20}
RANKS = (8, 16, 64, 256, 1024)


def table() -> str:
    head = (
        "tokens",
        "GPUs",
        "tokens a GPU",
        "strategy",
        "attention, a layer",
        "transfers, a layer",
        "memory, checkpointed",
        "kept",
    )
    rows = []
    for name, length in LENGTHS.items():
        for ranks in RANKS:
            row = plan(length, ranks)
            if row.memory > 120e9 or length // ranks < 1024:
                continue
            how = "hidden" if row.hidden else "waited for"
            times = _time(row.attention), f"{_time(row.transfer)}, {how}"
            memory = f"{row.memory / 1e9:.1f} GB", f"{row.kept / 1e9:.0f} GB"
            rows.append([name, ranks, f"{length // ranks:,}", row.strategy, *times, *memory])
    return markdown.table(head, rows)


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


if __name__ == "__main__":
    print(table())
