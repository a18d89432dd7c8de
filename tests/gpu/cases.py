"""The triton engine on a GPU, at real sizes: error budgets, equal bits, compile, graphs, strides, and a fuzz.

    make test-gpu                        with pytest
    python -m tests.gpu.cases [-j 8]     without: the same cases, in 8 processes (each compiles its own kernels);
                                         --only fuzz,slot: those whose names contain one of these; --but fuzz: the others

`CASES` names every case; each is a function without arguments that raises if a check fails.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import random
import sys
import time
from functools import partial

import torch

from posenc import Attention, Lookup, Plan, Positions, attend, index
from posenc.core.mask import make_mask
from posenc.engines.lowering import lower_plan
from posenc.engines.triton import arguments, supports
from tests import budget, layouts, seeds
from tests.plans import mapped, plan_of

SLOTS = ("bias", "dot_query", "states", "dot_key", "add_value", "slopes", "decay", "scale")


def tensors(batch, heads, kv_heads, lq, lk, size, dtype):
    make = lambda h, l: torch.randn(batch, h, l, size, dtype=dtype, device="cuda").requires_grad_()  # noqa: E731
    return make(heads, lq), make(kv_heads, lk), make(kv_heads, lk)


def tame(plan):
    """Smaller scales and slopes, so that scores are as small as a model's."""

    def smaller(name, x):
        return (x.detach().abs() / 8).requires_grad_() if name in ("scale", "slopes") else x

    return mapped(plan, smaller)


def check(q, k, v, plan, **options):
    """Output and every gradient, within their budgets. Returns the largest error, as a fraction of its budget."""
    g = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    out = attend(q, k, v, plan, engine="triton", **options)
    results = {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True)))}
    expected, allowed = budget.expect(q, k, v, plan, g, **options)
    for name, ours in results.items():
        budget.assert_within(ours, expected[name], allowed[name], name)
    return max(budget.excess(ours, expected[name], allowed[name]) for name, ours in results.items())


def every_slot(slot):
    q, k, v = tensors(2, 4, 2, 1000, 1000, 64, torch.bfloat16)
    check(q, k, v, tame(plan_of((slot,), q, k, v, reach=(60, 70))), causal=slot in ("bias", "dot_key"))


def wide_bands(options):
    """Most tiles lie within the span of the content terms."""
    q, k, v = tensors(2, 4, 2, 1000, 1100, 64, torch.bfloat16)
    if "key_mask" in options:
        last = torch.tensor([[k.shape[2]], [k.shape[2] - 200]], device="cuda")[: k.shape[0]]
        options = {"key_mask": torch.arange(k.shape[2], device="cuda") < last}
    check(q, k, v, tame(plan_of(("dot_query", "dot_key", "add_value"), q, k, v, reach=(300, 400))), **options)
    check(q, k, v, tame(plan_of(("bias", "states", "scale"), q, k, v, reach=(400, 300))), **options)


def head_sizes_and_types(size, dtype):
    q, k, v = tensors(1, 2, 1, 333, 500, size, dtype)
    check(q, k, v, plan_of(("bias", "dot_query", "add_value"), q, k, v, reach=(40, 40)), window=200)


def shaw_values(length, size):
    table = lambda: (torch.randn(1, 129, size, device="cuda") / 4).requires_grad_()  # noqa: E731
    return Plan(Positions(length), lookups=(Lookup(index.clip(64, 64), dot_query=table(), add_value=table()),))


def ten_runs_give_the_same_bits():
    q, k, v = tensors(2, 4, 4, 2049, 2049, 64, torch.bfloat16)
    plan = shaw_values(2049, 64)
    plan = dataclasses.replace(
        plan,
        lookups=(*plan.lookups, Lookup(index.log_buckets(32, 128, causal=True), bias=torch.randn(4, 32, device="cuda").requires_grad_())),
    )  # fmt: skip
    same_bits(q, k, v, plan)


def same_bits(q, k, v, plan):
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors())]
    g = torch.randn_like(q)
    first = None
    for _ in range(10):
        out = attend(q, k, v, plan, causal=True, engine="triton")
        now = [out, *torch.autograd.grad(out, leaves, g)]
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True)), "different bits"


