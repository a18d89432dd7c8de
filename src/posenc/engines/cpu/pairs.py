"""Biases of any positions under any mask: PyTorch's attention, a block of queries at a time, with what is added to each pair as its mask.

It runs what is no function of the distance between consecutive tokens in O(block · L) memory: tables over grids of patches, positions with
gaps, documents and dense masks of long texts, functions of positions. pair_blocks.py makes the masks; where a function of positions may want
gradients, pairs_training.py runs them.
Backward the scores of some heads are made again; in short texts the probabilities are kept. The gradient of each pair is added to its row
of the table:

    dS [b, h, R, K]  ── sum over texts ──▶  [h, R · K]  ── added in the order of the pairs ──▶  d_table [h, n]

first within a block, then block by block: the same sums in the same order, however often it runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.plan_checks import holds_nan
from ...core.torch_modes import direct_apply, first_derivatives_only
from .. import blocked, further_axes
from ..lowering import LoweredPlan
from . import block_sizes, pairs_training
from .dense import gradients, probabilities, stack
from .forward import flash, pad_head_sizes
from .head_block import NEG_INF, share_blocks
from .pair_blocks import Block, Blocks, make_terms, own_heads, own_texts


def refusal(lowered: LoweredPlan) -> str | None:
    """Why a plan is more than numbers added to pairs, or its call needs more than PyTorch's attention gives; None: it runs here."""
    facts = lowered.facts
    if facts.pair and facts.return_lse:
        return "it may hide all keys of a query, whose log-sum-exp is not known then"
    if facts.dropout:
        return "dropout needs the probabilities themselves"
    if facts.mask == "learned":
        return "the mask wants a gradient"
    if facts.scale == "tensor" and facts.dtype.itemsize < 4:
        return "a scale for each query would round half precision"
    if any(name != "bias" for x in lowered.plan.lookups for name, _ in x.tensors()):
        return "a term reads queries, keys or values"
    return "a compiled graph of its blocks would be as long as the text" if torch.compiler.is_compiling() else None


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    facts, mask = lowered.facts, lowered.mask
    given, plan, scale = q, lowered.plan, lowered.scale
    if isinstance(scale, Tensor):
        q, plan = further_axes.prescale(q, plan)
        scale = 1.0
    decay_q, decay_k = plan.decay or (None, None)
    tables = [x.bias for x in plan.lookups if x.bias is not None]
    if any(table.detach().amin().item() == NEG_INF for table in tables):  # they may hide all keys of a query
        return blocked.run(given, k, v, lowered)
    own = (Blocks(lowered), scale, q, k, v, plan.slopes, decay_q, decay_k)
    if facts.pair and torch.is_grad_enabled():  # it may read tensors that want gradients
        lse, trained = None, pairs_training.attend(*own, *tables)
        if trained is None:
            return blocked.run(given, k, v, lowered)
        out = trained
    else:
        out, lse = _apply(*own, *tables)
    # a masked key or value may hold NaN, and a function of positions may hide all keys of a query
    if (facts.is_limited or not mask.plain or facts.pair) and holds_nan(out):
        return blocked.run(given, k, v, lowered)
    return out, lse if facts.return_lse else None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, blocks: Blocks, scale: float, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None,
        decay_q: Tensor | None, decay_k: Tensor | None, *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        terms = make_terms(blocks.precision, slopes, decay_q, decay_k, tables, blocks.pair)
        batch, heads, q_length, _ = q.shape
        size = v.shape[3]
        whole = None
        kept: list[Tensor] = []
        threads = torch.get_num_threads() if blocks.are_few else 0  # backward may run in a thread that has others
        q_, k_, v_ = (q, k, v) if threads else pad_head_sizes(q, k, v)
        for texts, block in blocks:
            mask = None if block.sees_none else block.mask(terms, texts, slice(0, heads))
            if mask is None:
                o, s = _hide(q, v, texts.batch, block, blocks.precision)
            elif threads:
                o, s = _attend_few(q, k, v, texts.batch, block, mask, scale, kept, threads)
            else:
                o, s = _attend_fused(q_, k_, v_, texts.batch, block, mask, scale)
            if mask is not None and block.empty is not None:
                o, s = o.masked_fill(block.empty, 0.0), s.masked_fill(block.empty[..., 0], NEG_INF)
            if o.shape[0] == batch and o.shape[2] == q_length:
                whole = o[..., :size], s
                break
            if whole is None:  # as a layer's last projection reads it
                whole = o.new_empty(batch, q_length, heads, size).transpose(1, 2), s.new_empty(batch, heads, q_length)
            at = texts.batch, slice(None), block.rows
            whole[0][at], whole[1][at] = o[..., :size], s
        # what the blocks read is saved too: autograd then refuses a backward pass after it was changed in place
        given = [x for x in blocks.given() if not x.is_inference()]
        ctx.save_for_backward(q, k, v, slopes, decay_q, decay_k, *tables, *kept, *given)
        ctx.facts = blocks, scale, threads, len(tables), len(kept)
        ctx.set_materialize_grads(False)
        assert whole is not None
        return whole

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None):
        saved = ctx.saved_tensors  # once: PyTorch's checkpoints free what they hand out
        q, k, v, slopes, decay_q, decay_k, *others = saved
        blocks, scale, threads, table_count, kept_count = ctx.facts
        tables, kept = others[:table_count], iter(others[table_count : table_count + kept_count])
        terms = make_terms(blocks.precision, slopes, decay_q, decay_k, tuple(tables))
        grad = q.new_zeros(*q.shape[:3], v.shape[3]) if grad is None else grad
        given, wanted = (*terms[1:4], *terms.tables), ctx.needs_input_grad[5:]
        d_terms = [None if x is None or not want else torch.zeros_like(x) for x, want in zip(given, wanted)]
        d_qkv: list[Tensor] = []
        no_mask = q.new_empty(0, dtype=blocks.precision)
        for texts, block in blocks:
            if block.sees_none:
                continue
            known, mask = None, no_mask
            for batch, some, own, kv in _split_heads(q, k, texts.batch, block, threads):
                if known != own and not threads:
                    known, mask = own, block.mask(terms, texts, own)
                part, to_keys = (batch, own, block.rows), (batch, kv, block.columns)
                g, g_lse = grad[part], None if grad_lse is None else grad_lse[part]
                if block.empty is not None:
                    empty = own_texts(own_heads(block.empty, own), some)
                    g = g.masked_fill(empty, 0.0)
                    g_lse = None if g_lse is None else g_lse.masked_fill(empty[..., 0], 0.0)
                *own_qkv, d_s = gradients(
                    q[part], k[to_keys], v[to_keys], own_texts(mask, some), g, scale, p=next(kept, None), grad_lse=g_lse
                )
                _add_gradients(d_terms, block, batch, some, own, d_s)
                if not d_qkv and all(x.shape == y.shape for x, y in zip(own_qkv, (q, k, v))):
                    d_qkv = own_qkv  # of everything: nothing is left to be added
                    continue
                d_qkv = d_qkv or [torch.zeros(x.shape, dtype=blocks.precision, device=x.device) for x in (q, k, v)]
                for d, at, more in zip(d_qkv, (part, to_keys, to_keys), own_qkv):
                    d[at] += more
        d_qkv = d_qkv or [torch.zeros_like(x) for x in (q, k, v)]  # no query sees a key
        found = (*d_qkv, *d_terms[:3], *[None if x is None else x[:, :-1] for x in d_terms[3:]])
        return None, None, *[None if x is None else x.to(y.dtype) for x, y in zip(found, saved)]


