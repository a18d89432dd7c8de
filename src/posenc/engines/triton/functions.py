"""Functions and operators, called with little of the host's time."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor, nn


def traced(x: Tensor) -> bool:
    """Whether something traces or watches operators, so that it should see one instead of launches."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return type(x) not in (Tensor, nn.Parameter)


def on(x: Tensor):
    """Launches go to the tensor's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def quick(function: type[torch.autograd.Function], *inputs):
    """function.apply(*inputs). PyTorch looks at the signature of a function with `setup_context` at every call, which takes
    longer than many a forward pass; only torch.func needs that form."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    return _direct(function).apply(*inputs)


@cache
def _direct(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    class Direct(function):
        setup_context = staticmethod(torch.autograd.Function.setup_context)

        @staticmethod
        def forward(ctx, *inputs):
            output = function.forward(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

    Direct.__name__ = Direct.__qualname__ = function.__name__
    return Direct