def token_positions_give_the_same_bits():
    """Every distance repeats within a row; its pairs are added in any order."""
    q, k, v = tensors(1, 4, 2, 1024, 1024, 64, torch.bfloat16)
    positions = Positions(torch.arange(1024, device="cuda") // 8)
    plan = plan_of(("bias", "dot_query", "dot_key", "add_value"), q, k, v, positions, reach=(40, 40))
    same_bits(q, k, v, plan)
    check(q, k, v, plan)


def compile_without_graph_breaks():
    q, k, v = tensors(1, 2, 2, 512, 512, 64, torch.bfloat16)
    plan = shaw_values(512, 64)
    token = torch.arange(512, device="cuda")
    for masks in (
        {}, {"key_mask": token[None] < 500}, {"documents": (token > 200).long()[None]}, {"mask": token % 7 != token[:, None] % 5},
    ):  # fmt: skip
        run = lambda a, b, c, masks: attend(a, b, c, plan, causal=True, engine="triton", **masks)  # noqa: E731
        eager, compiled = run(q, k, v, masks), torch.compile(run, fullgraph=True)(q, k, v, masks)
        assert (eager - compiled).abs().max() <= 2e-2
        grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (eager, compiled)]
        assert all((a - b).abs().max() <= 5e-2 * a.abs().max() for a, b in zip(*grads, strict=True))


def short_compiled_texts():
    """PyTorch's attention with a dense bias; the second text is padded on the left, or has no real key."""
    real = torch.arange(128, device="cuda") >= torch.tensor([[0], [100]], device="cuda")
    hidden = real & torch.tensor([[True], [False]], device="cuda")
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    for length, dtype, options in (
        (128, torch.bfloat16, {"key_mask": real}), (75, torch.float16, {"key_mask": hidden, "causal": True}), (128, torch.bfloat16, {}),
    ):  # fmt: skip
        q, k, v = tensors(2, 4, 4, length, 128, 64, dtype)
        plan = plan_of(("bias",), q, k, v, Positions((128 - length, length), 128), reach=(60, 70), dtype=dtype)
        torch._dynamo.reset()
        with torch.no_grad():
            out = compiled(q, k, v, plan, **options)
        expected, allowed = budget.expect(q, k, v, plan, **options)
        budget.assert_within(out, expected["out"], allowed["out"], "out")


def a_cuda_graph_replays():
    q, k, v = (x.detach() for x in tensors(1, 4, 2, 1, 3000, 64, torch.bfloat16))
    plan = Plan(Positions((2999, 1), 3000), slopes=torch.rand(4, device="cuda"))
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


def offsets_past_two_billion_elements():
    """One head whose rows lie more than 2^31 elements apart from its first."""
    length, size = 70_000, 64
    wide = torch.empty(length, 1, 40_000, dtype=torch.bfloat16, device="cuda")  # strides of a very wide model
    k = wide[None, :, 0, :size].unsqueeze(1)
    k.copy_(torch.randn_like(k))
    q = torch.randn(1, 1, 64, size, dtype=torch.bfloat16, device="cuda")
    plan = Plan(Positions((length - 64, 64), length), slopes=torch.tensor([0.001], device="cuda"))
    out = attend(q, k, k, plan, causal=True, engine="triton")
    expected = attend(q, k.contiguous(), k.contiguous(), plan, causal=True, engine="reference")
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def packed_sequences():
    """Token positions that start again, documents, and two packed rows."""
    q, k, v = tensors(2, 2, 2, 700, 700, 64, torch.bfloat16)
    positions = torch.cat([torch.arange(300), torch.arange(400)]).cuda()[None].expand(2, 700)
    ids = torch.cat([torch.zeros(300), torch.ones(400)]).long().cuda()[None].expand(2, 700)
    plan = plan_of(("bias", "dot_query", "dot_key", "add_value"), q, k, v, Positions(positions), reach=(40, 40))
    check(q, k, v, tame(plan), documents=ids, causal=True)


def every_distance(causal):
    """A content term over every distance, in blocks of queries, with a bias in it."""
    arguments.ROWS = 0  # so that there are several
    q, k, v = tensors(1, 2, 2, 1500, 1500, 64, torch.bfloat16)
    check(q, k, v, plan_of(("exact",), q, k, v), causal=causal)


def documents():
    """Packed texts of several lengths, with narrow and wide bands, padding, and ids in no order."""
    q, k, v = tensors(2, 4, 2, 1400, 1400, 64, torch.bfloat16)
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([300, 64, 1, 500, 35, 500])).cuda()[None].expand(2, -1)
    padding = torch.arange(1400, device="cuda")[None] < torch.tensor([[1400], [1100]], device="cuda")
    plan = tame(plan_of(("bias", "slopes"), q, k, v, reach=(60, 70)))
    check(q, k, v, plan, documents=ids, causal=True)
    check(q, k, v, plan, documents=ids[:, torch.randperm(1400, device="cuda")])
    check(q, k, v, tame(plan_of(("dot_query", "add_value"), q, k, v, reach=(60, 70))), documents=ids, key_mask=padding)
    check(q, k, v, tame(plan_of(("dot_query", "dot_key"), q, k, v, reach=(300, 400))), documents=ids)
    q, k, v = tensors(2, 4, 4, 1400, 1400, 64, torch.bfloat16)
    plan = plan_of(("exact",), q, k, v)
    check(q, k, v, plan, documents=ids, causal=True)


