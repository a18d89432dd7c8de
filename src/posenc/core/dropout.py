"""Dropout by a hash of seed, head, query and key: the mask does not depend on the block, or the rank, that computes a score.

    row    = hash(i + hash(b H + h + seed_low))      once for each query
    column = hash(j + seed_high)                     once for each key
    keep   = mix(row, column) >= dropout · 2^24      two multiplications a pair

i and j are slots of the whole sequence and h a head of the whole layer. The triton engine computes the same numbers.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from .constants import constant

MASK = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


class Dropout(float):
    """A dropout rate with its seed. It is a float, so `attend` accepts it as a rate.

    seed    int64 [1]
    q, k    (first slot, step) of the call's queries and keys in the whole sequence
    heads   (first head, number of all heads): a call may have only some of a layer's heads
    """

    __slots__ = ("heads", "k", "q", "seed")
    seed: Tensor
    q: tuple[int, int]
    k: tuple[int, int]
    heads: tuple[int, int]

    def __new__(
        cls, rate: float, seed: Tensor, *, q: tuple[int, int] = (0, 1), k: tuple[int, int] = (0, 1), heads: tuple[int,
        int] | None = None,
    ) -> Dropout:  # fmt: skip
        self = super().__new__(cls, rate)
        self.seed, self.q, self.k = seed, q, k
        self.heads = (0, 0) if heads is None else heads
        return self

    def factors(self, batch: int, heads: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """1 / (1 - rate) where a probability is kept, 0 where it is dropped: [B, H, rows, columns] of the call."""
        device = self.seed.device
        first, every = self.heads[0], self.heads[1] or heads
        low, high = self.seed & MASK, (self.seed >> 32) & MASK
        b, h = torch.arange(batch, device=device), torch.arange(heads, device=device)
        bh = b[:, None] * every + (h + first)
        i = torch.arange(rows.start, rows.stop, device=device) * self.q[1] + self.q[0]
        j = torch.arange(columns.start, columns.stop, device=device) * self.k[1] + self.k[0]
        row = hash_bits(i + hash_bits(bh + low)[..., None])
        again, column = hash_bits(row + high), hash_bits(j + high)
        # int32 wraps around as the kernel's uint32 does; its shifts copy the sign, so the copied bits are masked off
        x = (_int32(column) ^ _int32(row)[..., None]).mul_(FIRST)
        x = (x ^ ((x >> 15) & 0x1FFFF)).add_(_int32(again)[..., None]).mul_(SECOND - 2**32)
        least = math.ceil(struct.unpack("f", struct.pack("f", float(self)))[0] * 2**24)
        return (((x >> 8) & 0xFFFFFF) >= least).to(dtype).mul_(1.0 / (1.0 - float(self)))


def as_dropout(rate: float, device: torch.device) -> Dropout:
    """The rate as a `Dropout`, with a new seed unless it has one."""
    return rate if isinstance(rate, Dropout) else Dropout(rate, draw_seed(device))


def kernel_numbers(rate: float, heads: int, device: torch.device) -> Tensor:
    """int64 [8] for a kernel: seed, (first, step) of queries and of keys, first head, all heads, the call's heads."""
    if isinstance(rate, Dropout):
        first, every = rate.heads
        return torch.cat((rate.seed, constant((*rate.q, *rate.k, first, every or heads, heads), device)))
    return torch.cat((draw_seed(device), constant((0, 1, 0, 1, 0, heads, heads), device)))


def draw_seed(device: torch.device) -> Tensor:
    return torch.randint(0, 2**62, (1,), device=device)


def hash_bits(x: Tensor) -> Tensor:
    """A 32-bit hash of the low 32 bits of x; both are int64 tensors."""
    x = x & MASK
    x = (x ^ (x >> 16)) * FIRST & MASK
    x = (x ^ (x >> 15)) * SECOND & MASK
    return x ^ (x >> 16)


def _int32(x: Tensor) -> Tensor:
    """The low 32 bits, in two's complement."""
    return ((x & MASK) - ((x & 0x80000000) << 1)).to(torch.int32)
