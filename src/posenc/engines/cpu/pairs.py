"""Pairs: the scores of a block of query rows against all their keys, as one stack of matrices in memory.

What is constant along a row rides in the matrix product as channels of its own, and tables count from one far end,
their base: a row's base is such a constant, and only the band is looked up.

    s  =  [scale q, 1, base, right - base] · [k, padding, 1, far right?]  +  (band - base)  +  (decay_q - decay_k)

The band is a view of the pairs that has their diagonals as columns; no copy, and matrix products take it. Where it
would leave the keys there are dead ones, whose scores are -inf:

    pairs    a b c . . 0 0       band   a b c
             . d e f . 0 0              d e f
             . . g h 0 0 0              g h 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import sizes
from .band import Band, Tile
from .mask import KeyDots, by_distance
from .products import one_by_one, product
from .skew import stride_of
from .slab import NEVER, Slab

SMALLEST = -87.0
"""exp of less is a subnormal float32, on which matrix products crawl; steep biases give many."""
CLOSE = 16.0
"""Biases that lie within this may be counted from one of them: they lose less than scores of that size do."""


def ends(band: Band) -> tuple[int | None, bool]:
    """The table row that the others count from, if there is a far field; whether there is another one on the right."""
    left, right = band.far
    if left or right:
        return (0 if left else -1), left and right and band.lo < band.hi
    return None, False


def rows_of(band: Band) -> int:
    """Query rows of a block, all blocks of nearly one size."""
    most = sizes.ROWS
    if band.k_length <= sizes.PAIRS:
        most = min(sizes.LOW, max(32, band.k_length // 4))
    return -(-band.q_length // -(-band.q_length // most))


class Buffers:
    """Memory that the slabs share."""

    def __init__(self, like: Tensor):
        self.like = like
        self.flat: dict[str, Tensor] = {}

    def block(self, name: str, heads: int, rows: int, keys: int) -> Tensor:
        """[X, R, K], not cleared, for products of such stacks."""
        stride = stride_of(keys) if one_by_one((heads, rows, keys)) else keys
        if name not in self.flat or self.flat[name].numel() < heads * rows * stride:
            self.flat[name] = self.like.new_empty(heads * rows * stride)
        return self.flat[name].as_strided((heads, rows, keys), (rows * stride, stride, 1))


class Block(NamedTuple):
    """Rows [i0, i1) against the visible keys [j0, j1). Pairs are [X, R, K] of the keys [start, stop), dead ones too."""

    i0: int
    i1: int
    j0: int
    j1: int
    start: int
    stop: int
    some: slice | None  # the table rows of the band that occur

    @property
    def at(self) -> slice:
        return slice(self.i0, self.i1)

    @property
    def keys(self) -> slice:
        return slice(self.j0, self.j1)

    @property
    def tile(self) -> Tile:
        return Tile(self.i0, self.i1, self.j0, self.j1, 0)

    @property
    def real(self) -> slice:
        """Where the visible keys are in the pairs."""
        return slice(self.j0 - self.start, self.j1 - self.start)


@lru_cache(maxsize=8)
def _forbidden(rows: int, keys: int, first: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """[rows, keys], True outside the limits. first: the slot distance of the first row and the first key."""
    steps = torch.arange(keys, device=device) + first - torch.arange(rows, device=device)[:, None]
    outside = torch.zeros_like(steps, dtype=torch.bool)
    if left is not None:
        outside |= steps < -left
    if right is not None:
        outside |= steps > right
    return outside


@lru_cache(maxsize=4)
def _triangle(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, rows - 1]: 1 from the diagonal on."""
    return torch.ones(rows, rows - 1, dtype=dtype, device=device).triu_()


