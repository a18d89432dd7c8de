"""Tools around RoPE: whole rotations from configurations, weights from one layout to the other, positions of images.

rope = posenc.rope.from_config(json.load(open("config.json")))
weight = posenc.rope.convert(weight, heads=32, to="half")
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import OptionError
from .by_layer import by_layer
from .configs import write
from .long_context import dual_chunk, rerope, self_extend
from .position_ids import clip_positions, grid_positions, mixed_positions, random_positions
from .rope import RoPE

__all__ = [
    "by_layer", "clip_positions", "convert", "dual_chunk", "from_config", "grid_positions", "mixed_positions", "random_positions",
    "rerope", "self_extend", "to_config",
]  # fmt: skip


from_config = RoPE.from_config


def to_config(rope: RoPE, dialect: str = "hf") -> dict:
    """The keys to merge into config.json so that `dialect` rotates as this RoPE does; see `posenc.scaling.to_config`.

    Raises OptionError for what the dialect cannot express.

        >>> posenc.rope.to_config(posenc.RoPE(head_dim=64))["rope_parameters"]["rope_theta"]
        10000.0
    """
    return write(rope, dialect)


def convert(weight: Tensor, heads: int, *, to: str, rotary_dim: int | None = None) -> Tensor:
    """A query or key projection's rows, bias or norm weight, for the other layout. The round trip is exact.

        half:         [x0 x1 x2 .. | y0 y1 y2 ..]          pairs (c, c + R/2)
        interleaved:  [x0 y0 x1 y1 x2 y2 .. .. ..]         pairs (2c, 2c + 1)

    weight      [heads * D, ...]: a Linear's weight or bias, or a qk-norm's weight over all heads; a norm shared by
                the heads is [D] with heads=1. Convert queries, keys and their norms alike; never values.
    to          "half" (from interleaved, Meta -> Hugging Face) or "interleaved"
    rotary_dim  the rotated channels of each head; default all

    Raises OptionError for an unknown layout and sizes that do not fit.

        >>> posenc.rope.convert(torch.arange(8.0)[:, None], heads=2, to="half").flatten()
        tensor([0., 2., 1., 3., 4., 6., 5., 7.])
    """
    if to not in ("half", "interleaved"):
        raise OptionError(f"to={to!r} is unknown; use 'half' or 'interleaved'")
    if weight.dim() < 1 or heads < 1 or weight.shape[0] % heads:
        raise OptionError(f"the first size of {list(weight.shape)} must be a multiple of heads={heads}")
    size = weight.shape[0] // heads
    width = size if rotary_dim is None else rotary_dim
    if width % 2 or not 0 <= width <= size:
        raise OptionError(f"rotary_dim={width} must be even and at most the head size {size}")
    split = weight.unflatten(0, (heads, size))
    rotated, rest = split[:, :width], split[:, width:]
    shape = (width // 2, 2) if to == "half" else (2, width // 2)
    rotated = rotated.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    joined = rotated if width == size else torch.cat((rotated, rest), dim=1)
    return joined.flatten(0, 1).contiguous()
