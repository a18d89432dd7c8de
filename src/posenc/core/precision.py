"""Code that must keep its precision under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch

NOTHING = nullcontext()


def autocast_is_on(device: torch.device) -> bool:
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Disable autocast inside, where it is on."""
    return torch.autocast(device.type, enabled=False) if autocast_is_on(device) else NOTHING
