"""Helpers for PyTorch's modes: autograd functions, torch.compile, torch.export and torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .precision import keep_dtypes


def pack_tensors(inputs: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int]]:
    """The tensors that are not None, and their numbers: operators take no None in a list."""
    present = [number for number, tensor in enumerate(inputs) if tensor is not None]
    return [inputs[number] for number in present], present  # type: ignore[misc]


def unpack_tensors(tensors: Sequence[Tensor], present: Sequence[int], count: int) -> list[Tensor | None]:
    """The `count` inputs that `pack_tensors` was given."""
    given = dict(zip(present, tensors, strict=True))
    return [given.get(number) for number in range(count)]


def apply_function(function: type[torch.autograd.Function], *inputs):
    """function.apply(*inputs), with less overhead. PyTorch inspects the signature of a function with `setup_context` at every
    call, which can take longer than the forward pass; only torch.func and torch.compile need that form."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    return _with_context(function).apply(*inputs)


def direct_apply(function: type[torch.autograd.Function]) -> Callable:
    """function.apply for eager code outside of torch.func: PyTorch's own looks at each argument first, for torch.func."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def first_derivatives_only(backward: Callable) -> Callable:
    """A backward that keeps its dtypes under autocast, and whose results raise where they are differentiated again. PyTorch's
    `once_differentiable` marks them with leaves of its own, so `torch.autograd.grad`, which visits only what leads to its inputs, takes
    them for constants, in silence.

    The marked results depend on the incoming gradients, the saved tensors and those in ctx.more, which it is enough to set where
    the gradient depends on an input that is not saved.
    """
    backward = keep_dtypes(backward)

    @wraps(backward)
    def call(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        inputs = [
            x for x in (*grads, *ctx.saved_tensors, *getattr(ctx, "more", ())) if x is not None and x.requires_grad
        ]
        found = [x for x in results if x is not None]
        marked = iter(_FirstDerivatives.apply(len(inputs), *inputs, *found))
        return tuple([None if x is None else next(marked) for x in results])

    return call


class _FirstDerivatives(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([x.clone() for x in tensors[count:]])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "fused attention has first derivatives only; for second ones use engine='reference', or plain operations"
        )


@cache
def _with_context(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same function in the form whose forward takes ctx."""

    class Direct(function):  # type: ignore[misc, valid-type]
        setup_context = staticmethod(torch.autograd.Function.setup_context)

        @staticmethod
        def forward(ctx, *inputs):
            output = function.forward(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

    Direct.__name__ = Direct.__qualname__ = function.__name__
    return Direct


has_fake_tensors: Callable[[], object | None] = partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
)
"""FakeTensorMode, or None: whether eager code runs with tensors that have no values. Nothing can be read then, and what is made must
not be kept. Each step of decoding asks, so it is no function of Python. Compiled code asks torch.compiler.is_compiling() first."""


def is_exporting() -> bool:
    """Whether this call is traced for a program that runs elsewhere (torch.export, ONNX), where the operators of the engines
    do not exist and lengths are symbolic, or runs with fake tensors. Before PyTorch 2.13, torch.compiler.is_exporting() is also
    True under torch.compile, so the flag itself is read."""
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return True
    return not torch.compiler.is_compiling() and has_fake_tensors() is not None


F = TypeVar("F", bound=Callable)
P = ParamSpec("P")
R = TypeVar("R")


def call_like(forward: Callable[P, R]) -> Callable[[Callable[..., Any]], Callable[P, R]]:
    """Gives a layer's `__call__` the types of its `forward`, for type checkers: nn.Module declares that it returns Any."""
    return lambda call: call


def cache_in_eager_mode(maxsize: int) -> Callable[[F], F]:
    """lru_cache, except that torch.compile traces the function itself: it would ignore the cache, with a warning."""

    def decorate(function: F) -> F:
        cached = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*arguments):
            return function(*arguments) if torch.compiler.is_compiling() else cached(*arguments)

        return call  # type: ignore[return-value]

    return decorate


def transform_reason(*, plain_grad: bool = False) -> str | None:
    """Why a call inside torch.func or forward-mode differentiation cannot use fused attention, or None.

    PyTorch's own attention supports one torch.func.grad (`plain_grad`); the operators of the engines have gradients outside
    of torch.func only.
    """
    eager = not torch.compiler.is_compiling()
    forward_mode = eager and forward_ad._current_level >= 0
    if not forward_mode and not torch._C._are_functorch_transforms_active():
        return None
    if eager and plain_grad and not forward_mode:
        if [x.key().name for x in torch._C._functorch.get_interpreter_stack() or ()] == ["Grad"]:
            return None
    return (
        "fused attention does not support torch.func (vmap, grad, jvp, jacrev, ...) or forward-mode differentiation; "
        "the reference engine does"
    )
