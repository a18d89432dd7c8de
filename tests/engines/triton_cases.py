"""The triton engine's kernels under Triton's interpreter, on a CPU. Run by test_triton.py, each group in a fresh process:

python tests/engines/triton_cases.py GROUP

The interpreter must be on before Triton is imported, and must not be on for any other test.
"""

import dataclasses
import itertools
import os
import sys
import weakref
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parents[2])]

import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton import language as tl  # noqa: E402

from posenc import Index, Lookup, Plan, Positions, UnsupportedPlan, attend, index  # noqa: E402
from posenc.core.dropout import Dropout, draw_seed  # noqa: E402
from tests import budget, seeds  # noqa: E402
from tests.engines.groups import run_group  # noqa: E402
from tests.plans import mapped, plan_of, tensors  # noqa: E402

SLOTS = ("bias", "dot_query", "states", "dot_key", "add_value", "slopes", "decay", "scale")


WORST = []


def check(q, k, v, plan, **options):
    """Output and every gradient in float32, within their budgets."""

    def leaf(name, x):
        # Smaller scales and slopes keep scores as small as a model's: at 60, exp2 has fewer digits than exp.
        return (x / 4 if name in ("scale", "slopes") else x).detach().float().requires_grad_()

    plan = mapped(plan, leaf)
    leaves = {name: x.detach().float().requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
    out = attend(*leaves.values(), plan, engine="triton", **options)
    leaves.update(plan.tensors())
    g = torch.randn(out.shape)
    expected, allowed = budget.expect(leaves["q"], leaves["k"], leaves["v"], plan, g, **options)
    results = {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g, allow_unused=True)))}
    for name, ours in results.items():
        budget.assert_within(ours, expected[name], allowed[name], name)
        WORST.append(budget.excess(ours, expected[name], allowed[name]))


