"""What every launch asks: whether an operator must stand for it, and on which device it runs."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn


def is_traced(x: Tensor) -> bool:
    """Whether something traces or watches operators, so that it should see one instead of launches."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return type(x) not in (Tensor, nn.Parameter)


def launch_on(x: Tensor):
    """Launches go to the tensor's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
