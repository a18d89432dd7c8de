"""Compile kernels for typical arguments, and launch them.

Triton compiles a variant of its own for each integer argument that is 1, or divisible by 16. For strides the second is needed
(loads of 16 bytes); lengths and bounds would only multiply the variants, so that a new length could cost seconds. Kernels are
therefore compiled for typical arguments, in which such integers have a value that nothing follows from:

    a band of a call     pitch 272  lo -128  hi 16  origin 1          compiled for     pitch 16  lo 3  hi 3  origin 3

`launch` asks Triton for the variant each time, which takes tens of microseconds; `launch_known` and recorded calls (replay.py) keep
it (core/launches.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core import launches, variants
from ...core.launches import INTERPRETED, describe_variant, find_known, find_launch
from .structs import NOT_SPECIALISED

__all__ = [
    "INTERPRETED", "Launch", "compile_kernel", "describe_variant", "find_known", "find_launch", "launch", "launch_first", "launch_known",
    "trailing_arguments", "typical_argument",
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


def launch_first(device: torch.device, run: Callable[[], object]) -> Launch:
    """`launch` for a call's first run: where a kernel is new, all that run() launches are compiled side by side."""
    if INTERPRETED or device.type != "cuda":
        return launch

    def compile_and_launch(kernel, programs: int, *args, **constants) -> None:
        typical = [typical_argument(*pair) for pair in zip(kernel.params, args, strict=False)]
        variants.compile_first(device, kernel, typical, constants, run)
        launch(kernel, programs, *args, **constants)

    return compile_and_launch


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
    """The compiled kernel for arguments like these, from Triton's caches if it is there; None where launches are recorded."""
    return launches.compile_kernel(kernel, args, constants, NOT_SPECIALISED)


def typical_argument(parameter, x):
    return launches.typical_argument(parameter, x, NOT_SPECIALISED)


def trailing_arguments(kernel, args: tuple, constants: dict) -> tuple:
    """The constants that are parameters of the kernel, in its order; the others are options of the compiler."""
    return tuple(constants[name] for name in kernel.arg_names[len(args) :])
