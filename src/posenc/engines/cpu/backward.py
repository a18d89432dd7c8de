"""The backward pass: blocks of query rows, every sum in float32 or better and in a fixed order.

    P  = softmax(s)                              dv = Pᵀ dO
    dS = P (dO·(v + table_v) - dO·O)             dq = scale dS k,   dk = scale dSᵀ q

pairs.py gives the probabilities; dO·v is made as the scores are. What a table counts from (its base) gets what
the other rows of the table leave of all pairs' gradients: a row of dS sums to the gradient of its log-sum-exp, mostly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes
from .band import Band
from .mask import KeyDots
from .pairs import Block, Buffers, Pairs, ends, rows_of
from .products import add_product, product
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
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    terms: Terms,
    band: Band,
    scale: float,
    wanted: list[bool],
) -> Gradients:
    result = Gradients(q, k, v, terms, wanted)
    buffers = Buffers(result.q)
    rows = rows_of(band)
    for slab in slabs(q, k, terms, memory=sizes.BACKWARD, rows=rows, width=band.k_length, stacked=True):
        if slab.keys[0] < slab.keys[1]:
            _Slab(grad, grad_lse, q, k, v, out, slab, band, scale, result, buffers, rows).run()
    base, _ = ends(band)
    for table in (result.terms.bias, result.terms.table_q, result.terms.table_v):
        if base is not None and table is not None:
            table[:, base] -= table.sum(1) - table[:, base]
    return result


class _Slab(Pairs):
    def __init__(
        self,
        grad: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        slab: Slab,
        band: Band,
        scale: float,
        result: Gradients,
        buffers: Buffers,
        rows: int,
    ):
        super().__init__(q, k, slab, band, scale, buffers, rows)
        at, kv, terms = (slab.rows, slab.heads), (slab.rows, slab.kv_heads), slab.terms
        self.result = result
        self.grad, self.v = self.precise(grad[at]), self.of_keys(v[kv])
        # dO·O, except where O was rounded: there the blocks sum P dP, which is the same in exact arithmetic
        self.rounded = out.dtype != self.grad.dtype
        delta = torch.zeros_like(self.grad[..., 0])
        if not self.rounded:
            delta = (self.grad * out[at].flatten(0, 1)).sum(-1)
        # the derivative of the log-sum-exp is the probabilities themselves
        self.grad_lse = None if grad_lse is None else self.precise(grad_lse[at][..., None]).squeeze(-1)
        if self.grad_lse is not None and not self.rounded:
            delta = delta - self.grad_lse
        channels = self._with_ends(-delta, slab.value_constant, self.grad)
        self.grad_wide = torch.cat([self.grad, torch.stack(channels, -1)], -1)
        self.v_wide = self._wide(self.v)
        self.marked.append(self.v_wide)

        self.dq, self.to_k, self.to_v = (self._stack(x) for x in (result.q[at], result.k[kv], result.v[kv]))
        self.one_to_one = self.heads == self.to_k.shape[0]
        # grouped queries: every head's own sum, added up at the end
        self.dk = self.to_k if self.one_to_one else torch.zeros_like(self.k)
        self.dv = self.to_v if self.one_to_one else torch.zeros_like(self.v)
        self.dstates: Tensor | None = None
        if terms.table_q is not None:
            own = result.terms.states
            self.dstates = self.dq if terms.states is None else None if own is None else self._stack(own[at])
        self.gathered = None if terms.table_k is None else KeyDots(slab, band, None, like=self.q)

    def _stack(self, x: Tensor) -> Tensor:
        """[rows, heads, ...] as [X, ...], a view."""
        return x.view(-1, *x.shape[2:])

    def run(self) -> None:
        for block in self.blocks():
            self.block(block)
        if self.grad_lse is not None:
            self.to_rows(self.grad_lse)
        if self.gathered is not None:
            self.key_table()
        if not self.one_to_one:
            self.to_k += self.dk.unflatten(0, (self.to_k.shape[0], -1)).sum(1)
            self.to_v += self.dv.unflatten(0, (self.to_v.shape[0], -1)).sum(1)

    def block(self, block: Block) -> None:
        at, to, grad = block.at, block.keys, self.grad[:, block.at]
        weights = self.probabilities(block)
        add_product(self.dv[:, to], weights[:, :, block.real].mT, grad)

        change = self.buffers.block("change", *weights.shape)
        product(self.grad_wide[:, at], self.v_wide[:, self.wide(block)], change)
        if self.table_v is not None:
            self.look_up(change, block, self.grad, self.table_v)
            self.add_right(change, block, self.grad_wide)
            self.to_values(weights, block)
        if self.rounded:
            change.sub_((weights * change).sum(-1, keepdim=True))
            if self.grad_lse is not None:
                change.add_(self.grad_lse[:, at, None])
        change.mul_(weights)
        add_product(self.dq[:, at], change[:, :, block.real], self.k[:, to], self.scale)
        add_product(self.dk[:, to], change[:, :, block.real].mT, self.q[:, at], self.scale)
        self.to_terms(change, block)
        if self.gathered is not None:
            self.gathered.gather(change[:, :, block.real], block.tile)

    # ---- terms --------------------------------------------------------------------------------------------------
    def to_terms(self, scores: Tensor, block: Block) -> None:
        wanted = self.result.terms
        if self.dstates is not None and self.table_q is not None:
            to = self.dstates[:, block.at]
            if block.some is not None:
                add_product(to, self.band_of(scores, block), self.table_q[:, block.some], self.scale)
            if self.far_right:
                to.addcmul_(self.sum_right(scores, block), self.table_q[:, -1:], value=self.scale)
        if self.table_q is not None:
            self.to_table(wanted.table_q, scores, block, self.states, self.scale)
        if wanted.bias is not None:
            if block.some is not None:
                self._add(wanted.bias, block.some, self.band_of(scores, block).sum(1))
            if self.far_right:
                self._add(wanted.bias, self._row(-1), self.sum_right(scores, block).sum(1))
        if wanted.decay_k is not None:
            each = scores[:, :, block.real].sum(1).unflatten(0, (self._count, -1))
            if wanted.decay_k.shape[0] == 1:
                wanted.decay_k[0, self.slab.heads, block.keys] -= each.sum(0)
            else:
                wanted.decay_k[self.slab.rows, self.slab.heads, block.keys] -= each

    def to_rows(self, total: Tensor) -> None:
        """What moves whole rows gets the sum of dS over the row, `total` [X, Lq]: decay_q, and a table's base."""
        wanted, table = self.result.terms, self.slab.terms.table_q
        if wanted.decay_q is not None:
            each = total.unflatten(0, (self._count, -1))
            if wanted.decay_q.shape[0] == 1:
                wanted.decay_q[0, self.slab.heads] += each.sum(0)
            else:
                wanted.decay_q[self.slab.rows, self.slab.heads] += each
        if self.base is None:
            return
        row = self._row(self.base)
        if wanted.bias is not None:
            self._add(wanted.bias, row, total.sum(1, keepdim=True))
        if wanted.table_q is not None:
            self._add(wanted.table_q, row, torch.bmm(total.unsqueeze(1), self.states), self.scale)
        if self.dstates is not None and table is not None:
            self.dstates.addcmul_(total.unsqueeze(-1), table[:, row].expand(self.heads, -1, -1), value=self.scale)

    def to_table(self, to: Tensor | None, pairs: Tensor, block: Block, states: Tensor, scale: float = 1.0) -> None:
        """Pairs' part of the gradient of a table, except for its base."""
        if to is None:
            return
        states = states[:, block.at]
        if block.some is not None:
            self._add(to, block.some, torch.bmm(self.band_of(pairs, block).mT, states), scale)
        if self.far_right:
            self._add(to, self._row(-1), torch.bmm(self.sum_right(pairs, block).mT, states), scale)

    def to_values(self, weights: Tensor, block: Block) -> None:
        to = self.result.terms.table_v
        self.to_table(to, weights, block, self.grad)
        if to is not None and self.base is not None:
            total = torch.bmm(weights.sum(-1).unsqueeze(1), self.grad[:, block.at])
            self._add(to, self._row(self.base), total)

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

    @property
    def _count(self) -> int:
        return self.slab.rows.stop - self.slab.rows.start

    def _row(self, end: int) -> slice:
        row = end % (self.band.hi - self.band.lo + 1)
        return slice(row, row + 1)

    def _add(self, to: Tensor, some: slice, what: Tensor, scale: float = 1.0) -> None:
        """Into a table [H or 1, n, ..]; one that the heads share takes their sum."""
        if to.shape[0] == 1:
            to[0, some].add_(what.sum(0), alpha=scale)
        else:
            to[self.slab.heads, some].add_(what.unflatten(0, (self._count, -1)).sum(0), alpha=scale)
