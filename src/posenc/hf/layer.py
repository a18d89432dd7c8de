"""Part and Layer: what every swapped attention layer can do.

A swap changes the class of one module to a subclass of its own, with the same parameters, buffers and hooks; nothing
is copied, so state_dict, deepcopy, pickle and training go on as before, and changing the class back undoes it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import Index, Plan, attend

logger = logging.getLogger("posenc.hf")


class Part(nn.Module):
    """Base of everything that is swapped. `original` is the class it stands in for."""

    original: type[nn.Module]

    if TYPE_CHECKING:  # the attributes are transformers'

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def refuses(module: Any) -> str | None:
        """Why this module cannot be swapped, or None."""
        return None

    def posenc_prepare(self) -> None:
        """Keep what does not change from call to call, in attributes named posenc_*; `restore` takes them away."""


class Layer(Part):
    """An attention layer."""

    encoding: str
    posenc_engine = "auto"

    def posenc_index_of(self) -> Index | None:
        """The index of its distances, where it does not follow the length; ValueError where there is none. Also asked of the
        original module, before it is swapped."""
        return None

    def posenc_prepare(self) -> None:
        self.posenc_index: Any = self.posenc_index_of()

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        """Heads, head size, plan and mask arguments of a typical call: what `report` asks the engines about."""
        raise NotImplementedError

    def posenc_run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, seen: dict[str, Any], dropout: float,
        blind: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, H, L, D] -> [B, L, H * D], dropout in training only.

        blind [B or 1, L]: queries that see nothing. All their scores are the same to the originals, which average the values.
        """
        out = attend(q, k, v, plan, dropout=dropout if self.training else 0.0, engine=self.posenc_engine, **seen)
        if blind is not None:
            out = torch.where(blind[:, None, :, None], v.mean(2, keepdim=True), out)
        return out.transpose(1, 2).flatten(2)


class NoAttentions:
    """output_attentions=False with something to say to the layers: it is false, and models hand it on as it is."""

    def __bool__(self) -> bool:
        return False


def split(projected: Tensor, size: int) -> Tensor:
    """[B, L, H * size] -> [B, H, L, size]."""
    return projected.unflatten(-1, (-1, size)).transpose(1, 2)


def against(other: Tensor, shift: Tensor, table: Tensor, scale: float) -> Tensor:
    """(other - shift)·table, scaled, [H, n]: queries carry `shift` already, a further bias vector is a difference."""
    with torch.autocast(table.device.type, enabled=False):
        precision = torch.promote_types(table.dtype, torch.float32)
        difference = other.to(precision) - shift.to(precision)
        return (table.to(precision) @ difference[:, :, None]).squeeze(-1) * scale


_said: set[str] = set()


def say(text: str) -> None:
    """Log a note once in a process."""
    if text not in _said and not torch.compiler.is_compiling():
        _said.add(text)
        logger.warning(text)
