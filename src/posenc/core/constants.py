"""Constant tensors on a device, made once for each (values, dtype, device) and never written to."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from .torch_modes import has_fake_tensors


def constant(values: tuple, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A 1-D tensor of `values`. Shared: do not write to it. Floats are float32 unless dtype is given."""
    if torch.compiler.is_compiling() or has_fake_tensors():
        return torch.tensor(values, device=device, dtype=dtype)
    return _made(values, type(values[0]).__name__ if values else "", torch.device(device), dtype)


@lru_cache(maxsize=512)
def _made(values: tuple, kind: str, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """`kind` tells 1, 1.0 and True apart, which are equal as keys."""
    if dtype is None and kind == "float":
        dtype = torch.float32
    if device.type == "cuda":
        # memory that this thread allocates may belong to a CUDA graph (mode="reduce-overhead"), which reuses it; that of
        # another thread does not
        with ThreadPoolExecutor(1) as other:
            return other.submit(torch.tensor, values, device=device, dtype=dtype).result()
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(values, device=device, dtype=dtype)
