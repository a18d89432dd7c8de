"""The triton engine on a GPU, at real sizes: error budgets, equal bits, compile, graphs, and a fuzz. `make test-gpu`."""

import dataclasses
import random

import pytest
import torch

from posenc import Lookup, Plan, Where, attend, index
from posenc.engines.triton import refuses
from posenc.mask import make_mask
from tests.plans import plan_of

pytestmark = pytest.mark.gpu

SLOTS = ("bias", "dot_query", "states", "dot_key", "add_value", "slopes", "decay", "scale")


def tensors(batch, heads, kv_heads, lq, lk, size, dtype):
    make = lambda h, l: torch.randn(batch, h, l, size, dtype=dtype, device="cuda").requires_grad_()  # noqa: E731
    return make(heads, lq), make(kv_heads, lk), make(kv_heads, lk)


def tame(plan):
    """Scores of a model's size: random scales and slopes multiply products and distances."""
    scale, slopes = (None if x is None else (x.detach().abs() / 8).requires_grad_() for x in (plan.scale, plan.slopes))
    return dataclasses.replace(plan, scale=scale, slopes=slopes)


def errors(q, k, v, plan, options, g):
    """Relative errors against float64: of the dense formula on the same inputs rounded to q's dtype, and ours."""
    leaves = [tensor for _, tensor in plan.tensors()]
    results = []
    for engine, dtype in (("reference", torch.float64), ("reference", q.dtype), ("triton", q.dtype)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, plan, engine=engine, **options)
        results.append([out, *torch.autograd.grad(out, inputs + leaves, g.to(dtype), allow_unused=True)])
    found = []
    for truth, plain, ours in zip(*results, strict=True):
        if truth is None:
            continue
        assert ours.isfinite().all()
        size = max(truth.double().norm().item(), 1e-3)  # one visible key: a gradient of zero
        found.append([(x.double() - truth.double()).norm().item() / size for x in (plain, ours)])
    return found


def check(q, k, v, plan, **options):
    g = torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype, device="cuda")
    floor = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[q.dtype]
    for number, (plain, ours) in enumerate(errors(q, k, v, plan, options, g)):
        # The dense reference keeps products in float32, so half precision's own rounding is the floor.
        assert ours <= max(2 * plain, floor), f"result {number}: {ours:.1e}, the dense formula {plain:.1e}"


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot(slot):
    q, k, v = tensors(2, 4, 2, 1000, 1000, 64, torch.bfloat16)
    check(q, k, v, tame(plan_of((slot,), q, k, v, reach=(60, 70))), causal=slot in ("bias", "dot_key"))


@pytest.mark.parametrize(
    "size,dtype", [(16, torch.bfloat16), (128, torch.float16), (80, torch.bfloat16), (64, torch.float32)]
)
def test_head_sizes_and_types(size, dtype):
    q, k, v = tensors(1, 2, 1, 333, 500, size, dtype)
    check(q, k, v, plan_of(("bias", "dot_query", "add_value"), q, k, v, reach=(40, 40)), window=200)


def shaw_values(length, size):
    table = lambda: (torch.randn(1, 129, size, device="cuda") / 4).requires_grad_()  # noqa: E731
    return Plan(Where(length), lookups=(Lookup(index.clip(64, 64), dot_query=table(), add_value=table()),))


def test_ten_runs_give_the_same_bits():
    q, k, v = tensors(2, 4, 4, 2049, 2049, 64, torch.bfloat16)
    plan = shaw_values(2049, 64)
    plan = dataclasses.replace(
        plan,
        lookups=(*plan.lookups, Lookup(index.log_buckets(32, 128, causal=True), bias=torch.randn(4, 32, device="cuda").requires_grad_())),
    )  # fmt: skip
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors())]
    g = torch.randn_like(q)
    first = None
    for _ in range(10):
        out = attend(q, k, v, plan, causal=True, engine="triton")
        now = [out, *torch.autograd.grad(out, leaves, g)]
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


def test_compile_without_graph_breaks():
    q, k, v = tensors(1, 2, 2, 512, 512, 64, torch.bfloat16)
    plan = shaw_values(512, 64)
    run = lambda a, b, c: attend(a, b, c, plan, causal=True, engine="triton")  # noqa: E731
    eager, compiled = run(q, k, v), torch.compile(run, fullgraph=True)(q, k, v)
    assert (eager - compiled).abs().max() <= 2e-2
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (eager, compiled)]
    assert all((a - b).abs().max() <= 5e-2 * a.abs().max() for a, b in zip(*grads, strict=True))


def test_a_cuda_graph_replays():
    q, k, v = (x.detach() for x in tensors(1, 4, 2, 1, 3000, 64, torch.bfloat16))
    plan = Plan(Where((2999, 1), 3000), slopes=torch.rand(4, device="cuda"))
    expected = attend(q, k, v, plan, causal=True, engine="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, plan, causal=True, engine="triton")
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.testing.assert_close(out, attend(q, k, v, plan, causal=True, engine="triton"))


def test_offsets_past_two_billion_elements():
    """One head whose rows lie more than 2^31 elements apart from its first."""
    length, size = 70_000, 64
    wide = torch.empty(length, 1, 40_000, dtype=torch.bfloat16, device="cuda")  # strides of a very wide model
    k = wide[None, :, 0, :size].unsqueeze(1)
    k.copy_(torch.randn_like(k))
    q = torch.randn(1, 1, 64, size, dtype=torch.bfloat16, device="cuda")
    plan = Plan(Where((length - 64, 64), length), slopes=torch.tensor([0.001], device="cuda"))
    out = attend(q, k, k, plan, causal=True, engine="triton")
    expected = attend(q, k.contiguous(), k.contiguous(), plan, causal=True, engine="reference")
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_fuzz():
    """500 draws of lengths, heads, masks and spans over a few sets of slots (each set is compiled once)."""
    draw = random.Random(0)
    sets = [("bias",), ("slopes", "bias"), ("dot_query",), ("dot_query", "add_value"), ("dot_key", "states", "scale")]
    for number in range(500):
        slots = sets[number % len(sets)]
        lk = draw.choice([1, 7, 63, 64, 65, 129, 300, 777, 1000])
        lq = draw.choice([1, 5, 64, 100, lk])
        heads = draw.choice([1, 2, 4])
        q, k, v = tensors(draw.choice([1, 2]), heads, draw.choice([1, heads]), lq, lk, 64, torch.bfloat16)
        options = draw.choice([{}, {"causal": True}])
        if draw.random() < 0.3:
            options["key_mask"] = torch.rand(q.shape[0], lk, device="cuda") < 0.8
        plan = tame(plan_of(slots, q, k, v, reach=(draw.randrange(0, 90), draw.randrange(0, 90))))
        seen = {"causal": False, "window": None, "key_mask": None, "documents": None, "mask": None, **options}
        assert refuses(q, k, v, plan, make_mask(q, k, **seen), 0.0) is None
        g = torch.randn_like(q)
        for plain, ours in errors(q, k, v, plan, options, g):
            assert ours <= max(4 * plain, 2e-2), (number, slots, lq, lk, options, plain, ours)
