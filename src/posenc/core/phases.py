"""Phases: cos and sin of position × frequency, from integers, without ever multiplying large floats.

    turns = frequency / 2π, kept as three 32-bit digits after the point:  0.[ t1 ][ t2 ][ t3 ]
    position · turns mod 1 is then whole-number arithmetic in int64, with nothing to round:

        (p·t1 mod 2^32) · 2^28  +  p·t2 / 2^4  +  p·t3 / 2^36     mod 2^60        (units of 2^-60 turn)

float32 holds p·w at p = 2^20 to 0.06 radian only, and float64 loses as much near 2^50; here every position
below 2^31 has its angle to 1e-17. There is no table to cast, so `.to(torch.bfloat16)` and autocast change nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

LIMIT = 2**31
"""Positions must lie strictly between -LIMIT and LIMIT: a 32-bit digit times one must fit into int64."""

_TWO_PI = 0x6487ED5110B4611A62633145C06E0E68948127044533E63A0105DF531D89CD9  # floor(2π · 2^248)
_TWO_PI_BITS = 248
_DIGIT = 2**32 - 1
_FRACTION = 2**60 - 1
# 2π in pieces of 12 bits, so that float32 multiplies them exactly with 12 bits of an angle
_HIGH = round(math.tau * 2**9) / 2**9
_MIDDLE = round((math.tau - _HIGH) * 2**27) / 2**27
_PIECES = tuple(piece / 2**60 for piece in (_HIGH, _MIDDLE, math.tau - _HIGH - _MIDDLE))


@lru_cache(maxsize=256)
def digits(frequencies: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    """frequency / 2π mod 1 as three tuples of 32-bit digits, from the exact value of each float."""
    rows = []
    for w in frequencies:
        top, bottom = w.as_integer_ratio()
        turns = (top << (96 + _TWO_PI_BITS)) // (bottom * _TWO_PI)  # floor(w / 2π · 2^96)
        rows.append((turns >> 64 & _DIGIT, turns >> 32 & _DIGIT, turns & _DIGIT))
    return tuple(zip(*rows, strict=True)) if rows else ((), (), ())


def digits_of(frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same digits of a float64 tensor of frequencies (those that depend on a length known on the device only)."""
    rest = frequencies / math.tau
    rest = rest - rest.floor()
    parts = []
    for _ in range(3):
        rest = rest * 2.0**32
        whole = rest.floor()
        parts.append(whole.to(torch.int64))
        rest = rest - whole
    return parts[0], parts[1], parts[2]


def phases(positions: Tensor, turns: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [.., L, n] in float32 or float64 of int64 positions [.., L, 1], or one for each pair [.., L, n], and
    digits [n] or [.., n].
    """
    first, second, third = (digit.unsqueeze(-2) for digit in turns)
    p = positions
    t = ((p * first & _DIGIT) << 28) + (p * second >> 4) + (p * third >> 36)
    if positions.device.type == "mps":
        return without_float64(t)
    angle = (((t + 2**59) & _FRACTION) - 2**59).to(torch.float64) * (math.tau / 2**60)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def without_float64(t: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin in float32 of t · 2^-60 turns, to 2 ulp: an eighth of a turn at most is left to the float functions,
    and the rounding error of its angle is put back to first order.
    """
    quarter = (t + 2**57) >> 58
    left = t - (quarter << 58)  # [-2^57, 2^57): up to an eighth of a turn
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
    cos = torch.where((quarter + 1) & 2 == 2, -cos, cos)
    sin = torch.where(quarter & 2 == 2, -sin, sin)
    return cos, sin
