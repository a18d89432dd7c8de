"""Compile kernels for typical arguments, and launch them.

Triton compiles a variant of its own for each integer argument that is 1, or divisible by 16. For strides the second is needed
(loads of 16 bytes); lengths and bounds would only multiply the variants, so that a new length could cost seconds. Kernels are
therefore compiled for typical arguments, in which such integers have a value that nothing follows from:

    a band of a call     pitch 272  lo -128  hi 16  origin 1          compiled for     pitch 16  lo 3  hi 3  origin 3

`launch` asks Triton for the variant each time, which takes tens of microseconds; `launch_known` and recorded calls (replay.py) keep
it (core/launches.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...core import launches
from ...core.launches import INTERPRETED, describe_variant, find_known, find_launch
from .structs import NOT_SPECIALISED

__all__ = [
    "INTERPRETED", "Launch", "compile_kernel", "describe_variant", "find_known", "find_launch", "is_recording", "launch",
    "launch_known", "recording", "trailing_arguments", "typical_argument",
]  # fmt: skip

Launch = Callable[..., None]
"""launch(kernel, programs, *arguments, **constants)."""


def launch(kernel, programs: int, *args, **constants) -> None:
    """kernel[(programs,)](*args, **constants)"""
    if INTERPRETED:
        kernel[(programs,)](*args, **constants)
        return
    compiled = compile_kernel(kernel, args, constants)
    if compiled is not None:  # None where launches are only recorded (tests/gpu/compiles.py)
        compiled[(programs, 1, 1)](*args, *trailing_arguments(kernel, args, constants))


def current_stream(device: int | None) -> int:
    """The address of PyTorch's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def launch_known(key: tuple, kernel, programs: int, device: torch.device, args: tuple, **options) -> None:
    """launch, by core.launches from the second time on. key: as there; options: of the compiler."""
    if INTERPRETED:
        kernel[(programs,)](*args, **options)
    else:
        launches.launch_known(key, lambda: compile_kernel(kernel, args, options), programs, device, args)


def compile_kernel(kernel, args: tuple, constants: dict):
    """The compiled kernel for arguments like these, from Triton's caches if it is there; None where it is recorded instead."""
    record = _record_of_all or getattr(_record_of_thread, "record", None)
    if record is not None:
        return record(kernel, args, constants)
    return launches.compile_kernel(kernel, args, constants, NOT_SPECIALISED)


_record_of_all: Callable[..., None] | None = None
_record_of_thread = threading.local()


@contextmanager
def recording(record: Callable[..., None], everywhere: bool = False) -> Iterator[None]:
    """In it nothing is compiled or launched: record(kernel, args, constants) for each launch of this thread; everywhere: of
    autograd's threads too, and of any other."""
    global _record_of_all
    if everywhere:
        _record_of_all = record
    else:
        _record_of_thread.record = record
    try:
        yield
    finally:
        if everywhere:
            _record_of_all = None
        else:
            _record_of_thread.record = None


def is_recording() -> bool:
    return (_record_of_all or getattr(_record_of_thread, "record", None)) is not None


def typical_argument(parameter, x):
    return launches.typical_argument(parameter, x, NOT_SPECIALISED)


def trailing_arguments(kernel, args: tuple, constants: dict) -> tuple:
    """The constants that are parameters of the kernel, in its order; the others are options of the compiler."""
    return tuple(constants[name] for name in kernel.arg_names[len(args) :])
