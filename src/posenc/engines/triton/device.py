"""What every launch asks of PyTorch: the device, its compute capability, and whether operators are traced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor, nn

NO_CONTEXT = nullcontext()


def is_traced(x: Tensor) -> bool:
    """Whether torch.compile, a dispatch mode or a tensor subclass must meet one operator instead of separate launches."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return type(x) not in (Tensor, nn.Parameter)


def define_operator(name: str, function: Callable):
    """torch.ops.posenc.<name>: a function that changes none of its arguments. torch.library.custom_op compares the memory of all
    arguments and results at every call, which takes longer than the function."""
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"posenc::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"posenc::{name}", "CompositeExplicitAutograd", function)
    return getattr(torch.ops.posenc, name).default


def launch_on(x: Tensor):
    """A context in which kernels are launched on the tensor's device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return NO_CONTEXT
    return torch.cuda.device(x.device)


def capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability, cached: PyTorch's own call takes microseconds."""
    return torch.cuda.get_device_capability(device) if torch.compiler.is_compiling() else _capability(device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
