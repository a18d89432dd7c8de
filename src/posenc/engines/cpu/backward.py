"""The backward pass: blocks of query rows, every sum in float32 or better and in a fixed order.

    P  = softmax(s)                              dv = Pᵀ dO
    dS = P (dO·(v + table_v) - dO·O)             dq = scale dS k,   dk = scale dSᵀ q

block_scores.py recomputes the probabilities P; dO·v is computed like the scores. A row of dS sums to the gradient of its
log-sum-exp (0 unless that was returned), so the base row of a table gets that sum less the gradients of the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_sizes
from .band import BandGeometry
from .band_mask import KeyTableScores
from .block_scores import BlockScores, Buffers, RowBlock, choose_block_rows, find_base
from .head_block import HeadBlock, split_heads
from .matmul import add_matmul, matmul_into
from .terms import Terms


class Gradients:
    """The gradients of q, k, v and of the terms that need one, in float32 or better."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, needs_grad: list[bool]):
        precision = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = (torch.zeros(x.shape, dtype=precision, device=x.device) for x in (q, k, v))
        self.terms = Terms(
            *(
                torch.zeros(t.shape, dtype=precision, device=t.device) if t is not None and w else None
                for t, w in zip(terms, needs_grad)
            )
        )


def backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, terms: Terms,
    band: BandGeometry, scale: float, needs_grad: list[bool],
) -> Gradients:  # fmt: skip
    result = Gradients(q, k, v, terms, needs_grad)
    buffers = Buffers(result.q)
    rows = choose_block_rows(band)
    for head_block in split_heads(
        q, k, terms, memory=block_sizes.SCORE_MEMORY, rows=rows, width=band.k_length, stacked=True
    ):
        if head_block.keys[0] < head_block.keys[1]:
            HeadBlockGradients(grad, grad_lse, q, k, v, out, head_block, band, scale, result, buffers, rows).run()
    base, _ = find_base(band)
    for table in (result.terms.bias, result.terms.table_q, result.terms.table_v):
        if base is not None and table is not None:
            table[:, base] -= table.sum(1) - table[:, base]
    return result