# ---- one block -----------------------------------------------------------------------------------------------------------
def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, batch: slice, block: Block, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of a block's queries, by PyTorch's attention."""
    queries, (keys, values) = q[batch, :, block.rows], (x[batch, :, block.columns] for x in (k, v))
    return flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)


def _attend_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: slice,
    block: Block,
    mask: Tensor,
    scale: float,
    kept: list[Tensor],
    threads: int,
) -> tuple[Tensor, Tensor]:
    """The same with the probabilities in memory, which are added to `kept`; the log-sum-exp is not computed."""
    count, (q_length, heads) = batch.stop - batch.start, (block.shape[0], q.shape[1])
    out = q.new_empty(count, q_length, heads, v.shape[3]).transpose(1, 2)
    for some_batch, some, _, _ in _split_heads(q, k, batch, block, threads):
        own = q[some_batch, :, block.rows]
        rows, keys, values = stack(own, k[some_batch, :, block.columns], v[some_batch, :, block.columns], mask.dtype)
        p = probabilities(rows, keys, own_texts(mask, some), own.shape, scale)
        out[some] = torch.bmm(p, values).view(*own.shape[:3], -1)
        kept.append(p)
    return out, out.new_empty(out.shape[:3], dtype=mask.dtype)


def _hide(q: Tensor, v: Tensor, batch: slice, block: Block, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of queries that see no key."""
    out = q.new_zeros(batch.stop - batch.start, q.shape[1], block.shape[0], v.shape[3])
    return out, torch.full(out.shape[:3], NEG_INF, dtype=precision, device=q.device)


