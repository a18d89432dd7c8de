"""Randomised positions: any scheme, with gaps drawn at random between the positions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptionError
from ..formulas import FARTHEST
from ..options import require_int
from ..places import random_positions
from ..plan import Plan
from ..rotation import Rotation
from ..scheme import Host, Scheme
from ..where import Run, Where


class Randomized(Scheme):
    """Train on short sequences with the positions of long ones (Ruoss et al. 2023, arXiv:2305.16843).

        p = 0, 1, 2, 3, ...   becomes   4, 5, 17, 90, ...      sorted and distinct, below `longest`

    Each plan draws anew, in evaluation too, as in the paper; give each layer its own wrapper for a draw of its own,
    or share one plan. `seed` makes the draw a function of the seed and the number of tokens alone. Keys are cached
    unrotated, so that a step sees one draw; encodings added to the input cannot be drawn again and go without cache.
    """

    length_dependent = True

    def __init__(self, *, scheme: Scheme, longest: int, seed: int | None = None):
        super().__init__()
        if not isinstance(scheme, Scheme):
            raise OptionError(f"scheme={scheme!r} must be an encoding, such as posenc.create('rope', head_dim=64)")
        require_int("longest", longest, least=1, most=FARTHEST)
        if seed is not None:
            require_int("seed", seed, most=2**62)
        self.scheme, self.longest, self.seed = scheme, longest, seed
        self.absolute = scheme.absolute
        self.embeds_whole = type(scheme).embed is not Scheme.embed

    def draw(self, where: Where) -> Where:
        """The same tokens at random places."""
        device = self.device_of(where)
        total = where.total
        count = int(total.max()) if isinstance(total, Tensor) else total
        if count > self.longest:
            raise ValueError(f"{count} tokens do not fit into {self.longest} positions; give a larger longest")
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + count)
        table = random_positions(count, self.longest, generator=generator, device=device)
        q, k = (self._placed(side, table, device) for side in (where.q, where.k))
        return Where(q, k, reach=(1 - self.longest, self.longest - 1))

    def _placed(self, side, table: Tensor, device: torch.device) -> Tensor:
        positions = side.positions(device) if isinstance(side, Run) else side.to(device=device, dtype=torch.int64)
        return table[positions.clamp(min=0)]

    def check_causal(self, causal: bool) -> str | None:
        return self.scheme.check_causal(causal)

    def embed(self, x: Tensor, where: Where) -> Tensor:
        return self.scheme.embed(x, self.draw(where))

    def rotation(self, where: Where) -> Rotation | None:
        return self.scheme.rotation(self.draw(where))

    def terms(self, where: Where, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        return self.scheme.terms(self.draw(where), x=x, host=host)

    def plan(self, where: Where, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        self.check_axes(where)
        return self.scheme.plan(self.draw(where), x=x, host=host)  # one draw for the rotation and the terms
