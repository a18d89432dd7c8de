"""Bounded caches of tensors, shared by threads and not used in traced code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .torch_modes import has_fake_tensors


class Memo:
    """A least-recently-used cache of at most `most` results with `numbers` elements in all.

    Reads take no lock; threads that miss at the same time each compute the result, and one of them is kept.
    """

    def __init__(self, most: int, numbers: int):
        self.most, self.numbers = most, numbers
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> Any:
        """The kept result, or None."""
        found = self._entries.get(key)
        if found is None:
            return None
        try:  # noqa: SIM105  contextlib takes longer
            self._entries.move_to_end(key)
        except KeyError:  # another thread has evicted it
            pass
        return found[0]

    def put(self, key: Hashable, result: Any, numbers: int) -> None:
        if numbers * 2 > self.numbers:
            return  # it would evict most of the others
        with self._lock:
            old = self._entries.pop(key, None)
            self._held += numbers - (0 if old is None else old[1])
            self._entries[key] = result, numbers
            while self._held > self.numbers or len(self._entries) > self.most:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._held -= dropped

    def find_or_make(self, key: Hashable, make: Callable[[], Any], numbers: Callable[[Any], int]) -> Any:
        """The kept result, or make(), which is kept for every mode. numbers(result): its elements."""
        found = self.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = make()
            self.put(key, found, numbers(found))
        return found

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._held = 0

    def __len__(self) -> int:
        return len(self._entries)


def may_keep(device: torch.device) -> bool:
    """Whether tensors made now are plain ones that may outlive the call: not while tracing, inside torch.func, with fake
    tensors, or while a CUDA graph is captured, which reuses its memory."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if has_fake_tensors():
        return False
    kind = device.type
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_current_stream_capturing())


STEP = 1024
"""Rows of runs are made in aligned blocks of this many, so that the next decoding steps find theirs."""


def rows_of_run(
    memo: Memo, start: int, length: int, key: tuple, width: int, make: Callable[[int, int], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """make(start, length), tensors whose second to last axis are the rows start .. start + length - 1, kept in `memo`.

    key: what else the rows depend on; width: elements of a row in all tensors. The results are shared: do not write to them.
    """
    own = (start, length, *key)
    found = memo.get(own)
    if found is not None:
        return found
    first, last = start // STEP * STEP, -(-(start + length) // STEP) * STEP
    whole = memo.get((first, last - first, *key))
    if whole is None:
        with torch.inference_mode(False), torch.no_grad():
            if 2 * (last - first) * width > memo.numbers:  # would not be kept
                return make(start, length)
            whole = make(first, last - first)
        memo.put((first, last - first, *key), whole, (last - first) * width)
    found = tuple([x.narrow(-2, start - first, length) for x in whole])
    memo.put(own, found, 0)
    return found
