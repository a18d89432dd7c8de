"""The Gluon kernel without a GPU: its source in an emulator (tests/engines/gluon_emulator.py), and where it is chosen."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import gluon
from posenc.engines.gluon import launch as gluon_launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton.arguments import kernel_arguments
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.gluon_emulator import emulate

LOG2E = 1.4426950408889634
TILE = gluon_launch.PlainTile(128, 2)


@pytest.fixture(scope="module")
def kernel():
    return gluon_emulator.load()


def run(module, monkeypatch, q, k, v, plan, tile=TILE, programs=3, **masks):
    gluon_emulator.set_processors(monkeypatch, programs)
    inputs, numbers, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    inputs = gluon_emulator.with_bounds(inputs)
    out = torch.full_like(q, float("nan"))
    lse = torch.full((*q.shape[:2], -(-q.shape[2] // 64) * 64), float("nan"))
    with torch.no_grad():
        gluon_launch.run_forward(emulate(module), inputs, numbers, scale, out, lse, tile)
    lse = lse[..., : q.shape[2]]
    return out, torch.where(lse == float("inf"), float("-inf"), lse / LOG2E)


def draw(terms, lengths, causal=False, start=0, heads=(2, 1), batch=1):
    lq, lk = lengths
    q = torch.randn(batch, heads[0], lq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads[1], lk, 64, dtype=torch.bfloat16) for _ in range(2))
    spot = {"near": index.clip(300, 200), "apart": index.Index(3, 9)}.get(
        terms, index.log_buckets(32, 64, causal=causal)
    )
    lookups = (Lookup(spot, bias=torch.randn(heads[0], spot.n)),) if terms not in ("none", "slopes") else ()
    slopes = torch.rand(heads[0]) / 8 if terms in ("slopes", "apart") else None
    return q, k, v, Plan(Positions((start, lq), lk), lookups=lookups, slopes=slopes)


def check(module, monkeypatch, terms, causal, lengths, start=0, heads=(2, 1), batch=1, masks=None, **options):
    q, k, v, plan = draw(terms, lengths, causal, start, heads, batch)
    masks = {"causal": causal, **(masks or {})}
    out, lse = run(module, monkeypatch, q, k, v, plan, **options, **masks)
    expected, allowed = budget.expect(q, k, v, plan, **masks)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none", "slopes", "apart", "near"])
def test_terms(kernel, monkeypatch, terms, causal):
    check(kernel, monkeypatch, terms, causal, (600, 600))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (64, 64), (129, 127), (200, 700), (700, 200), (1, 500)])
def test_lengths(kernel, monkeypatch, lengths, causal):
    check(kernel, monkeypatch, "bias", causal, lengths, start=max(lengths[1] - lengths[0], 0))


@pytest.mark.parametrize("tile", [(64, 4, False), (128, 3, True, 3), (128, 4, True, 0, 2)])
def test_tiles(kernel, monkeypatch, tile):
    tile = gluon_launch.PlainTile(*tile)
    check(kernel, monkeypatch, "bias", True, (400, 450), 7, heads=(4, 2), batch=2, tile=tile, programs=5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "slopes"])
def test_padding(kernel, monkeypatch, terms, causal):
    """On the right, on the left, with gaps, and of a whole row."""
    at = torch.arange(500)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    check(kernel, monkeypatch, terms, causal, (400, 500), 100, batch=4, heads=(1, 1), masks={"key_mask": real})
    check(kernel, monkeypatch, terms, causal, (130, 500), 370, batch=2, heads=(1, 1), masks={"key_mask": real[:1]})
    nothing = torch.zeros(1, 256, dtype=torch.bool)  # of whole tiles: there is none after them
    check(kernel, monkeypatch, terms, causal, (256, 256), masks={"key_mask": nothing})


@pytest.mark.parametrize("terms", ["bias", "none"])
@pytest.mark.parametrize("window", [(150, 0), (0, 0), (70, 200)])
def test_windows(kernel, monkeypatch, terms, window):
    check(kernel, monkeypatch, terms, False, (600, 600), masks={"window": window})
    check(kernel, monkeypatch, terms, False, (300, 200), masks={"window": window})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none"])
def test_documents(kernel, monkeypatch, terms, causal):
    """In order, with one that has no keys; in no order; with padding and a window."""
    ids = torch.arange(400)[None] // 150
    check(kernel, monkeypatch, terms, causal, (400, 400), masks={"documents": ids})
    check(kernel, monkeypatch, terms, causal, (400, 400), masks={"documents": (ids, 2 * (ids // 2))})
    masks = {"documents": torch.randint(3, (1, 400)), "key_mask": (torch.arange(400) < 333)[None], "window": (210, 50)}
    check(kernel, monkeypatch, terms, causal, (400, 400), masks=masks)


ROWS_OF_TEXTS = ((100, 28, 272), (400,), (256, 144), (64, 64, 1, 191, 80))


def packed(rows=ROWS_OF_TEXTS):
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none"])
def test_documents_by_cost(kernel, monkeypatch, terms, causal):
    """Rows of different texts, whose blocks are ordered in several sections; two consumers; a text without keys."""
    monkeypatch.setattr(gluon_launch, "SECTION", 10)
    ids = packed()
    check(kernel, monkeypatch, terms, causal, (400, 400), batch=4, programs=5, masks={"documents": ids})
    short = gluon_launch.PlainTile(128, 4, True, 0, 2)
    check(kernel, monkeypatch, terms, causal, (400, 400), batch=4, programs=4, masks={"documents": ids}, tile=short)
    masks = {"documents": (ids[:, :300], ids + (ids == 1)), "window": (150, 60)}
    check(kernel, monkeypatch, terms, causal, (300, 400), batch=4, programs=3, masks=masks)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_documents_are_ordered(kernel, monkeypatch, causal):
    """Every block once, in sections, by the tiles of its consumers up and down in turns; and each consumer's own tiles."""
    monkeypatch.setattr(gluon_launch, "SECTION", 10)
    ids = packed((*ROWS_OF_TEXTS, (7, 393)))
    q, k, v, plan = draw("bias", (400, 400), causal, batch=5)
    given = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, causal=causal, documents=ids)))
    inputs, numbers, scale = gluon_emulator.with_bounds(given[0]), *given[1:]
    lse = torch.empty(5, 2, 448)
    tiles = gluon_launch.prepare_blocks(
        emulate(kernel), inputs, numbers, scale, lse, 192, 128, (numbers.lo, numbers.hi), (numbers.lo, numbers.hi), 192, True
    )[0].view(15, -1)  # fmt: skip
    assert {(int(row[9]), int(row[10])) for row in tiles} == {(b, block) for b in range(5) for block in range(3)}
    costs = []
    for row in tiles:
        b, m0 = int(row[9]), int(row[10]) * 192
        cost, ends = 0, []
        for c, (first, last, clear0, clear1) in enumerate(row[11:].view(3, 4).tolist()):
            own = ids[b, m0 + 64 * c : m0 + 64 * c + 64]
            visible = own[:, None] == ids[b]
            if causal:
                visible &= torch.arange(400) <= torch.arange(m0 + 64 * c, m0 + 64 * c + len(own))[:, None]
            seen = [bool(visible[:, n : n + 128].any()) for n in range(0, 400, 128)]
            assert [first <= n < last for n in range(4)] == seen
            assert all(visible[:, 128 * n : 128 * n + 128].all() for n in range(clear0, clear1))
            cost += sum(seen)
            ends += [first, last] if any(seen) else []
        assert row[[0, 5]].tolist() == [min(ends), max(ends)]
        costs.append(cost + max(ends) - min(ends))
    assert costs[10:] == sorted(costs[10:], reverse=True) and costs[:5] == sorted(costs[:5], reverse=True)
    assert costs[5:10] == sorted(costs[5:10])


