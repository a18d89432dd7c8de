"""Compile a model's kernels ahead of its first step, in parallel processes.

processes start, and load what they need          meanwhile
model(*inputs) with launches left out   ─▶  which kernels, for which typical arguments (launcher.py)
each in one of the processes            ─▶  Triton's cache on disk, where the first step finds them
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.memo import Memo


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
    # they load PyTorch and Triton while the kernels are found
    children = _start(processes or min(os.cpu_count() or 1, 8)) if torch.cuda.is_available() else []
    try:
        _find_kernels(launcher, found, function, inputs, options)
        return list(_compile_all(list(found), children, progress)) if found else []
    finally:
        _end(children)


def _find_kernels(launcher, found: dict[Kernel, None], function: Callable, inputs: tuple, options: dict) -> None:
    """Those of function(*inputs, **options) and of its gradients."""
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    with _recording(launcher, found):
        outputs = [x for x in _tensors(function(*inputs, **options)) if x.requires_grad]
        if outputs:
            leaves = [x for x in _leaves(function, (inputs, options)) if x.requires_grad]
            torch.autograd.grad([x.float().sum() for x in outputs], leaves, allow_unused=True)
    torch.random.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


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
    launcher.compile_kernel, steps = record, known_calls._steps
    known_calls._known, prepared._calls, replay._programs, known_calls._steps = Memo(64, 64), Memo(64, 64), {}, {}
    try:
        yield
    finally:
        launcher.compile_kernel = compile_kernel
        known_calls._known, prepared._calls, replay._programs = kept
        known_calls._steps = steps


def _described(x):
    """Pickled and hashed, and the same to Triton."""
    if isinstance(x, Tensor):
        return Pointer(x.dtype, x.data_ptr() & 15)
    if type(x).__name__ == "TensorDescriptor":
        return Blocks(_described(x.base), tuple(x.block_shape), x.layout)
    if isinstance(x, tuple):
        return type(x)(*map(_described, x))
    return x


def _start(processes: int) -> list[subprocess.Popen]:
    """Processes of this module (`python -m`): those of multiprocessing would run the caller's script once more."""
    path = os.pathsep.join(part for part in sys.path if part)
    command, environment = (
        [sys.executable, "-m", __name__, str(torch.cuda.current_device())],
        {**os.environ, "PYTHONPATH": path},
    )
    return [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) for _ in range(processes)
    ]  # fmt: skip


def _end(children: list[subprocess.Popen]) -> None:
    for child in children:
        child.kill()  # it waits for a kernel, or compiles one that nobody waits for
        with contextlib.suppress(OSError), child:
            pass


def _compile_all(
    kernels: list[Kernel], children: list[subprocess.Popen], progress: bool
) -> Iterator[tuple[str, float]]:
    jobs = sorted(kernels, key=lambda kernel: len(repr(kernel.arguments)))  # the last first, which takes longest
    done: SimpleQueue = SimpleQueue()

    def work(child: subprocess.Popen) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while jobs:
                kernel = jobs.pop()
                pickle.dump(kernel, child.stdin)
                child.stdin.flush()
                done.put((kernel.name, pickle.load(child.stdout)))
        except (
            EOFError,
            OSError,
            ValueError,
            IndexError,
            pickle.PickleError,
        ) as error:  # ValueError: `_end` came first
            if not isinstance(error, IndexError):  # another thread took the last one
                done.put(("", f"a process that compiles has ended: {error!r}"))

    for child in children:
        Thread(target=work, args=(child,), daemon=True).start()
    for number in range(1, len(kernels) + 1):
        name, taken = done.get()
        if not isinstance(taken, float):
            raise RuntimeError(f"warm_up could not compile {name}: {taken}")
        if progress:
            ends = "\n" if number == len(kernels) else ""
            print(f"\rposenc: {number} of {len(kernels)} kernels compiled", end=ends, flush=True)
        yield name, taken


def main() -> None:
    """Kernels from the standard input, each answered by the seconds that it took, or by an error's text."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not be among the answers
    device = int(sys.argv[1])
    with contextlib.suppress(Exception):  # ahead of the first kernel, which would raise it again
        torch.cuda.set_device(device)
        importlib.import_module("posenc.engines.triton.prepared")
    while True:
        try:
            kernel = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: float | str = _compile(kernel, device)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


def _compile(kernel: Kernel, device: int) -> float:
    from triton.runtime import driver

    began = time.perf_counter()
    torch.cuda.set_device(device)
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    arguments = [x.restore() if isinstance(x, Blocks) else x for x in kernel.arguments]
    compiled = function.warmup(*arguments, grid=(1,), **dict(kernel.constants))
    driver.active.launcher_cls(compiled.src, compiled.metadata)  # before Triton 3.7 C code, compiled and cached too
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


if __name__ == "__main__":
    main()
