"""The backward pass: blocks of query rows, every sum in float32 or better and in a fixed order.

    P  = exp(s - log-sum)                        dv = Pᵀ dO
    dS = P (dO·(v + table_v) - dO·O)             dq = scale dS k,   dk = scale dSᵀ q

What is constant along a row of far keys rides in the matrix products as channels of its own:

    s - log-sum  =  [scale q, -log-sum, left, right] · [k, 1, far left?, far right?]     and the same for dS

so only the band is looked up; there a skewed buffer turns pairs into distances for the tables' gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes
from .band import Band, Tile
from .mask import KeyDots, product, skewed
from .skew import Skew, clear_corners, fill, fold
from .slab import NEVER, Slab, slabs
from .terms import Terms

SMALLEST = -87.0
"""exp of less is a subnormal float32, on which matrix products crawl; steep biases give many."""


class Gradients:
    """The gradients of q, k, v and of the terms that want one, in float32 or better."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wanted: list[bool]):
        precision = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = (torch.zeros(x.shape, dtype=precision, device=x.device) for x in (q, k, v))
        self.terms = Terms(
            *(
                torch.zeros(t.shape, dtype=precision, device=t.device) if t is not None and w else None
                for t, w in zip(terms, wanted)
            )
        )


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    terms: Terms,
    band: Band,
    scale: float,
    wanted: list[bool],
) -> Gradients:
    result = Gradients(q, k, v, terms, wanted)
    buffers = Buffers(result.q)
    rows = min(sizes.ROWS, band.q_length)
    for slab in slabs(q, k, terms, memory=sizes.BACKWARD, rows=rows, width=band.k_length, single=True):
        if slab.keys[0] < slab.keys[1]:
            _Slab(grad, q, k, v, out, sums, slab, band, scale, result, buffers).run(rows)
    return result


class Buffers:
    """Memory that the slabs share."""

    def __init__(self, like: Tensor):
        self.like = like
        self.flat: dict[str, Tensor] = {}
        self.skew: dict[str, Skew] = {}

    def block(self, name: str, heads: int, rows: int, keys: int) -> Tensor:
        """[X, R, K], not cleared."""
        stride = (keys + 31) // 16 * 16 + 8  # no power of two: cache sets would collide
        if name not in self.flat or self.flat[name].numel() < heads * rows * stride:
            self.flat[name] = self.like.new_empty(heads * rows * stride)
        return self.flat[name].as_strided((heads, rows, keys), (rows * stride, stride, 1))

    def skewed(self, name: str, heads: int, rows: int, keys: int) -> Skew:
        if name not in self.skew or not self.skew[name].holds(heads, rows, keys):
            self.skew[name] = Skew(heads, rows, keys, self.like)
        return self.skew[name]


