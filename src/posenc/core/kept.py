"""What is made once and used again: bounded in number and size, shared by threads, never in code that is traced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import torch
from torch import Tensor


class Kept:
    """The latest results by key, up to `most` of them with `numbers` numbers in all.

    Reading takes no lock; threads that miss at once each make their own result, and one of them is kept.
    """

    def __init__(self, most: int, numbers: int):
        self.most, self.numbers = most, numbers
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> Any:
        """What was kept, or None."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def put(self, key: Hashable, result: Any, numbers: int) -> None:
        if numbers * 2 > self.numbers:
            return  # it would drive out most of the others
        with self._lock:
            old = self._entries.pop(key, None)
            self._held += numbers - (0 if old is None else old[1])
            self._entries[key] = result, numbers
            while self._held > self.numbers or len(self._entries) > self.most:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._held -= dropped

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._held = 0

    def __len__(self) -> int:
        return len(self._entries)


def may_keep(device: torch.device) -> bool:
    """Whether tensors made now are plain ones that may outlive the call: not while tracing, inside torch.func, with fake
    tensors, or while a CUDA graph is captured, whose memory is its own."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    kind = device.type
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_current_stream_capturing())


def make_plain(make: Callable[[], Any]) -> Any:
    """Make tensors that autograd may save later, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


def count_numbers(*tensors: Tensor) -> int:
    return sum(tensor.numel() for tensor in tensors)
