"""What rounding errors are relative to: for the output and each gradient, the same sums over the sizes of their terms.

A gradient is a sum of terms that may cancel (a table's always do: each query's dS sum to zero), so its error is no
fraction of the result, but of

    weights       |a| (1 + |s| + mean |s|)                        exp turns the absolute error of s into a relative one
    dS            weights (|do| . |v| + its mean over keys)
    gradients     the same linear maps as in the formula, with every factor replaced by its absolute value
"""

import dataclasses

import torch

from posenc import Lookup
from posenc.engines import reference
from posenc.mask import make_mask


def positive(plan, dtype=torch.float64):
    """The plan with the absolute values of its tensors (all terms then add up), and those tensors in order."""
    leaves = []

    def leaf(x, sign=1):
        if not isinstance(x, torch.Tensor):
            return x
        leaves.append(x.detach().to(dtype).abs().requires_grad_())
        return sign * leaves[-1]

    lookups = tuple(
        Lookup(
            one.index, *(leaf(getattr(one, name)) for name in ("bias", "dot_query", "states", "dot_key", "add_value"))
        )
        for one in plan.lookups
    )
    scale, slopes = leaf(plan.scale), leaf(plan.slopes, -1)
    decay = None if plan.decay is None else (leaf(plan.decay[0]), leaf(plan.decay[1], -1))
    return dataclasses.replace(plan, lookups=lookups, scale=scale, slopes=slopes, decay=decay), leaves


def sizes(q, k, v, plan, g, **options):
    """Norms for [out, dq, dk, dv, *the plan's tensors in order]; errors are a few of these times the unit roundoff."""
    q, k, v, g = (x.detach().double() for x in (q, k, v, g))
    nothing = dict.fromkeys(("window", "key_mask", "documents", "mask"))
    seen = make_mask(q, k, **{"causal": False, **nothing, **options})
    weights = reference.softmax(reference.masked(reference.logits(q, k, plan), seen).detach())
    plan, leaves = positive(plan)
    q, k, v, g = q.abs().requires_grad_(), k.abs().requires_grad_(), v.abs().requires_grad_(), g.abs()
    s = reference.logits(q, k, plan)
    if isinstance(options.get("mask"), torch.Tensor) and options["mask"].is_floating_point():
        s = s + options["mask"].abs()
    size = s.detach()
    weights = weights * (1 + size + (weights * size).sum(-1, keepdim=True))
    out = value(weights, v, plan)
    of_weights = torch.autograd.grad(value(ones := weights.clone().requires_grad_(), v.detach(), plan), ones, g)[0]
    of_scores = weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True))
    wanted = [q, k, v, *leaves]
    first = torch.autograd.grad(s, wanted, of_scores, allow_unused=True)
    second = torch.autograd.grad(out, wanted, g, allow_unused=True)
    grads = [sum(x for x in pair if x is not None) for pair in zip(first, second)]
    return [x.norm().item() if isinstance(x, torch.Tensor) else 0.0 for x in [out.detach(), *grads]]


def value(weights, v, plan):
    """sum_j a_ij (v_j + add_value)."""
    out = weights @ reference.repeat(v, weights.shape[1])
    for lookup in plan.lookups:
        if lookup.add_value is not None:
            at = lookup.index.of(plan.where, weights.device)
            at = (at if at.dim() == 2 else at[:, None]).expand(weights.shape)
            binned = weights.new_zeros(*weights.shape[:3], lookup.index.n).scatter_add(3, at, weights)
            out = out + binned @ lookup.add_value
    return out
