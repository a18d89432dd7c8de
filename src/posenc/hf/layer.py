"""Part and Layer: the base classes of everything that `accelerate` swaps.

A swap changes the class of one module to a subclass, with the same parameters, buffers and hooks. Nothing is copied, so
state_dict, deepcopy, pickle and training work as before, and changing the class back undoes the swap.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import Index, Plan, attend

logger = logging.getLogger("posenc.hf")


class Part(nn.Module):
    """Base of every swapped module. `original` is the class that it replaces."""

    original: type[nn.Module]

    if TYPE_CHECKING:  # the attributes are transformers'

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def refuses(module: Any) -> str | None:
        """Why this module cannot be swapped, or None."""
        return None

    def posenc_prepare(self) -> None:
        """Store what is the same for every call in attributes named posenc_*; `restore` deletes them."""


class Layer(Part):
    """An attention layer."""

    encoding: str
    posenc_engine = "auto"

    def posenc_index_of(self) -> Index | None:
        """The index of its distances where it does not depend on the length; ValueError where none exists. `accelerate` also
        calls it with the original module, before the swap."""
        return None

    def posenc_prepare(self) -> None:
        self.posenc_index: Any = self.posenc_index_of()

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        """Heads, head size, plan and mask options of a typical call, for `report`."""
        raise NotImplementedError

    def posenc_run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, options: dict[str, Any], dropout: float,
        fully_masked: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, H, L, D] -> [B, L, H * D], dropout in training only.

        fully_masked [B or 1, L]: queries without a visible key. The originals give all their keys one score, so the output
        is the mean of the values.
        """
        out = attend(q, k, v, plan, dropout=dropout if self.training else 0.0, engine=self.posenc_engine, **options)
        if fully_masked is not None:
            out = torch.where(fully_masked[:, None, :, None], v.mean(2, keepdim=True), out)
        return out.transpose(1, 2).flatten(2)


class NoAttentions:
    """output_attentions=False that carries arguments to the layers: it is false, and models pass it on unchanged."""

    def __bool__(self) -> bool:
        return False


def split(projected: Tensor, size: int) -> Tensor:
    """[B, L, H * size] -> [B, H, L, size]."""
    return projected.unflatten(-1, (-1, size)).transpose(1, 2)


_logged: set[str] = set()


def log_once(text: str) -> None:
    """Log a warning once in a process."""
    if text not in _logged and not torch.compiler.is_compiling():
        _logged.add(text)
        logger.warning(text)
