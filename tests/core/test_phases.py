"""Phases against exact arithmetic: within 2 ulp of the true cosine at any position."""

import math

import mpmath
import pytest
import torch

from posenc.core.formulas import inverse_frequencies
from posenc.core.phases import compute_phases, phases_without_float64, split_frequencies, split_frequency_tensor

W = inverse_frequencies(32, 500000.0)
POSITIONS = [0, 1, 7, 511, 2**20, 2**20 + 12345, 10**9 + 7, 2**31 - 1, -1, -9, -(2**20) - 3, 1 - 2**31]


@pytest.fixture(scope="module")
def truth():
    with mpmath.workprec(200):
        angles = [[mpmath.mpf(p) * mpmath.mpf(w) for w in W] for p in POSITIONS]
        return [[[f(a) for a in row] for row in angles] for f in (mpmath.cos, mpmath.sin)]


def ulps(value: float, true, mantissa: int) -> float:
    if true == 0:
        return 0.0 if value == 0.0 else math.inf
    return float(abs(mpmath.mpf(value) - true)) / 2.0 ** (math.frexp(float(true))[1] - mantissa)


def worst(computed, truth, mantissa=24):
    return max(
        ulps(float(ours[i, c]), exact[i][c], mantissa)
        for ours, exact in zip(computed, truth, strict=True)
        for i in range(len(POSITIONS))
        for c in range(len(W))
    )


def test_float32_is_rounded_correctly(truth):
    digits = [torch.tensor(digit) for digit in split_frequencies(W)]
    assert worst(compute_phases(torch.tensor(POSITIONS)[:, None], digits, torch.float32), truth) <= 0.51


def test_float64_keeps_sixteen_digits(truth):
    digits = [torch.tensor(digit) for digit in split_frequencies(W)]
    computed = compute_phases(torch.tensor(POSITIONS)[:, None], digits, torch.float64)
    for ours, exact in zip(computed, truth, strict=True):
        torch.testing.assert_close(
            ours, torch.tensor([[float(x) for x in row] for row in exact], dtype=torch.float64), atol=1e-15, rtol=1e-15
        )


def test_devices_without_float64_stay_within_two_ulp(truth):
    first, second, third = (torch.tensor(digit) for digit in split_frequencies(W))
    p = torch.tensor(POSITIONS)[:, None]
    fraction = ((p * first & 2**32 - 1) << 28) + (p * second >> 4) + (p * third >> 36)
    assert worst(phases_without_float64(fraction), truth) <= 2.0


def test_digits_of_a_tensor_are_those_of_its_numbers():
    ours = split_frequency_tensor(torch.tensor(W, dtype=torch.float64))
    exact = split_frequencies(W)
    value = [sum(int(d[c]) * 2.0 ** (-32 * (i + 1)) for i, d in enumerate(exact)) for c in range(len(W))]
    again = [sum(int(d[c]) * 2.0 ** (-32 * (i + 1)) for i, d in enumerate(ours)) for c in range(len(W))]
    assert again == pytest.approx(value, rel=3e-16)
