"""Phases: cos and sin of position × frequency, by integer arithmetic: no large float is ever multiplied.

A frequency w in cycles per position, w / 2π mod 1, is a fixed-point number of three 32-bit digits. A position times a
digit fits into int64, and whole cycles drop out of the sum:

                        bit weight:   2^-1 … 2^-32      2^-33 … 2^-64     2^-65 … 2^-96
    w / 2π mod 1   =  0 .          [      d1       ] [      d2       ] [      d3       ]
    p · d1         =  cycles . [ 32 bits of phase  ]                                        << 28   (cycles are masked off)
    p · d2         =           [ up to 31 bits     . 32 bits of phase ]                     >> 4
    p · d3         =                              [ up to 31 bits     . 32 bits of phase ]  >> 36
                      ─────────────────────────────────────────────────
    phase          =  0 . [        60 bits, in units of 2^-60 cycle   ]                     mod 2^60

float32 holds p · w at p = 2^20 to 0.06 radian only, and float64 loses as much near 2^50; here every position
below 2^31 has its angle to 1e-17. There is no table to cast, so `.to(torch.bfloat16)` and autocast change nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .constants import constant
from .memo import Memo, may_keep, rows_of_run

LIMIT = 2**31
"""Positions must lie strictly between -LIMIT and LIMIT: a 32-bit digit times one must fit into int64."""

FrequencyDigits = tuple[Tensor, Tensor, Tensor]
"""d1, d2, d3: int64 [n], [B, n], or [B, L, n] with frequencies for each token."""

_TWO_PI = 0x6487ED5110B4611A62633145C06E0E68948127044533E63A0105DF531D89CD9  # floor(2π · 2^248)
_TWO_PI_BITS = 248
_DIGIT = 2**32 - 1
_FRACTION = 2**60 - 1
# 2π in pieces of 12 bits, so that float32 multiplies them exactly with 12 bits of an angle
_HIGH = round(math.tau * 2**9) / 2**9
_MIDDLE = round((math.tau - _HIGH) * 2**27) / 2**27
_PIECES = tuple(piece / 2**60 for piece in (_HIGH, _MIDDLE, math.tau - _HIGH - _MIDDLE))


class Digits(tuple):
    """Digits of frequencies as a key of caches: the hash is computed once."""

    def __hash__(self) -> int:
        found = self.__dict__.get("hash")
        if found is None:
            found = self.hash = super().__hash__()
        return found


@lru_cache(maxsize=256)
def split_frequencies(frequencies: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    """The digits (d1, d2, d3) of each frequency / 2π mod 1, from the exact value of each float."""
    rows = []
    for w in frequencies:
        top, bottom = w.as_integer_ratio()
        cycles = (top << (96 + _TWO_PI_BITS)) // (bottom * _TWO_PI)  # floor(w / 2π · 2^96)
        rows.append((cycles >> 64 & _DIGIT, cycles >> 32 & _DIGIT, cycles & _DIGIT))
    return Digits(zip(*rows, strict=True)) if rows else Digits(((), (), ()))


def split_frequency_tensor(frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same digits of a float64 tensor of frequencies, which depend on a length known on the device only."""
    rest = frequencies / math.tau
    rest = rest - rest.floor()
    parts = []
    for _ in range(3):
        rest = rest * 2.0**32
        parts.append(rest.floor())
        rest = rest - parts[-1]
    d1, d2, d3 = (part.to(torch.int64) for part in parts)
    return d1, d2, d3


def compute_phases(positions: Tensor, digits: FrequencyDigits, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [.., L, n] in float32 or float64.

    positions  int64 [.., L, 1], or [.., L, n] with a position for each pair
    digits     [n] or [.., n]
    """
    d1, d2, d3 = (digit.unsqueeze(-2) for digit in digits)
    p = positions
    phase = ((p * d1 & _DIGIT) << 28) + (p * d2 >> 4) + (p * d3 >> 36)
    if positions.device.type == "mps":
        return phases_without_float64(phase)
    angle = (((phase + 2**59) & _FRACTION) - 2**59).to(torch.float64) * (math.tau / 2**60)
    return angle.cos().to(dtype), angle.sin().to(dtype)


_phases = Memo(most=64, numbers=1 << 22)
"""Phases of runs, for all layers of a forward pass and for the next one."""


def phases_of_run(
    start: int, length: int, digits: tuple[tuple[int, ...], ...], factor: float, device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cos, sin [1, length, n] times `factor` for consecutive positions. Shared: do not write to them."""

    def make(first: int, count: int) -> tuple[Tensor, Tensor]:
        d1, d2, d3 = (constant(digit, device, torch.int64) for digit in digits)
        positions = torch.arange(count, device=device) + first
        cos, sin = compute_phases(positions[None, :, None], (d1, d2, d3), dtype)
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)

    if not may_keep(device):
        return make(start, length)
    cos, sin = rows_of_run(_phases, start, length, (digits, factor, device, dtype), 2 * len(digits[0]), make)
    return cos, sin


def phases_without_float64(phase: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin in float32 of phase · 2^-60 cycles, to 2 ulp. Symmetry reduces the angle to an eighth of a cycle; the
    rounding error of that angle is corrected to first order: cos(a + e) = cos a - e sin a.
    """
    quarter = (phase + 2**57) >> 58
    left = phase - (quarter << 58)  # [-2^57, 2^57): up to an eighth of a cycle
    sign = 1 - 2 * (left < 0).to(torch.float32)
    left = left.abs()  # else the digits of a small negative angle would cancel
    high = left >> 46 << 46
    middle = (left - high) >> 34 << 34
    low = (left - high - middle).to(torch.float32)
    high, middle = high.to(torch.float32), middle.to(torch.float32)
    c1, c2, c3 = _PIECES
    angle = high * c1  # 12 bits times 12 bits: exact, as are the next two
    small = high * c2 + middle * c1
    total = angle + small
    error = small - (total - angle) + ((high * c3 + middle * c2) + low * (math.tau / 2**60))
    cos, sin = total.cos(), total.sin()
    cos, sin = cos - error * sin, (sin + error * cos) * sign
    odd = quarter & 1 == 1
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    return torch.where((quarter + 1) & 2 == 2, -cos, cos), torch.where(quarter & 2 == 2, -sin, sin)
