"""What the band adds to the scores, as a mask that PyTorch's fused attention takes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes
from .band import Band, Tile
from .products import product
from .skew import Skew, fill
from .slab import NEVER, Slab


def hankel(slab: Slab, band: Band, tile: Tile, like: Tensor) -> Tensor | None:
    """[1, H, R, K] for the tile's queries in reverse order: a view of R + K - 1 numbers a head."""
    bias, keys = slab.terms.bias, tile.j1 - tile.j0
    rows = tile.i1 - tile.i0
    if bias is None and not band.limited:
        return None
    table = by_distance(slab, band, band.first_distance(tile.i1, tile.j0), rows + keys - 1, like)
    heads = slab.heads.stop - slab.heads.start
    return table.as_strided((1, heads, rows, keys), (0, 0 if table.shape[0] == 1 else table.shape[1], 1, 1))


def by_distance(slab: Slab, band: Band, r0: int, count: int, like: Tensor) -> Tensor:
    """[H or 1, count]: the bias at distances r0 .. , -inf outside the limits."""
    bias = slab.terms.bias
    if bias is None:
        table = like.new_zeros(1, count, dtype=torch.promote_types(like.dtype, torch.float32))
    else:
        before, first, last, after = band.pieces(r0, count)
        parts = [bias[:, first:last]]
        if before:
            parts.insert(0, bias[:, first : first + 1].expand(-1, before))
        if after:
            parts.append(bias[:, last - 1 : last].expand(-1, after))
        table = torch.cat(parts, 1)
    forbid(table, band, r0)
    return table


def forbid(table: Tensor, band: Band, r0: int) -> None:
    """-inf outside the limits; the last dimension is distances r0 .. ."""
    n, m = band.forbidden(r0, table.shape[-1])
    if n:
        table[..., :n] = NEVER
    if m < table.shape[-1]:
        table[..., m:] = NEVER


def skewed(buffer: Skew, slab: Slab, band: Band, tile: Tile, states: Tensor, scale: float) -> None:
    """Fill the buffer of a tile with what depends on distance. states [X, R, E] are the tile's."""
    table_q, bias = slab.terms.table_q, slab.terms.bias
    heads, rows, keys = states.shape[0], tile.i1 - tile.i0, tile.j1 - tile.j0
    distances = buffer.distances(heads, rows, keys)
    r0 = band.first_distance(tile.i1, tile.j0)
    wide = None
    if table_q is not None:
        wide, states = table_q, states * scale
        if bias is not None:  # one more channel
            wide = slab.table_and_bias
            states = torch.cat([states, states.new_ones(*states.shape[:2], 1)], -1)
    for s in range(0, rows, sizes.CHUNK):
        e = min(s + sizes.CHUNK, rows)
        at, count = r0 + rows - e, keys + e - s - 1
        chunk = distances[:, s:e, rows - e : rows - e + count]
        pieces = band.pieces(at, count)
        some = slice(pieces.first, pieces.last)
        if wide is not None:
            if pieces.before or pieces.after:
                fill(chunk, states[:, s:e] @ wide[:, some].transpose(1, 2), pieces)
            else:
                product(states[:, s:e], wide[:, some].expand(heads, -1, -1), chunk)
        elif bias is not None:
            row = bias.new_empty(bias.shape[0], 1, count)
            fill(row, bias[:, None, some], pieces)
            chunk.copy_(row.expand(chunk.shape))
        else:
            chunk.zero_()
        forbid(chunk, band, at)


class KeyDots:
    """k_j·table_k[r] of every key and distance, in a layout whose diagonals are a block of scores.

    memory [X, keys, pad + n + pad], steps of falling distance; beyond the ends the end's value
    pair (i, j): step pad + hi - (j - i + offset)            strides over (i, j): (1, width - 1)
    """

    def __init__(self, slab: Slab, band: Band, keys: Tensor | None, like: Tensor):
        table = slab.terms.table_k
        assert table is not None
        self.band, self.first = band, slab.keys[0]
        self.heads = like.shape[0]
        self.n, self.pad = table.shape[1], sizes.CHUNK - 1
        self.width = self.n + 2 * self.pad
        self.keys = slab.keys[1] - slab.keys[0]
        shape = (self.heads, self.keys, self.width)
        if keys is None:  # to gather gradients in
            self.memory = like.new_zeros(shape)
            return
        self.memory = like.new_empty(shape)
        dots = self.memory[:, :, self.pad : -self.pad]
        product(keys, table.flip(1).expand(self.heads, -1, -1), dots)
        self.memory[:, :, : self.pad] = dots[:, :, :1]
        self.memory[:, :, -self.pad :] = dots[:, :, -1:]

    def chunks(self, tile: Tile):
        """(rows of the tile, far left keys, band keys, far right keys, the band's view [X, R, K])."""
        band = self.band
        for i in range(tile.i0, tile.i1, sizes.CHUNK):
            end = min(i + sizes.CHUNK, tile.i1)
            left = min(max(i + band.lo - band.offset + 1, tile.j0), tile.j1)
            right = min(max(end - 1 + band.hi - band.offset, left), tile.j1)
            view = None
            if left < right:
                start = (left - self.first) * self.width + self.pad + band.hi - (left - i + band.offset)
                strides = (self.keys * self.width, 1, self.width - 1)
                view = self.memory.as_strided((self.heads, end - i, right - left), strides, start)
            yield slice(i - tile.i0, end - tile.i0), (tile.j0, left), (left, right), (right, tile.j1), view

    def add_to(self, pairs: Tensor, tile: Tile, scale: float) -> None:
        """pairs [X, R, K] += scale k·table_k"""
        for rows, (a, b), (c, d), (e, f), view in self.chunks(tile):
            if a < b:
                edge = self.memory[:, a - self.first : b - self.first, -1]
                pairs[:, rows, a - tile.j0 : b - tile.j0].add_(edge[:, None], alpha=scale)
            if view is not None:
                pairs[:, rows, c - tile.j0 : d - tile.j0].add_(view, alpha=scale)
            if e < f:
                edge = self.memory[:, e - self.first : f - self.first, 0]
                pairs[:, rows, e - tile.j0 : f - tile.j0].add_(edge[:, None], alpha=scale)

    def gather(self, pairs: Tensor, tile: Tile) -> None:
        """The transpose of `add_to`: each pair has a step of its own, so the band is a copy; far keys are summed."""
        for rows, (a, b), (c, d), (e, f), view in self.chunks(tile):
            if a < b:
                self.memory[:, a - self.first : b - self.first, -1] += pairs[:, rows, a - tile.j0 : b - tile.j0].sum(1)
            if view is not None:
                view.copy_(pairs[:, rows, c - tile.j0 : d - tile.j0])
            if e < f:
                self.memory[:, e - self.first : f - self.first, 0] += pairs[:, rows, e - tile.j0 : f - tile.j0].sum(1)

    def folded(self) -> Tensor:
        """[X, keys, n] in falling distance, what lies beyond the ends summed into them. Call once: it is done in place."""
        inner = self.memory[:, :, self.pad : -self.pad]
        inner[:, :, 0] += self.memory[:, :, : self.pad].sum(-1)
        inner[:, :, -1] += self.memory[:, :, -self.pad :].sum(-1)
        return inner
