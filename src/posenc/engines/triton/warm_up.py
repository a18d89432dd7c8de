"""Compile a model's kernels ahead of its first step, in parallel processes.

model(*inputs) with launches left out   ─▶  which kernels, for which typical arguments (launcher.py)
each in a process of its own            ─▶  Triton's cache on disk, where the first step finds them
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.memo import Memo


class Pointer(NamedTuple):
    """What Triton reads of a tensor: dtype and whether its address is divisible by 16."""

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


class Kernel(NamedTuple):
    module: str
    name: str
    arguments: tuple
    constants: tuple[tuple[str, Any], ...]


def warm_up(
    function: Callable, *inputs, processes: int | None = None, progress: bool = True, **options
) -> list[tuple[str, float]]:
    """Compile every kernel that function(*inputs, **options) launches, and those of its gradients if it has any.

        posenc.warm_up(model, input_ids, attention_mask=mask)        before the first step, or when a server starts

    function    a model, a layer, or a function that calls them
    inputs      as in a step; the sizes hardly matter, as kernels serve every length, but dtypes and masks do
    processes   that compile side by side: as many as there are cores, at most 8

    Nothing is computed: kernels are found and left out. Parameters, their gradients, buffers of statistics aside, and the
    random numbers of the next step are as before. Returns (kernel, seconds) for each; [] on a CPU.

    Raises what the function raises.

        >>> layer = posenc.Attention(32, 2, encoding="t5")
        >>> posenc.warm_up(layer, torch.randn(1, 8, 32))  # x [B, L, d_model], on a CPU
        []
    """
    from . import launcher

    found: dict[Kernel, None] = {}
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    with _recording(launcher, found):
        outputs = [x for x in _tensors(function(*inputs, **options)) if x.requires_grad]
        if outputs:
            leaves = [x for x in _leaves(function, (inputs, options)) if x.requires_grad]
            torch.autograd.grad([x.float().sum() for x in outputs], leaves, allow_unused=True)
    torch.random.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    return list(_compile_all(list(found), processes or min(os.cpu_count() or 1, 8), progress)) if found else []


@contextmanager
def _recording(launcher, found: dict[Kernel, None]) -> Iterator[None]:
    """Launches are recorded and left out; calls take none of what was prepared before, and leave nothing behind."""
    from .. import known_calls
    from . import prepared, replay

    def record(kernel, args: tuple, constants: dict) -> None:
        arguments = tuple(
            _described(launcher.typical_argument(p, x)) for p, x in zip(kernel.params, args, strict=False)
        )
        found[Kernel(kernel.__module__, kernel.__name__, arguments, tuple(constants.items()))] = None

    compile_kernel, kept = launcher.compile_kernel, (known_calls._known, prepared._calls, replay._programs)
    launcher.compile_kernel = record
    known_calls._known, prepared._calls, replay._programs = Memo(64, 64), Memo(64, 64), {}
    try:
        yield
    finally:
        launcher.compile_kernel = compile_kernel
        known_calls._known, prepared._calls, replay._programs = kept


def _described(x):
    """Pickled and hashed, and the same to Triton."""
    if isinstance(x, Tensor):
        return Pointer(x.dtype, x.data_ptr() & 15)
    if type(x).__name__ == "TensorDescriptor":
        return Blocks(_described(x.base), tuple(x.block_shape), x.layout)
    if isinstance(x, tuple):
        return type(x)(*map(_described, x))
    return x


def _compile_all(kernels: list[Kernel], processes: int, progress: bool) -> Iterator[tuple[str, float]]:
    device = torch.cuda.current_device()
    context = get_context("spawn")  # a forked process could not use CUDA
    with ProcessPoolExecutor(min(processes, len(kernels)), mp_context=context) as pool:
        jobs = {pool.submit(_compile, kernel, device): kernel for kernel in kernels}
        for number, job in enumerate(as_completed(jobs), 1):
            seconds = job.result()
            if progress:
                ends = "\n" if number == len(jobs) else ""
                print(f"\rposenc: {number} of {len(jobs)} kernels compiled", end=ends, flush=True)
            yield jobs[job].name, seconds


def _compile(kernel: Kernel, device: int) -> float:
    import time

    began = time.perf_counter()
    torch.cuda.set_device(device)
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    arguments = [x.restore() if isinstance(x, Blocks) else x for x in kernel.arguments]
    function.warmup(*arguments, grid=(1,), **dict(kernel.constants))
    return time.perf_counter() - began


def _tensors(x) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from _tensors(value)
    elif isinstance(x, (tuple, list)):
        for value in x:
            yield from _tensors(value)


def _leaves(function: Callable, inputs) -> list[Tensor]:
    own = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    return [*own, *(x for x in _tensors(inputs) if x.is_leaf)]