def test_a_start_for_each_row(kernel, monkeypatch):
    q, k, v, plan = draw("bias", (300, 300), batch=2)
    starts = torch.tensor([0, -40])
    plan = Plan(Positions((starts, 300), 300), lookups=plan.lookups)
    out, _ = run(kernel, monkeypatch, q, k, v, plan, causal=True)
    expected, allowed = budget.expect(q, k, v, plan, causal=True)
    budget.assert_within(out, expected["out"], allowed["out"], "out")


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("masks", ["causal", "window", "key_mask", "documents"])
@pytest.mark.parametrize("terms", ["bias", "slopes", "none"])
def test_a_masked_key_does_not_reach_the_output(kernel, monkeypatch, terms, masks, fault):
    """As in the triton kernels: its score is replaced, so that NaN and infinities are too. A visible one comes out as NaN."""
    q, k, v, plan = draw(terms, (260, 260))
    at = torch.arange(260)
    given = {"causal": True, "window": (30, 20), "key_mask": (at != 150)[None], "documents": at[None] // 200}[masks]
    clean, _ = run(kernel, monkeypatch, q, k, v, plan, **{masks: given})
    visible = make_mask(q, k, **{masks: given}).allowed(260, 260, q.device).expand(1, 1, 260, 260)[0, 0, :, 150]
    k[0, 0, 150] = fault
    out, _ = run(kernel, monkeypatch, q, k, v, plan, **{masks: given})
    assert torch.equal(out[:, :, ~visible], clean[:, :, ~visible])
    if fault != fault:  # -inf in a key may be a score of -inf
        assert out[:, :, visible].isnan().all()


# ---- where it is chosen ------------------------------------------------------------------------------------------------
def given(lq=2048, lk=2048, size=64, dtype=torch.bfloat16, plan=None, batch=9, **masks):
    """The arguments of `refuse_call`; nothing is computed."""
    q, k, v = (torch.empty(batch, 2, length, size, dtype=dtype) for length in (lq, lk, lk))
    plan = plan or Plan(Positions(lq, lk), lookups=(Lookup(index.clip(9, 9), bias=torch.zeros(2, 19)),))
    return *kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks))), 0.0


