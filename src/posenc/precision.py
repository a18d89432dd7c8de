"""Where numbers must keep their digits whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch

NOTHING = nullcontext()


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Turns autocast off inside, where it is on."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return NOTHING
    return torch.autocast(kind, enabled=False)