class Pairs:
    """Of some rows of the batch and some heads: X in all, row after row. rows: those of a block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        slab: Slab,
        band: Band,
        scale: float,
        buffers: Buffers,
        rows: int,
    ):
        at, kv, terms = (slab.rows, slab.heads), (slab.rows, slab.kv_heads), slab.terms
        self.slab, self.band, self.scale, self.buffers, self.rows = slab, band, scale, buffers, rows
        self.q = self.precise(q[at])
        self.heads = self.q.shape[0]
        self.k = self.of_keys(k[kv])
        self.states = self.q if terms.states is None else terms.states
        self.base, self.far_right = ends(band)
        self.bias, self.table_q, self.table_v = map(self._less_base, (terms.bias, terms.table_q, terms.table_v))
        row = torch.zeros_like(self.q[..., 0])
        span = 0.0 if terms.bias is None else float(terms.bias.amax() - terms.bias.amin())
        # counted from a far end that is much lower (a mask of -1e4, -inf) the near biases would lose their digits
        self.apart = self.base is not None and not span <= CLOSE
        constants = replace(slab, terms=terms._replace(bias=None)) if self.apart else slab
        channels = self._with_ends(row, constants.row_constant, self.states, scale)
        self.q_wide = torch.cat([self.q * scale, torch.stack([torch.ones_like(row), *channels], -1)], -1)
        padding = slab.padding(0, band.k_length)
        self.k_wide = self._wide(self.k, self.k.new_zeros(1, 1, band.k_length) if padding is None else padding)
        self.marked = [self.k_wide]
        self.edge = 0  # keys from here on are marked as far right
        self.steep = span > -SMALLEST
        self.decay: tuple[Tensor, Tensor] | None = None
        if terms.decay_q is not None and terms.decay_k is not None:
            self.steep = self.steep or float(terms.decay_k.amax() - terms.decay_k.amin()) > -SMALLEST
            self.decay = (
                terms.decay_q[..., None],
                self._wide(self.of_keys(terms.decay_k[None, ..., None]))[..., 0].unsqueeze(1),
            )
        self.dots: KeyDots | None = None
        if terms.table_k is not None:
            a, c = slab.keys
            self.dots = KeyDots(slab, band, self.k[:, a:c], like=self.q)

    def blocks(self) -> Iterator[Block]:
        """All rows that see something."""
        for i in range(0, self.band.q_length, self.rows):
            end = min(i + self.rows, self.band.q_length)
            j0, j1 = self.band.visible(i, end, *self.slab.keys)
            if j0 < j1:
                block = self.place(i, end, j0, j1)
                if self.far_right:
                    self.mark(block)
                yield block

    def place(self, i0: int, i1: int, j0: int, j1: int) -> Block:
        band = self.band
        slot = band.offset + band.k_length - band.q_length  # r of slot distance 0
        lowest, highest = j0 - (i1 - 1) + band.offset, j1 - 1 - i0 + band.offset
        lowest = max(lowest, band.lo + int(self.base == 0))
        highest = min(highest, band.hi - int(self.base == -1 or self.far_right))
        if band.left is not None:
            lowest = max(lowest, slot - band.left)
        if band.right is not None:
            highest = min(highest, slot + band.right)
        nothing = self.bias is None and self.table_q is None and self.table_v is None
        if nothing or lowest > highest:
            return Block(i0, i1, j0, j1, j0, j1, None)
        start, stop = i0 + lowest - band.offset, i1 + highest - band.offset
        return Block(
            i0, i1, j0, j1, min(j0, start), max(j1, stop), slice(lowest - band.lo, highest - band.lo + 1)
        )  # fmt: skip

    def wide(self, block: Block) -> slice:
        """Where the block's keys are among those with dead ones at both ends."""
        return slice(block.start + self.rows - 1, block.stop + self.rows - 1)

    def scores(self, block: Block) -> Tensor:
        """[X, R, K], in memory that the next block takes again."""
        pairs = self.buffers.block("scores", self.heads, block.i1 - block.i0, block.stop - block.start)
        if self.decay is not None:  # the difference first: each alone is as large as the sequence is long
            torch.sub(self.decay[0][:, block.at], self.decay[1][:, :, self.wide(block)], out=pairs)
        product(self.q_wide[:, block.at], self.k_wide[:, self.wide(block)], pairs, add=self.decay is not None)
        if self.dots is not None:
            self.dots.add_to(pairs[:, :, block.real], block.tile, self.scale)
        self.look_up(pairs, block, self.states, self.table_q, self.scale)
        if self.apart:
            self.add_bias(pairs, block)
        elif block.some is not None and self.bias is not None:
            self.band_of(pairs, block).add_(self.bias[:, None, block.some])
        self.add_right(pairs, block, self.q_wide)
        self.forbid(pairs, block)
        return pairs

    def probabilities(self, block: Block) -> Tensor:
        """[X, R, K], in the memory of the scores: their sums are these scores' own, so that no rounding comes between.

        A block has all keys that its rows may see. A row that sees nothing gives zeros.
        """
        pairs = self.softmax(self.scores(block))
        if bool(pairs[..., 0].sum().isnan()):  # there is such a row, or NaN was given
            pairs = self.scores(block)
            hidden = pairs.amax(-1, keepdim=True) == NEVER
            pairs = self.softmax(pairs.masked_fill_(hidden, 0.0)).masked_fill_(hidden, 0.0)
        return pairs

    def softmax(self, scores: Tensor) -> Tensor:
        """In place, gaps included: PyTorch's kernel wants memory without them."""
        if self.steep:
            self.cut(scores.sub_(scores.amax(-1, keepdim=True)))
        (heads, rows, keys), stride = scores.shape, scores.stride(1)
        whole = scores.as_strided((heads, rows, stride), (rows * stride, stride, 1))
        whole[:, :, keys:] = NEVER
        torch.softmax(whole, -1, out=whole)
        return scores

    def to_weights(self, scores: Tensor) -> Tensor:
        """exp, in place."""
        return (self.cut(scores) if self.steep else scores).exp_()

    def cut(self, scores: Tensor) -> Tensor:
        return torch.nn.functional.threshold(scores, SMALLEST, NEVER, inplace=True)

    def forbid(self, scores: Tensor, block: Block) -> None:
        """-inf outside the limits: in the columns that some row may not see."""
        band = self.band
        if not band.limited:
            return
        ca, cc = band.common(block.i0, block.i1, block.start, block.stop)
        for first, last in ((block.start, min(ca, block.stop)), (max(cc, block.start), block.stop)):
            if first < last:  # not added: NaN would stay NaN
                outside = self.forbidden(block, first, last)
                scores[:, :, first - block.start : last - block.start].masked_fill_(outside, NEVER)

    def allowed(self, block: Block) -> Tensor | None:
        """[R, visible keys], True inside the limits; None without any."""
        return ~self.forbidden(block, block.j0, block.j1) if self.band.limited else None

    def forbidden(self, block: Block, first: int, last: int) -> Tensor:
        """[R, last - first]: the rows and some keys, True outside the limits."""
        band = self.band
        step = first - block.i0 - (band.k_length - band.q_length)
        return _forbidden(block.i1 - block.i0, last - first, step, band.left, band.right, self.q.device)

    # ---- the band -----------------------------------------------------------------------------------------------
    def band_of(self, pairs: Tensor, block: Block) -> Tensor:
        """[X, R, n], a view."""
        assert block.some is not None
        first = block.i0 + block.some.start + self.band.lo - self.band.offset - block.start
        shape = (*pairs.shape[:2], block.some.stop - block.some.start)
        return pairs.as_strided(shape, (pairs.stride(0), pairs.stride(1) + 1, 1), pairs.storage_offset() + first)

    def look_up(self, pairs: Tensor, block: Block, states: Tensor, table: Tensor | None, scale: float = 1.0) -> None:
        """The band's pairs += scale states·table"""
        if block.some is None or table is None:
            return
        states, table = states[:, block.at], table[:, block.some]
        dots = self.buffers.block("dots", self.heads, states.shape[1], table.shape[1])
        product(states, table, dots)
        self.band_of(pairs, block).add_(dots, alpha=scale)

    def add_bias(self, pairs: Tensor, block: Block) -> None:
        """All pairs += bias[r], each its own."""
        rows, keys = pairs.shape[1:]
        table = by_distance(
            self.slab, self.band, self.band.first_distance(block.i1, block.start), rows + keys - 1, pairs
        )
        for x, to in enumerate(pairs):  # a window of distances for each row, the last row's first
            to += table[x % table.shape[0]].unfold(0, keys, 1).flip(0)

    # ---- the far field on the right, where there is one on the left too -----------------------------------------
    def mark(self, block: Block) -> None:
        """Far right are the keys that are so for all rows of the block; for some rows: `add_right`."""
        dead = self.rows - 1
        edge = min(max(block.i1 - 1 + self.band.hi - self.band.offset, -dead), self.band.k_length + dead)
        for wide in self.marked:
            wide[:, self.edge : dead + edge, -1] = 0.0
        self.edge = dead + edge

    def corner(self, block: Block) -> tuple[slice, Tensor, slice]:
        """The columns that are far right for some rows, 1 where they are so, and the columns that are it for all."""
        rows = block.i1 - block.i0
        first = block.i0 + self.band.hi - self.band.offset
        a, c = (min(max(x, block.start), block.stop) for x in (first, first + rows - 1))
        triangle = _triangle(rows, self.q.dtype, self.q.device)[:, a - first : c - first]
        return slice(a - block.start, c - block.start), triangle, slice(c - block.start, None)

    def add_right(self, pairs: Tensor, block: Block, wide: Tensor) -> None:
        if self.far_right:
            some, triangle, _ = self.corner(block)
            pairs[:, :, some].addcmul_(wide[:, block.at, -1:], triangle)

    def sum_right(self, pairs: Tensor, block: Block) -> Tensor:
        """[X, R, 1]"""
        some, triangle, every = self.corner(block)
        return (pairs[:, :, some] * triangle).sum(-1, keepdim=True) + pairs[:, :, every].sum(-1, keepdim=True)

    # ---- what a slab holds --------------------------------------------------------------------------------------
    def precise(self, x: Tensor) -> Tensor:
        """[rows, heads, L, D] as [X, L, D]"""
        return x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)

    def of_keys(self, x: Tensor) -> Tensor:
        """[rows, Hkv, Lk, D] as [X, Lk, D]. Whatever padding between real keys holds, it counts for nothing."""
        x = self.precise(x)
        x = x if x.shape[0] == self.heads else x.repeat_interleave(self.heads // x.shape[0], 0)
        return x if self.slab.holes is None else x.masked_fill((self.slab.holes == NEVER)[:, None], 0.0)

    def _less_base(self, table: Tensor | None) -> Tensor | None:
        """[X, n, ..]"""
        if table is None:
            return None
        if self.base is not None:
            table = table - table.select(1, self.base).unsqueeze(1)
        return table.expand(self.heads, *table.shape[1:])

    def _with_ends(self, row: Tensor, constant, *given) -> list[Tensor]:
        """A row's own number and its base in one, and what it has far right beyond that, where there is such a field."""
        if self.base is None:
            return [row]
        base = constant(self.base, *given)
        row = row if base is None else row + base
        if not self.far_right:
            return [row]
        right = constant(-1, *given)
        return [row, torch.zeros_like(row) if right is None else (right - base).expand(row.shape)]

    def _wide(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """[X, rows - 1 + Lk + rows - 1, D + ..]: dead keys at both ends, and instead of those that padding hides."""
        a, c = self.slab.keys
        dead, size = self.rows - 1, x.shape[2]
        extra = 1 + int(columns is not None) + int(self.far_right)
        wide = x.new_zeros(x.shape[0], x.shape[1] + 2 * dead, size + extra)
        wide[:, dead + a : dead + c, :size] = x[:, a:c]
        wide[:, :, size:] = 1.0
        if columns is not None:
            wide[:, :, size] = NEVER
            wide[:, dead + a : dead + c, size] = columns[:, 0, a:c]
        return wide
