"""The Gluon kernel with a content term, without a GPU: its source in an emulator, and where it is chosen."""

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import gluon
from posenc.engines.gluon import content_launch, rolling_launch
from posenc.engines.gluon.launch import Tile
from posenc.engines.lowering import lower_plan
from posenc.engines.triton import launch as triton_launch
from posenc.engines.triton.arguments import kernel_arguments
from posenc.engines.triton.band_layout import MARGIN, make_band
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.gluon_emulator import with_bounds
from tests.engines.test_gluon import LOG2E, TILE, emulate


@pytest.fixture(scope="module")
def kernel():
    return gluon_emulator.load("content.py")


def make_rows(x, num, scale):
    """What band_from_states makes, with NaN around it."""
    states = (x.q if x.states is None else x.states).float()
    table = x.table.float().expand(x.q.shape[1], -1, -1)
    numbers = states @ table.mT
    if x.bias is not None:
        numbers = numbers + x.bias[:, None] / scale
    batch, heads, length, span = numbers.shape
    band = make_band(x.q, heads, num.rows_lo, num.rows_hi, num.offset, 0, length)
    buffer = torch.full((band.ptr.numel() + 2 * MARGIN,), float("nan"), dtype=x.q.dtype)
    row, column = torch.arange(length)[:, None], torch.arange(span)
    at = row * (band.pitch + 1) + column + (band.lo - band.origin)
    for b in range(batch):
        for h in range(heads):
            buffer[MARGIN + b * band.b + h * band.h + at] = numbers[b, h].to(x.q.dtype)
    rows = -(-length // 64) * 64
    ends = torch.full((batch, heads, 2, rows), float("nan"))
    ends[:, :, 0, :length], ends[:, :, 1, :length] = numbers[..., 0], numbers[..., -1]
    return band._replace(ptr=gluon_emulator.Pointer(buffer, MARGIN), ends=ends, rows=rows)


def run(module, monkeypatch, q, k, v, plan, tile=TILE, programs=3, **masks):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=programs)
    )
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    x = with_bounds(x)
    out = torch.full_like(q, float("nan"))
    lse = torch.full((*q.shape[:2], -(-q.shape[2] // 64) * 64), float("nan"))
    with torch.no_grad():
        content_launch.run_forward(emulate(module), x, num, scale, make_rows(x, num, scale), out, lse, tile)
    lse = lse[..., : q.shape[2]]
    return out, torch.where(lse == float("inf"), float("-inf"), lse / LOG2E)


SPANS = {
    "shaw": index.clip(64, 64), "one side": index.Index(-300, 0), "one distance": index.Index(5, 5), "apart": index.Index(3, 9),
    "narrow": index.clip(2, 1), "wide": index.clip(200, 170),
}  # fmt: skip


def draw(span, lengths, start=0, heads=(2, 1), batch=1, states=0, bias=False):
    lq, lk = lengths
    q = torch.randn(batch, heads[0], lq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads[1], lk, 64, dtype=torch.bfloat16) for _ in range(2))
    spot = SPANS[span]
    table = torch.randn(heads[0], spot.n, states or 64, dtype=torch.bfloat16) / 2
    given = torch.randn(batch, heads[0], lq, states, dtype=torch.bfloat16) if states else None
    bias = torch.randn(heads[0], spot.n) if bias else None
    lookup = Lookup(spot, dot_query=table, states=given, bias=bias)
    return q, k, v, Plan(Positions((start, lq), lk), lookups=(lookup,))


def check(
    module, monkeypatch, span, lengths, start=0, heads=(2, 1), batch=1, states=0, bias=False, masks=None, **options
):
    q, k, v, plan = draw(span, lengths, start, heads, batch, states, bias)
    masks = masks or {}
    out, lse = run(module, monkeypatch, q, k, v, plan, **options, **masks)
    expected, allowed = budget.expect(q, k, v, plan, **masks)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("span", SPANS)
def test_spans(kernel, monkeypatch, span, causal):
    check(kernel, monkeypatch, span, (600, 600), masks={"causal": causal})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (64, 64), (129, 127), (200, 700), (700, 200), (1, 500)])
def test_lengths(kernel, monkeypatch, lengths, causal):
    check(kernel, monkeypatch, "shaw", lengths, start=max(lengths[1] - lengths[0], 0), masks={"causal": causal})