def further_axes():
    """Segments, with a term over every distance; all slots on a second axis; a grid. Equal bits; compiled."""
    q, k, v = tensors(2, 4, 2, 1000, 1100, 64, torch.bfloat16)
    check(q, k, v, plan_of(("segments", "exact"), q, k, v), causal=True)
    further = torch.randint(0, 5, (2, 1100), device="cuda")
    positions = Positions((100, 1000), 1100, more=[(further[:, 100:], further, (0, 4))])
    buckets = index.clip(3, 2, axis=1)
    make = lambda *shape: (torch.randn(*shape, device="cuda") / 4).requires_grad_()  # noqa: E731
    every = Lookup(buckets, make(4, 6), make(1, 6, 64), dot_key=make(4, 6, 64), add_value=make(1, 6, 64))
    plan = Plan(
        positions, lookups=(every, Lookup(index.clip(40, 40), dot_query=make(4, 81, 64), add_value=make(1, 81, 64)))
    )
    check(q, k, v, plan)
    same_bits(q, k, v, plan)
    run = lambda a, b, c: attend(a, b, c, plan, engine="triton")  # noqa: E731
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(q, k, v), run(q, k, v), rtol=2e-2, atol=2e-2)
    layer = Attention(256, 4, encoding="xlnet", engine="triton").cuda().bfloat16()
    x, segments = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16), (further[:, :300] % 2, (0, 1))
    compiled = torch.compile(layer, fullgraph=True)(x, segments=segments)
    torch.testing.assert_close(compiled, layer(x, segments=segments), rtol=2e-2, atol=2e-2)
    q, k, v = tensors(8, 4, 4, 144, 144, 32, torch.bfloat16)
    table = torch.stack((torch.arange(144) // 12, torch.arange(144) % 12), -1)[None].cuda()
    grid = index.Grid((index.clip(11, 11), index.clip(11, 11, axis=1)))
    check(q, k, v, Plan(Positions(table), lookups=(Lookup(grid, dot_query=make(4, grid.n, 32)),)))


def starts():
    """Left padding: a start per row, a key mask."""
    q, k, v = tensors(2, 2, 1, 500, 500, 64, torch.bfloat16)
    pad = torch.tensor([37, 0], device="cuda")
    plan = plan_of(("bias", "dot_query", "dot_key"), q, k, v, Positions((-pad, 500), (-2 * pad, 500)), reach=(30, 30))
    check(q, k, v, plan, key_mask=torch.arange(500, device="cuda")[None] >= pad[:, None])


def dense_masks():
    """A number or a truth value of each pair: rows of any length and alignment, shared by rows of the batch, heads or queries, beside every kind
    of term; and functions of both positions, whose blocks are such masks."""
    kinds = [
        ((), {"causal": True}),
        (("bias",), {}),
        (("dot_query", "bias"), {"causal": True}),
        (("dot_key", "scale"), {"window": (90, 20)}),
    ]
    shapes = [(2, 4, 300, 301), (1, 1, 64, 516), (1, 4, 1, 777), (2, 1, 130, 130)]
    for number, ((slots, options), (rows, heads, lq, lk)) in enumerate(itertools.product(kinds, shapes)):
        q, k, v = tensors(2, 4, 2, max(lq, 100), lk, 64, torch.bfloat16)
        plan = tame(plan_of(slots, q, k, v, reach=(60, 70)))
        numbers = torch.randn(rows, heads, lq if lq == 1 else q.shape[2], lk + 3, device="cuda")[..., :lk]
        if lk == 777:
            numbers = numbers.masked_fill(numbers > 1.0, float("-inf"))
        check(q, k, v, plan, mask=numbers.to(torch.float32 if lk % 2 else torch.bfloat16), **options)
        visible = numbers > -1.0
        check(q, k, v, plan, mask=visible if number % 3 else visible.mT.contiguous().mT, **options)
    for size, lk in ((64, 301), (128, 516), (80, 130)):
        q, k, v = tensors(2, 4, 2, 130, lk, size, torch.bfloat16)
        weight = torch.randn(4, device="cuda").requires_grad_()
        pair = lambda p_q, p_k, w=weight: w[:, None, None] * torch.sin(p_k * (p_q[:, None] + 1.0).log())  # noqa: E731
        found = []
        for engine, kind in (("triton", torch.bfloat16), ("reference", torch.float64)):
            own = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
            out = attend(*own, Plan(Positions((lk - 130, 130), lk), pair=pair), causal=True, engine=engine)
            g = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(torch.bfloat16).to(kind)
            found.append([out, *torch.autograd.grad(out, [*own, weight], g)])
        for ours, exact in zip(*found, strict=True):
            torch.testing.assert_close(ours.double(), exact.double(), rtol=0.0, atol=2e-2 * float(exact.abs().max()))


FUZZ, PARTS, EVERY = 500, 10, 1
REACHES = [(1, 0), (7, 64), (89, 3)]  # few: kernels are specialised on these numbers


def fuzz(part):
    """500 draws of lengths, heads, masks and spans over a few sets of slots, in PARTS parts."""
    sets = [("bias",), ("slopes", "bias"), ("dot_query",), ("dot_query", "add_value"), ("dot_key", "states", "scale")]
    for number in range(part * FUZZ // PARTS, (part + 1) * FUZZ // PARTS, EVERY):
        draw = random.Random(seeds.seed(number))
        torch.manual_seed(seeds.seed(number))
        slots = sets[part % len(sets)]
        lk = draw.choice([1, 7, 63, 64, 65, 129, 300, 777, 1000])
        lq = draw.choice([1, 5, 64, 100, lk])
        heads = draw.choice([1, 2, 4])
        q, k, v = tensors(draw.choice([1, 2]), heads, draw.choice([1, heads]), lq, lk, 64, torch.bfloat16)
        options = draw.choice([{}, {"causal": True}, {"window": (draw.randrange(1, 200), draw.randrange(0, 50))}])
        if draw.random() < 0.3:
            options["key_mask"] = torch.rand(q.shape[0], lk, device="cuda") < 0.8
        plan = tame(plan_of(slots, q, k, v, reach=draw.choice(REACHES)))
        masks = {"causal": False, "window": None, "key_mask": None, "documents": None, "mask": None, **options}
        assert supports(lower_plan(q, k, v, plan, make_mask(q, k, **masks))) is None
        try:
            check(q, k, v, plan, **options)
        except AssertionError as error:
            raise AssertionError(f"draw {number}, {slots}, {lq} queries, {lk} keys, {options}: {error}") from error


def strides(name):
    for layout in layouts.LAYOUTS:
        for which in range(3):
            layouts.check("triton", name, which, layout, "cuda")


CASES = {
    **{f"slot {slot}": partial(every_slot, slot) for slot in SLOTS},
    **{
        f"head size {size}, {str(dtype)[6:]}": partial(head_sizes_and_types, size, dtype)
        for size, dtype in [(16, torch.bfloat16), (128, torch.float16), (80, torch.bfloat16), (64, torch.float32)]
    },
    "ten runs give the same bits": ten_runs_give_the_same_bits,
    "token positions give the same bits": token_positions_give_the_same_bits,
    "compile without graph breaks": compile_without_graph_breaks,
    "short compiled texts": short_compiled_texts,
    "a CUDA graph replays": a_cuda_graph_replays,
    "offsets past two billion elements": offsets_past_two_billion_elements,
    **{
        f"wide bands, {', '.join(options) or 'plain'}": partial(wide_bands, options)
        for options in ({}, {"causal": True}, {"window": 500}, {"key_mask": None})
    },
    "packed sequences": packed_sequences,
    "every distance": partial(every_distance, False),
    "every distance, causal": partial(every_distance, True),
    "documents": documents,
    "further axes": further_axes,
    "starts": starts,
    "dense masks": dense_masks,
    **{f"strides {name}": partial(strides, name) for name in layouts.ENCODINGS},
    **{f"fuzz {part + 1} of {PARTS}": partial(fuzz, part) for part in range(PARTS)},
}


def run(name) -> bool:
    began = time.time()
    torch.manual_seed(seeds.of(name))
    try:
        CASES[name]()
        print(f"passed  {name} ({time.time() - began:.1f} s)", flush=True)
        return True
    except Exception as error:
        print(f"FAILED  {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--but")
    args = parser.parse_args()
    jobs = args.jobs
    named = lambda name, parts: any(part in name for part in parts.split(","))  # noqa: E731
    names = [name for name in CASES if named(name, args.only) and not (args.but and named(name, args.but))]
    names.sort(key=lambda name: not name.startswith("fuzz"))  # the longest first
    if jobs == 1:
        passed = list(map(run, names))
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            passed = list(pool.imap_unordered(run, names))
    sys.exit(int(not all(passed)))


if __name__ == "__main__":
    main()
