"""The Gluon backward kernel without a GPU: its source in an emulator, against float64."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import gluon
from posenc.engines.gluon import backward_launch, launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton.arguments import GRADIENTS, kernel_arguments
from posenc.engines.triton.launch import run_backward
from posenc.engines.triton.tables import Parts
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.gluon_emulator import emulate
from tests.plans import mapped

LOG2E = 1.4426950408889634


@pytest.fixture(scope="module")
def kernel():
    return gluon_emulator.load(
        "backward_prepare.py", "backward_tiles.py", "backward_diagonals.py", "backward_sums.py", "backward.py"
    )


def check(
    module,
    monkeypatch,
    terms,
    causal,
    lengths,
    start=0,
    heads=(2, 2),
    batch=1,
    programs=3,
    wants_bias=True,
    size=64,
    masks=None,
    **options,
):
    gluon_emulator.set_processors(monkeypatch, programs)
    lq, lk = lengths
    q, do = (torch.randn(batch, heads[0], lq, size, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, heads[1], lk, size, dtype=torch.bfloat16) for _ in range(2))
    spot = {"near": index.clip(300, 200), "apart": index.Index(3, 9), "one": index.Index(2, 2)}.get(
        terms, index.log_buckets(32, 64, causal=causal)
    )
    lookups = () if terms in ("none", "slopes") else (Lookup(spot, bias=torch.randn(heads[0], spot.n)),)
    slopes = torch.rand(heads[0]) / 8 if terms in ("slopes", "apart") else None
    plan = mapped(Plan(Positions((start, lq), lk), lookups=lookups, slopes=slopes), lambda name, x: x.requires_grad_())
    masks = {"causal": causal, **(masks or {})}
    lowered = lower_plan(q, k, v, plan, make_mask(q, k, **masks))
    inputs, numbers, scale = kernel_arguments(q, k, v, lowered)
    inputs = gluon_emulator.with_bounds(inputs)
    expected, allowed = budget.expect(q, k, v, plan, do, **masks)
    lse = torch.full((batch, heads[0], -(-lq // 64) * 64), float("nan"))
    lse[..., :lq] = torch.where(expected["lse"] == float("-inf"), float("inf"), expected["lse"] * LOG2E)
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    with torch.no_grad():
        parts, d_slopes = backward_launch.run_backward(
            emulate(module), do, None, expected["out"].to(q.dtype), lse, inputs, numbers, scale, *grads, wants_bias, True,
            backward_launch.SCHEDULES[size]._replace(**options),
        )  # fmt: skip
    names = dict(zip("qkv", grads, strict=True))
    if lookups and wants_bias:
        inputs.bias.backward(parts.sum((0, 2)))
    if slopes is not None:
        inputs.slopes.backward(d_slopes.sum((0, 2, 3)))
    names |= {name: x.grad for name, x in plan.tensors() if x.grad is not None}
    for name, ours in names.items():
        budget.assert_within(ours, expected[name], allowed[name], name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none", "apart", "near", "one", "slopes"])
def test_terms(kernel, monkeypatch, terms, causal):
    check(kernel, monkeypatch, terms, causal, (500, 500), heads=(2, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (64, 128), (129, 127), (200, 700), (700, 200), (1, 500)])
def test_lengths(kernel, monkeypatch, lengths, causal):
    check(kernel, monkeypatch, "bias", causal, lengths, start=max(lengths[1] - lengths[0], 0))


@pytest.mark.slow  # the schedules that run are those of the other tests
@pytest.mark.parametrize(
    "options",
    [
        {"size": 128},
        {"stages": 2, "spread": 0},
        {"add": 3, "slots": 3},
        {"size": 128, "add": 3},
        {"late": 1},
        {"size": 128, "late": 1},
        {"queries": 32, "late": 1, "add": 3},
    ],
)
def test_schedules(kernel, monkeypatch, options):
    check(kernel, monkeypatch, "bias", True, (400, 450), start=7, heads=(2, 1), batch=2, programs=5, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "slopes"])
def test_padding(kernel, monkeypatch, terms, causal):
    """On the right, on the left, with gaps, and of a whole row."""
    at = torch.arange(500)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    check(kernel, monkeypatch, terms, causal, (400, 500), 100, batch=4, heads=(1, 1), masks={"key_mask": real})
    check(kernel, monkeypatch, terms, causal, (130, 500), 370, batch=2, heads=(2, 1), masks={"key_mask": real[:1]})


@pytest.mark.parametrize("terms", ["bias", "none"])
@pytest.mark.parametrize("window", [(150, 0), (0, 0), (70, 200)])
def test_windows(kernel, monkeypatch, terms, window):
    check(kernel, monkeypatch, terms, False, (600, 600), heads=(2, 1), masks={"window": window})
    check(kernel, monkeypatch, terms, False, (300, 200), heads=(1, 1), masks={"window": window})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none"])
def test_documents(kernel, monkeypatch, terms, causal):
    """In order, with one that has no keys; in no order; with padding and a window."""
    ids = torch.arange(400)[None] // 150
    check(kernel, monkeypatch, terms, causal, (400, 400), masks={"documents": ids})
    check(kernel, monkeypatch, terms, causal, (400, 400), masks={"documents": (ids, 2 * (ids // 2))})
    masks = {"documents": torch.randint(3, (1, 400)), "key_mask": (torch.arange(400) < 333)[None], "window": (210, 50)}
    check(kernel, monkeypatch, terms, causal, (400, 400), heads=(4, 2), masks=masks)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none"])
def test_documents_by_cost(kernel, monkeypatch, terms, causal):
    """Rows of different texts, whose blocks the device orders in several sections."""
    monkeypatch.setattr(launch, "SECTION", 6)
    rows = ((100, 28, 272), (400,), (64, 64, 1, 191, 80))
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    check(kernel, monkeypatch, terms, causal, (400, 400), heads=(2, 2), batch=3, programs=5, masks={"documents": ids})


@pytest.mark.parametrize("heads, rows, length, programs", [(16, 4, 4096, 132), (16, 1, 16384, 132), (1, 1, 300, 3), (3, 2, 700, 13), (200, 2, 300, 132)])  # fmt: skip
def test_the_device_orders_blocks(kernel, heads, rows, length, programs):
    """Every block once; the busiest program of many blocks has hardly more to do than the mean."""
    torch.manual_seed(0)
    count = -(-length // 128)
    cuts = torch.randint(length, (rows, length // 400))
    ids = (torch.arange(length)[None, None] >= cuts[..., None]).sum(1)
    bounds = gluon_emulator.document_bounds(ids, ids)
    blocks = rows * count
    width = 1 - (-blocks * heads // programs)
    order = torch.full((programs, width), -1, dtype=torch.int32)
    section = launch.section_of(heads)
    store = kernel.files["prepare"]["store_turns"]
    for at in range(blocks):
        given = (
            at,
            order,
            width,
            programs,
            blocks,
            section,
            bounds,
            2 * length,
            heads,
            count,
            length,
            length,
            0,
            None,
            128,
            64,
        )
        store(*(gluon_emulator._given(x) for x in given))
    taken = [row[1 : 1 + row[0]].tolist() for row in order]
    assert sorted(x for row in taken for x in row) == list(range(blocks * heads))
    ends = bounds[..., 1].gather(1, (torch.arange(1, count + 1) * 128).clamp(max=length)[None].expand(rows, -1) - 1)
    begins = torch.arange(count) * 128 // 64
    costs = (-(-ends // 64) - begins).tolist()
    work = [sum(costs[x // count // heads][x % count] + 3 for x in row) for row in taken]
    if blocks * heads > 10 * programs:
        assert max(work) < 1.06 * sum(work) / programs


@pytest.mark.parametrize("heads, blocks", [(64, 32), (16, 128), (96, 16), (12, 32), (1, 3)])
def test_the_order_of_blocks(heads, blocks):
    """Every block once; causal, the busiest of 132 programs has hardly more to do than the mean."""
    costs = tuple(2 * (blocks - block) + 3 for block in range(blocks))
    numbers, width = backward_launch.order_blocks(heads, costs, min(132, heads * blocks))
    rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
    taken = [row[1 : 1 + row[0]] for row in rows]
    assert sorted(x for row in taken for x in row) == list(range(heads * blocks))
    work = [sum(costs[x % blocks] for x in row) for row in taken]
    if heads > 1:
        assert max(work) < 1.05 * sum(work) / 132


def test_where_it_is_chosen(monkeypatch):
    monkeypatch.setattr(gluon, "VERSION", "3.6")
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)

    def reason(length=4096, kv_heads=2, dropout=0.0, plan=None, span=9, **masks):
        q, k = (torch.empty(9, heads, length, 64, dtype=torch.bfloat16) for heads in (2, kv_heads))
        plan = plan or Plan(
            Positions(length), lookups=(Lookup(index.clip(span, span), bias=torch.zeros(2, 2 * span + 1)),)
        )
        lowered = lower_plan(q, k, k, plan, make_mask(q, k, **masks))
        return gluon.refuse_backward(*kernel_arguments(q, k, k, lowered), dropout, q)

    assert reason() is None
    assert "got 1024 and 1024" in reason(length=1024)
    assert reason(kv_heads=1, window=300) is None
    assert reason(key_mask=torch.arange(4096).expand(9, -1) < 4000) is None
    monkeypatch.setattr(gluon, "FEWEST", 300)
    assert "300 blocks of 128 keys to fill a device and takes up to 1048576, got 288" in reason(kv_heads=1)
    assert reason(plan=Plan(Positions(4096), slopes=torch.zeros(2))) is None
    assert "no dropout" in reason(dropout=0.1)
    assert "more than 2048 distances" in reason(span=1500)
    torch.use_deterministic_algorithms(True)
    try:
        assert "no fixed order" in reason()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_triton_engine_takes_it(kernel, monkeypatch):
    """From the engine's own backward pass."""
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)
    for name, least in (("SHORTEST", 1), ("SHORTEST_BACKWARD", 1), ("FEWEST", 1)):
        monkeypatch.setattr(gluon, name, least)
    gluon_emulator.set_processors(monkeypatch, 3)
    q, k, v, do = (torch.randn(1, 2, 150, 64, dtype=torch.bfloat16) for _ in range(4))
    plan = Plan(Positions(150), lookups=(Lookup(index.clip(9, 9), bias=torch.randn(2, 19)),))
    inputs, numbers, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k)))
    expected, allowed = budget.expect(q, k, v, plan, do)
    lse = torch.nn.functional.pad(expected["lse"].float() * LOG2E, (0, 42))
    wanted = {name: name in ("q", "k", "v", "bias") for name in GRADIENTS}
    found = run_backward(
        emulate(kernel), do, None, expected["out"].to(q.dtype), lse, None, inputs, numbers, scale, 0.0, wanted
    )
    grads = dict(zip(GRADIENTS, found, strict=True))
    assert isinstance(grads["bias"], Parts)
    grads["bias"] = grads["bias"].tensor.sum((0, 2))
    names = {"q": "q", "k": "k", "v": "v", "bias": next(name for name, _ in plan.tensors())}
    for ours, name in names.items():
        budget.assert_within(grads[ours], expected[name], allowed[name], name)
    assert all(grads[name] is None for name in GRADIENTS if name not in names)


def test_after_an_error_the_pair_runs(monkeypatch):
    monkeypatch.setattr(gluon, "_failures", [])
    with pytest.warns(UserWarning, match="takes the slower pair of kernels: RuntimeError: no ptxas"):
        gluon.give_up(RuntimeError("no ptxas"))
    assert gluon.refuse_backward(None, None, 1.0, 0.0, None) == "it failed before: RuntimeError: no ptxas"


def test_dk_and_dv_are_late_where_that_was_faster_and_compared():
    choose = backward_launch.choose_schedule
    late = {(size, slopes): choose(size, slopes).late for size in (64, 128) for slopes in (False, True)}
    assert late == {(64, False): 1, (64, True): 0, (128, False): 0, (128, True): 0}