@pytest.mark.parametrize("tile", [(64, 4), (128, 3)])
def test_tiles_states_and_a_bias(kernel, monkeypatch, tile):
    options = {"start": 7, "heads": (4, 2), "batch": 2, "tile": Tile(*tile), "programs": 5}
    check(kernel, monkeypatch, "shaw", (400, 450), states=16, **options)
    check(kernel, monkeypatch, "wide", (400, 450), bias=True, masks={"causal": True}, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_masks(kernel, monkeypatch, causal):
    at = torch.arange(500)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    masks = {"key_mask": real, "causal": causal}
    check(kernel, monkeypatch, "shaw", (400, 500), 100, batch=4, heads=(1, 1), masks=masks)
    check(kernel, monkeypatch, "one side", (600, 600), masks={"window": (250, 0)})
    masks = {"documents": torch.arange(400)[None] // 150, "causal": causal}
    check(kernel, monkeypatch, "shaw", (400, 400), masks=masks)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_masked_key_does_not_reach_the_output(kernel, monkeypatch, fault):
    q, k, v, plan = draw("shaw", (260, 260))
    clean, _ = run(kernel, monkeypatch, q, k, v, plan, causal=True)
    k[0, 0, 150] = fault
    out, _ = run(kernel, monkeypatch, q, k, v, plan, causal=True)
    assert torch.equal(out[:, :, :150], clean[:, :, :150])


# ---- a term over every distance ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rolling():
    return gluon_emulator.load("skew.py", "rolling.py")


def check_rolling(
    module, monkeypatch, lengths, start=0, heads=(2, 1), batch=1, bias=True, shared=False, programs=3, masks=None
):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=programs)
    )
    (lq, lk), masks = lengths, masks or {}
    q = torch.randn(batch, heads[0], lq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads[1], lk, 64, dtype=torch.bfloat16) for _ in range(2))
    positions = Positions((start, lq), lk)
    spot = index.exact(positions)
    table = torch.randn(1 if shared else heads[0], spot.n, 64, dtype=torch.bfloat16) / 2
    lookup = Lookup(spot, dot_query=table, bias=torch.randn(heads[0], spot.n) if bias else None)
    plan = Plan(positions, lookups=(lookup,))
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((*q.shape[:2], -(-lq // 64) * 64), float("nan"))
    with torch.no_grad():
        rolling_launch.run_forward(emulate(module), with_bounds(x), num, scale, out, lse)
    lse = torch.where(lse == float("inf"), float("-inf"), lse / LOG2E)[..., :lq]
    expected, allowed = budget.expect(q, k, v, plan, **masks)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [(600, 600), (1, 1), (63, 65), (64, 64), (129, 127), (200, 700), (700, 200), (1, 500)]
)
def test_every_distance(rolling, monkeypatch, lengths, causal):
    start = max(lengths[1] - lengths[0], 0)
    check_rolling(rolling, monkeypatch, lengths, start, masks={"causal": causal})


def test_every_distance_of_several_heads(rolling, monkeypatch):
    options = {"heads": (4, 2), "batch": 2, "programs": 5}
    check_rolling(rolling, monkeypatch, (400, 450), 7, bias=False, **options)
    check_rolling(rolling, monkeypatch, (400, 450), 7, bias=False, shared=True, masks={"causal": True}, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_every_distance_and_masks(rolling, monkeypatch, causal):
    at = torch.arange(500)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    masks = {"key_mask": real, "causal": causal}
    check_rolling(rolling, monkeypatch, (400, 500), 100, batch=4, heads=(1, 1), masks=masks)
    check_rolling(rolling, monkeypatch, (600, 600), masks={"window": (250, 0 if causal else 100)})
    check_rolling(rolling, monkeypatch, (400, 400), masks={"documents": at[None, :400] // 150, "causal": causal})


# ---- where it is chosen ------------------------------------------------------------------------------------------------
def given(plan, lq=2048, lk=2048, size=64, **masks):
    q, k, v = (torch.empty(9, 2, length, size, dtype=torch.bfloat16) for length in (lq, lk, lk))
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    return triton_launch._without_joined_bias(x, num), num, scale, 0.0


def test_where_it_is_chosen(monkeypatch):
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)
    table = torch.zeros(2, 129, 64)
    shaw = Lookup(index.clip(64, 64), dot_query=table, bias=torch.zeros(2, 129))
    runs = Positions(2048)
    assert gluon.refuse_content(*given(Plan(runs, lookups=(shaw,)), causal=True)) is None
    both = Lookup(index.clip(64, 64), dot_query=table, dot_key=table)
    assert "not key_table" in gluon.refuse_content(*given(Plan(runs, lookups=(both,))))
    apart = Lookup(index.clip(200, 200), bias=torch.zeros(2, 401))
    assert "not bias" in gluon.refuse_content(*given(Plan(runs, lookups=(shaw, apart))))
    every = index.exact(runs)
    exact = Plan(runs, lookups=(Lookup(every, dot_query=torch.zeros(2, every.n, 64)),))
    assert "queries at a time" in gluon.refuse_content(*given(exact))
    starts = Plan(Positions((torch.zeros(9, dtype=torch.int64), 2048), 2048), lookups=(shaw,))
    assert "unaligned" in gluon.refuse_content(*given(starts))
    assert "needs a content term" in gluon.refuse_content(*given(Plan(runs)))