def test_it_takes_what_it_can():
    for causal, size, dtype in ((False, 64, torch.bfloat16), (True, 128, torch.float16)):
        assert gluon.refuse_call(*given(size=size, dtype=dtype, causal=causal)) is None
    slopes = Plan(Positions(2048), slopes=torch.zeros(2))
    assert (
        gluon.refuse_call(
            *given(plan=slopes, causal=True, window=300, documents=torch.zeros(1, 2048, dtype=torch.int32))
        )
        is None
    )


def test_it_leaves_what_it_is_slower_at(monkeypatch):
    """Documents that are not causal, with a content term; not those without."""
    ids = torch.zeros(1, 2048, dtype=torch.int32)
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)
    assert gluon.refuse(*given(documents=ids)) is None
    content = Plan(Positions(2048), lookups=(Lookup(index.clip(9, 9), dot_query=torch.zeros(2, 19, 64)),))
    for options, is_slower in (({"documents": ids}, True), ({}, False), ({"causal": True, "documents": ids}, False)):
        reason = gluon.refuse_window(*given(plan=content, batch=12, **options))
        assert (reason is not None and "documents" in reason) is is_slower, reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": 80}, "head sizes are 64 or 128"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"lq": 100}, "got 100 and 2048"),
        ({"batch": 5}, "got 110"),
        ({"mask": torch.ones(2048, 2048, dtype=torch.bool)}, "not extra"),
        ({"plan": Plan(Positions(2048), decay=(torch.zeros(9, 2, 2048), torch.zeros(9, 2, 2048)))}, "not decay_q, decay_k"),
        ({"plan": Plan(Positions(2048), scale=1e-15)}, "at least"),
    ],
)  # fmt: skip
def test_it_names_what_it_cannot(options, reason):
    arguments = given(**options)
    assert reason in (gluon.refuse_call(*arguments) or gluon.refuse_size(arguments[0]))


def test_short_texts_run_where_they_are_many():
    """As measured: without content terms from 64 tokens on, where blocks of 192 queries fill the device twice."""
    for batch, length, reason in (
        (128, 64, None),
        (128, 128, None),
        (127, 128, "needs 256 blocks"),
        (128, 63, "needs 64"),
        (32, 512, None),
    ):
        found = gluon.refuse_plain_size(given(length, length, batch=batch)[0])
        assert found is None if reason is None else reason in found
    without = given(256, 256, batch=128, plan=Plan(Positions(256)))[0]
    assert "without terms" in gluon.refuse_plain_size(without)
    consumers = {64: 2, 128: 2, 129: 3, 192: 3, 193: 2, 384: 2, 512: 2, 513: 3}
    assert {length: gluon_launch.choose_tile(64, length).consumers for length in consumers} == consumers


def test_dropout_and_strides_are_refused():
    inputs, numbers, scale, _ = given()
    assert gluon.refuse_call(inputs, numbers, scale, 0.1) == "it has no dropout"
    odd = torch.empty(9, 2, 2048, 68, dtype=torch.bfloat16)[..., :64]
    assert "16 bytes" in gluon.refuse_call(inputs._replace(k=odd), numbers, scale, 0.0)
    one = torch.empty(3 * 2048 * 64 + 5, dtype=torch.bfloat16).as_strided((1, 3, 2048, 64), (1, 2048 * 64, 64, 1))
    assert not gluon.bad_strides(one) and gluon.bad_strides(one[0][None, :, :, 4:])
    assert gluon_launch._describe(one, 64).strides == [64, 2048 * 64, 64, 1]
    shared = inputs.v[:, :1].expand(-1, 2, -1, -1)
    assert "strides above zero" in gluon.refuse_call(inputs._replace(v=shared), numbers, scale, 0.0)


def test_it_runs_on_hopper_with_tested_versions_only(monkeypatch):
    monkeypatch.setattr(gluon, "VERSION", "3.6")
    monkeypatch.setattr(gluon, "capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    assert gluon.refuse_device(cuda) is None
    assert "9.0" in gluon.refuse_device(torch.device("cpu"))
    monkeypatch.setattr(gluon, "capability", lambda device: (10, 0))
    assert "9.0" in gluon.refuse_device(cuda)
    monkeypatch.setattr(gluon, "VERSION", "3.7")
    assert gluon.refuse_device(cuda) == "it is tested with Triton 3.6, found 3.7"


def test_descriptors_are_described():
    from posenc.core import variants

    made = gluon_launch._describe(torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16), 64)
    described = variants._describe(made)
    assert hash(described) == hash(
        variants._describe(gluon_launch._describe(torch.ones(2, 2, 64, 64, dtype=torch.bfloat16), 64))
    )
    restored = described.restore()
    assert (restored.block_shape, restored.layout, restored.base.dtype) == (
        made.block_shape,
        made.layout,
        torch.bfloat16,
    )


def test_a_recorded_call_makes_its_descriptors_anew():
    from posenc.engines.triton import replay

    x = torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16)
    recorder = replay.Recorder([x])
    text = recorder.write(gluon_launch._describe(recorder.inputs[0], 64))
    other = torch.ones_like(x)
    made = eval(text, {**recorder.space, recorder.parameters[0]: other})
    assert (made.base is other, made.shape, made.strides) == (True, [2, 2, 64, 64], [8192, 4096, 64, 1])
