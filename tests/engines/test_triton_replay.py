"""Records of launches without a kernel; triton_cases.group_replay runs recorded kernels."""

import pickle

import pytest
import torch

import posenc

pytest.importorskip("triton")
from posenc.engines.triton import launcher, replay


def test_memory_of_records_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    replay._programs.clear()
    for number in range(10):
        replay.run_recorded((number,), [], lambda launch: None)
        assert len(replay._programs) <= 3


def test_a_record_must_not_read_values():
    x = torch.ones(3)
    for number in range(2):
        if number == 0:
            replay.run_recorded(("values",), [x], lambda launch, x: x * float(x.sum()))
        else:
            with pytest.raises(RuntimeError, match="must not depend"):
                replay.run_recorded(("values",), [x], lambda launch, x: x * float(x.sum()))
    replay._programs.clear()


def test_lengths_do_not_multiply_variants():
    from posenc.engines.triton.band_layout import Band

    def band(lo, hi, origin, pitch):
        return Band(None, 64, 32, pitch, 16, 0, origin, lo, hi, None, 64, None, None)

    first, second = launcher.make_typical(band(-128, 128, 1, 272)), launcher.make_typical(band(-3, 16, 0, 48))
    assert first == second
    assert launcher.make_typical(band(-3, 16, 0, 50)) != second, "divisibility of a stride is needed for wide loads"
    assert launcher.make_typical(2**40 + 1) > 2**31, "the type is kept"


def test_warm_up_changes_nothing_on_a_cpu():
    layer = posenc.Attention(16, 2, encoding="t5", dropout=0.5)
    x = torch.randn(1, 5, 16)
    state = torch.random.get_rng_state()
    assert posenc.warm_up(layer, x) == []
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_what_warm_up_finds_can_be_sent_to_another_process():
    from posenc.engines.triton import warm_up
    from posenc.engines.triton.structs import View

    described = warm_up._described((View(torch.zeros(4), 16, 3, None),)[0])
    assert described == pickle.loads(pickle.dumps(described)) and described.ptr.dtype == torch.float32
    assert described.ptr.data_ptr() == 0 or described.ptr.data_ptr() % 16 == described.ptr.address
