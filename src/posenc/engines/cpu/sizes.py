"""How large the blocks are. Measured on a 2-core CPU; any positive number gives the same results."""

BLOCK = 1024
"""Query rows of one fused call: from 768 rows on PyTorch's kernel works in its largest tiles (1.2 × the speed)."""
SMALL = 256
"""Query rows where the visible keys change from row to row (causality, windows)."""
FAR = 256
"""Fewer far keys than this are not worth a call of their own."""
FEW = 16
"""Fewer query rows than this (decoding) take all their keys in one call."""
COPIED = 64
"""Distances of a block of a few queries' mask: one block stands for the whole far field."""
KEPT = 1 << 17
"""Most distances whose table rows are kept from one decoding step to the next."""
CHUNK = 128
"""Rows of a skewed buffer that are filled at once: few distances beyond those of their own keys."""
FORWARD = 6 << 20
"""Numbers in the forward pass's skewed buffer: heads share a call while they fit."""
DIAGONAL = 128
"""Query rows whose dS is summed by distance at once."""
FUSED = 1 << 20
"""Numbers that PyTorch's own backward kernel may return at once: heads share a call while they fit."""
SHORT = 256
"""So few keys that calls cost more than sums: the batch shares them even where a band is as wide as the keys."""
TOGETHER = 1 << 24
"""Numbers that the rows of a batch may need to share their calls: 64 MiB of float32."""
ROWS = 192
"""Query rows of a block of pairs in memory."""
BACKWARD = 1 << 20
"""Pairs of a block in memory, in each buffer: 4 MiB of float32."""
PAIRS = 512
"""So few keys that plans with content may have the pairs of a block in memory forwards too; ..."""
LOW = 96
"""... and that blocks are of so many rows at most (a quarter of the keys): many heads fit, and causality cuts little."""
MANY = 8
"""Batch rows from which on they share that memory forwards ..."""
LIGHT = 1 << 21
"""... if none has more multiplications than this for its scores."""
LARGE = 1 << 18
"""Numbers from which on a matrix product keeps the cores busy by itself; smaller ones go in stacks (5 × the speed)."""
