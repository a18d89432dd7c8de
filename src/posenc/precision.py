"""Where numbers must keep their digits whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Turns autocast off inside, where it is on."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
