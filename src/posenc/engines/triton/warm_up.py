"""Compile a model's kernels ahead of its first step: model(*inputs) with launches left out, then a thread for each kernel (core/variants.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core import variants
from ...core.memo import Memo


def warm_up(
    function: Callable, *inputs, threads: int | None = None, progress: bool = True, **options
) -> list[tuple[str, float]]:
    """Compile every kernel that function(*inputs, **options) launches, and those of its gradients if it has any.

        posenc.warm_up(model, input_ids, attention_mask=mask)        before the first step, or when a server starts

    function    a model, a layer, or a function that calls them
    inputs      as in a step; the sizes hardly matter, as kernels serve every length, but dtypes and masks do
    threads     that compile side by side: as many as there are cores, at most 8

    Nothing is computed: kernels are found and left out. Parameters, their gradients, buffers of statistics aside, and the
    random numbers of the next step are as before. Returns (kernel, seconds) for each; [] on a CPU.

    Without it the first call of a layer compiles its kernels of both passes side by side, and the next kind of layer its own.

    Raises what the function raises, and RuntimeError for a kernel that does not compile.

        >>> layer = posenc.Attention(32, 2, encoding="t5")
        >>> posenc.warm_up(layer, torch.randn(1, 8, 32))  # x [B, L, d_model], on a CPU
        []
    """
    with _without_records(), variants.record_variants(everywhere=True) as found:
        _run(function, inputs, options)
    compiled: list[tuple[str, float]] = []
    if found:
        for name, taken in variants.compile_all(list(found), torch.cuda.current_device(), threads):
            if isinstance(taken, Exception):
                raise RuntimeError(f"warm_up could not compile {name}: {type(taken).__name__}: {taken}") from taken
            compiled.append((name, taken))
            if progress:
                ends = "\n" if len(compiled) == len(found) else ""
                print(f"\rposenc: {len(compiled)} of {len(found)} kernels compiled", end=ends, flush=True)
    return compiled


def _run(function: Callable, inputs: tuple, options: dict) -> None:
    """function(*inputs, **options) and its gradients."""
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    outputs = [x for x in _tensors(function(*inputs, **options)) if x.requires_grad]
    if outputs:
        leaves = [x for x in _leaves(function, (inputs, options)) if x.requires_grad]
        torch.autograd.grad([x.float().sum() for x in outputs], leaves, allow_unused=True)
    torch.random.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


@contextmanager
def _without_records() -> Iterator[None]:
    """Calls take none of what was prepared before, and leave nothing behind."""
    from .. import known_calls
    from . import prepared, replay

    kept, steps = (known_calls._known, prepared._calls, replay._programs), known_calls._steps
    known_calls._known, prepared._calls, replay._programs, known_calls._steps = Memo(64, 64), Memo(64, 64), {}, {}
    try:
        yield
    finally:
        known_calls._known, prepared._calls, replay._programs = kept
        known_calls._steps = steps


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
