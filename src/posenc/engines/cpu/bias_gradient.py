"""BiasGradient: dS near the diagonal, summed by distance.

In reverse order of the queries, a distance is an antidiagonal i' + j of dS. Written with a row stride of one more than the
buffer's, antidiagonals become columns, and a column sum is the gradient of one table row:

    dS   a b c        buffer   a b c . .
         d e f                 . d e f .
         g h i                 . . g h i
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_sizes
from .band import BandGeometry, ScoreTile
from .band_mask import hankel_mask
from .head_block import HeadBlock
from .skewed_buffer import fold


class BiasGradient:
    """Of one head block. keys, values [B, Hkv, Lk, D]."""

    def __init__(self, keys: Tensor, values: Tensor, head_block: HeadBlock, band: BandGeometry, scale: float):
        self.head_block, self.band, self.scale = head_block, band, scale
        self.keys, self.values = keys, values
        self.heads = head_block.heads.stop - head_block.heads.start
        self.by_distance = keys.new_zeros(self.heads, band.hi - band.lo + 1)
        self.shape: tuple[int, ...] = ()
        self.flat = keys.new_empty(0)
        self.skewed = keys.new_empty(0)

    @staticmethod
    def memory(band: BandGeometry) -> int:
        """Numbers for each head and row of the batch."""
        rows = min(block_sizes.DIAGONAL_ROWS, band.q_length)
        keys = min(band.k_length, block_sizes.QUERY_BLOCK + band.hi - band.lo)
        return rows * (rows + 3 * keys)

    def add_block(
        self, i0: int, i1: int, grad: Tensor, q: Tensor, delta: Tensor, lse: Tensor, covers_left: bool
    ) -> None:
        """Rows [i0, i1), in reverse order. covers_left: all keys after their far left tile, not the band alone."""
        far_left, far_right = self.band.has_far_fields
        start = 0
        if covers_left:
            far = [t for t in self.band.tiles(i0, i1, *self.head_block.keys, far=True) if t.kind < 0]
            start = far[0].j1 if far else self.head_block.keys[0]
        for i in range(i0, i1, block_sizes.DIAGONAL_ROWS):
            end = min(i + block_sizes.DIAGONAL_ROWS, i1)
            tile = ScoreTile(i, end, *self.band.visible_keys(i, end, *self.head_block.keys), 0)
            left, right = self.band.varying_keys(tile)
            if not far_left:
                left = tile.j0
            elif covers_left:
                left = max(tile.j0, start)
            right = right if far_right else tile.j1
            if left < right:
                rows = slice(i1 - end, i1 - i)
                self.add_tile(tile._replace(j0=left, j1=right), *(x[:, :, rows] for x in (grad, q, delta, lse)))

    def add_tile(self, tile: ScoreTile, grad: Tensor, q: Tensor, delta: Tensor, lse: Tensor) -> None:
        batch, rows, keys = grad.shape[0], tile.i1 - tile.i0, tile.j1 - tile.j0
        p, dp, ds, columns = self.buffers(batch * self.heads, rows, keys)
        shape = (batch, self.heads, rows, keys)
        mask = hankel_mask(self.head_block, self.band, tile, q)
        assert mask is not None
        torch.sub(mask, lse.unsqueeze(-1), out=p.view(shape))
        p.baddbmm_(self.flatten(q), self.flatten(self.keys[:, :, tile.j0 : tile.j1]).mT, alpha=self.scale)
        p.clamp_(max=0.0).exp_()  # the log-sum-exp was rounded elsewhere; no probability is more than 1
        dp.view(shape).copy_(delta.neg().unsqueeze(-1).expand(shape))
        dp.baddbmm_(self.flatten(grad), self.flatten(self.values[:, :, tile.j0 : tile.j1]).mT)
        torch.mul(p, dp, out=ds)
        by_distance = columns.sum(1).view(batch, self.heads, -1).sum(0)
        table_rows = self.band.table_rows(self.band.first_distance(tile.i1, tile.j0), rows + keys - 1)
        self.by_distance[:, table_rows.first : table_rows.last] += fold(by_distance[:, None], table_rows)[:, 0]

    def buffers(self, count: int, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """p, dp and ds [X, R, K], columns [X, R, R + K - 1], the last two the same memory."""
        width = rows + keys - 1
        if self.shape != (count, rows, keys):
            self.shape = (count, rows, keys)
            if self.flat.numel() < 2 * count * rows * keys:
                self.flat = self.keys.new_empty(2 * count * rows * keys)
            if self.skewed.numel() < count * rows * width:
                self.skewed = self.keys.new_empty(count * rows * width)
            self.skewed[: count * rows * width] = 0.0  # the corners stay zero
        flat = self.flat[: 2 * count * rows * keys].view(2, count, rows, keys)
        columns = self.skewed[: count * rows * width].view(count, rows, width)
        return flat[0], flat[1], columns.as_strided((count, rows, keys), (rows * width, width + 1, 1)), columns

    def flatten(self, x: Tensor) -> Tensor:
        """[B, H or Hkv, n, D] as [B H, n, D]"""
        if x.shape[1] != self.heads:
            x = x.repeat_interleave(self.heads // x.shape[1], 1)
        return x.reshape(-1, *x.shape[2:])

    def add_far_left(self, total: Tensor) -> None:
        self.by_distance[:, 0] += total

    def finish(self) -> Tensor:
        """[H, n]. Call it once, at the end: as rows of dS sum to 0, the last far field is minus the sum of the rest."""
        left, right = self.band.has_far_fields
        if left or right:
            self.by_distance[:, -1 if right else 0] -= self.by_distance.sum(-1)
        return self.by_distance
