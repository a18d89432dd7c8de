"""Plans at the sizes that the kernels are tuned for, and their error on a GPU against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from posenc import Lookup, Plan, Positions, Rotation, attend
from posenc.core import index

SHAPES = [(4, 16, 4096, 64, False), (4, 16, 4096, 64, True), (1, 16, 16384, 64, False), (1, 16, 16384, 64, True)]
WIDE = [(4, 16, 4096, 128, True)]


def table(*shape, dtype=torch.float32):
    return (torch.randn(*shape, device="cuda", dtype=dtype) / 4).requires_grad_()


def t5(heads, length, size, causal):
    return Plan(
        Positions(length),
        lookups=(Lookup(index.log_buckets(32, 128, causal=causal), bias=table(heads, 32)),),
        scale=1.0,
    )


def clipped(heads, length, size, causal):
    return Plan(Positions(length), lookups=(Lookup(index.clip(128, 128), bias=table(heads, 257)),))


def alibi(heads, length, size, causal):
    return Plan(Positions(length), slopes=(torch.rand(heads, device="cuda") / 8).requires_grad_())


def shaw(heads, length, size, causal):
    return Plan(
        Positions(length), lookups=(Lookup(index.clip(64, 64), dot_query=table(1, 129, size, dtype=torch.bfloat16)),)
    )


def shaw_values(heads, length, size, causal):
    tables = (table(1, 129, size, dtype=torch.bfloat16) for _ in range(2))
    return Plan(
        Positions(length), lookups=(Lookup(index.clip(64, 64), dot_query=next(tables), add_value=next(tables)),)
    )


def deberta(heads, length, size, causal):
    buckets = index.deberta_buckets(256, 512)
    tables = [table(heads, buckets.n, size, dtype=torch.bfloat16) for _ in range(2)]
    return Plan(
        Positions(length), lookups=(Lookup(buckets, dot_query=tables[0], dot_key=tables[1]),), scale=(3 * size) ** -0.5
    )


def relative_logits(heads, length, size, causal):
    states = torch.randn(4, heads, length, 16, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bank = F.pad(torch.randn(1, 1024, 16, device="cuda", dtype=torch.bfloat16) / 4, (0, 0, 1, 0)).requires_grad_()
    return Plan(Positions(length), lookups=(Lookup(index.Index(-1024, 0), dot_query=bank, states=states),))


def transformer_xl(heads, length, size, causal):
    distances = index.exact(Positions(length))
    content = table(heads, distances.n, size, dtype=torch.bfloat16)
    return Plan(Positions(length), lookups=(Lookup(distances, dot_query=content, bias=table(heads, distances.n)),))


def xlnet(heads, length, size, causal):
    """The same with two segments."""
    plain = transformer_xl(heads, length, size, causal)
    parts = (torch.arange(length, device="cuda") > length // 3).long()
    same_or_not = index.Index(-1, 1, rows=(1, 0, 1), n=2, axis=1)
    segments = Lookup(same_or_not, bias=table(heads, 2), dot_query=table(heads, 2, size, dtype=torch.bfloat16))
    return Plan(Positions(length, length, more=[(parts, parts, (0, 1))]), lookups=(*plain.lookups, segments))


def packed(heads, length, size, causal):
    """T5's table with a position for each token: four texts in a row."""
    ids = (torch.arange(length, device="cuda") % max(length // 4, 1)).int()
    return Plan(Positions(ids), lookups=t5(heads, length, size, causal).lookups, scale=1.0)


def rope(heads, length, size, causal):
    angle = torch.outer(torch.arange(length, device="cuda"), 1e4 ** -torch.linspace(0, 1, size // 2, device="cuda"))[
        None
    ]
    return Plan(Positions(length), rotate=Rotation((angle.cos(), angle.sin()), (angle.cos(), angle.sin())))


PLANS = {
    "t5": (t5, SHAPES), "clipped": (clipped, SHAPES), "alibi": (alibi, SHAPES), "shaw": (shaw, SHAPES),
    "shaw + values": (shaw_values, SHAPES), "relative logits": (relative_logits, WIDE),
    "deberta": (deberta, SHAPES[:3:2]), "rope": (rope, SHAPES), "transformer_xl": (transformer_xl, SHAPES[:3:2]),
    "xlnet": (xlnet, SHAPES[:1]), "packed t5": (packed, SHAPES[:2]),
}  # fmt: skip


def largest_error(make) -> float:
    """The largest error of output and gradients against float64, relative in norm, in bfloat16 at length 700."""
    torch.manual_seed(0)
    if make in (relative_logits, rope):  # causal only; the states of relative_logits have a batch of 4
        return error(make(2, 700, 64, True), 4 if make is relative_logits else 1, 2, 700, 64, True)
    return max(error(make(2, 700, 64, causal), 1, 2, 700, 64, causal) for causal in (False, True))


def error(plan, batch, heads, length, size, causal) -> float:
    inputs = [torch.randn(batch, heads, length, size, device="cuda", dtype=torch.bfloat16) / 2 for _ in range(3)]
    g = torch.randn_like(inputs[2])
    leaves = [tensor for _, tensor in plan.tensors()]
    results = []
    for engine, dtype in (("reference", torch.float64), ("triton", torch.bfloat16)):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        out = attend(q, k, v, plan, causal=causal, engine=engine)
        results.append([out, *torch.autograd.grad(out, [q, k, v, *leaves], g.to(dtype))])
    return max(((b.double() - a.double()).norm() / a.double().norm()).item() for a, b in zip(*results, strict=True))
