"""Python numbers as tensors on a device, made once for each (numbers, dtype, device) and never changed."""

from functools import lru_cache

import torch
from torch import Tensor


def constant(values: tuple, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A 1-D tensor of `values`. Shared: do not write to it. Floats are float32 unless dtype says otherwise."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, device=device, dtype=dtype)
    return _made(values, torch.device(device), dtype)


@lru_cache(maxsize=512)
def _made(values: tuple, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    if dtype is None and values and isinstance(values[0], float):
        dtype = torch.float32
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(values, device=device, dtype=dtype)
