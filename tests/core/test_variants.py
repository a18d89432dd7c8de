"""Kernels that are compiled side by side, without a kernel; triton_cases.group_known has the launches of a real call."""

import contextlib
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import posenc

pytest.importorskip("triton")
from posenc.core import variants
from posenc.engines.triton import launcher
from posenc.engines.triton.structs import View


def test_a_described_argument_holds_no_tensor():
    described = variants._describe(View(torch.zeros(4), 16, 3, None))
    assert described.ptr == variants.Pointer(torch.float32, described.ptr.address) and hash(described)
    assert described.ptr.data_ptr() % 16 == described.ptr.address


def test_a_described_argument_is_to_triton_what_a_tensor_is():
    from triton._C import libtriton
    from triton.backends.compiler import BaseBackend

    specialise = getattr(libtriton, "native_specialize_impl", None)
    if specialise is None:
        pytest.skip("this release of Triton specialises otherwise")
    x = torch.zeros(64, dtype=torch.bfloat16)
    for tensor in (x, x[1:], x.float(), x.to(torch.int32)[1:]):
        described = variants._describe(tensor)
        assert specialise(BaseBackend, described, False, True, True) == specialise(
            BaseBackend, tensor, False, True, True
        )


class FakeKernel:
    """As much of a Triton kernel as is needed to compile and launch it."""

    params = (SimpleNamespace(is_constexpr=False, do_not_specialize=False),) * 2
    arg_names = ("x", "n")

    def __init__(self, name: str, events: list, barrier: threading.Barrier | None = None, error: str = ""):
        self.__name__, self.__module__ = name, __name__
        self.events, self.barrier, self.error, self.device_caches = events, barrier, error, {0: None}
        self.compiled = None

    def warmup(self, x, n, grid, **constants):
        if self.compiled is None:
            if self.barrier is not None:
                self.barrier.wait(20)  # until the others are being compiled too
            if self.error:
                raise ValueError(self.error)
            self.events.append(("compiled", self.__name__))
            self.compiled = SimpleNamespace(_init_handles=lambda: None)
        return self

    def _init_handles(self):
        pass

    def __getitem__(self, grid):
        return lambda *args: self.events.append(("launched", self.__name__))


@pytest.fixture
def fake_kernels(monkeypatch):
    """Three kernels of this module that can only be compiled at the same time, and what happens to them."""
    events: list = []
    barrier = threading.Barrier(3)
    kernels = [FakeKernel(name, events, barrier) for name in ("first", "second", "third")]
    for kernel in kernels:
        monkeypatch.setattr(sys.modules[__name__], kernel.__name__, kernel, raising=False)
    monkeypatch.setattr(variants, "_known", set())
    monkeypatch.setattr(variants, "MOST_THREADS", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    return kernels, events


def test_the_first_launch_compiles_the_kernels_of_a_call_side_by_side(fake_kernels):
    kernels, events = fake_kernels
    x = torch.zeros(4)

    def run():
        for kernel in kernels:
            launcher.launch(kernel, 1, x, 3)

    for _ in range(2):
        launch = launcher.launch_first(torch.device("cuda", 0), run)
        launch(kernels[0], 1, x, 3)
        launch(kernels[1], 1, x, 3)
        assert sorted(events[:3]) == [("compiled", name) for name in ("first", "second", "third")]
        assert events[3:] == [("launched", "first"), ("launched", "second")]
        del events[3:]


def test_what_does_not_compile_ahead_is_left_to_its_launch(fake_kernels):
    kernels, events = fake_kernels
    kernels[2].error = "no such layout"
    x = torch.zeros(4)
    launch = launcher.launch_first(
        torch.device("cuda", 0), lambda: [launcher.launch(kernel, 1, x, 3) for kernel in kernels]
    )
    launch(kernels[0], 1, x, 3)
    assert ("launched", "first") in events and ("compiled", "second") in events
    kernels[2].barrier = None
    with pytest.raises(ValueError, match="no such layout"):
        launch(kernels[2], 1, x, 3)


def test_a_recording_leaves_launches_of_other_threads_alone(fake_kernels):
    kernels, events = fake_kernels
    kernels[0].barrier = None
    x = torch.zeros(4)
    with variants.record_variants() as found:
        other = threading.Thread(target=launcher.launch, args=(kernels[0], 1, x, 3))
        other.start()
        other.join()
        assert events == [("compiled", "first"), ("launched", "first")] and not found
        launcher.launch(kernels[0], 1, x, 3)
        assert len(found) == 1 and len(events) == 2
    with variants.record_variants(everywhere=True) as found:
        other = threading.Thread(target=launcher.launch, args=(kernels[0], 1, x, 3))
        other.start()
        other.join()
        assert len(found) == 1 and len(events) == 2


def test_what_warm_up_cannot_compile_is_raised(fake_kernels, monkeypatch):
    kernels, _ = fake_kernels
    kernels[0].barrier, kernels[0].error = None, "no such layout"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match=r"warm_up could not compile first: ValueError: no such layout"):
        posenc.warm_up(lambda: launcher.launch(kernels[0], 1, torch.zeros(4), 3))
    kernels[0].error = ""
    assert [name for name, _ in posenc.warm_up(lambda: launcher.launch(kernels[0], 1, torch.zeros(4), 3))] == ["first"]
