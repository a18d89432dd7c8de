"""What the band adds to the scores, as an additive mask for PyTorch's fused attention: the Hankel view of a table (drawn in
forward.py), or a skewed buffer (skewed_buffer.py) with the scores of keys and table (KeyTableScores)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_sizes
from .band import BandGeometry, ScoreTile
from .head_block import NEG_INF, HeadBlock
from .matmul import matmul_into
from .skewed_buffer import SkewedBuffer, fill


def hankel_mask(head_block: HeadBlock, band: BandGeometry, tile: ScoreTile, like: Tensor) -> Tensor | None:
    """[1, H, R, K] for the tile's queries in reverse order: a view of R + K - 1 numbers a head."""
    bias, keys = head_block.terms.bias, tile.j1 - tile.j0
    rows = tile.i1 - tile.i0
    if bias is None and not band.is_limited:
        return None
    table = bias_by_distance(head_block, band, band.first_distance(tile.i1, tile.j0), rows + keys - 1, like)
    heads = head_block.heads.stop - head_block.heads.start
    return table.as_strided((1, heads, rows, keys), (0, 0 if table.shape[0] == 1 else table.shape[1], 1, 1))


def bias_by_distance(head_block: HeadBlock, band: BandGeometry, r0: int, count: int, like: Tensor) -> Tensor:
    """[H or 1, count]: the bias of the distances from r0 on, -inf outside the limits."""
    bias = head_block.terms.bias
    if bias is None:
        table = like.new_zeros(1, count, dtype=torch.promote_types(like.dtype, torch.float32))
    else:
        before, first, last, after = band.table_rows(r0, count)
        parts = [bias[:, first:last]]
        if before:
            parts.insert(0, bias[:, first : first + 1].expand(-1, before))
        if after:
            parts.append(bias[:, last - 1 : last].expand(-1, after))
        table = torch.cat(parts, 1)
    mask_limits(table, band, r0)
    return table


def mask_limits(table: Tensor, band: BandGeometry, r0: int) -> None:
    """-inf outside the limits; the last dimension is the distances from r0 on."""
    n, m = band.masked_ends(r0, table.shape[-1])
    if n:
        table[..., :n] = NEG_INF
    if m < table.shape[-1]:
        table[..., m:] = NEG_INF


def fill_skewed(
    buffer: SkewedBuffer, head_block: HeadBlock, band: BandGeometry, tile: ScoreTile, states: Tensor, scale: float
) -> None:
    """Fill the buffer with a tile's bias and query table: states [X, R, E] of the tile times the table, by distance."""
    table_q, bias = head_block.terms.table_q, head_block.terms.bias
    heads, rows, keys = states.shape[0], tile.i1 - tile.i0, tile.j1 - tile.j0
    distances = buffer.distances(heads, rows, keys)
    r0 = band.first_distance(tile.i1, tile.j0)
    wide = None
    if table_q is not None:
        wide, states = table_q, states * scale
        if bias is not None:  # one more channel
            wide = head_block.table_and_bias
            states = torch.cat([states, states.new_ones(*states.shape[:2], 1)], -1)
    for s in range(0, rows, block_sizes.SKEW_ROWS):
        e = min(s + block_sizes.SKEW_ROWS, rows)
        at, count = r0 + rows - e, keys + e - s - 1
        chunk = distances[:, s:e, rows - e : rows - e + count]
        table_rows = band.table_rows(at, count)
        some = slice(table_rows.first, table_rows.last)
        if wide is not None:
            if table_rows.before or table_rows.after:
                fill(chunk, states[:, s:e] @ wide[:, some].transpose(1, 2), table_rows)
            else:
                matmul_into(states[:, s:e], wide[:, some].expand(heads, -1, -1), chunk)
        elif bias is not None:
            row = bias.new_empty(bias.shape[0], 1, count)
            fill(row, bias[:, None, some], table_rows)
            chunk.copy_(row.expand(chunk.shape))
        else:
            chunk.zero_()
        mask_limits(chunk, band, at)


def count_visible(band: BandGeometry, tile: ScoreTile, is_real: Tensor | None, device: torch.device) -> Tensor:
    """[.., R]: how many keys of a tile each of its rows sees. is_real [.., Lk]: False at padding."""
    slots = torch.arange(tile.i0, tile.i1, device=device) + (band.k_length - band.q_length)
    first, last = torch.full_like(slots, tile.j0), torch.full_like(slots, tile.j1)
    if band.left is not None:
        first = (slots - band.left).clamp(tile.j0, tile.j1)
    if band.right is not None:
        last = (slots + band.right + 1).clamp(tile.j0, tile.j1)
    if is_real is None:
        return last - first
    before = torch.nn.functional.pad(is_real.long().cumsum(-1), (1, 0))  # real keys before each key
    return before[..., last] - before[..., first]