def group_together():
    """Every slot in a few plans; far tiles, band tiles and a ragged end on both sides. The other groups test them one by one."""
    q, k, v = tensors(1, 2, 1, 20, 33, 16)
    check(q, k, v, plan_of(("bias", "dot_query", "add_value", "slopes"), q, k, v), causal=True)
    check(q, k, v, plan_of(("states", "dot_key", "decay", "scale"), q, k, v, per_head=False), window=(9, 5))
    tokens = Positions(torch.arange(13, 33)[None] // 3, torch.arange(33)[None] // 3)
    real = torch.arange(33)[None] < 27
    check(q, k, v, plan_of(("bias", "dot_query", "dot_key", "add_value"), q, k, v, tokens), key_mask=real)


def group_slots():
    """Every slot; far tiles, band tiles and a ragged end on both sides."""
    q, k, v = tensors(1, 2, 1, 37, 50, 16)
    for number, slot in enumerate(SLOTS):
        check(q, k, v, plan_of((slot,), q, k, v, per_head=number % 2 == 0), causal=number % 3 == 0)


def group_pairs():
    """Every pair of slots."""
    q, k, v = tensors(1, 2, 1, 20, 37, 16)
    for number, slots in enumerate(itertools.combinations(SLOTS, 2)):
        check(q, k, v, plan_of(slots, q, k, v, per_head=number % 2 == 0), causal=number % 3 == 0)


def group_masks():
    q, k, v = tensors(2, 1, 1, 34, 53, 16, 24)
    mixed = plan_of(("bias", "dot_query", "add_value", "slopes"), q, k, v)
    causal = {"causal": True}
    check(q, k, v, mixed, **causal, window=20)
    check(q, k, v, mixed, window=(5, 21))
    padding = torch.ones(2, 53, dtype=torch.bool)
    padding[0, 40:] = False
    padding[1, :9] = False
    check(q, k, v, mixed, key_mask=padding)
    padding[0, 20] = False
    padding[1] = False  # fully masked: zeros, and no gradient
    check(q, k, v, mixed, key_mask=padding, **causal)
    ids = torch.tensor([[0] * 20 + [1] * 17 + [2] * 16, [7] * 53])
    check(q, k, v, mixed, documents=(ids[:, 19:], ids), **causal)
    check(q, k, v, mixed, documents=(ids[:1, 19:], ids[:1] * 3), window=9)  # most queries are fully masked
    # documents without a query, one of which shares its tile of keys with the next
    early = torch.tensor([[0] * 7 + [1] * 12 + [3] * 34, [2] * 19 + [5] * 20 + [6] * 14])
    check(q, k, v, mixed, documents=(early[:, 19:], early), **causal)
    for slots in (("bias",), ("dot_query",), ("dot_key",)):
        check(q, k, v, plan_of(slots, q, k, v), documents=(early[:, 19:], early))
    padding = torch.arange(53)[None] < torch.tensor([[50], [30]])
    check(q, k, v, mixed, documents=(ids[:, 19:].flip(1), ids), key_mask=padding)
    check(q, k, v, mixed, documents=(ids[:, 19:], ids[:, torch.randperm(53)]))  # in no order: their bounds are unknown
    check(q, k, v, mixed, mask=torch.rand(2, 1, 34, 53) > 0.3)
    check(q, k, v, mixed, mask=torch.randn(1, 1, 1, 53))


def group_positions():
    q, k, v = tensors(2, 1, 1, 33, 33, 16)
    packed = torch.cat([torch.arange(14), torch.arange(19)])[None]
    everything = ("bias", "dot_query", "dot_key", "add_value", "slopes")
    check(
        q,
        k,
        v,
        plan_of(everything, q, k, v, Positions(packed)),
        documents=(packed.diff(prepend=packed[:, :1]) < 0).cumsum(1),
    )
    repeated = torch.stack((torch.arange(33) // 5, torch.full((33,), 7)))  # up to 33 equal distances in a row
    check(q, k, v, plan_of(everything, q, k, v, Positions(repeated)))
    q, k, v = tensors(2, 1, 1, 21, 40, 16)
    start = torch.tensor([3, 0])
    check(q, k, v, plan_of(everything, q, k, v, Positions((start + 19, 21), (start * 2, 40))))
    check(q, k, v, plan_of(everything, q, k, v, Positions((1_000_019, 21), (1_000_000, 40))), causal=True)


def group_lengths():
    """Awkward sizes, one query (split keys), heads of 16 to 24, wide bias spans whose diagonals cross tiles."""
    for lq, lk in ((1, 1), (1, 70), (7, 7), (2, 55), (33, 17)):
        q, k, v = tensors(1, 2, 1, lq, lk, 24, 16)
        check(q, k, v, plan_of(("bias", "slopes", "dot_key"), q, k, v), causal=lq <= lk)
    q, k, v = tensors(1, 1, 1, 45, 60, 16)
    for left, right in ((60, 60), (19, 33), (0, 0)):
        table = torch.randn(1, left + right + 1)
        check(q, k, v, Plan(Positions((15, 45), 60), lookups=(Lookup(index.clip(left, right), bias=table),)))
    two = Plan(
        Positions((15, 45), 60),
        lookups=(
            Lookup(index.clip(2, 9), bias=torch.randn(1, 12), dot_query=torch.randn(1, 12, 16)),
            Lookup(Index(-6, -1), bias=torch.randn(1, 6), dot_query=torch.randn(1, 6, 16)),
        ),
    )
    check(q, k, v, two)


def group_axes():
    """Lookups on further axes and on grids, alone and with each slot of the first axis; more distances than a band is for."""
    q, k, v = tensors(2, 2, 1, 19, 35, 16, 24)
    for slots in (("bias",), ("exact", "slopes"), ("dot_key", "add_value"), ("dot_query", "decay"), ("states",)):
        check(q, k, v, plan_of(("segments", *slots), q, k, v), causal=len(slots) == 1)
    further = torch.randint(-2, 3, (2, 35))
    positions = Positions((16, 19), 35, more=[(further[:, 16:], further, (-2, 2)), ((0, 19), (0, 35))])
    buckets = index.clip(3, 2, axis=1)
    for heads in (1, 2):
        tables = dict(dot_query=(16,), dot_key=(16,), add_value=(24,))
        every = Lookup(
            buckets, torch.randn(2, 6), **{name: torch.randn(heads, 6, *size) for name, size in tables.items()}
        )
        check(q, k, v, Plan(positions, lookups=(every,)), key_mask=torch.rand(2, 35) > 0.2)
        for missing in ("bias", "dot_key"):
            some = (dataclasses.replace(every, **{missing: None}),)
            check(q, k, v, Plan(positions, scale=torch.rand(2, 1, 19) / 2, lookups=some))
    table = torch.stack((torch.arange(35) // 7, torch.arange(35) % 7), -1)[None]
    grid = index.Grid((index.clip(5, 5), index.clip(3, 3, axis=1)))
    lookups = (
        Lookup(grid, bias=torch.randn(2, grid.n), dot_query=torch.randn(1, grid.n, 16)),
        Lookup(index.clip(2, 2, axis=1), bias=torch.randn(2, 5), add_value=torch.randn(2, 5, 24)),
        Lookup(index.clip(4, 4), bias=torch.randn(2, 9)),
    )
    check(q, k, v, Plan(Positions(table[:, 16:], table), lookups=lookups))
    far = Lookup(index.clip(1100, 1100), dot_key=torch.randn(1, 2201, 16), add_value=torch.randn(1, 2201, 24))
    check(q[:1, :1], k[:1], v[:1], Plan(Positions((16, 19), 35), lookups=(far,)))
    many = Positions((16, 19), 35, more=[(further[:, 16:], further * 100)])
    with pytest.raises(UnsupportedPlan, match="a channel for each different position.* at most 256"):
        attend(
            q.float(), k.float(), v.float(), Plan(many, lookups=(Lookup(buckets, torch.randn(2, 6)),)), engine="triton"
        )
    scaled = Plan(
        positions,
        scale=torch.rand(2, 2, 19),
        lookups=(Lookup(buckets, torch.randn(2, 6), dot_key=torch.randn(1, 6, 16)),),
    )
    with pytest.raises(UnsupportedPlan, match="a scale for each query"):
        attend(q.float(), k.float(), v.float(), scaled, engine="triton")


def group_lse():
    """The log-sum-exp and its gradient, in far tiles, bands and integer sums; for a fully masked query."""
    thirds = Positions(torch.arange(50) // 3)
    content = ("dot_query", "dot_key", "add_value")
    masks = {"causal": True, "key_mask": torch.arange(50)[None] > 3}
    for slots, positions in ((("bias", "slopes", "decay"), None), (content, None), (("bias",), thirds)):
        q, k, v = (x.float().requires_grad_() for x in tensors(1, 2, 1, 50, 50, 16))
        plan = plan_of(slots, q, k, v, positions)
        leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
        out, lse = attend(q, k, v, plan, engine="triton", **masks, return_lse=True)
        assert (lse[..., :4] == float("-inf")).all()
        g, g_lse = torch.randn(out.shape), torch.randn(lse.shape).masked_fill(lse.isinf(), 0.0)
        for upstream in ((g, g_lse), (None, g_lse)):  # together, and the log-sum-exp alone
            expected, allowed = budget.expect(q, k, v, plan, *upstream, **masks)
            some = [(x, y) for x, y in zip((out, lse), upstream) if y is not None]
            grads = torch.autograd.grad(
                [x for x, _ in some], list(leaves.values()), [y for _, y in some], retain_graph=True, allow_unused=True
            )
            for name, ours in {"out": out, "lse": lse, **dict(zip(leaves, grads))}.items():
                budget.assert_within(ours, expected[name], allowed[name], name)


def group_empty():
    """No queries, or no keys: zeros, and gradients of zero for every tensor of the plan."""
    for lq, lk in ((0, 5), (5, 0)):
        for slots in (("dot_key", "slopes"), ("dot_query", "states", "add_value", "bias", "decay", "scale")):
            q, k, v = (x.float().requires_grad_() for x in tensors(2, 2, 1, lq, lk, 16))
            plan = plan_of(slots, q, k, v)
            leaves = [q, k, v, *dict(plan.tensors()).values()]
            out, lse = attend(q, k, v, plan, engine="triton", return_lse=True)
            grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.zeros_like(lse)])
            assert not any(grad.any() for grad in (out, *grads))


def group_documents():
    """Bounds of documents: ids in order and in none, rows that are shared, no tokens."""
    from posenc.engines.triton import launcher, padding

    for (own_rows, rows), (own_length, length), is_sorted in itertools.product(
        ((2, 2), (1, 3), (3, 1)), ((1, 1), (300, 300), (257, 1), (0, 4), (4, 0), (5, 600)), (False, True)
    ):
        own, ids = torch.randint(6, (own_rows, own_length)) - 2, torch.randint(6, (rows, length)) - 2
        ids = ids.sort(-1)[0] if is_sorted else ids
        other = ids.int() if rows == 2 else ids
        below, upto = ((ids[:, None] < own[..., None]).sum(-1), (ids[:, None] <= own[..., None]).sum(-1))
        ascends = (ids.diff() >= 0).all(-1, keepdim=True)
        expected = torch.stack((below.where(ascends, -1), upto.where(ascends, length)), -1).int()
        of_queries = padding.find_documents(launcher.launch, own, other)[0]
        of_keys = padding.find_documents(launcher.launch, other, own)[1]
        for found in (of_queries, of_keys):
            assert torch.equal(found, expected), (
                f"{own_rows}, {rows} rows of {own_length}, {length}, in order: {is_sorted}"
            )


def group_tiles():
    """Blocks of other shapes than the interpreter's default."""
    from posenc.engines.triton import schedule

    q, k, v = tensors(1, 1, 1, 70, 70, 16)
    plan = plan_of(("bias", "dot_query", "dot_key", "add_value"), q, k, v)
    for shape in ((32, 16), (16, 32)):
        schedule.INTERPRETED = schedule.Tile(*shape, 4, 1)
        check(q, k, v, plan)


def group_chunks():
    """Content terms over every distance, a block of queries at a time."""
    from posenc.engines.triton import arguments

    arguments.LONGEST, arguments.QUERIES, arguments.ROWS = 8, 16, 0
    q, k, v = tensors(1, 2, 1, 37, 45, 16)
    check(q, k, v, plan_of(("exact", "slopes", "states"), q, k, v))
    check(q, k, v, plan_of(("exact", "bias", "decay", "scale"), q, k, v), causal=True)
    check(q, k, v, plan_of(("exact",), q, k, v), window=(20, 3))


def group_decay():
    """Sums of gates, which grow with the text, keep the digits of their differences: forward, backward and for one query."""
    q, k, v = (x.float().requires_grad_() for x in tensors(1, 2, 1, 40, 40, 16))
    total = (
        torch.nn.functional.logsigmoid(torch.randn(1, 2, 40, dtype=torch.float64)).cumsum(-1) - 3e5
    ).requires_grad_()
    leaves = (q, k, v, total)
    for rows in (slice(None), slice(39, 40)):
        plan = Plan(Positions((rows.start or 0, 40 - (rows.start or 0)), 40), decay=(total[..., rows], total))
        ours, exact = (
            attend(*(x.to(dtype) for x in (q[:, :, rows], k, v)), plan, causal=True, engine=engine)
            for dtype, engine in ((torch.float32, "triton"), (torch.float64, "reference"))
        )
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()
        weight = torch.randn_like(exact)
        grads = (torch.autograd.grad((x * weight).sum(), leaves) for x in (ours, exact))
        for one, other in zip(*grads):
            assert (one - other).abs().max() < 1e-5 * other.abs().max()
    with torch.no_grad():
        ours = attend(q[:, :, 39:], k, v, plan, causal=True, engine="triton")
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def group_dropout():
    """The same weights are dropped forward and backward, and the mean is kept."""
    q, k, v = (x.float().requires_grad_() for x in tensors(1, 1, 1, 20, 33, 16))
    plan = plan_of(("bias", "add_value"), q, k, v)
    direction = torch.randn_like(v)

    def run(values):
        torch.manual_seed(seeds.seed(5))
        return attend(q, k, values, plan, dropout=0.4, engine="triton")

    out = run(v)
    (grad,) = torch.autograd.grad(out.sum(), v)
    slope = (run(v + direction) - out).sum()  # linear in v, so the difference is the derivative
    assert abs((grad * direction).sum() - slope) < 1e-3 * slope.abs() + 1e-3
    assert not torch.equal(out, run(v).mul(1).add(attend(q, k, v, plan, dropout=0.4, engine="triton") - run(v)))
    ones = torch.ones(1, 1, 400, 16)
    still = Plan(Positions(20, 400))
    mean = attend(q, torch.zeros(1, 1, 400, 16), ones, still, dropout=0.4, engine="triton").mean()
    assert abs(mean - 1.0) < 0.05
    step = 1e-2 * torch.randn_like(q)
    (grad,) = torch.autograd.grad(run(v).double().square().sum(), q)
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            torch.manual_seed(seeds.seed(5))
            values.append(attend(q + sign * step, k, v, plan, dropout=0.4, engine="triton").double().square().sum())
    assert abs((values[0] - values[1]) / 2 - (grad * step).sum()) < 2e-3 * grad.norm() * step.norm()

    # A document mask that hides nothing takes every tile through the general path: the same weights must be dropped.
    q, k, v = (x.float().requires_grad_() for x in tensors(2, 2, 1, 70, 70, 16))
    plan = Plan(Positions(70), lookups=(Lookup(index.clip(5, 5), bias=torch.randn(2, 11).requires_grad_()),))
    leaves, g, results = [q, k, v, plan.lookups[0].bias], torch.randn(2, 2, 70, 16), []
    for documents in (None, torch.zeros(2, 70, dtype=torch.int32)):
        torch.manual_seed(seeds.seed(5))
        out = attend(q, k, v, plan, dropout=0.3, documents=documents, engine="triton")
        results.append([out, *torch.autograd.grad(out, leaves, g)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()

    # The formula drops the same probabilities, and so does a call for some of the heads, queries and keys.
    torch.manual_seed(seeds.seed(5))
    whole = attend(q, k, v, plan, dropout=0.3, engine="reference")
    assert (results[0][0] - whole).norm() <= 1e-5 * whole.norm()
    torch.manual_seed(seeds.seed(5))
    seed = draw_seed(q.device)
    some, table = Positions((41, 9), (0, 70)), Lookup(index.clip(5, 5), bias=plan.lookups[0].bias[1:])
    draw = Dropout(0.3, seed, q=(41, 1), heads=(1, 2))
    part = attend(q[:, 1:, 41:50], k, v, Plan(some, lookups=(table,)), dropout=draw, engine="triton")
    assert (part - whole[:, 1:, 41:50]).norm() <= 1e-5 * part.norm()
    striped = Positions(torch.arange(1, 70, 3), torch.arange(2, 70, 3))
    q_rows, k_rows = q[:, :, 1::3], (k[:, :, 2::3], v[:, :, 2::3])
    draw = Dropout(0.3, seed, q=(1, 3), k=(2, 3))
    found = [attend(q_rows, *k_rows, Plan(striped), dropout=draw, engine=name) for name in ("triton", "reference")]
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


def group_again():
    """Content terms are freed after the forward pass; the backward pass makes them again, with the same dropout."""
    from posenc.engines.triton import launch

    q, k, v = (x.float().requires_grad_() for x in tensors(2, 2, 2, 35, 35, 16))
    rows = index.deberta_buckets(8, 20)
    tables = [torch.randn(2, rows.n, 16).requires_grad_() for _ in range(2)]
    plan = Plan(Positions(35), lookups=(Lookup(rows, dot_query=tables[0], dot_key=tables[1]),))
    made, band_from_states = [], launch.band_from_states

    def noted(*arguments, **options):
        band = band_from_states(*arguments, **options)
        made.append(weakref.ref(band.ptr))
        return band

    launch.band_from_states = noted
    out = attend(q, k, v, plan, dropout=0.3, engine="triton")
    assert [term() is None for term in made] == [True, True]
    torch.autograd.grad(out, [q, k, v, *tables], torch.ones_like(out))
    assert [term() is None for term in made] == [True] * 4


def group_wide():
    """Half precision, where whole tiles lie within the bands: every content slot, masks, chunks."""
    from posenc.engines.triton import arguments, schedule
    from tests.gpu.cases import check, tame

    schedule.WIDE, arguments.MARGIN = 40, 32
    for dtype, slots, lengths, options in (
        (torch.bfloat16, ("dot_query", "dot_key"), (70, 110), {}),
        (torch.bfloat16, ("dot_query", "dot_key", "add_value"), (90, 90), {"causal": True}),
        (torch.float16, ("dot_key", "states", "scale", "decay"), (90, 90), {"window": (50, 33)}),
        (torch.float16, ("bias", "dot_query", "slopes"), (100, 70), {}),
        (torch.bfloat16, ("add_value", "scale"), (64, 96), {"key_mask": torch.arange(96)[None] < 81}),
        (torch.bfloat16, ("dot_query", "dot_key"), (110, 110), {"documents": (torch.arange(110) > 70).int()[None]}),
    ):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors(1, 2, 1, *lengths, 16))
        check(q, k, v, tame(plan_of(slots, q, k, v, reach=(28, 33))), **options)
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors(1, 2, 1, 70, 100, 16))
    for heads in (2, 1):  # the bias in the row term, and separate
        table, bias = (
            torch.randn(heads, 62, 16).div(4).requires_grad_(),
            torch.randn(2, 62).index_fill(1, torch.arange(20, 45), float("-inf")).requires_grad_(),
        )
        plan = Plan(Positions(70, 100), lookups=(Lookup(Index(-28, 33), dot_query=table, bias=bias),))
        ours, dense = (attend(q, k, v, plan, engine=engine) for engine in ("triton", "reference"))
        torch.testing.assert_close(ours, dense, rtol=0, atol=3e-2)
        for grad, truth in zip(
            *(torch.autograd.grad(out.float().sum(), (q, k, v, table)) for out in (ours, dense)), strict=True
        ):
            assert (grad.float() - truth.float()).norm() <= 3e-2 * truth.float().norm()
    arguments.QUERIES, arguments.LONGEST, arguments.ROWS = 32, 60, 0  # chunks of queries, every distance its own
    for causal in (False, True):
        q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors(1, 2, 1, 70, 100, 16))
        positions = Positions((30, 70), 100)
        exact = index.exact(positions)
        content, bias = (torch.randn(2, exact.n, *size).div(4).requires_grad_() for size in ((16,), ()))
        check(q, k, v, Plan(positions, lookups=(Lookup(exact, dot_query=content, bias=bias),)), causal=causal)


def group_compile():
    """One graph forward and backward, in half precision; two runs give the same bits."""
    q, k, v = (x.half().requires_grad_() for x in tensors(1, 2, 1, 33, 40, 16))
    plan = plan_of(("bias", "dot_query", "add_value"), q, k, v)
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors())]
    run = lambda a, b, c: attend(a, b, c, plan, causal=True, engine="triton")  # noqa: E731
    eager = run(q, k, v)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(eager, compiled)
    visible = torch.rand(1, 1, 33, 40) > 0.2
    for masks in ({"key_mask": torch.arange(40)[None] < 35}, {"documents": (torch.zeros(1, 33).long(), torch.arange(40)[None] // 25)}, {"mask": visible}):  # fmt: skip
        masked = lambda a, b, c, masks: attend(a, b, c, plan, engine="triton", **masks)  # noqa: E731
        eager_masked = masked(q, k, v, masks)
        assert torch.equal(eager_masked, torch.compile(masked, fullgraph=True, backend="aot_eager")(q, k, v, masks))
    parts = torch.randint(0, 3, (1, 40))
    positions = Positions((7, 33), 40, more=[(parts[:, 7:], parts, (0, 2))])  # compiled code cannot read the bounds
    table = torch.randn(2, 2).requires_grad_()
    segments = Plan(positions, lookups=(Lookup(Index(-1, 1, (1, 0, 1), 2, axis=1), bias=table),))
    some = lambda a, b, c: attend(a, b, c, segments, engine="triton")  # noqa: E731
    assert torch.equal(some(q, k, v), torch.compile(some, fullgraph=True, backend="aot_eager")(q, k, v))
    dense = attend(q, k, v, plan, causal=True, engine="reference")
    torch.testing.assert_close(eager, dense, rtol=0, atol=1e-2)
    g = torch.randn_like(eager)
    first = torch.autograd.grad(eager, leaves, g, retain_graph=True)
    for other in (torch.autograd.grad(compiled, leaves, g), torch.autograd.grad(eager, leaves, g)):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@triton.jit
def faulty(x, FAULT: tl.constexpr):
    at = x + tl.arange(0, 16)
    if FAULT == "outside":
        tl.load(at + 40)
    elif FAULT == "two programs":
        tl.store(at, 1.0)
    else:
        at += 16 * tl.program_id(0)
        tl.store(at, 1.0)
        if FAULT == "barrier":
            tl.debug_barrier()
        tl.store(at, tl.load(at) + 1.0)


def group_watch():
    """triton_memory, which checks all other groups, finds faults."""
    faulty[(2,)](torch.zeros(32), "barrier")
    for fault, words in (("outside", "outside"), ("two programs", "stores twice"), ("none", "loads what was stored")):
        with pytest.raises(triton.runtime.errors.InterpreterError, match=words):
            faulty[(2,)](torch.zeros(32), fault)


def group_operator():
    """Eager calls run without an operator; under a dispatch mode there is one, with the same bits. It returns a gradient for each
    distance, which autograd sums into buckets; an eager call sums all of a bucket's parts at once, in another order."""
    operators = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = (x.half().requires_grad_() for x in tensors(1, 2, 1, 20, 20, 16))
    plan = plan_of(("bias", "dot_query"), q, k, v)
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors())]
    out = attend(q, k, v, plan, engine="triton")
    first = torch.autograd.grad(out, leaves, torch.ones_like(out))
    with Watch():
        again = attend(q, k, v, plan, engine="triton")
        second = torch.autograd.grad(again, leaves, torch.ones_like(out))
    assert {"posenc.attend.default", "posenc.attend_backward.default"} <= set(operators)
    assert torch.equal(out, again) and all(map(torch.equal, first[:3], second[:3]))
    lookup = plan.lookups[0]
    rows = torch.tensor(lookup.index.rows)
    by_distance = Lookup(
        Index(lookup.index.lo, lookup.index.hi), bias=lookup.bias[:, rows], dot_query=lookup.dot_query[:, rows]
    )
    tables = (by_distance.bias, by_distance.dot_query)
    parts = torch.autograd.grad(
        attend(q, k, v, dataclasses.replace(plan, lookups=(by_distance,)), engine="triton"), tables, torch.ones_like(out)
    )  # fmt: skip
    for one, other, part in zip(first[3:], second[3:], parts, strict=True):
        assert torch.equal(other, torch.zeros_like(other).index_add(1, rows, part)), "the operator sums by distance"
        sizes = torch.zeros_like(other).index_add(1, rows, part.abs())
        several = (rows.bincount() > 1).view(1, -1, *[1] * (one.dim() - 2))
        assert ((one - other).abs() <= torch.where(several, 2.0**-22 * sizes, 0.0)).all()
    (slope,) = torch.autograd.grad(attend(q, k, v, plan, engine="triton").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only; for second ones use engine='reference'"):
        slope.sum().backward()
    leaf = plan.lookups[0].bias.detach()

    def loss(x, table):
        lookup = dataclasses.replace(plan.lookups[0], bias=table)
        return attend(x, k, v, dataclasses.replace(plan, lookups=(lookup,)), engine="triton").sum()

    slopes = torch.func.grad(loss, (0, 1))(q.detach(), leaf)
    assert torch.equal(slopes[0], second[0]) and torch.equal(slopes[1], second[3])


def check_replay(slots, options):
    """From its third call on, a step is replayed: the same bits as without a record, for other numbers and other tensors."""
    from posenc.engines.triton import prepared

    def step(q, k, v, tables):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *tables)]
        lookups = (Lookup(Index(-4, 4), **dict(zip(slots, leaves[3:], strict=True))),) if tables else ()
        plan = Plan(Positions((3, 17), 20), lookups=lookups)
        out = attend(*leaves[:3], plan, engine="triton", **options)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    shapes = [(1, 2, 17, 16), (1, 1, 20, 16), (1, 1, 20, 16)]
    draws = [([torch.randn(x) for x in shapes], [torch.randn(x) for x in slots.values()]) for _ in range(4)]
    expected = []
    for qkv, tables in draws:
        forget()
        expected.append(step(*qkv, tables))
    forget()
    for (qkv, tables), wanted in zip(draws, expected, strict=True):
        assert all(map(torch.equal, step(*qkv, tables), wanted))
    ((call, _),) = prepared._calls._entries.values()
    assert call.program is not None and len(call.backwards) == 1 and all(call.backwards.values())


def forget():
    from posenc.engines import known_calls
    from posenc.engines.triton import prepared, replay

    for kept in (known_calls._known, prepared._calls, replay._programs):
        kept.clear()


def group_replay_tables():
    check_replay({"dot_query": (2, 9, 16), "dot_key": (1, 9, 16), "bias": (2, 9), "add_value": (1, 9, 16)}, {})


def group_replay():
    check_replay({}, {"causal": True, "key_mask": torch.arange(20)[None] < 19})
    x, y, z = (torch.randn(1, 1, 16, 16) for _ in range(3))
    forget()
    for _ in range(3):
        attend(x, x, x, engine="triton")  # one tensor given three times
    replayed = attend(x, y, z, engine="triton")
    forget()
    assert torch.equal(replayed, attend(x, y, z, engine="triton"))
    check_tables()


def check_tables():
    from posenc.engines.triton import launcher, tables

    table, rows = torch.randn(50, 3).t(), torch.randint(0, 50, (3000,), dtype=torch.int32)
    assert torch.equal(tables.gather(table, rows), table.index_select(1, rows))
    part = tables.Parts(
        torch.randn(2, 1, 30, 16), 0, first=4, factor=0.5
    )  # one row for each distance, of which some are there
    for into in (torch.empty(2, 40, 16), torch.empty(40, 2, 16).transpose(0, 1)):
        tables.sum_parts(launcher.launch, part, into, index.Index(-20, 19), -15, 5)
        expected = torch.zeros(2, 40, 16)
        expected[:, 5:26] = 0.5 * part.tensor[:, 0, 4:25]
        assert torch.equal(into, expected)
    tables.UNFOLDED = 32
    fold, grad, shift, table = (
        torch.randn(2, 40),
        torch.randn(2, 40, 16),
        torch.randn(2, 16),
        torch.randn(40, 2, 16).transpose(0, 1),
    )
    for n in (20, 40):  # by one program for each head and block of channels, by several
        out = torch.empty(2, n, 16)
        d_shift = tables.unfold_shift(
            launcher.launch, grad[:, :n].contiguous(), fold[:, :n].contiguous(), table[:, :n], shift, out, True
        )
        torch.testing.assert_close(out, grad[:, :n] + fold[:, :n, None] * shift[:, None])
        torch.testing.assert_close(d_shift, torch.einsum("hn,hne->he", fold[:, :n], table[:, :n]))


def group_first():
    """What a call's first launch compiles (launcher.launch_first) is what its two passes launch."""
    from posenc.engines.triton import launcher

    real, found, launched = launcher.launch, [], []

    def launch(kernel, *args, **constants):
        launched.append(kernel.__name__)
        real(kernel, *args, **constants)

    def launch_first(device, run):
        launcher.launch = lambda kernel, *args, **constants: found.append(kernel.__name__)
        run()
        launcher.launch = launch
        return launch

    launcher.launch_first = launch_first
    q, k, v = (x.float().requires_grad_() for x in tensors(1, 2, 1, 17, 17, 16))
    plan = plan_of(("bias", "dot_query", "dot_key", "add_value"), q, k, v)
    attend(q, k, v, plan, engine="triton").sum().backward()
    assert found == launched and {"forward", "backward_k", "backward_q", "sum_parts_kernel"} <= set(found)


def group_known():
    """A call that is known takes the way of its facts, and nothing that is part of the key is overlooked."""
    from posenc.engines import known_calls
    from posenc.engines.triton import prepared

    q, k, v = (x.float() for x in tensors(1, 2, 1, 17, 17, 16))
    buckets = index.log_buckets(8, 12, causal=False)
    for number in range(3):  # one after the other: first sight, record, replay
        q, k, v = (torch.randn_like(x) for x in (q, k, v))
        tables = {
            "bias": torch.randn(8, 2).t(), "dot_query": torch.randn(1, 8, 16), "dot_key": torch.randn(2, 8, 16),
        }  # fmt: skip
        check(q, k, v, Plan(Positions(17), lookups=(Lookup(buckets, **tables),), scale=0.3 + number * 0))
    assert len(known_calls._known) == len(prepared._calls) == 1
    for _ in range(4):  # shifts of queries and of tables are those of each call
        q, k, v = torch.randn(3, 1, 2, 17, 16).unbind()
        shift, other = torch.randn(2, 2, 16).unbind()
        exact = Lookup(index.Index(-16, 16), dot_query=torch.randn(2, 33, 16), query_shift=other)
        check(q, k, v, Plan(Positions(17), shift=shift, lookups=(exact,)))
    assert len(known_calls._known) == 2 and len(prepared._calls) == 1, "a plan with shifts has a call of its own"
    with torch.no_grad():  # a text of a few tokens with a term of the keys, which the decoding kernels do not have
        for _ in range(3):
            short, last = (
                Plan(Positions(9), lookups=(Lookup(buckets, dot_key=torch.randn(2, 8, 16)),)),
                Positions((16, 1), 17),
            )
            attend(q[:, :, :9], k[:, :, :9], v[:, :, :9], short, engine="triton")
            attend(q[:, :, 16:], k, v, Plan(last, lookups=short.lookups), engine="triton")
    assert len(known_calls._known) == 3, "the text is kept, the token after others is not"
    with torch.autograd.set_detect_anomaly(True):  # a call that is not described: `attend` adds the shifts
        check(q, k, v, Plan(Positions(17), shift=shift, lookups=(exact,)))
    forget()
    k, v = k[:, :1], v[:, :1]
    table = torch.randn(8, 2, requires_grad=True)

    def step(x=q, table=table, **options):
        plan = Plan(Positions(17), lookups=(Lookup(buckets, bias=table.t()),))
        return attend(x, k, v, plan, engine="triton", **options)

    first = step()
    for _ in range(3):
        assert torch.equal(step(), first) and step().requires_grad
    (grad,) = torch.autograd.grad(step().sum(), table)
    assert grad.stride() == table.stride()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(step(), first) and not step().requires_grad
    forget()
    with torch.inference_mode():  # where operators come in other forms
        for _ in range(4):
            assert torch.equal(step(), first)
    assert not step(table=table.detach()).requires_grad
    assert torch.equal(step(x=q.expand(1, 2, 17, 16).transpose(1, 2).contiguous().transpose(1, 2)), first)
    for options in ({"causal": True}, {"window": 3}, {"key_mask": torch.arange(17)[None] < 9}, {"return_lse": True}):
        for _ in range(3):
            found = step(**options)
            found = found[0] if isinstance(found, tuple) else found
            assert torch.equal(found, first) == ("return_lse" in options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(), first)
    with pytest.raises(ValueError, match="heads"):
        step(table=torch.randn(8, 3))
    with pytest.raises(TypeError, match="no_such_mask"):
        step(no_such_mask=None)
    half = torch.func.grad(lambda x: step(x=x).sum())(q)
    (whole,) = torch.autograd.grad(step(x=(leaf := q.clone().requires_grad_())).sum(), leaf)
    assert torch.equal(half, whole)
    dropped = {float(step(dropout=0.5).sum()) for _ in range(5)}
    assert len(dropped) == 5, "every call draws anew"


def group_shifts():
    """Shifts of queries and scores inside a prepared call: gradients of each, whichever are wanted, as the reference gives them."""
    names = ("q", "shift", "dot_query", "query_shift", "states")

    def run(given, wanted, engine, dtype, **options):
        x = {name: one.clone().requires_grad_(name in wanted) for name, one in given.items()}
        buckets = index.log_buckets(8, 12, causal=False)
        lookups = (
            Lookup(buckets, dot_query=x["dot_query"], query_shift=x["query_shift"], states=x.get("states")),
            Lookup(index.clip(2, 2), bias=x["bias"]),
        )
        plan = Plan(Positions(19), shift=x["shift"], lookups=lookups)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            out = attend(x["q"], x["k"], x["v"], plan, engine=engine, **options)
        if not wanted:
            return {"out": out}
        grads = torch.autograd.grad(out, [x[name] for name in wanted], given["g"])
        return {"out": out.detach(), **dict(zip(wanted, grads))}

    for number in range(4):  # first sight, record, replay
        shapes = {
            "q": (2, 2, 19, 16), "k": (2, 1, 19, 16), "v": (2, 1, 19, 16), "g": (2, 2, 19, 16), "shift": (2, 16),
            "dot_query": (8, 2, 16), "query_shift": (2, 16), "bias": (2, 5),
        }  # fmt: skip
        given = {name: torch.randn(shape) for name, shape in shapes.items()}
        given["dot_query"] = given["dot_query"].transpose(0, 1)  # as projections make it
        for wanted in (
            ("q", "shift", "dot_query", "query_shift", "bias"),
            ("query_shift",),
            ("dot_query", "bias"),
            ("shift",),
            (),
        ):
            for dtype in (None, torch.bfloat16) if number == 3 else (None,):
                ours, expected = (run(given, wanted, name, dtype, causal=True) for name in ("triton", "reference"))
                for name, x in expected.items():
                    torch.testing.assert_close(ours[name], x, rtol=0, atol=2e-6 * float(x.abs().max()))
    states = {**given, "states": torch.randn(2, 2, 19, 16)}
    for _ in range(3):
        ours, expected = (run(states, names, name, None) for name in ("triton", "reference"))
        for name, x in expected.items():
            torch.testing.assert_close(ours[name], x, rtol=0, atol=2e-6 * float(x.abs().max()))


if __name__ == "__main__":
    run_group(globals())
    if "-v" in sys.argv:
        print("largest errors, of their budgets:", *(f"{excess:.3f}" for excess in sorted(WORST)[-5:]))
    print("passed")