def _split_heads(
    q: Tensor, k: Tensor, batch: slice, block: Block, threads: int
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Rows of the batch, of the block's texts, heads of queries and of keys, whose scores are in memory at once. threads: a row of the batch
    has few of them, and as many rows are taken as keep so many threads busy (one row's heads are multiplied without a copy); 0: it has many."""
    heads, pairs = q.shape[1], block.shape[0] * block.shape[1]
    most = max(block_sizes.FEWEST_SCORES, heads * pairs * -(-threads // heads)) if threads else block_sizes.PAIR_SCORES
    for (some, own), (_, kv) in share_blocks(batch.stop - batch.start, heads, k.shape[1], pairs, most):
        yield slice(batch.start + some.start, batch.start + some.stop), some, own, kv


def _add_gradients(
    d_terms: list[Tensor | None], block: Block, batch: slice, some: slice, heads: slice, d_s: Tensor
) -> None:
    """d_s [b, h, R, K] to the gradients of the terms. batch: its rows of the batch; some: of the block's texts."""
    slopes, decay_q, decay_k, *tables = d_terms
    for decay, own, axis, sign in ((decay_q, block.rows, 3, 1.0), (decay_k, block.columns, 2, -1.0)):
        if decay is not None:
            part = own_heads(own_texts(decay, batch), heads)[..., own]
            part.add_(d_s.sum(axis).sum_to_size(part.shape), alpha=sign)
    if slopes is None and all(x is None for x in tables):
        return
    total = d_s if d_s.shape[0] == 1 else d_s.sum(0, keepdim=True)
    if slopes is not None and block.distance is not None:
        shared = total if block.distance.shape[0] == 1 else d_s
        slopes[heads] -= (shared * own_texts(block.distance, some)[:, None]).sum((0, 2, 3))
    for table, at in zip(tables, block.at):
        if table is None:
            continue
        shared = total if at.shape[0] == 1 else d_s
        if table.shape[0] == 1:
            shared = shared.sum(1, keepdim=True)
        shared = shared.transpose(0, 1).reshape(shared.shape[1], -1)
        part = torch.zeros(shared.shape[0], table.shape[1], dtype=table.dtype, device=table.device)
        part.scatter_add_(1, own_texts(at, some).reshape(1, -1).expand_as(shared), shared)
        own_heads(table, heads, 0).add_(part)


_apply = direct_apply(_Attend)
