"""Time and memory of a call."""

import time
from types import SimpleNamespace

import torch

from posenc.bench import measure


def test_peak_bytes_counts_what_is_held_at_once():
    def call():
        a = torch.empty(1000, 1000)
        b = a + 1
        del a
        return b + 1

    assert 8_000_000 <= measure.peak_bytes(call) < 8_100_000


def test_contenders_are_interleaved_and_slow_ones_do_fewer_rounds(monkeypatch):
    heard, now = [], [0.0]

    def slow():
        heard.append("s")
        now[0] += 0.03

    # a simulated clock: on a busy machine the fast call may appear slow
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {"fast": lambda: heard.append("f"), "slow": slow}
    taken = measure.time_interleaved(calls, {"fast": 1.0, "slow": 1.0}, repeats=5, budget=0.05)
    assert "".join(heard) == "fsfsfff"
    assert len(taken["fast"]) == 5 and len(taken["slow"]) == 2
    short = measure.time_interleaved({"a": lambda: heard.append("a")}, {"a": 0.005}, repeats=2, budget=1.0)
    assert heard.count("a") == 8 and len(short["a"]) == 2  # four calls of 5 ms make 20 ms


def test_ratios_are_of_the_same_round():
    # the machine was twice as slow from the third round on; the ratio is unaffected
    base = [1.0, 1.0, 2.0, 2.0, 2.0]
    took, ratio, spread = measure.compare_with_base([1.5, 1.5, 3.0, 3.0, 3.0], base)
    assert (took, ratio, spread) == (3.0, 1.5, 0.0)
    assert measure.compare_with_base([2.0, 4.0], base) == (3.0, 3.0, 1.0)


def test_the_load_of_others_excludes_this_process():
    others = measure.OtherProcesses()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    wall, busy, own = (b - a for a, b in zip(others.start, others._now()))
    assert own >= 0.25
    assert busy >= own - 0.1
    assert 0.0 <= others.share() <= 1.0
