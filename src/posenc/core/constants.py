"""Python numbers as tensors on a device, made once for each (numbers, dtype, device) and never changed.

A compiled graph on a GPU takes them by an operator that copies what was made: torch.tensor in it would be a copy from the CPU in
every call, which waits for the device and cannot be part of a CUDA graph.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from .functions import define_operator, is_exporting


def constant(values: tuple, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A 1-D tensor of `values`. Shared: do not write to it. Floats are float32 unless dtype is given."""
    if torch.compiler.is_compiling():
        if is_exporting() or not values or not is_copied(torch.device(device)):
            return torch.tensor(values, device=device, dtype=dtype)
        return (_floats if isinstance(values[0], float) else _integers)(values, device, dtype)
    return _made(values, type(values[0]).__name__ if values else "", torch.device(device), dtype)


def is_copied(device: torch.device) -> bool:
    """Whether numbers reach a device by a copy."""
    return device.type == "cuda"


def _copy_integers(values: Sequence[int], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return _made(tuple(values), "int", device, dtype).clone()


def _copy_floats(values: Sequence[float], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return _made(tuple(values), "float", device, dtype).clone()


_integers = define_operator("integers", _copy_integers)
_floats = define_operator("floats", _copy_floats)


@torch.library.register_fake("posenc::integers")
def _(values, device, dtype):
    return torch.empty(len(values), device=device, dtype=torch.int64 if dtype is None else dtype)


@torch.library.register_fake("posenc::floats")
def _(values, device, dtype):
    return torch.empty(len(values), device=device, dtype=torch.float32 if dtype is None else dtype)


@lru_cache(maxsize=512)
def _made(values: tuple, kind: str, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """`kind`: to a cache 1, 1.0 and True are the same."""
    if dtype is None and kind == "float":
        dtype = torch.float32
    if device.type == "cuda":
        # what this thread allocates may be the memory of a CUDA graph (mode="reduce-overhead"), which nothing may keep
        with ThreadPoolExecutor(1) as other:
            return other.submit(torch.tensor, values, device=device, dtype=dtype).result()
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(values, device=device, dtype=dtype)
