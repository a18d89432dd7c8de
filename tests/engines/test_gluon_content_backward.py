"""The Gluon backward kernel with content terms, without a GPU: its source in an emulator, over bands made here, against float64."""

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import gluon
from posenc.engines.gluon import content_launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton.arguments import kernel_arguments
from posenc.engines.triton.band_layout import make_band
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.test_gluon_backward import LOG2E, emulate
from tests.plans import mapped

SPANS = {"shaw": index.clip(64, 64), "one side": index.Index(-150, 0), "wide": index.clip(170, 140)}


@pytest.fixture(scope="module")
def kernel():
    files = (
        "backward_prepare.py",
        "backward_tiles.py",
        "backward_sums.py",
        "backward.py",
        "bands.py",
        "content_backward.py",
    )
    return gluon_emulator.load(*files)


def band_of(states, table, heads, lo, hi, offset):
    """triton.band_products.band_from_states."""
    states = states.repeat_interleave(heads // states.shape[1], 1)
    band = make_band(states, heads, lo, hi, offset, 0, states.shape[2])
    numbers = (states.float() @ table.float().transpose(-1, -2)).to(states.dtype)
    band.ptr.fill_(float("nan"))
    rows_of(band, numbers.shape[0], numbers.shape[2]).copy_(numbers)
    ends = torch.full((*numbers.shape[:2], 2, -(-numbers.shape[2] // 64) * 64), float("nan"))
    ends[..., : numbers.shape[2]] = numbers[..., (0, -1)].float().transpose(-1, -2)
    return band._replace(ends=ends, rows=ends.shape[-1])


def rows_of(band, batch, tokens):
    """[B, H, tokens, distances] in the band's memory."""
    shape = batch, band.b // band.h, tokens, band.hi - band.lo + 1
    return band.ptr.as_strided(
        shape, (band.b, band.h, band.pitch + 1, 1), band.ptr.storage_offset() + band.lo - band.origin
    )


def check(
    module, monkeypatch, span, lengths, terms=("query",), start=0, heads=(2, 2), batch=1, size=64, states=0, masks=None, programs=3, **options
):  # fmt: skip
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=programs)
    )
    for name, value in {
        "SHORTEST_CONTENT_BACKWARD": 1,
        "WIDE_OF_128": True,
        "refuse_device": lambda device: None,
    }.items():
        monkeypatch.setattr(gluon, name, value)
    lq, lk = lengths
    q, do = (torch.randn(batch, heads[0], lq, size, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, heads[1], lk, size, dtype=torch.bfloat16) for _ in range(2))
    spot = SPANS[span]
    given = torch.randn(batch, heads[0], lq, states, dtype=torch.bfloat16) if states else None
    query, key, value = (
        torch.randn(heads[0], spot.n, width, dtype=torch.bfloat16) / 2 if name in terms else None
        for name, width in (("query", states or size), ("key", size), ("value", size))
    )
    lookup = Lookup(spot, dot_query=query, states=given, dot_key=key, add_value=value)
    plan = mapped(Plan(Positions((start, lq), lk), lookups=(lookup,)), lambda name, x: x.requires_grad_())
    masks = masks or {}
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    x = gluon_emulator.with_bounds(x)
    expected, allowed = budget.expect(q, k, v, plan, do, **masks)
    lse = torch.full((batch, heads[0], -(-lq // 64) * 64), float("nan"))
    lse[..., :lq] = torch.where(expected["lse"] == float("-inf"), float("inf"), expected["lse"] * LOG2E)
    dq, dk, dv = (torch.full_like(y, float("nan")) for y in (q, k, v))
    rows = cols = mass = d_rows = d_cols = None
    with torch.no_grad():
        if x.table is not None:
            assert content_launch.is_one_sided(x, num)
            rows = band_of(q if given is None else x.states, x.table, heads[0], num.rows_lo, num.rows_hi, num.offset)
            d_rows = make_band(q, heads[0], num.rows_lo, num.rows_hi, num.offset, 0, lq)
        if x.key_table is not None:
            cols = band_of(k, x.key_table, heads[0], num.cols_lo, num.cols_hi, -num.offset)
            d_cols = make_band(q, heads[0], num.cols_lo, num.cols_hi, -num.offset, 0, lk)
        if x.value is not None:
            mass = band_of(do, x.value, heads[0], num.mass_lo, num.mass_hi, num.offset)
        for band in (d_rows, d_cols):
            if band is not None:
                band.ptr.fill_(float("nan"))
        content_launch.run_backward(
            emulate(module), do, None, expected["out"].to(q.dtype), lse, x, num, scale, dq, dk, dv, rows, cols, mass, d_rows, d_cols,
            content_launch.SCHEDULES[size]._replace(**options),
        )  # fmt: skip
        for band, tokens in ((d_rows, lq), (d_cols, lk)):
            if band is not None:  # products read beyond the span
                assert not band.ptr.unflatten(0, (-1, band.h))[:, : tokens * (band.pitch + 1)].isnan().any()
        found = {"q": dq.float(), "k": dk.float(), "v": dv.float()}
        tables = []
        if d_rows is not None:
            gradient = rows_of(d_rows, batch, lq).float() * scale
            table = x.table.float().expand(heads[0], -1, -1)
            d_states = gradient @ table
            if given is None:
                found["q"] += d_states
            tables.append((x.table, gradient.transpose(-1, -2) @ (q if given is None else x.states).float()))
            if given is not None:
                tables.append((x.states, d_states))
        if d_cols is not None:
            gradient = rows_of(d_cols, batch, lk).float() * scale
            own = k.float().repeat_interleave(heads[0] // heads[1], 1)
            more = gradient @ x.key_table.float()
            found["k"] += more.unflatten(1, (heads[1], -1)).sum(2)
            tables.append((x.key_table, gradient.transpose(-1, -2) @ own))
    for tensor, gradient in tables:
        gradient = gradient if gradient.shape == tensor.shape else gradient.sum(0)
        tensor.backward(gradient.to(tensor.dtype), retain_graph=True)
    found |= {name: y.grad for name, y in plan.tensors() if y.grad is not None}
    for name, ours in found.items():
        budget.assert_within(ours.to(q.dtype) if name in "qkv" else ours, expected[name], allowed[name], name)
    return found, expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("terms", [("query",), ("key",), ("query", "key"), ("query", "value")])
def test_terms(kernel, monkeypatch, span, terms, causal):
    check(kernel, monkeypatch, span, (500, 500), terms, masks={"causal": causal})


@pytest.mark.parametrize("span", [index.Index(300, 318), index.Index(318, 340)])
def test_distances_beyond_one_end_of_a_narrow_span(kernel, monkeypatch, span):
    """Those of a block of keys that begins beyond the other end, where everything is masked."""
    monkeypatch.setitem(SPANS, "narrow", span)
    found, expected = check(kernel, monkeypatch, "narrow", (320, 640), masks={"window": (10, 6)})
    name = "lookups[0].dot_query"
    error = (found[name].double() - expected[name]).abs().max() / expected[name].abs().max()
    assert error < 0.01, "budgets of so large scores allow a tenth"


def test_whole_tiles_of_wide_bands_are_copied(kernel, monkeypatch):
    copied = []
    names = kernel.files["content_backward"]
    load = names["load_copied"]
    monkeypatch.setitem(names, "load_copied", lambda *args: copied.append(1) or load(*args))
    check(
        kernel, monkeypatch, "wide", (600, 700), ("query", "key"), start=50, heads=(2, 1), masks={"window": (400, 90)}
    )
    assert copied
    copied.clear()
    check(kernel, monkeypatch, "wide", (500, 450), start=7, size=128, states=16, masks={"causal": True})
    assert copied
    copied.clear()
    check(kernel, monkeypatch, "wide", (500, 500), ("query", "key"), copied=0)
    check(kernel, monkeypatch, "shaw", (500, 500), ("query", "key"))
    assert not copied


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (64, 128), (129, 127), (200, 700), (700, 200), (1, 500)])
def test_lengths(kernel, monkeypatch, lengths, causal):
    start = max(lengths[1] - lengths[0], 0)
    check(kernel, monkeypatch, "shaw", lengths, ("query", "key"), start=start, masks={"causal": causal})


@pytest.mark.parametrize(
    "options", [{"size": 128}, {"stages": 2, "spread": 0}, {"states": 16}, {"size": 128, "states": 16}]
)
def test_schedules_heads_and_states(kernel, monkeypatch, options):
    terms = ("query",) if "states" in options else ("query", "key", "value")
    check(kernel, monkeypatch, "shaw", (400, 450), terms, start=7, heads=(4, 2), programs=5, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_masks(kernel, monkeypatch, causal):
    at = torch.arange(500)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    both = ("query", "key")
    masks = {"key_mask": real, "causal": causal}
    check(kernel, monkeypatch, "shaw", (400, 500), both, start=100, batch=4, heads=(1, 1), masks=masks)
    check(kernel, monkeypatch, "shaw", (600, 600), both, masks={"window": (250, 0 if causal else 100)})
    check(kernel, monkeypatch, "shaw", (400, 400), both, masks={"documents": at[None, :400] // 150, "causal": causal})


def test_where_it_is_chosen(monkeypatch):
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)
    monkeypatch.setattr(gluon, "FEWEST", 1)

    def reason(length=4096, size=64, span=64, dropout=0.0, masks=None, **terms):
        q, k = (torch.empty(1, 2, length, size, dtype=torch.bfloat16) for _ in range(2))
        spot = index.clip(span, span)
        shapes = {name: (2, spot.n, *(() if name == "bias" else (size,))) for name in terms}
        tables = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
        plan = Plan(Positions(length), lookups=(Lookup(spot, **tables),))
        x, num, scale = kernel_arguments(q, k, k, lower_plan(q, k, k, plan, make_mask(q, k, **(masks or {}))))
        return gluon.refuse_content_backward(x, num, scale, dropout, q)

    assert reason(dot_query=1) is None
    assert reason(dot_query=1, dot_key=1, masks={"causal": True}) is None
    assert reason(dot_query=1, add_value=1) is None
    assert reason(dot_query=1, size=128) is None
    assert reason(dot_key=1) is None
    packed = {"documents": torch.zeros(1, 4096, dtype=torch.int64)}
    assert reason(dot_query=1, masks=packed) is None
    assert reason(dot_query=1, dot_key=1, size=128) is None
    assert reason(dot_query=1, add_value=1, size=128) is None
    assert reason(dot_query=1, size=128, masks=packed) is None
    assert reason(dot_query=1, span=200) is None
    assert "heads of 128 over wide spans were compared, but not timed" in reason(dot_query=1, span=200, size=128)
    assert reason(length=2100, dot_query=1, dot_key=1, span=512) is None
    assert "needs 512 queries and keys, got 500" in reason(length=500, dot_query=1)
    assert reason(length=600, dot_query=1, span=512, masks={"causal": True}) is None
    assert "beyond both ends" in reason(span=9, dot_query=1)
    assert reason(span=9, dot_query=1, masks={"causal": True}) is None
    assert "too many distances" in reason(span=3000, dot_query=1)
    assert "no dropout" in reason(dropout=0.1, dot_query=1)
    assert "more than 134217728" in reason(length=1 << 17, dot_query=1)
    assert "needs a content term" in reason(bias=1)
    torch.use_deterministic_algorithms(True)
    try:
        assert "no fixed order" in reason(dot_query=1)
    finally:
        torch.use_deterministic_algorithms(False)
