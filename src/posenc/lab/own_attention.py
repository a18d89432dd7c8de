"""Layers for attention of its own, which is no encoding of `posenc.Attention`: the functions of posenc.contextual, and latent attention.

cope[:counts=64]                      a table of counts for each layer
stick_breaking[:include_current=true]
path                                  w and β are projections of the input, as in its paper (without its convolution)
latent[:kv_rank=128]                  LatentAttention, half of each head rotated
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import posenc

from ..core.errors import OptionError
from ..core.options import require_bool, require_int
from ..encodings.registry import OWN_ATTENTION

MOST_COUNTS = 1 << 16


class Positional(nn.Module):
    """What a layer learns for its positions alone; the lab gives these parameters their own learning rate."""


class ContextualLayer(nn.Module):
    """Projections as in `posenc.Attention`, around a function of posenc.contextual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        q, k, v = (self.split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(x, q, k, v, masks).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """[B, L, width] -> [B, H, L, D]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError


class CountsTable(Positional):
    def __init__(self, counts: int, size: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(counts, size))


class Cope(ContextualLayer):
    def __init__(self, width: int, heads: int, counts: int = 64):
        super().__init__(width, heads)
        self.position = CountsTable(require_int("counts", counts, least=2, most=MOST_COUNTS), width // heads)

    def attend(self, x, q, k, v, masks):
        return posenc.contextual.cope(q, k, v, self.position.table.to(q.dtype), **masks)


class StickBreaking(ContextualLayer):
    def __init__(self, width: int, heads: int, include_current: bool = False):
        super().__init__(width, heads)
        self.include_current = require_bool("include_current", include_current)

    def attend(self, x, q, k, v, masks):
        return posenc.contextual.stick_breaking(q, k, v, include_current=self.include_current, **masks)[0]


class Reflections(Positional):
    """w and β of each token: directions start from the seed, β at 1, where a matrix takes a direction out."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.w_proj, self.beta_proj = nn.Linear(width, width, bias=False), nn.Linear(width, heads)
        nn.init.zeros_(self.beta_proj.weight)
        nn.init.zeros_(self.beta_proj.bias)


class Path(ContextualLayer):
    def __init__(self, width: int, heads: int):
        super().__init__(width, heads)
        self.position = Reflections(width, heads)

    def attend(self, x, q, k, v, masks):
        w = nn.functional.normalize(self.split(self.position.w_proj(x)).float(), dim=-1).to(q.dtype)
        beta = 2.0 * self.position.beta_proj(x).float().sigmoid().transpose(1, 2)
        return posenc.contextual.path(q, k, v, w, beta, **masks)


def make_latent(width: int, heads: int, **options: Any) -> posenc.LatentAttention:
    size = width // heads
    rotated = size // 4 * 2 or 2  # half of a head, in pairs
    sizes = {"kv_rank": 2 * size, "nope_dim": max(1, size - rotated), "rope_dim": rotated, "v_dim": size}
    return posenc.LatentAttention(width, heads, **{**sizes, **options})


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "cope": Cope,
    "stick_breaking": StickBreaking,
    "path": Path,
    "latent": make_latent,
}
assert LAYERS.keys() == OWN_ATTENTION.keys()


def build(name: str, options: dict[str, Any], *, width: int, heads: int, layers: int, causal: bool) -> list[nn.Module]:
    """One layer for each block."""
    if not causal:
        raise OptionError(f"{name} is causal; leave it out of tasks for encoders")
    try:
        return [LAYERS[name](width, heads, **options) for _ in range(layers)]
    except TypeError as error:
        raise OptionError(f"{name}: {error}; see posenc show {name}") from None
