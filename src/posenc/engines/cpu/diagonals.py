"""dS near the diagonal, summed by distance: the gradient of a bias.

With the queries in reverse order a distance is an antidiagonal i' + j of the pairs. Written with a row stride of one
more than the buffer's, antidiagonals become its columns:

    pairs   a b c        buffer   a b c . .
            d e f                 . d e f .
            g h i                 . . g h i
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes
from .band import Band, Tile
from .mask import hankel
from .skew import fold
from .slab import Slab


class Diagonals:
    """Of one slab. keys, values [B, Hkv, Lk, D]."""

    def __init__(self, keys: Tensor, values: Tensor, slab: Slab, band: Band, scale: float):
        self.slab, self.band, self.scale = slab, band, scale
        self.keys, self.values = keys, values
        self.heads = slab.heads.stop - slab.heads.start
        self.sums = keys.new_zeros(self.heads, band.hi - band.lo + 1)
        self.shape: tuple[int, ...] = ()
        self.flat = keys.new_empty(0)
        self.skew = keys.new_empty(0)

    @staticmethod
    def memory(band: Band) -> int:
        """Numbers for each head and row of the batch."""
        rows = min(sizes.DIAGONAL, band.q_length)
        keys = min(band.k_length, sizes.BLOCK + band.hi - band.lo)
        return rows * (rows + 3 * keys)

    def block(self, i0: int, i1: int, grad: Tensor, q: Tensor, delta: Tensor, sums: Tensor, whole: bool) -> None:
        """Rows [i0, i1), in reverse order. whole: everything up to a far left tile of theirs, not the band alone."""
        far_left, far_right = self.band.far
        start = 0
        if whole:
            far = [t for t in self.band.tiles(i0, i1, *self.slab.keys, far=True) if t.kind < 0]
            start = far[0].j1 if far else self.slab.keys[0]
        for i in range(i0, i1, sizes.DIAGONAL):
            end = min(i + sizes.DIAGONAL, i1)
            tile = Tile(i, end, *self.band.visible(i, end, *self.slab.keys), 0)
            left, right = self.band.inner(tile)
            if not far_left:
                left = tile.j0
            elif whole:
                left = max(tile.j0, start)
            right = right if far_right else tile.j1
            if left < right:
                rows = slice(i1 - end, i1 - i)
                self.add(tile._replace(j0=left, j1=right), *(x[:, :, rows] for x in (grad, q, delta, sums)))

    def add(self, tile: Tile, grad: Tensor, q: Tensor, delta: Tensor, sums: Tensor) -> None:
        batch, rows, keys = grad.shape[0], tile.i1 - tile.i0, tile.j1 - tile.j0
        weights, scores, pairs, columns = self.buffers(batch * self.heads, rows, keys)
        shape = (batch, self.heads, rows, keys)
        mask = hankel(self.slab, self.band, tile, q)
        assert mask is not None
        torch.sub(mask, sums.unsqueeze(-1), out=weights.view(shape))
        weights.baddbmm_(self.flatten(q), self.flatten(self.keys[:, :, tile.j0 : tile.j1]).mT, alpha=self.scale)
        weights.clamp_(max=0.0).exp_()  # the log-sums were rounded elsewhere; no weight is more than 1
        scores.view(shape).copy_(delta.neg().unsqueeze(-1).expand(shape))
        scores.baddbmm_(self.flatten(grad), self.flatten(self.values[:, :, tile.j0 : tile.j1]).mT)
        torch.mul(weights, scores, out=pairs)
        by_distance = columns.sum(1).view(batch, self.heads, -1).sum(0)
        pieces = self.band.pieces(self.band.first_distance(tile.i1, tile.j0), rows + keys - 1)
        self.sums[:, pieces.first : pieces.last] += fold(by_distance[:, None], pieces)[:, 0]

    def buffers(self, count: int, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """weights, scores and pairs [X, R, K], columns [X, R, R + K - 1], the last two the same memory."""
        width = rows + keys - 1
        if self.shape != (count, rows, keys):
            self.shape = (count, rows, keys)
            if self.flat.numel() < 2 * count * rows * keys:
                self.flat = self.keys.new_empty(2 * count * rows * keys)
            if self.skew.numel() < count * rows * width:
                self.skew = self.keys.new_empty(count * rows * width)
            self.skew[: count * rows * width] = 0.0  # what belongs to no pair stays so
        flat = self.flat[: 2 * count * rows * keys].view(2, count, rows, keys)
        columns = self.skew[: count * rows * width].view(count, rows, width)
        return flat[0], flat[1], columns.as_strided((count, rows, keys), (rows * width, width + 1, 1)), columns

    def flatten(self, x: Tensor) -> Tensor:
        """[B, H or Hkv, n, D] as [B H, n, D]"""
        if x.shape[1] != self.heads:
            x = x.repeat_interleave(self.heads // x.shape[1], 1)
        return x.reshape(-1, *x.shape[2:])

    def far_left(self, total: Tensor) -> None:
        self.sums[:, 0] += total

    def bias(self) -> Tensor:
        """[H, n]. Call once, after everything was added: the last far field is what the rows' zero sums leave."""
        left, right = self.band.far
        if left or right:
            self.sums[:, -1 if right else 0] -= self.sums.sum(-1)
        return self.sums
