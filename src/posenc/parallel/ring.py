"""Ring: keys and values travel from rank to rank; each rank attends to the part that it holds and merges the results.

    step      0          1          2                       rank r computes with the part of rank r - step,
    rank 0   part 0     part 2     part 1                   while it sends that part to rank r + 1
    rank 1   part 1     part 0     part 2
    rank 2   part 2     part 1     part 0

In the backward pass the parts travel again, each with the sum of its gradients so far, and return to their rank after the
last step. Each block is recomputed and differentiated with its share w_p of the merged output:

    o = Σ w_p o_p,   w_p = exp(lse_p - lse)        do_p = w_p do        dlse_p = w_p (do · (o_p - o) + dlse)

With a causal window and consecutive tokens, parts travel no further than the window reaches; the sums return from there.

So a rank keeps its own tokens, the output and the log-sum-exp, and never more than two parts of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.torch_modes import first_derivatives_only
from .blocks import INF, Block, Call, Tokens, blocks_of, run_block
from .collectives import exchange
from .plan_tensors import Values

TRAVELLING = ("k", "v", "decay_k")
"""Tensors with gradients that move with the keys."""


def attend_ring(call: Call, inputs: Values) -> tuple[Tensor, Tensor]:
    """`inputs` are q, k, v, the plan's tensors and the mask of this rank."""
    return _Ring.apply(call, tuple(inputs), *inputs.values())


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, names: tuple[str, ...], *tensors: Tensor):  # type: ignore[override]
        out, lse = _forward(call, dict(zip(names, tensors, strict=True)))
        ctx.save_for_backward(out, lse, *tensors)
        ctx.call, ctx.names = call, names
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivatives_only
    def backward(ctx, d_out: Tensor | None, d_lse: Tensor | None):  # type: ignore[override]
        out, lse, *tensors = ctx.saved_tensors
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if needed]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        grads = _backward(ctx.call, dict(zip(ctx.names, tensors, strict=True)), out, lse, d_out, d_lse, wanted)
        return None, None, *(grads.get(name) for name in ctx.names)


def _forward(call: Call, inputs: Values) -> tuple[Tensor, Tensor]:
    q, v = inputs["q"], inputs["v"]
    precision = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=precision)
    lse = q.new_full(q.shape[:3], -INF, dtype=precision)
    for keys, current in _travel(call, inputs):
        for block in blocks_of(call, keys):
            _merge(block, out, lse, *run_block(call, keys, block, block.cut(inputs | current)))
    return out.to(q.dtype), lse


def _travel(call: Call, inputs: Values):
    """(tokens, tensors) of one rank's keys after another: the next ones arrive while the caller computes."""
    cp = call.cp
    names = [name for name in TRAVELLING if name in inputs]
    tokens, tensors = call.keys, [inputs[name] for name in names]
    local = inputs["k"].shape[2]
    steps = steps_of(call, local)
    for step in range(steps):
        pending = exchange(cp, [*tensors, *tokens.tensors()]) if step + 1 < steps else None
        yield tokens, dict(zip(names, tensors, strict=True))
        if pending is not None:
            arrived = pending.wait()
            tensors = arrived[: len(names)]
            tokens = tokens.moved(cp.segments(local, (cp.rank - step - 1) % cp.size), arrived[len(names) :])


def steps_of(call: Call, local: int) -> int:
    """How many ranks' parts a rank needs: all, or those that a causal window reaches, where tokens are consecutive."""
    cp = call.cp
    if cp.balance != "none" or call.left is None or call.right != 0 or call.shift != 0:
        return cp.size
    return min(cp.size, (call.left + local - 1) // local + 1)


def _merge(block: Block, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a block's result to the running output and log-sum-exp, in place."""
    ours, total = block.select("q", out), block.select("decay_q", lse)
    both = torch.logaddexp(total, part_lse.to(total.dtype))
    base = both.masked_fill(both == -INF, 0.0)  # fully masked so far
    ours.mul_((total - base).exp()[..., None]).add_((part_lse - base).exp()[..., None] * part)
    total.copy_(both)


def _backward(
    call: Call, inputs: Values, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, wanted: Sequence[str]
) -> Values:
    cp = call.cp
    precision = torch.promote_types(out.dtype, torch.float32)
    moving = [name for name in TRAVELLING if name in wanted]
    sums = {name: _zeros(inputs[name]) for name in wanted if name not in moving}
    # delta of FlashAttention's backward pass, for the merged output
    delta = (d_out.to(precision) * out.to(precision)).sum(-1)
    delta = delta if d_lse is None else delta - d_lse
    base = lse.masked_fill(lse == -INF, 0.0)
    carried, own = None, {}
    last = steps_of(call, inputs["k"].shape[2]) - 1
    for step, (keys, current) in enumerate(_travel(call, inputs)):
        own = {name: _zeros(inputs[name]) for name in moving}
        for block in blocks_of(call, keys):
            cut = block.cut(inputs | current)
            shares = [block.select(name, x) for name, x in (("q", d_out), ("decay_q", delta), ("decay_q", base))]
            _add(block, wanted, _block_gradients(call, keys, block, cut, shares, wanted), sums | own)
        if moving:
            if carried is not None:
                _add(None, moving, carried.wait(), own)
            # after the last step the sums go home, to the rank whose part this is
            hop = 1 if step < last else -last
            carried = exchange(cp, [own[name] for name in moving], hop) if last else None
    sums |= own if carried is None else dict(zip(moving, carried.wait(), strict=True))
    return {name: x.to(inputs[name].dtype) for name, x in sums.items()}


def _add(block: Block | None, names: Sequence[str], grads: Sequence[Tensor | None], sums: Values) -> None:
    """Add gradients, in place; those of a block to its part of the tokens."""
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            (sums[name] if block is None else block.select(name, sums[name])).add_(grad)


def _block_gradients(
    call: Call, keys: Tokens, block: Block, cut: Values, shares: list[Tensor], wanted: Sequence[str]
) -> Sequence[Tensor | None]:
    """Gradients of a block's inputs: its result is computed again, with its share of the output's gradient."""
    d_out, delta, base = shares
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in cut.items()}
    with torch.enable_grad():
        part, part_lse = run_block(call, keys, block, leaves)
    weight = (part_lse.detach() - base).exp()
    d_part = weight[..., None] * d_out
    d_part_lse = (d_part * part.detach()).sum(-1, dtype=weight.dtype) - weight * delta
    pairs = [(x, g) for x, g in ((part, d_part.to(part.dtype)), (part_lse, d_part_lse)) if x.requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, [leaves[name] for name in wanted], grads, allow_unused=True)


def _zeros(x: Tensor) -> Tensor:
    """For a sum of gradients."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
