"""Every block size of the engine. Measured on a 2-core CPU; any positive number gives the same results."""

QUERY_BLOCK = 1024
"""Query rows of one fused call: from 768 rows on PyTorch's kernel works in its largest tiles (1.2 × the speed)."""
EDGE_BLOCK = 256
"""Query rows where the visible keys change from row to row (causality, windows)."""
MIN_FAR_KEYS = 256
"""Fewer far keys than this are not worth a separate call."""
DECODE_ROWS = 16
"""Fewer query rows than this (decoding) take all their keys in one call."""
COPY_BLOCK = 64
"""Distances of a block of a decoding mask: the whole far field is copies of one block."""
PICKED = 1 << 14
"""Numbers of such a mask up to which they are picked one by one: 2 µs instead of 7 for 8 heads over 257 keys, 14 instead of 10 over
4096."""
CACHED_DISTANCES = 1 << 17
"""Most distances whose table rows are kept from one decoding step to the next."""
SKEW_ROWS = 128
"""Rows of a skewed buffer that are filled at once: few distances beyond those of their keys."""
FORWARD_MEMORY = 6 << 20
"""Numbers in the forward pass's skewed buffer: heads share a call while they fit."""
DIAGONAL_ROWS = 128
"""Query rows whose dS is summed by distance at once."""
FUSED_MEMORY = 1 << 20
"""Numbers that PyTorch's own backward kernel may return at once: heads share a call while they fit."""
SHORT_BIAS_KEYS = 256
"""Up to this many keys, calls cost more than arithmetic, and the fused backward pass serves even a band as wide as the keys."""
SHARED_MEMORY = 1 << 24
"""Numbers up to which the rows of a batch share their calls: 64 MiB of float32."""
SCORE_ROWS = 192
"""Query rows of a block of materialised scores."""
SCORE_MEMORY = 1 << 20
"""Materialised scores of a block, in each buffer: 4 MiB of float32."""
SHORT_KEYS = 512
"""Keys up to which plans with content may materialise scores in the forward pass too; ..."""
SHORT_ROWS = 96
"""... there, blocks have at most this many rows (a quarter of the keys): many heads fit, and causality masks little."""
MANY_BATCH_ROWS = 8
"""Batch rows from which on that forward pass serves plans without positional values ..."""
LIGHT_PRODUCTS = 1 << 21
"""... if a batch row has no more multiplications than this for its scores."""
LARGE_MATRIX = 1 << 18
"""Elements from which on one matrix product keeps the cores busy; smaller ones are batched (5 × the speed)."""
PAIR_SCORES = 1 << 19
"""Scores of the backward pass that are in memory at once where biases are read pair by pair ..."""
KEPT_SCORES = 1 << 22
"""... beyond so many of all texts, whose probabilities are kept for it (16 MiB): a step takes 0.7 to 1.0 of the time."""
FEWEST_SCORES = 1 << 18
"""Those are computed together at least so many at a time, where the rows of a batch have so few that calls would cost more than copies."""
VARIED_SCORES = 1 << 20
"""Scores of the rows of a batch that share a block although their positions or masks differ."""
