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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launches

MOST_THREADS = 8


@dataclass(frozen=True)
class Pointer:
    """What Triton reads of a tensor: dtype and whether its address is divisible by 16. No tuple, which Triton would take apart."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class DescriptorVariant(NamedTuple):
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


def make_variant(kernel, arguments: Sequence, options: dict) -> Variant:
    """arguments: typical ones (launches.typical_argument)."""
    return Variant(kernel.__module__, kernel.__name__, tuple(map(_describe, arguments)), tuple(options.items()))


def _describe(x):
    if isinstance(x, Tensor):
        return Pointer(x.dtype, x.data_ptr() & 15)
    if type(x).__name__ == "TensorDescriptor":
        return DescriptorVariant(_describe(x.base), tuple(x.block_shape), x.layout)
    if isinstance(x, tuple):
        return type(x)(*map(_describe, x))
    return x


@contextmanager
def record_variants(everywhere: bool = False) -> Iterator[dict[Variant, None]]:
    """Launches of this thread, or of all, are left out and recorded."""
    found: dict[Variant, None] = {}

    def record(kernel, arguments: Sequence, options: dict) -> None:
        found[make_variant(kernel, arguments, options)] = None

    with launches.recording(record, everywhere):
        yield found


# ---- the first call of a kind ------------------------------------------------------------------------------------------
_known: set[Variant] = set()
_lock = threading.Lock()


def compile_first(device: torch.device, kernel, arguments: Sequence, options: dict, run: Callable[[], object]) -> None:
    """`compile_launches(device, run)` before the launch of a kernel, if it is new. arguments: typical ones."""
    variant = make_variant(kernel, arguments, options)
    if variant not in _known and not launches.is_recording():
        compile_launches(device, run)
        _known.add(variant)


def compile_launches(device: torch.device, run: Callable[[], object]) -> None:
    """Compile every new kernel that run() launches. run() allocates as the call does; random numbers that it draws are drawn again."""
    if launches.INTERPRETED or device.type != "cuda" or launches.is_recording():
        return
    with suppress(Exception):  # the launches themselves raise it, or give up
        if torch.cuda.is_current_stream_capturing():  # no other thread may load a kernel meanwhile
            return
        with torch.random.fork_rng([device]), torch.no_grad(), record_variants() as found:
            run()
        new = [variant for variant in found if variant not in _known]
        for _ in compile_all(new, device.index) if len(new) > 1 else ():
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
    arguments = [x.restore() if isinstance(x, DescriptorVariant) else x for x in variant.arguments]
    compiled = _function_of(variant).warmup(*arguments, grid=(1,), **dict(variant.constants))
    compiled._init_handles()  # loads it; before Triton 3.7 its launcher is C code, compiled too
    return time.perf_counter() - began


def _function_of(variant: Variant):
    return getattr(importlib.import_module(variant.module), variant.name)