class _Slab:
    """One row of the batch, some heads."""

    def __init__(self, grad, q, k, v, out, sums, slab: Slab, band: Band, scale: float, result: Gradients, buffers):
        b, heads, terms = slab.rows.start, slab.heads, slab.terms
        precision = result.q.dtype
        self.slab, self.band, self.scale, self.result, self.buffers = slab, band, scale, result, buffers
        self.b, self.heads = b, heads.stop - heads.start
        self.q, self.grad = q[b, heads].to(precision), grad[b, heads].to(precision)
        self.k, self.v = (
            self._spread(k[b, slab.kv_heads].to(precision)),
            self._spread(v[b, slab.kv_heads].to(precision)),
        )
        self.states = self.q if terms.states is None else terms.states
        # dO·O, except where O was rounded: there the blocks sum P dP, which is the same in exact arithmetic
        self.rounded = out.dtype != precision
        delta = (self.grad * out[b, heads]).sum(-1)
        if self.rounded:
            delta.zero_()

        ends = (0, -1)
        edges = [self._full(slab.row_constant(end, self.states, scale), delta) for end in ends]
        self.q_wide = torch.cat([self.q * scale, torch.stack([-sums[b, heads], *edges], -1)], -1)
        self.k_wide = self._with_channels(self.k)
        edges = [delta.new_zeros(delta.shape)] * 2
        if terms.table_v is not None:
            edges = [(self.grad * terms.table_v[:, end, None]).sum(-1) for end in ends]
        self.grad_wide = torch.cat([self.grad, torch.stack([-delta, *edges], -1)], -1)
        self.v_wide = self._with_channels(self.v)
        self.marked = [self.k_wide] if terms.table_v is None else [self.k_wide, self.v_wide]

        self.one_to_one = self.heads == slab.kv_heads.stop - slab.kv_heads.start
        # grouped queries: every head's own sum, added up at the end
        self.dk = result.k[b, slab.kv_heads] if self.one_to_one else torch.zeros_like(self.k)
        self.dv = result.v[b, slab.kv_heads] if self.one_to_one else torch.zeros_like(self.v)
        self.dq = result.q[b, heads]
        self.dots: KeyDots | None = None
        self.gathered: KeyDots | None = None
        self.steep = terms.bias is not None and float(terms.bias.amax() - terms.bias.amin()) > -SMALLEST

    def _spread(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == self.heads else x.repeat_interleave(self.heads // x.shape[0], 0)

    def _full(self, constant: Tensor | None, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if constant is None else constant.expand(like.shape)

    def _with_channels(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[:2], x.shape[2] + 3)
        wide[..., : x.shape[2]] = x
        wide[..., -3] = 1.0
        return wide

    def run(self, rows: int) -> None:
        slab, band = self.slab, self.band
        a, c = slab.keys
        if slab.terms.table_k is not None:
            self.dots = KeyDots(slab, band, self.k[:, a:c], like=self.q)
            self.gathered = KeyDots(slab, band, None, like=self.q)
        for i in range(0, band.q_length, rows):
            end = min(i + rows, band.q_length)
            j0, j1 = band.visible(i, end, a, c)
            if j0 < j1:
                self.block(Tile(i, end, j0, j1, 0))
        if self.gathered is not None:
            self.key_table()
        if not self.one_to_one:
            b, kv = self.b, slab.kv_heads
            self.result.k[b, kv] += self.dk.unflatten(0, (kv.stop - kv.start, -1)).sum(1)
            self.result.v[b, kv] += self.dv.unflatten(0, (kv.stop - kv.start, -1)).sum(1)

    def block(self, tile: Tile) -> None:
        heads, rows, keys = self.heads, tile.i1 - tile.i0, tile.j1 - tile.j0
        at, to = slice(tile.i0, tile.i1), slice(tile.j0, tile.j1)
        q, k, grad = self.q[:, at], self.k[:, to], self.grad[:, at]
        left, right = self.band.inner(tile)
        middle = tile._replace(j0=left, j1=right)
        inner = slice(left - tile.j0, right - tile.j0)
        for wide in self.marked:
            wide[:, tile.j0 : left, -2] = 1.0
            wide[:, left : tile.j1, -2] = 0.0
            wide[:, tile.j0 : right, -1] = 0.0
            wide[:, right : tile.j1, -1] = 1.0

        weights = self.buffers.block("weights", heads, rows, keys)
        product(self.q_wide[:, at], self.k_wide[:, to], weights)
        if self.dots is not None:
            self.dots.add_to(weights, tile, self.scale)
        if self.slab.terms.key_bias is not None or self.slab.holes is not None:
            weights.add_(self.slab.key_columns(tile.j0, tile.j1))
        if left < right and self.looked_up:
            self.add_band(weights[:, :, inner], middle)
        if self.steep:
            torch.nn.functional.threshold(weights, SMALLEST, NEVER, inplace=True)
        weights.exp_()
        self.dv[:, to].baddbmm_(weights.transpose(1, 2), grad)

        scores = self.buffers.block("scores", heads, rows, keys)
        product(self.grad_wide[:, at], self.v_wide[:, to], scores)
        if self.slab.terms.table_v is not None:
            self.values(weights, scores, tile, middle)
        if self.rounded:
            scores.sub_((weights * scores).sum(-1, keepdim=True))
        scores.mul_(weights)
        torch.baddbmm(self.dq[:, at], scores, k, alpha=self.scale, out=self.dq[:, at])
        self.dk[:, to].baddbmm_(scores.transpose(1, 2), q, alpha=self.scale)
        self.tables(scores, tile, middle)

    @property
    def looked_up(self) -> bool:
        terms = self.slab.terms
        return terms.bias is not None or terms.table_q is not None or self.band.limited

    def add_band(self, scores: Tensor, middle: Tile) -> None:
        rows, keys = middle.i1 - middle.i0, middle.j1 - middle.j0
        buffer = self.buffers.skewed("band", self.heads, rows, keys)
        skewed(buffer, self.slab, self.band, middle, self.states[:, middle.i0 : middle.i1], self.scale)
        scores.add_(buffer.pairs(self.heads, rows, keys))

    def by_distance(self, pairs: Tensor, middle: Tile) -> tuple[Tensor, slice]:
        """The band's pairs [X, R, K] summed to table rows: [X, R, rows of the slice]."""
        heads, rows, keys = pairs.shape
        buffer = self.buffers.skewed("band", heads, rows, keys)
        buffer.pairs(heads, rows, keys).copy_(pairs)
        distances = buffer.distances(heads, rows, keys)
        clear_corners(distances, keys)
        pieces = self.band.pieces(self.band.first_distance(middle.i1, middle.j0), rows + keys - 1)
        return fold(distances, pieces), slice(pieces.first, pieces.last)

    def parts(self, pairs: Tensor, tile: Tile, middle: Tile):
        """(table rows, their [X, R, n]) of the far left, the band and the far right."""
        last = self.band.hi - self.band.lo
        if tile.j0 < middle.j0:
            yield slice(0, 1), pairs[:, :, : middle.j0 - tile.j0].sum(-1, keepdim=True)
        if middle.j0 < middle.j1:
            folded, some = self.by_distance(pairs[:, :, middle.j0 - tile.j0 : middle.j1 - tile.j0], middle)
            yield some, folded
        if middle.j1 < tile.j1:
            yield slice(last, last + 1), pairs[:, :, middle.j1 - tile.j0 :].sum(-1, keepdim=True)

    def tables(self, scores: Tensor, tile: Tile, middle: Tile) -> None:
        terms, wanted = self.slab.terms, self.result.terms
        at = slice(tile.i0, tile.i1)
        if terms.table_q is not None or wanted.bias is not None:
            to_states: Tensor | None = self.dq
            if terms.states is not None:
                to_states = None if wanted.states is None else wanted.states[self.b, self.slab.heads]
            for some, part in self.parts(scores, tile, middle):
                if terms.table_q is not None and to_states is not None:
                    table = terms.table_q[:, some].expand(self.heads, -1, -1)
                    to_states[:, at].baddbmm_(part, table, alpha=self.scale)
                if wanted.table_q is not None:
                    self._add(wanted.table_q, some, part.transpose(1, 2) @ self.states[:, at], self.scale)
                if wanted.bias is not None:
                    self._add(wanted.bias, some, part.sum(1))
        if wanted.key_bias is not None:
            row = self.b if wanted.key_bias.shape[0] > 1 else 0
            wanted.key_bias[row, self.slab.heads, tile.j0 : tile.j1] += scores.sum(1)
        if self.gathered is not None:
            self.gathered.gather(scores, tile)

    def values(self, weights: Tensor, scores: Tensor, tile: Tile, middle: Tile) -> None:
        """table_v: its part of dS, and its gradient."""
        table, grad = self.slab.terms.table_v, self.grad[:, tile.i0 : tile.i1]
        assert table is not None
        rows, keys = middle.i1 - middle.i0, middle.j1 - middle.j0
        wanted = self.result.terms.table_v
        if wanted is not None:
            for some, part in self.parts(weights, tile, middle):
                self._add(wanted, some, part.transpose(1, 2) @ grad)
        if keys:
            buffer = self.buffers.skewed("band", self.heads, rows, keys)
            pieces = self.band.pieces(self.band.first_distance(middle.i1, middle.j0), rows + keys - 1)
            by_distance = grad @ table[:, pieces.first : pieces.last].transpose(1, 2)
            fill(buffer.distances(self.heads, rows, keys), by_distance, pieces)
            inner = slice(middle.j0 - tile.j0, middle.j1 - tile.j0)
            scores[:, :, inner].add_(buffer.pairs(self.heads, rows, keys))

    def key_table(self) -> None:
        a, c = self.slab.keys
        table = self.slab.terms.table_k
        assert self.gathered is not None
        assert table is not None
        folded = self.gathered.folded()
        falling = table.flip(1).expand(self.heads, -1, -1)
        for x in range(self.heads):  # no copy of the strided operand
            self.dk[x, a:c].addmm_(folded[x], falling[x], alpha=self.scale)
        if self.result.terms.table_k is not None:
            to_table = torch.empty_like(falling, memory_format=torch.contiguous_format)
            for x in range(self.heads):
                torch.mm(folded[x].t(), self.k[x, a:c], out=to_table[x])
            self._add(self.result.terms.table_k, slice(None), to_table.flip(1), self.scale)

    def _add(self, to: Tensor, some: slice, what: Tensor, scale: float = 1.0) -> None:
        """Into a table [H or 1, n, ..]; one that the heads share takes their sum."""
        if to.shape[0] == 1:
            to[0, some].add_(what.sum(0), alpha=scale)
        else:
            to[self.slab.heads, some].add_(what, alpha=scale)
