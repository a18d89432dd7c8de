"""Kernels with the arguments that they are compiled for, and how several are compiled at once.

    a call's first launch whose kernel is new
        ─▶ both passes of the call with launches left out    which kernels, for which arguments
        ─▶ a thread each                                     Triton's caches: nothing else of the call compiles

Triton's compiler is native code and an assembler, which run without Python's lock for nine tenths of their time. One after the other, the
kernels of a training step take the sum of their times; in threads little more than the longest.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launcher

MOST_THREADS = 8


@dataclass(frozen=True)
class Pointer:
    """What Triton reads of a tensor: dtype and whether its address is divisible by 16. No tuple, which Triton would take apart."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class Blocks(NamedTuple):
    """What Triton reads of a TensorDescriptor, in which a Gluon kernel copies a tensor."""

    base: Pointer
    block_shape: tuple[int, ...]
    layout: Any

    def restore(self):
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        block = list(self.block_shape)
        return TensorDescriptor(self.base, block, [block[-1]] * (len(block) - 1) + [1], block, self.layout)


class Variant(NamedTuple):
    """What is compiled once. It holds no tensor."""

    module: str
    name: str
    arguments: tuple
    constants: tuple[tuple[str, Any], ...]


def describe_launch(kernel, args: tuple, constants: dict) -> Variant:
    arguments = tuple([_describe(launcher.typical_argument(p, x)) for p, x in zip(kernel.params, args, strict=False)])
    return Variant(kernel.__module__, kernel.__name__, arguments, tuple(constants.items()))


def _describe(x):
    if isinstance(x, Tensor):
        return Pointer(x.dtype, x.data_ptr() & 15)
    if type(x).__name__ == "TensorDescriptor":
        return Blocks(_describe(x.base), tuple(x.block_shape), x.layout)
    if isinstance(x, tuple):
        return type(x)(*map(_describe, x))
    return x


@contextmanager
def record_variants(everywhere: bool = False) -> Iterator[dict[Variant, None]]:
    """Launches of this thread, or of all, are left out and recorded."""
    found: dict[Variant, None] = {}

    def record(*launch) -> None:
        found[describe_launch(*launch)] = None

    with launcher.recording(record, everywhere):
        yield found


# ---- the first call of a kind ------------------------------------------------------------------------------------------
_known: set[Variant] = set()
_lock = threading.Lock()


def launch_first(device: torch.device, run: Callable[[], object]) -> launcher.Launch:
    """A `launch` for a call's first run: before a kernel that is new, every new kernel that run() launches is compiled. run()
    allocates as the call does; random numbers that it draws are drawn again."""
    if launcher.INTERPRETED or device.type != "cuda" or launcher.is_recording():
        return launcher.launch

    def launch(kernel, programs: int, *args, **constants) -> None:
        variant = describe_launch(kernel, args, constants)
        if variant not in _known:
            with suppress(Exception):  # the launches themselves raise it, or give up
                _compile_new(device, run)
            _known.add(variant)
        launcher.launch(kernel, programs, *args, **constants)

    return launch


def _compile_new(device: torch.device, run: Callable[[], object]) -> None:
    if torch.cuda.is_current_stream_capturing():  # no other thread may load a kernel meanwhile
        return
    with torch.random.fork_rng([device]), torch.no_grad(), record_variants() as found:
        run()
    new = [variant for variant in found if variant not in _known]
    if len(new) > 1:
        for _ in compile_all(new, device.index):
            pass


# ---- threads that compile ----------------------------------------------------------------------------------------------
def compile_all(
    variants: list[Variant], device: int, threads: int | None = None
) -> Iterator[tuple[str, float | Exception]]:
    """(kernel, seconds, or what went wrong) as they are done."""
    for variant in variants:  # what threads share is made before they start
        caches = getattr(_function_of(variant), "device_caches", None)
        if caches is not None:
            caches[device]
    variants = sorted(variants, key=lambda variant: -len(repr(variant.arguments)))  # the first take longest
    with _lock, ThreadPoolExecutor(threads or min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        names = {pool.submit(_compile, variant, device): variant for variant in variants}
        for done in as_completed(names):
            error = done.exception()
            if error is None:
                _known.add(names[done])
            elif not isinstance(error, Exception):
                raise error
            yield names[done].name, done.result() if error is None else error


def _compile(variant: Variant, device: int) -> float:
    began = time.perf_counter()
    torch.cuda.set_device(device)  # of this thread
    arguments = [x.restore() if isinstance(x, Blocks) else x for x in variant.arguments]
    compiled = _function_of(variant).warmup(*arguments, grid=(1,), **dict(variant.constants))
    compiled._init_handles()  # loads it; before Triton 3.7 its launcher is C code, compiled too
    return time.perf_counter() - began


def _function_of(variant: Variant):
    return getattr(importlib.import_module(variant.module), variant.name)