class HeadBlockGradients(BlockScores):
    """The part of one head block, added to `result`."""

    def __init__(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, head_block: HeadBlock,
        band: BandGeometry, scale: float, result: Gradients, buffers: Buffers, rows: int,
    ):  # fmt: skip
        super().__init__(q, k, head_block, band, scale, buffers, rows)
        at, kv, terms = (head_block.batch, head_block.heads), (head_block.batch, head_block.kv_heads), head_block.terms
        self.result = result
        self.grad, self.v = self.stack_heads(grad[at]), self.stack_keys(v[kv])
        # dO·O, except where O was rounded: there the blocks sum P dP, which is the same in exact arithmetic
        self.out_is_rounded = out.dtype != self.grad.dtype
        delta = torch.zeros_like(self.grad[..., 0])
        if not self.out_is_rounded:
            delta = (self.grad * out[at].flatten(0, 1)).sum(-1)
        # the derivative of the log-sum-exp is the probabilities themselves
        self.grad_lse = None if grad_lse is None else self.stack_heads(grad_lse[at][..., None]).squeeze(-1)
        if self.grad_lse is not None and not self.out_is_rounded:
            delta = delta - self.grad_lse
        channels = self._constant_channels(-delta, head_block.value_constant, self.grad)
        self.grad_extended = torch.cat([self.grad, torch.stack(channels, -1)], -1)
        self.v_extended = self._extend_keys(self.v)
        self.extended_keys.append(self.v_extended)

        self.dq, self.dk_shared, self.dv_shared = (self._stack(x) for x in (result.q[at], result.k[kv], result.v[kv]))
        self.has_own_keys = self.heads == self.dk_shared.shape[0]
        # grouped queries: a sum for each query head, added up at the end
        self.dk = self.dk_shared if self.has_own_keys else torch.zeros_like(self.k)
        self.dv = self.dv_shared if self.has_own_keys else torch.zeros_like(self.v)
        self.dstates: Tensor | None = None
        if terms.table_q is not None:
            own = result.terms.states
            self.dstates = self.dq if terms.states is None else None if own is None else self._stack(own[at])
        self.key_ds = None if terms.table_k is None else KeyTableScores(head_block, band, None, like=self.q)

    def _stack(self, x: Tensor) -> Tensor:
        """[batch, heads, ...] as [X, ...], a view."""
        return x.view(-1, *x.shape[2:])

    def run(self) -> None:
        for block in self.blocks():
            self.block(block)
        if self.grad_lse is not None:
            self.add_row_gradients(self.grad_lse)
        if self.key_ds is not None:
            self.add_key_table_gradient()
        if not self.has_own_keys:
            self.dk_shared += self.dk.unflatten(0, (self.dk_shared.shape[0], -1)).sum(1)
            self.dv_shared += self.dv.unflatten(0, (self.dv_shared.shape[0], -1)).sum(1)

    def block(self, block: RowBlock) -> None:
        at, to, grad = block.rows, block.keys, self.grad[:, block.rows]
        p = self.probabilities(block)
        add_matmul(self.dv[:, to], p[:, :, block.visible].mT, grad)

        ds = self.buffers.block("dp", *p.shape)
        matmul_into(self.grad_extended[:, at], self.v_extended[:, self.padded_columns(block)], ds)
        if self.table_v is not None:
            self.add_band(ds, block, self.grad, self.table_v)
            self.add_far_right(ds, block, self.grad_extended)
            self.add_value_gradient(p, block)
        if self.out_is_rounded:
            ds.sub_((p * ds).sum(-1, keepdim=True))
            if self.grad_lse is not None:
                ds.add_(self.grad_lse[:, at, None])
        ds.mul_(p)
        add_matmul(self.dq[:, at], ds[:, :, block.visible], self.k[:, to], self.scale)
        add_matmul(self.dk[:, to], ds[:, :, block.visible].mT, self.q[:, at], self.scale)
        self.add_term_gradients(ds, block)
        if self.key_ds is not None:
            self.key_ds.gather(ds[:, :, block.visible], block.tile)

    # ---- terms --------------------------------------------------------------------------------------------------
    def add_term_gradients(self, scores: Tensor, block: RowBlock) -> None:
        wanted = self.result.terms
        if self.dstates is not None and self.table_q is not None:
            to = self.dstates[:, block.rows]
            if block.table_rows is not None:
                add_matmul(to, self.band_view(scores, block), self.table_q[:, block.table_rows], self.scale)
            if self.far_right:
                to.addcmul_(self.sum_far_right(scores, block), self.table_q[:, -1:], value=self.scale)
        if self.table_q is not None:
            self.add_table_gradient(wanted.table_q, scores, block, self.states, self.scale)
        if wanted.bias is not None:
            if block.table_rows is not None:
                self._add_to_table(wanted.bias, block.table_rows, self.band_view(scores, block).sum(1))
            if self.far_right:
                self._add_to_table(wanted.bias, self._table_row(-1), self.sum_far_right(scores, block).sum(1))
        if wanted.decay_k is not None:
            each = scores[:, :, block.visible].sum(1).unflatten(0, (self._batch_rows, -1))
            if wanted.decay_k.shape[0] == 1:
                wanted.decay_k[0, self.head_block.heads, block.keys] -= each.sum(0)
            else:
                wanted.decay_k[self.head_block.batch, self.head_block.heads, block.keys] -= each

    def add_row_gradients(self, total: Tensor) -> None:
        """Gradients of what is constant along a row, decay_q and the base row of a table: total [X, Lq] is dS summed over keys."""
        wanted, table = self.result.terms, self.head_block.terms.table_q
        if wanted.decay_q is not None:
            each = total.unflatten(0, (self._batch_rows, -1))
            if wanted.decay_q.shape[0] == 1:
                wanted.decay_q[0, self.head_block.heads] += each.sum(0)
            else:
                wanted.decay_q[self.head_block.batch, self.head_block.heads] += each
        if self.base is None:
            return
        row = self._table_row(self.base)
        if wanted.bias is not None:
            self._add_to_table(wanted.bias, row, total.sum(1, keepdim=True))
        if wanted.table_q is not None:
            self._add_to_table(wanted.table_q, row, torch.bmm(total.unsqueeze(1), self.states), self.scale)
        if self.dstates is not None and table is not None:
            self.dstates.addcmul_(total.unsqueeze(-1), table[:, row].expand(self.heads, -1, -1), value=self.scale)

    def add_table_gradient(
        self, to: Tensor | None, scores: Tensor, block: RowBlock, states: Tensor, scale: float = 1.0
    ) -> None:
        """Add what ds (or p) of a block gives to a table, except to its base row."""
        if to is None:
            return
        states = states[:, block.rows]
        if block.table_rows is not None:
            self._add_to_table(to, block.table_rows, torch.bmm(self.band_view(scores, block).mT, states), scale)
        if self.far_right:
            self._add_to_table(to, self._table_row(-1), torch.bmm(self.sum_far_right(scores, block).mT, states), scale)

    def add_value_gradient(self, p: Tensor, block: RowBlock) -> None:
        to = self.result.terms.table_v
        self.add_table_gradient(to, p, block, self.grad)
        if to is not None and self.base is not None:
            total = torch.bmm(p.sum(-1).unsqueeze(1), self.grad[:, block.rows])
            self._add_to_table(to, self._table_row(self.base), total)

    def add_key_table_gradient(self) -> None:
        a, c = self.head_block.keys
        table = self.head_block.terms.table_k
        assert self.key_ds is not None and table is not None
        folded = self.key_ds.folded()
        falling = table.flip(1).expand(self.heads, -1, -1)
        for x in range(self.heads):  # no copy of the strided operand
            self.dk[x, a:c].addmm_(folded[x], falling[x], alpha=self.scale)
        if self.result.terms.table_k is not None:
            to_table = torch.empty_like(falling, memory_format=torch.contiguous_format)
            for x in range(self.heads):
                torch.mm(folded[x].t(), self.k[x, a:c], out=to_table[x])
            self._add_to_table(self.result.terms.table_k, slice(None), to_table.flip(1), self.scale)

    @property
    def _batch_rows(self) -> int:
        return self.head_block.batch.stop - self.head_block.batch.start

    def _table_row(self, end: int) -> slice:
        row = end % (self.band.hi - self.band.lo + 1)
        return slice(row, row + 1)

    def _add_to_table(self, to: Tensor, some: slice, what: Tensor, scale: float = 1.0) -> None:
        """to [H or 1, n, ..] += scale what, summed over heads where they share the table."""
        if to.shape[0] == 1:
            to[0, some].add_(what.sum(0), alpha=scale)
        else:
            to[self.head_block.heads, some].add_(what.unflatten(0, (self._batch_rows, -1)).sum(0), alpha=scale)
