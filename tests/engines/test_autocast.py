"""A backward pass that is called under autocast computes in the dtypes of its forward pass, with the same bits."""

import pytest
import torch

from posenc.core.index import Grid, clip, log_buckets
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines.cpu import block_sizes
from posenc.functional import attend

H, D = 4, 8


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def plan_of(kind: str, length: int) -> Plan:
    at = torch.arange(length) * 2
    bias, query = Lookup(log_buckets(8, 20, causal=True), bias=leaf(H, 8)), Lookup(clip(5, 0), dot_query=leaf(H, 6, D))
    grid = Grid((clip(9, 9, axis=0), clip(3, 3, axis=1)))
    return {
        "nothing": lambda: Plan(Positions(length)),
        "bias": lambda: Plan(Positions(length), lookups=(bias,)),
        "content": lambda: Plan(Positions(length), lookups=(query,)),
        "both": lambda: Plan(Positions(length), lookups=(bias, query)),
        "values": lambda: Plan(Positions(length), lookups=(Lookup(clip(5, 0), add_value=leaf(H, 6, D)),)),
        "slopes": lambda: Plan(Positions(length), slopes=leaf(H)),
        "gaps": lambda: Plan(Positions(at), lookups=(bias,)),
        "grid": lambda: Plan(Positions(length, more=[(at % 4, at % 4)]), lookups=(Lookup(grid, bias=leaf(H, grid.n)),)),
    }[kind]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind, length, options",
    [
        ("nothing", 33, dict(key_mask=True)), ("bias", 33, {}), ("bias", 700, {}), ("content", 33, {}), ("content", 700, {}),
        ("both", 33, {}), ("values", 33, {}), ("values", 700, {}), ("slopes", 700, {}), ("bias", 100, dict(dropout=0.1)),
        ("bias", 33, dict(key_mask=True)), ("gaps", 33, {}), ("gaps", 33, dict(kept=0)), ("grid", 33, {}),
    ],
    ids=str,
)  # fmt: skip
def test_the_cpu_engine_backward_under_autocast(kind, length, options, dtype, monkeypatch):
    if "kept" in options:
        monkeypatch.setattr(block_sizes, "KEPT_SCORES", options["kept"])
    options = {name: x for name, x in options.items() if name != "kept"}
    if "key_mask" in options:
        options["key_mask"] = torch.rand(2, length) > 0.3
    q, k, v = (leaf(2, H, length, D, dtype=dtype) for _ in range(3))
    plan = plan_of(kind, length)
    leaves, g = [q, k, v, *(tensor for _, tensor in plan.tensors())], torch.randn(2, H, length, D).to(dtype)
    out = attend(q, k, v, plan, causal=True, **options)
    expected = torch.autograd.grad(out, leaves, g, retain_graph=True)
    with torch.autocast("cpu", torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
        found = torch.autograd.grad(out, leaves, g)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
