"""Launches of compiled kernels that are known: compiled once for each variant, launched with all arguments."""

import pytest
import torch

from posenc.core import launches


class Compiled:
    """What Triton's compiled kernels have."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.prepared, self.launched = 0, []

    def _init_handles(self):
        self.prepared += 1

    def run(self, *arguments):
        self.launched.append(arguments)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(launches, "_variants", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)


def test_a_variant_is_compiled_once_and_launched_on_the_current_stream():
    made = []
    device = torch.device("cuda", 1)
    for number in range(3):
        launches.launch_known(("k", 1), lambda: made.append(Compiled()) or made[-1], 5 + number, device, (number, None))
    (compiled,) = made
    assert compiled.prepared == 1
    expected = [(5 + n, 1, 1, 71, "function", "metadata", None, None, None, n, None) for n in range(3)]
    assert compiled.launched == expected
    launches.launch_known(("k", 2), lambda: made.append(Compiled()) or made[-1], 5, device, ())
    assert len(made) == 2


def test_kept_variants_are_bounded(monkeypatch):
    monkeypatch.setattr(launches, "MOST", 3)
    for number in range(10):
        launches.launch_known((number,), Compiled, 1, torch.device("cuda", 0), ())
        assert 1 <= len(launches._variants) <= 3


def test_a_launch_that_is_only_recorded_keeps_nothing():
    launches.launch_known(("k",), lambda: None, 1, torch.device("cuda", 0), ())
    assert not launches._variants


def test_variants_follow_alignment_and_width_and_nothing_else():
    x = torch.zeros(64)
    usual = launches.describe_variant((16, 48, 0), (x, None))
    assert usual == launches.describe_variant((32, 160, 16), (x[16:], None))  # other lengths: the same kernel
    others = {
        launches.describe_variant((16, 40, 0), (x, None)),
        launches.describe_variant((8, 48, 0), (x, None)),
        launches.describe_variant((1 << 32, 48, 0), (x, None)),
        launches.describe_variant((16, 48, 0), (x[1:], None)),
        usual,
    }
    assert len(others) == 5
    assert [launches.typical_integer(n) for n in (1, 16, 17, 0)] == [3, 16, 3, 16]
    assert launches.typical_integer(16, divisible=False) == 3
    assert launches.typical_integer(1 << 40) == (1 << 33) + 16
