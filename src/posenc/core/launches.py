"""Launch compiled Triton kernels again in a few microseconds; Triton's own launch takes tens of them to find the variant.

launch_known(key, compile, programs, device, args)     key: everything on which the variant depends
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MOST = 4096
NOTHING = nullcontext()
_variants: dict[tuple, tuple[Callable, tuple]] = {}


def launch_known(key: tuple, compile: Callable, programs: int, device: torch.device, args: Sequence) -> None:
    """Launch what compile() returned for this key the first time, on the current stream of `device`, the current device.
    key: the kernel's name, the device, dtypes, constants, options, and `describe_variant` of strides and pointers."""
    known = _variants.get(key)
    if known is None:
        compiled = compile()
        if compiled is None:  # where launches are only recorded (tests/gpu/compiles.py)
            return
        compiled._init_handles()
        if len(_variants) >= MOST:
            _variants.clear()
        known = _variants[key] = find_launch(compiled)
    run, between = known
    run(programs, 1, 1, torch._C._cuda_getCurrentRawStream(device.index), *between, *args)


def find_known(key: tuple) -> tuple[Callable, tuple] | None:
    """The launch (`find_launch`) that launch_known keeps under a key, or None."""
    return _variants.get(key)


def find_launch(compiled) -> tuple[Callable, tuple]:
    """(run, between) for run(programs, 1, 1, stream, *between, *args). Triton 3.6 allocates scratch memory in Python at each
    launch; a kernel that needs none is launched by the compiled launcher directly."""
    run: Any = compiled.run
    between: tuple = (compiled.function, compiled.packed_metadata, None, None, None)
    code = getattr(type(run).__call__, "__code__", None)
    if getattr(code, "co_varnames", ())[:7] == LAUNCHER_OF_3_6 and not (
        run.global_scratch_size or run.profile_scratch_size
    ):
        between = (between[0], run.launch_cooperative_grid, run.launch_pdl, None, None, *between[1:])
        run = run.launch
    return run, between


LAUNCHER_OF_3_6 = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")
"""The parameters by which its Python launcher is recognised. Triton's own profiler hooks are then not called; CUDA's
profilers see the launch."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return find_spec("triton") is not None


def on_device(device: torch.device):
    """A context in which kernels are launched on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(device)


def find_allocation(device: torch.device) -> Callable | None:
    """allocate(size, stride, dtype) of memory on the current device, a CUDA device: what Inductor's programs call, without PyTorch's
    dispatcher, at a third of the price of torch.empty; None elsewhere, and where a release has none."""
    if device.type != "cuda":
        return None
    return getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def describe_variant(strides: Sequence[int], tensors: Sequence[Tensor | None]) -> object:
    """What Triton specialises on: whether strides and pointers are divisible by 16, and 32 or 64 bits wide. True in the usual
    case that all are 32 bits and divisible."""
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


def compile_kernel(kernel, args: tuple, options: dict, not_specialised: frozenset[str] = frozenset()):
    """The compiled kernel for arguments like these, from Triton's caches if it is there; None where launches are recorded."""
    typical = [typical_argument(*pair, not_specialised) for pair in zip(kernel.params, args, strict=False)]
    record = _find_record()
    if record is not None:
        return record(kernel, typical, options)
    return kernel.warmup(*typical, grid=(1,), **options)


_records_of_all: dict[str, Callable[..., None]] = {}
_record_of_thread = threading.local()


@contextmanager
def recording(record: Callable[..., None], everywhere: bool = False) -> Iterator[None]:
    """In it nothing is compiled or launched: record(kernel, typical arguments, options) for each launch of this thread; everywhere: of
    autograd's threads too, and of any other."""
    places = _records_of_all if everywhere else _record_of_thread.__dict__
    places["record"] = record
    try:
        yield
    finally:
        del places["record"]


def is_recording() -> bool:
    return _find_record() is not None


def _find_record() -> Callable[..., None] | None:
    return _records_of_all.get("record") or getattr(_record_of_thread, "record", None)


def typical_argument(parameter, x, not_specialised: frozenset[str] = frozenset()):
    """An argument for which Triton compiles the variant that serves x. not_specialised: fields of tuples of which it need not
    know whether they are divisible by 16."""
    return x if parameter.is_constexpr else make_typical(x, not parameter.do_not_specialize, not_specialised)


def make_typical(x, divisible: bool = True, not_specialised: frozenset[str] = frozenset()):
    if isinstance(x, tuple):
        fields = zip(x._fields, x, strict=True)  # type: ignore[attr-defined]
        return type(x)(*(make_typical(field, name not in not_specialised, not_specialised) for name, field in fields))
    if isinstance(x, int) and not isinstance(x, bool):
        return typical_integer(x, divisible)
    return 1.0 if isinstance(x, float) else x


def typical_integer(x: int, divisible: bool = True) -> int:
    """An integer for which Triton compiles the variant that serves x: it specialises on 1 and on multiples of 16."""
    wide = 0 if -(2**31) <= x < 2**31 else 2**33  # a kernel takes it as int32 or as int64
    return wide + (16 if divisible and x % 16 == 0 else 3)
