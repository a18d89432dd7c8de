"""The Gluon kernel with a content term, without a GPU: its source in an emulator, and where it is chosen."""

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import gluon
from posenc.engines.gluon import rolling_launch, window_launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton import launch as triton_launch
from posenc.engines.triton.arguments import kernel_arguments
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.gluon_emulator import with_bounds
from tests.engines.test_gluon import LOG2E, emulate
from tests.engines.test_gluon_content_backward import band_of

SPANS = {
    "shaw": index.clip(64, 64), "one side": index.Index(-300, 0), "one distance": index.Index(5, 5), "apart": index.Index(3, 9),
    "narrow": index.clip(2, 1), "wide": index.clip(200, 170),
}  # fmt: skip


def draw(span, lengths, start=0, heads=(2, 1), batch=1, states=0, bias=False, keys=False):
    lq, lk = lengths
    q = torch.randn(batch, heads[0], lq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads[1], lk, 64, dtype=torch.bfloat16) for _ in range(2))
    spot = SPANS[span]
    table = torch.randn(heads[0], spot.n, states or 64, dtype=torch.bfloat16) / 2
    given = torch.randn(batch, heads[0], lq, states, dtype=torch.bfloat16) if states else None
    bias = torch.randn(heads[0], spot.n) if bias else None
    key = torch.randn(heads[0], spot.n, 64, dtype=torch.bfloat16) / 2 if keys else None
    lookup = Lookup(spot, dot_query=table, states=given, bias=bias, dot_key=key)
    return q, k, v, Plan(Positions((start, lq), lk), lookups=(lookup,))


# ---- a term over every distance ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rolling():
    return gluon_emulator.load("rolling_prepare.py", "skew.py", "rolling.py")


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


# ---- from windows of the table -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def window():
    return gluon_emulator.load("skew.py", "bands.py", "window.py")


def check_window(module, monkeypatch, span, lengths, tile=None, programs=3, masks=None, **options):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=programs)
    )
    q, k, v, plan = draw(span, lengths, **options)
    masks = masks or {}
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((*q.shape[:2], -(-q.shape[2] // 64) * 64), float("nan"))
    with torch.no_grad():
        cols = None
        if x.key_table is not None:
            cols = band_of(k, x.key_table, q.shape[1], num.cols_lo, num.cols_hi, -num.offset)
        window_launch.run_forward(emulate(module), with_bounds(x), num, scale, out, lse, tile, cols)
    lse = torch.where(lse == float("inf"), float("-inf"), lse / LOG2E)[..., : q.shape[2]]
    expected, allowed = budget.expect(q, k, v, plan, **masks)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("span", SPANS)
def test_window_spans(window, monkeypatch, span, causal):
    check_window(window, monkeypatch, span, (600, 600), masks={"causal": causal})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (64, 64), (129, 127), (200, 700), (700, 200), (1, 500)])
def test_window_lengths(window, monkeypatch, lengths, causal):
    check_window(window, monkeypatch, "shaw", lengths, start=max(lengths[1] - lengths[0], 0), masks={"causal": causal})


@pytest.mark.parametrize("tile", [(64, 4, 1), (128, 3, 2), (64, 2, 2)])
def test_window_tiles_states_and_a_bias(window, monkeypatch, tile):
    options = {"start": 7, "heads": (4, 2), "batch": 2, "tile": window_launch.WindowTile(*tile), "programs": 5}
    check_window(window, monkeypatch, "shaw", (400, 450), states=16, **options)
    check_window(window, monkeypatch, "wide", (400, 450), bias=True, masks={"causal": True}, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_window_and_a_term_of_the_keys(window, monkeypatch, causal):
    for span in ("shaw", "wide"):
        for lengths in ((600, 600), (129, 127), (200, 700)):
            start = max(lengths[1] - lengths[0], 0)
            check_window(window, monkeypatch, span, lengths, start=start, keys=True, masks={"causal": causal})
    tile = window_launch.WindowTile(64, 2, 2)
    check_window(window, monkeypatch, "wide", (400, 450), tile, start=7, heads=(4, 2), batch=2, keys=True)
    real = (torch.arange(450) % 7 != 3)[None]
    check_window(
        window, monkeypatch, "wide", (400, 450), start=50, keys=True, masks={"key_mask": real, "causal": causal}
    )


@pytest.mark.parametrize("causal", [False, True])
def test_window_masks(window, monkeypatch, causal):
    at = torch.arange(500)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    masks = {"key_mask": real, "causal": causal}
    check_window(window, monkeypatch, "shaw", (400, 500), start=100, batch=4, heads=(1, 1), masks=masks)
    check_window(window, monkeypatch, "one side", (600, 600), masks={"window": (250, 0)})
    masks = {"documents": torch.arange(400)[None] // 150, "causal": causal}
    check_window(window, monkeypatch, "shaw", (400, 400), masks=masks)


# ---- where it is chosen ------------------------------------------------------------------------------------------------
def given(plan, lq=2048, lk=2048, size=64, **masks):
    q, k, v = (torch.empty(13, 2, length, size, dtype=torch.bfloat16) for length in (lq, lk, lk))
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    return triton_launch._without_joined_bias(x, num), num, scale, 0.0


def test_where_it_is_chosen(monkeypatch):
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)
    table = torch.zeros(2, 129, 64)
    shaw = Lookup(index.clip(64, 64), dot_query=table, bias=torch.zeros(2, 129))
    runs = Positions(2048)
    assert gluon.refuse_window(*given(Plan(runs, lookups=(shaw,)), causal=True)) is None
    assert "ends within the text" in gluon.refuse_rolling(*given(Plan(runs, lookups=(shaw,))))
    both = Lookup(index.clip(64, 64), dot_query=table, dot_key=table)
    assert gluon.refuse_window(*given(Plan(runs, lookups=(both,)))) is None
    larger = Lookup(index.clip(64, 64), dot_query=torch.zeros(2, 129, 128), dot_key=torch.zeros(2, 129, 128))
    assert gluon.refuse_window(*given(Plan(runs, lookups=(larger,)), size=128)) is None
    further = Lookup(index.clip(70, 64), dot_key=torch.zeros(2, 135, 64))
    assert "the distances of the queries' term" in gluon.refuse_window(*given(Plan(runs, lookups=(shaw, further))))
    apart = Lookup(index.clip(200, 200), bias=torch.zeros(2, 401))
    assert "not bias" in gluon.refuse_window(*given(Plan(runs, lookups=(shaw, apart))))
    every = index.exact(runs)
    exact = Plan(runs, lookups=(Lookup(every, dot_query=torch.zeros(2, every.n, 64)),))
    assert gluon.refuse_rolling(*given(exact)) is None and gluon.refuse_window(*given(exact)) is None
    assert "before 2048 keys" in gluon.refuse_window(*given(Plan(Positions(1024), lookups=(shaw,)), 1024, 1024))
    assert gluon.refuse_window(*given(Plan(Positions(1024), lookups=(shaw,)), 1024, 1024, causal=True)) is None
    starts = Plan(Positions((torch.zeros(13, dtype=torch.int64), 2048), 2048), lookups=(shaw,))
    assert gluon.refuse_window(*given(starts)) is None
    assert "needs a content term" in gluon.refuse_window(*given(Plan(runs)))
    wide = Lookup(index.clip(64, 64), dot_query=torch.zeros(2, 129, 192), states=torch.zeros(13, 2, 2048, 192))
    assert "shared memory" in gluon.refuse_window(*given(Plan(runs, lookups=(wide,)), size=128))
