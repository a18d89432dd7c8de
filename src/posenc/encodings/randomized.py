"""Randomised positions: any encoding, with gaps drawn at random between the positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.encoding import Encoding, Host, Kept
from ..core.errors import OptionError
from ..core.formulas import FARTHEST
from ..core.options import require_int
from ..core.plan import Plan
from ..core.positions import Positions
from ..core.rotation import Rotation
from .rope.position_ids import random_positions


class Randomized(Encoding):
    """Train on short sequences with the positions of long ones (Ruoss et al. 2023, arXiv:2305.16843).

        p = 0, 1, 2, 3, ...   becomes   4, 5, 17, 90, ...      sorted and distinct, below `max_length`

    Each plan is a new draw, in evaluation too, as in the paper; layers share a draw by sharing a plan. With `seed` the draw
    depends on the seed and the number of tokens only. Keys are cached unrotated, so that a step uses one draw; encodings
    that are added to the input cannot be redrawn and do not work with a cache.

    Raises OptionError for an `encoding` of another type, ValueError for more tokens than max_length.

        >>> encoding = posenc.Randomized(encoding=posenc.create("rope", head_dim=16), max_length=100, seed=0)
        >>> encoding.plan(posenc.Positions(8)).rotate.q[0].shape  # [B or 1, L, D/2]
        torch.Size([1, 8, 8])
    """

    length_dependent = True

    def __init__(self, *, encoding: Encoding, max_length: int, seed: int | None = None):
        super().__init__()
        if not isinstance(encoding, Encoding):
            raise OptionError(f"encoding={encoding!r} must be an encoding, such as posenc.create('rope', head_dim=64)")
        require_int("max_length", max_length, least=1, most=FARTHEST)
        if seed is not None:
            require_int("seed", seed, most=2**62)
        self.encoding, self.max_length, self.seed = encoding, max_length, seed
        self.absolute = encoding.absolute
        self.embeds_whole = type(encoding).embed is not Encoding.embed

    def draw(self, positions: Positions) -> Positions:
        """The same tokens at random positions."""
        device = self.device_of(positions)
        total = positions.total
        count = int(total.max()) if isinstance(total, Tensor) else total
        if count > self.max_length:
            raise ValueError(f"{count} tokens do not fit into {self.max_length} positions; give a larger max_length")
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + count)
        table = random_positions(count, self.max_length, generator=generator, device=device)
        q, k = (table[at.clamp(min=0)] for at in (positions.q_positions(device), positions.k_positions(device)))
        return Positions(q, k, reach=(1 - self.max_length, self.max_length - 1))

    def check_causal(self, causal: bool) -> str | None:
        return self.encoding.check_causal(causal)

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        return self.encoding.embed(x, self.draw(positions))

    def rotation(self, positions: Positions) -> Rotation | None:
        return self.encoding.rotation(self.draw(positions))

    def keep(self, x: Tensor) -> Tensor | None:
        return self.encoding.keep(x)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, **kept) -> Plan:
        return self.encoding.terms(self.draw(positions), x=x, host=host, **kept)

    def plan(
        self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, kept: Kept | None = None
    ) -> Plan:
        self.check_axes(positions)
        drawn = self.draw(positions)  # one draw for the rotation and the terms
        return self.encoding.plan(drawn, x=x, host=host, kept=kept)