class KeyTableScores:
    """k_j·table_k[r] of every key and distance, in a layout whose diagonals are a block of scores.

    memory [X, keys, pad + n + pad]: distance falls along a row; the pads repeat the value of the end

    key j       pad  r=hi ..  lo  pad         score (i, j) is in column pad + hi - (j - i + offset):
      0          e    e  d  c  c              one row further, one column further; one key further, one row down and
      1          f    f  e  d  d              one column back: strides (1, width - 1) over (i, j)
    """

    def __init__(self, head_block: HeadBlock, band: BandGeometry, keys: Tensor | None, like: Tensor):
        table = head_block.terms.table_k
        assert table is not None
        self.band, self.first = band, head_block.keys[0]
        self.heads = like.shape[0]
        self.n, self.pad = table.shape[1], block_sizes.SKEW_ROWS - 1
        self.width = self.n + 2 * self.pad
        self.keys = head_block.keys[1] - head_block.keys[0]
        shape = (self.heads, self.keys, self.width)
        if keys is None:  # to gather gradients
            self.memory = like.new_zeros(shape)
            return
        self.memory = like.new_empty(shape)
        dots = self.memory[:, :, self.pad : -self.pad]
        matmul_into(keys, table.flip(1).expand(self.heads, -1, -1), dots)
        self.memory[:, :, : self.pad] = dots[:, :, :1]
        self.memory[:, :, -self.pad :] = dots[:, :, -1:]

    def chunks(self, tile: ScoreTile):
        """(rows of the tile, far left keys, band keys, far right keys, view of the band [X, R, K])."""
        band = self.band
        for i in range(tile.i0, tile.i1, block_sizes.SKEW_ROWS):
            end = min(i + block_sizes.SKEW_ROWS, tile.i1)
            left = min(max(i + band.lo - band.offset + 1, tile.j0), tile.j1)
            right = min(max(end - 1 + band.hi - band.offset, left), tile.j1)
            view = None
            if left < right:
                start = (left - self.first) * self.width + self.pad + band.hi - (left - i + band.offset)
                strides = (self.keys * self.width, 1, self.width - 1)
                view = self.memory.as_strided((self.heads, end - i, right - left), strides, start)
            yield slice(i - tile.i0, end - tile.i0), (tile.j0, left), (left, right), (right, tile.j1), view

    def add_to(self, scores: Tensor, tile: ScoreTile, scale: float) -> None:
        """scores [X, R, K] += scale k·table_k"""
        for rows, (a, b), (c, d), (e, f), view in self.chunks(tile):
            if a < b:
                edge = self.memory[:, a - self.first : b - self.first, -1]
                scores[:, rows, a - tile.j0 : b - tile.j0].add_(edge[:, None], alpha=scale)
            if view is not None:
                scores[:, rows, c - tile.j0 : d - tile.j0].add_(view, alpha=scale)
            if e < f:
                edge = self.memory[:, e - self.first : f - self.first, 0]
                scores[:, rows, e - tile.j0 : f - tile.j0].add_(edge[:, None], alpha=scale)

    def gather(self, scores: Tensor, tile: ScoreTile) -> None:
        """The transpose of `add_to`: every score of the band has a separate element, so it is a copy; far keys are summed."""
        for rows, (a, b), (c, d), (e, f), view in self.chunks(tile):
            if a < b:
                self.memory[:, a - self.first : b - self.first, -1] += scores[:, rows, a - tile.j0 : b - tile.j0].sum(1)
            if view is not None:
                view.copy_(scores[:, rows, c - tile.j0 : d - tile.j0])
            if e < f:
                self.memory[:, e - self.first : f - self.first, 0] += scores[:, rows, e - tile.j0 : f - tile.j0].sum(1)

    def folded(self) -> Tensor:
        """[X, keys, n] in falling distance, the pads summed into the ends, in place: call it once."""
        inner = self.memory[:, :, self.pad : -self.pad]
        inner[:, :, 0] += self.memory[:, :, : self.pad].sum(-1)
        inner[:, :, -1] += self.memory[:, :, -self.pad :].sum(-1)
        return inner
