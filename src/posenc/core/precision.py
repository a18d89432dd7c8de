"""Code that must keep its precision under autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import torch

NOTHING = nullcontext()


def autocast_is_on(device: torch.device) -> bool:
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Disable autocast inside, where it is on."""
    return torch.autocast(device.type, enabled=False) if autocast_is_on(device) else NOTHING


def keep_dtypes(backward: Callable) -> Callable:
    """A backward of an autograd function that multiplies in the dtypes of its forward pass, also where it is called under autocast."""

    @wraps(backward)
    def call(ctx, *grads):
        if not torch._C._is_any_autocast_enabled():
            return backward(ctx, *grads)
        device = next((grad.device for grad in grads if grad is not None), torch.device("cpu"))
        with no_autocast(device):
            return backward(ctx, *grads)

    return call
