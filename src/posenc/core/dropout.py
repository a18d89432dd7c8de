"""Dropout by a hash of seed, head, query and key: the mask does not depend on the block, or the rank, that computes a score.

    row    = hash(i + hash(b H + h + seed_low))      once for each query
    column = hash(j + seed_high)                     once for each key
    keep   = mix(row, column) >= dropout · 2^24      two multiplications a pair

i and j are slots of the whole sequence and h a head of the whole layer. The triton engine computes the same numbers.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

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

    def from_key(self, first: int) -> Dropout:
        """The same for a call without the keys before this one."""
        start, step = self.k
        return Dropout(float(self), self.seed, q=self.q, k=(start + first * step, step), heads=self.heads)

    def hashes(self, batch: int, heads: int, rows: range, columns: range) -> tuple[Tensor, Tensor, Tensor]:
        """What `excess` takes, int32: two numbers for each query, [B, H, rows, 1], and one for each key, [columns]. Any rows or columns of
        them may be given to it."""
        device, seed = self.seed.device, self.seed
        first, every = self.heads[0], self.heads[1] or heads
        if first == 0 and every == heads:
            bh = torch.arange(batch * heads, device=device)
        else:
            b, h = torch.arange(batch, device=device), torch.arange(first, first + heads, device=device)
            bh = (b[:, None] * every + h).flatten()
        i = _slots(rows, *self.q, device)
        high = seed >> 32  # `hash_bits` takes the low 32 bits of a sum
        both = hash_bits(torch.cat((bh + seed, _slots(columns, *self.k, device) + high)))
        row = hash_bits(both[: batch * heads].view(batch, heads, 1, 1) + i.view(-1, 1))
        # the second number is added before the multiplication by SECOND, here after it; 2^31 makes a comparison of unsigned
        # numbers one of signed numbers
        (signed,) = _operands(device, torch.int64, 2**31)
        again = torch.add(signed, hash_bits(row + high), alpha=SECOND)
        return row.int(), again.int(), both[batch * heads :].int()

    def excess(self, row: Tensor, again: Tensor, column: Tensor) -> Tensor:
        """By how much the hash of a pair exceeds dropout · 2^24, int32: negative where the probability is dropped."""
        first, copied, less, low = _operands(row.device, torch.int32, FIRST, 0x1FFFF, 15, 8)
        # int32 wraps around as the kernel's uint32 does; its shifts copy the sign, so the copied bits are masked off
        x = (row ^ column).mul_(first)
        x.bitwise_xor_((x >> less).bitwise_and_(copied))
        torch.add(again, x, alpha=SECOND - 2**32, out=x)
        least = math.ceil(struct.unpack("f", struct.pack("f", float(self)))[0] * 2**24)
        return x.bitwise_right_shift_(low).sub_(least - 2**23)


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
    first, second, mask, half, less = _operands(x.device, torch.int64, FIRST, SECOND, MASK, 16, 15)
    x = x & mask
    x = (x ^ (x >> half)).mul_(first).bitwise_and_(mask)
    x = (x ^ (x >> less)).mul_(second).bitwise_and_(mask)
    return x.bitwise_xor_(x >> half)


@lru_cache(maxsize=16)
def _operands(device: torch.device, dtype: torch.dtype, *numbers: int) -> tuple[Tensor, ...]:
    """Tensors: PyTorch would make one of each number in each operation, which takes as long as hashing a short text."""
    return tuple([constant((number,), device, dtype) for number in numbers])


def _slots(own: range, first: int, step: int, device: torch.device) -> Tensor:
    if step == 1:
        return torch.arange(own.start + first, own.stop + first, device=device)
    return torch.arange(own.start, own.stop, device=device) * step + first
