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
        excess = self.excess(*self.hashes(batch, heads, rows, columns))
        return (excess >= 0).to(dtype).mul_(1.0 / (1.0 - float(self)))

    def hashes(self, batch: int, heads: int, rows: range, columns: range) -> tuple[Tensor, Tensor, Tensor]:
        """What `excess` takes, int32: two numbers for each query, [B, H, rows, 1], and one for each key, [columns]. Any rows or columns of
        them may be given to it."""
        device = self.seed.device
        first, every = self.heads[0], self.heads[1] or heads
        low, high = self.seed & MASK, (self.seed >> 32) & MASK
        b, h = torch.arange(batch, device=device), torch.arange(heads, device=device)
        bh = (b[:, None] * every + (h + (low + first))).flatten()
        i = torch.arange(rows.start, rows.stop, device=device) * self.q[1] + self.q[0]
        j = torch.arange(columns.start, columns.stop, device=device) * self.k[1] + (high + self.k[0])
        start, column = hash_bits(torch.cat((bh, j))).split((bh.shape[0], j.shape[0]))
        row = hash_bits(i + start[:, None])
        # the second number is added before the multiplication by SECOND, here after it; 2^31 makes a comparison of unsigned
        # numbers one of signed numbers
        again = (hash_bits(row + high) * SECOND + 2**31).to(torch.int32)
        shape = (batch, heads, len(rows), 1)
        return row.to(torch.int32).view(shape), again.view(shape), column.to(torch.int32)

    def excess(self, row: Tensor, again: Tensor, column: Tensor) -> Tensor:
        """By how much the hash of a pair exceeds dropout · 2^24, int32: negative where the probability is dropped."""
        # int32 wraps around as the kernel's uint32 does; its shifts copy the sign, so the copied bits are masked off
        x = (row ^ column).mul_(FIRST)
        x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
        torch.add(again, x, alpha=SECOND - 2**32, out=x)
        least = math.ceil(struct.unpack("f", struct.pack("f", float(self)))[0] * 2**24)
        return x.bitwise_right_shift_(8).sub_(least - 2**23)


def as_dropout(rate: float, device: torch.device) -> Dropout:
    """The rate as a `Dropout`, with a new seed unless it has one."""
    return rate if isinstance(rate, Dropout) else Dropout(rate, draw_seed(device))


def draw_once(rate: float, device: torch.device) -> float:
    """The rate with a seed, so that whatever runs the call drops the same. Compiled code and torch.func use PyTorch's own random numbers
    instead."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return rate
    return as_dropout(rate, device)


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
    x = (x ^ (x >> 16)).mul_(FIRST).bitwise_and_(MASK)
    x = (x ^ (x >> 15)).mul_(SECOND).bitwise_and_(MASK)
    return x.bitwise_xor_(x >> 16)
