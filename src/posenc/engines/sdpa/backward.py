"""The backward pass: blocks of query rows, two skewed buffers, every sum in float32 or better and in a fixed order.

P  = exp(s - log-sum)                        first buffer: table, then + q·k, then the weights
dS = P (dO·(v + table_v) - dO·O)             second buffer

dq = scale dS k,  dk = scale dSᵀ q,  dv = Pᵀ dO        matrix products with the (row, key) views
tables: the same memory's (row, distance) view is the operand, or is summed by columns
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes
from .band import Band, Tile
from .mask import KeyDots, skewed
from .skew import Skew, fill, fold
from .slab import Slab, slabs
from .terms import Terms


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
    rows = min(sizes.ROWS, band.q_length)
    for slab in slabs(q, k, terms, band, memory=sizes.BACKWARD, rows=rows, single=True):
        if slab.keys[0] < slab.keys[1]:
            _Slab(grad, q, k, v, out, sums, slab, band, scale, result).run(rows)
    return result


class _Slab:
    """One row of the batch, some heads."""

    def __init__(self, grad, q, k, v, out, sums, slab: Slab, band: Band, scale: float, result: Gradients):
        b, heads = slab.rows.start, slab.heads
        precision = result.q.dtype
        self.slab, self.band, self.scale, self.result = slab, band, scale, result
        self.b, self.heads = b, heads.stop - heads.start
        self.q, self.grad = q[b, heads].to(precision), grad[b, heads].to(precision)
        self.delta = (self.grad * out[b, heads]).sum(-1)
        self.sums = sums[b, heads]
        self.k, self.v = (
            self._spread(k[b, slab.kv_heads].to(precision)),
            self._spread(v[b, slab.kv_heads].to(precision)),
        )
        one_to_one = self.heads == slab.kv_heads.stop - slab.kv_heads.start
        # grouped queries: every head's own sum, added up at the end
        self.dk = result.k[b, slab.kv_heads] if one_to_one else torch.zeros_like(self.k)
        self.dv = result.v[b, slab.kv_heads] if one_to_one else torch.zeros_like(self.v)
        self.one_to_one = one_to_one
        self.dq = result.q[b, heads]

    def _spread(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == self.heads else x.repeat_interleave(self.heads // x.shape[0], 0)

    def run(self, rows: int) -> None:
        slab, band, terms = self.slab, self.band, self.slab.terms
        a, c = slab.keys
        self.weights = Skew(self.heads, rows, c - a, self.q)
        self.scores = Skew(self.heads, rows, c - a, self.q, zero=True)
        self.widest = 0  # while blocks only grow, the corners stay the zeros that they were made of
        self.dots = self.gathered = None
        if terms.table_k is not None:
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
        q, k, v, grad = self.q[:, at], self.k[:, to], self.v[:, to], self.grad[:, at]
        terms, band = self.slab.terms, self.band
        states = q if terms.states is None else terms.states[:, at]

        skewed(self.weights, self.slab, band, tile, states, self.scale, minus=self.sums[:, at])
        weights = self.weights.pairs(heads, rows, keys)
        if self.dots is not None:
            self.dots.add_to(weights, tile, self.scale)
        weights.baddbmm_(q, k.transpose(1, 2), alpha=self.scale).exp_()
        self.dv[:, to].baddbmm_(weights.transpose(1, 2), grad)

        scores = self.scores.pairs(heads, rows, keys)
        pieces = band.pieces(band.first_distance(tile.i1, tile.j0), rows + keys - 1)
        some = slice(pieces.first, pieces.last)
        if terms.table_v is None:
            scores.copy_(-self.delta[:, at, None].expand(scores.shape))
        else:
            table = terms.table_v[:, some]
            by_distance = grad @ table.transpose(1, 2) - self.delta[:, at, None]
            fill(self.scores.distances(heads, rows, keys), by_distance, pieces)
            self.value_table(grad, rows, keys, pieces)
        scores.baddbmm_(grad, v.transpose(1, 2)).mul_(weights)
        self.dq[:, at].baddbmm_(scores, k, alpha=self.scale)
        self.dk[:, to].baddbmm_(scores.transpose(1, 2), q, alpha=self.scale)
        if terms.table_v is not None or rows < self.scores.rows or keys < self.widest:
            self.scores.clear_corners(heads, rows, keys)
        self.widest = max(self.widest, keys)
        self.tables(tile, states, scores, pieces)

    def tables(self, tile: Tile, states: Tensor, scores: Tensor, pieces) -> None:
        terms, wanted = self.slab.terms, self.result.terms
        heads, rows, keys = self.heads, tile.i1 - tile.i0, tile.j1 - tile.j0
        some = slice(pieces.first, pieces.last)
        distances = self.scores.distances(heads, rows, keys)
        if terms.table_q is not None:
            folded = fold(distances, pieces)
            where_states = self.dq if terms.states is None else self._of(wanted.states, self.b)
            if where_states is not None:
                product = folded @ terms.table_q[:, some]
                where_states[:, tile.i0 : tile.i1].add_(product, alpha=self.scale)
            if wanted.table_q is not None:
                self._add(wanted.table_q, some, folded.transpose(1, 2) @ states, self.scale)
            if wanted.bias is not None:
                self._add(wanted.bias, some, folded.sum(1))
        elif wanted.bias is not None:
            self._add(wanted.bias, some, fold(distances.sum(1, keepdim=True), pieces)[:, 0])
        if wanted.key_bias is not None:
            row = self.b if wanted.key_bias.shape[0] > 1 else 0
            wanted.key_bias[row, self.slab.heads, tile.j0 : tile.j1] += scores.sum(1)
        if self.gathered is not None:
            self.gathered.gather(scores, tile)

    def value_table(self, grad: Tensor, rows: int, keys: int, pieces) -> None:
        if self.result.terms.table_v is None:
            return
        self.weights.clear_corners(self.heads, rows, keys)
        folded = fold(self.weights.distances(self.heads, rows, keys), pieces)
        self._add(self.result.terms.table_v, slice(pieces.first, pieces.last), folded.transpose(1, 2) @ grad)

    def key_table(self) -> None:
        a, c = self.slab.keys
        table = self.slab.terms.table_k
        assert self.gathered is not None
        assert table is not None
        folded = self.gathered.folded()
        self.dk[:, a:c].add_(folded @ table, alpha=self.scale)
        if self.result.terms.table_k is not None:
            self._add(self.result.terms.table_k, slice(None), folded.transpose(1, 2) @ self.k[:, a:c], self.scale)

    def _add(self, to: Tensor, some: slice, what: Tensor, scale: float = 1.0) -> None:
        """Into a table [H or 1, n, ..]; one that the heads share takes their sum."""
        if to.shape[0] == 1:
            to[0, some].add_(what.sum(0), alpha=scale)
        else:
            to[self.slab.heads, some].add_(what, alpha=scale)

    def _of(self, states: Tensor | None, b: int) -> Tensor | None:
        return None if states is None else states[b, self.slab.heads]
