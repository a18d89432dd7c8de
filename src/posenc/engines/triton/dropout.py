"""Dropout by a hash of seed, head, query and key: forward and backward drop the same probabilities, and store none."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash_bits(x):
    """A 32-bit number whose every bit depends on every bit of x."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_factor(masks, bh, i, j, dropout):
    """1 / (1 - dropout) where a probability is kept, 0 where it is dropped; i and j broadcast against each other.

    Most of the hash is computed once per query and once per key, so that a pair costs two multiplications: Philox for
    each pair would take longer than the attention itself. core/dropout.py computes the same numbers, and says what the
    eight numbers behind `seed` are: where this call's heads, queries and keys lie among those of the whole sequence.
    """
    seed = tl.load(masks.seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    i = i * tl.load(masks.seed + 2).to(tl.int32) + tl.load(masks.seed + 1).to(tl.int32)
    j = j * tl.load(masks.seed + 4).to(tl.int32) + tl.load(masks.seed + 3).to(tl.int32)
    heads = tl.load(masks.seed + 7).to(tl.int32)
    head = bh % heads + tl.load(masks.seed + 5).to(tl.int32)
    bh = bh // heads * tl.load(masks.seed + 6).to(tl.int32) + head
    row = hash_bits(i.to(tl.uint32) + hash_bits(bh.to(tl.uint32) + low))
    again = hash_bits(row + high)
    column = hash_bits(j.to(tl.uint32) + high)
    x = (column ^ row) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + again) * 0x846CA68B
    return tl.where((x >> 8).to(tl.float32) >= dropout * 16777216.0, 1.0 / (1.0 - dropout), 0.0)
