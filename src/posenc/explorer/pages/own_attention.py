"""The gallery's figures of attention that is no encoding of a layer: its weights for random tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

import posenc

from ...core.translation import Translation
from ...plot.panels import Heat, Lines, Panel, array

HEADS, SIZE = 4, 16
CALLS = {
    "cope": ["weights = posenc.contextual.cope(q, k, v, torch.randn(64, {size}))[0]  # v: one channel for each key"],
    "stick_breaking": ["weights = posenc.contextual.stick_breaking(q, k, v)[0][0]  # v: one channel for each key"],
    "path": [
        "w = torch.nn.functional.normalize(torch.randn(1, {heads}, {length}, {size}), dim=-1)",
        "weights = posenc.contextual.path(q, k, v, w, torch.ones(1, {heads}, {length}))[0]  # v: one channel for each key",
    ],
    "latent": [
        "layer = posenc.LatentAttention(64, {heads}, kv_rank=32, nope_dim=8, rope_dim=8, v_dim=16)",
        "plan = layer.encoding.plan(posenc.Positions({length}))  # rotates 8 of the 16 channels of q and k",
        "weights = posenc.scores(q, k, plan, causal=True).softmax(-1)[0]",
    ],
}
"""The lines that compute `weights` [heads, length, length]: the figures and the code beside them."""


def code(name: str, length: int) -> str:
    lines = [
        "import torch, posenc",
        "torch.manual_seed(0)",
        "q, k = torch.randn(2, 1, {heads}, {length}, {size}).unbind()",
        "v = torch.eye({length}).expand(1, {heads}, {length}, {length})",
        *CALLS[name],
    ]
    return "\n".join(lines).format(heads=HEADS, length=length, size=SIZE)


@lru_cache(maxsize=8)
def weights(name: str, length: int) -> Tensor:
    """[heads, length, length], by the code itself."""
    names: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        exec(code(name, length), names)
    return names["weights"]


def draw(name: str, length: int, words: Translation) -> list[Panel]:
    found, at = weights(name, length), np.arange(length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        q, k = torch.randn(2, 1, HEADS, length, SIZE).unbind()
    plain = posenc.scores(q, k, causal=True).softmax(-1)[0]
    series = {name: over_distance(found), words("no positions"): over_distance(plain)}
    bright = float(found[0].quantile(0.995))
    return [
        Heat(
            words("own weights", name=name), at, at, array(found[0]), words("key j"), words("query i"), words("weight"), (0.0, bright),
            diverging=False,
        ),
        Lines(words("own distance", name=name), -np.arange(length // 2), series, words("distance"), words("weight")),
    ]  # fmt: skip


def over_distance(found: Tensor) -> np.ndarray:
    """The mean weight at the distances 0, -1, .. of the later half of the queries, of all heads."""
    half = found.shape[-1] // 2
    return array(torch.stack([found.diagonal(-back, 1, 2)[:, -half:].mean() for back in range(half)]))
