"""Compile kernels for typical arguments, and launch them.

Triton compiles a variant of its own for each integer argument that is 1, or divisible by 16. For strides the second is needed
(loads of 16 bytes); lengths and bounds would only multiply the variants, so that a new length could cost seconds. Kernels are
therefore compiled for typical arguments, in which such integers have a value that nothing follows from:

    a band of a call     pitch 272  lo -128  hi 16  origin 1          compiled for     pitch 16  lo 3  hi 3  origin 3

Triton's own launch looks up its variant in tens of microseconds. `launch_known` keeps variants by what the caller knows to
matter, and calls the driver at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .structs import NOT_SPECIALISED

Launch = Callable[..., None]
"""launch(kernel, programs, *arguments, **constants)."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel, programs: int, *args, **constants) -> None:
    """kernel[(programs,)](*args, **constants)"""
    if INTERPRETED:
        kernel[(programs,)](*args, **constants)
        return
    compiled = compile_kernel(kernel, args, constants)
    if compiled is not None:  # None where launches are only recorded (tests/gpu/compiles.py)
        compiled[(programs, 1, 1)](*args, *trailing_arguments(kernel, args, constants))


def launch_known(key: tuple, kernel, programs: int, device: torch.device, args: tuple, **options) -> None:
    """launch, in a few microseconds from the second time on. key: everything on which the variant depends, `describe_variant`
    of strides and pointers included; options: of the compiler."""
    if INTERPRETED:
        kernel[(programs,)](*args, **options)
        return
    compiled = _variants.get(key)
    if compiled is None:
        compiled = compile_kernel(kernel, args, options)
        if compiled is None:
            return
        compiled._init_handles()
        if len(_variants) >= MOST_VARIANTS:
            _variants.clear()
        _variants[key] = compiled
    launch_compiled(compiled, programs, torch._C._cuda_getCurrentRawStream(device.index), args)


MOST_VARIANTS = 4096
_variants: dict[tuple, object] = {}


def launch_compiled(compiled, programs: int, stream: int, args: Sequence) -> None:
    """Launch a compiled kernel, whose handles exist (`compiled._init_handles()`), on a stream of the current device. args: all
    of its arguments, constants included. Triton's hooks for profilers are not called; CUDA's profilers see the launch."""
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def describe_variant(strides: Sequence[int], tensors: Sequence[Tensor | None]) -> object:
    """What Triton makes of strides and pointers: divisible by 16 or not, 32 bits or 64. True where all are 32 bits and
    divisible, as nearly always."""
    steps, addresses = 0, 0
    for stride in strides:
        steps |= stride
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    if not (steps | addresses) & 15 and steps < 1 << 31:
        return True
    aligned = [tensor is None or tensor.data_ptr() & 15 == 0 for tensor in tensors]
    return tuple([(stride & 15 == 0, stride < 1 << 31) for stride in strides]), tuple(aligned)


def compile_kernel(kernel, args: tuple, constants: dict):
    """The compiled kernel for arguments like these, from Triton's caches if it is there."""
    typical = [
        x if parameter.do_not_specialize or parameter.is_constexpr else make_typical(x)
        for parameter, x in zip(kernel.params, args, strict=False)
    ]
    return kernel.warmup(*typical, grid=(1,), **constants)


def trailing_arguments(kernel, args: tuple, constants: dict) -> tuple:
    """The constants that are parameters of the kernel, in its order; the others are options of the compiler."""
    return tuple(constants[name] for name in kernel.arg_names[len(args) :])


def make_typical(x, name: str = ""):
    """A value for which Triton compiles the variant that serves x. name: the field that x is."""
    if isinstance(x, tuple):
        return type(x)(*(make_typical(field, name) for name, field in zip(x._fields, x, strict=True)))  # type: ignore[attr-defined]
    if isinstance(x, int) and not isinstance(x, bool):
        wide = 0 if -(2**31) <= x < 2**31 else 2**33  # a kernel takes it as int32 or as int64
        return wide + (16 if x % 16 == 0 and name not in NOT_SPECIALISED else 3)
    return x
