"""The shortcut for the most common CPU calls has the results, errors and choices of the general path; no cache is stale."""

import threading
import warnings
from dataclasses import fields

import pytest
import torch

import posenc
from posenc import Lookup, Plan, Positions, attend, explain, index
from posenc.bench import uses_layers
from posenc.core.dropout import Dropout
from posenc.core.mask import make_mask
from posenc.engines import plain_call, rules_cpu
from posenc.engines.choose import choose_engine
from posenc.engines.cpu import dense, joined_masks
from posenc.engines.lowering import Facts, lower_plan


def tensors(batch=2, heads=4, queries=12, keys=12, size=8, kv_heads=None, dtype=torch.float32):
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries, size, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads or heads, keys, size, dtype=dtype) for _ in range(2))
    return q, k, v


def plans(heads=4, queries=12, keys=12):
    positions = Positions((keys - queries, queries), keys)
    rope = posenc.create("rope", head_dim=8)
    return {
        "none": Plan(positions),
        "rope": rope.plan(positions),
        "alibi": Plan(positions, slopes=torch.rand(heads)),
        "t5": Plan(positions, lookups=(Lookup(index.log_buckets(8, 6, causal=True), bias=torch.randn(heads, 8)),)),
        "both": Plan(
            positions, lookups=(Lookup(index.clip(3, 2), bias=torch.randn(heads, 6)),), slopes=torch.rand(heads), scale=0.5
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(plans()))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(12, 12, 4), (1, 9, 2), (1, 20, 1), (5, 9, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_the_reference(name, causal, queries, keys, kv_heads, dtype):
    q, k, v = tensors(queries=queries, keys=keys, kv_heads=kv_heads, dtype=dtype)
    plan = plans(queries=queries, keys=keys)[name]
    with torch.no_grad():
        for _ in range(2):  # the second call finds what the first kept
            ours = attend(q, k, v, plan, causal=causal)
            truth = attend(q.double(), k.double(), v.double(), plan, causal=causal, engine="reference")
            allowed = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-6}[dtype]
            torch.testing.assert_close(ours.double(), truth, atol=allowed, rtol=allowed)
        taken = plain_call.run(q, k, v, plan, causal)
        if taken is not None:
            assert torch.equal(taken, ours)
            is_plain = name in ("none", "rope") and not (causal and 1 != queries != keys)
            assert explain(q, k, v, plan, causal=causal).engine == ("sdpa" if is_plain else "cpu")


def test_no_slot_is_overlooked():
    """`plain_call.run` names the slots that it takes and those that it refuses: a new one belongs to either."""
    taken = {"positions", "shift", "rotate", "lookups", "scale", "slopes", "pair_axes"}
    refused = {"cosine", "append", "decay", "pair", "sinks"}
    assert {one.name for one in fields(Plan)} == taken | refused
    tables = {"index", "bias", "dot_query", "dot_key", "add_value"}
    assert {one.name for one in fields(Lookup)} == tables | {"states", "query_shift"}


def test_the_common_calls_are_taken():
    q, k, v = tensors()
    for name, plan in plans().items():
        with torch.no_grad():
            attend(q, k, v, plan)
            assert plain_call.run(q, k, v, plan, False) is not None, name


def test_a_table_that_changes_in_place_through_data_or_is_replaced_is_never_stale():
    q, k, v = tensors()
    table = torch.nn.Parameter(torch.randn(4, 8))
    rows = index.log_buckets(8, 6, causal=False)

    def check(queries):
        few = q[:, :, :queries]
        plan = Plan(Positions((12 - queries, queries), 12), lookups=(Lookup(rows, bias=table),))
        truth = attend(few, k, v, plan, engine="reference")
        torch.testing.assert_close(attend(few, k, v, plan), truth, atol=1e-5, rtol=1e-5)

    with torch.no_grad():
        for queries in (12, 1):
            check(queries)
            table.add_(1.0)
            check(queries)
            table.data.mul_(-2.0)  # no version is counted here
            check(queries)
            table = torch.nn.Parameter(torch.randn(4, 8))
            check(queries)


def test_what_is_kept_is_bounded():
    q, k, v = tensors(batch=1)
    with torch.no_grad():
        for number in range(200):
            slopes = torch.rand(4) + number
            attend(q, k, v, Plan(Positions(12), slopes=slopes))
            attend(q[:, :, :1], k, v, Plan(Positions((11, 1), 12), slopes=slopes))
    assert len(dense._masks) <= dense._masks.most
    assert len(dense._rows) <= dense._rows.most
    assert dense._masks._held <= dense._masks.numbers


def test_threads_get_their_own_results():
    q, k, v = tensors()
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            table = torch.randn(4, 8, generator=generator)
            plan = Plan(Positions(12), lookups=(Lookup(index.log_buckets(8, 6, causal=False), bias=table),))
            with torch.no_grad():
                ours, truth = attend(q, k, v, plan), attend(q, k, v, plan, engine="reference")
            if not torch.allclose(ours, truth, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nan_is_neither_hidden_nor_spread():
    q, k, v = tensors()
    plan = plans()["t5"]
    bad = q.clone()
    bad[0, 0, 3] = float("nan")
    out = attend(bad, k, v, plan)
    assert out[0, 0, 3].isnan().all()
    assert not out[1].isnan().any()
    late = v.clone()
    late[:, :, -1] = float("nan")
    out = attend(q, k, late, plan, causal=True)
    assert not out[:, :, :-1].isnan().any()
    assert out[:, :, -1].isnan().all()


def test_wrong_calls_have_the_errors_of_the_long_way():
    q, k, v = tensors()
    plan = plans()["t5"]
    with pytest.raises(ValueError, match="the plan was made for 12 queries"):
        attend(q[:, :, :3], k, v, plan)
    with pytest.raises(ValueError, match="made for 4 heads"):
        attend(q[:, :2], k[:, :2], v[:, :2], plan)
    with pytest.raises(ValueError, match="batch rows"):
        attend(q[:1], k, v, plan)
    nan = Plan(Positions(12), slopes=torch.full((4,), float("nan")))
    with pytest.raises(ValueError, match="holds NaN"):
        attend(q, k, v, nan)
    with pytest.raises(ValueError, match="holds NaN"):
        attend(q[:, :, :1], k, v, Plan(Positions((11, 1), 12), slopes=torch.full((4,), float("nan"))))
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="causal aligns"):
        warnings.simplefilter("error")
        attend(q[:, :, :2], k, v, Plan(Positions(2, 12), slopes=torch.rand(4)), causal=True)


def test_gradients_and_transforms_take_their_ways():
    q, k, v = tensors()
    slopes = torch.rand(4, requires_grad=True)
    plan = Plan(Positions(12), slopes=slopes)
    grads = [
        torch.autograd.grad(attend(q, k, v, plan, engine=engine).sum(), slopes)[0] for engine in ("auto", "reference")
    ]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
    plain = plans()["alibi"]
    ours = torch.func.grad(lambda q: attend(q, k, v, plain).square().sum())(q)
    theirs = torch.func.grad(lambda q: attend(q, k, v, plain, engine="reference").square().sum())(q)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def facts(batch, length, spans=(None, None, None, None), **changes) -> Facts:
    known = dict(
        device=torch.device("cpu"), dtype=torch.float32, batch=batch, heads=8, kv_heads=8, q_length=length, k_length=length,
        head_dim=64, value_dim=64, spans=spans, states=False, further_axes=False, slopes=False, decay=False, pair=False,
        scale="number", positions="run", left=None, right=None, padding=False, documents=False, mask="none", dropout=False,
        gradient=False, return_lse=False,
    )  # fmt: skip
    return Facts(**{**known, **changes})


BIAS, CONTENT, VALUES = ((-9, 9), None, None, None), (None, (-9, 9), None, None), (None, None, None, (-9, 9))


@pytest.mark.parametrize("form", ["dense", "tiles"])
def test_the_rules(form):
    """By cell of `posenc bench --suite uses`: what was measured to be faster."""
    cells = {
        "dense": [
            *(facts(b, n, BIAS) for b, n in ((1, 16), (8, 64), (8, 128), (4, 256), (64, 128), (1, 512))),
            *(facts(b, n, CONTENT) for b, n in ((1, 16), (8, 64), (8, 128), (4, 256), (1, 512))),
            *(facts(b, n, slopes=True) for b, n in ((1, 16), (8, 64), (8, 128), (4, 256), (1, 512))),
            facts(4, 256, BIAS, right=0),
        ],
        "tiles": [
            facts(1, 513, BIAS), facts(1, 512, BIAS, right=0), facts(1, 512, right=0, slopes=True), facts(8, 512, CONTENT), facts(1, 16, VALUES),
            facts(1, 16, BIAS, return_lse=True), facts(1, 16, BIAS, decay=True),
        ],
    }  # fmt: skip
    for one in cells[form]:
        assert rules_cpu.cpu_form(one) == form, one
        assert rules_cpu.cpu_form(one._replace(gradient=True)) == form, one


PLAIN = ("none", "sinusoidal", "learned", "rope", "xpos")
TILES = ("alibi",)
"""At 1 x 512 tokens these, which are causal, run in tiles; everything else is dense."""


@pytest.mark.parametrize("name", list(uses_layers.BY_HAND))
@pytest.mark.parametrize("training", [False, True])
def test_the_choice_of_every_cell(name, training):
    layer = uses_layers.make_layer(name, name in uses_layers.CAUSAL, "cpu", torch.float32, 512)
    for batch, length in uses_layers.SIZES:
        x = torch.zeros(batch, length, uses_layers.D_MODEL)
        q, k, v = (torch.empty(batch, 8, length, 64, requires_grad=training) for _ in range(3))
        with torch.set_grad_enabled(training):
            plan = layer.encoding.plan(Positions(length), x=x, host=layer)
            lowered = lower_plan(q, k, v, plan, make_mask(q, k, causal=layer.causal))
            assert choose_engine(lowered).engine == ("sdpa" if name in PLAIN else "cpu")
            if name not in PLAIN:
                expected = "tiles" if length == 512 and name in TILES else "dense"
                assert rules_cpu.cpu_form(lowered.facts) == expected, (batch, length)


@pytest.mark.parametrize("name", ["t5", "alibi", "shaw", "rope"])
@pytest.mark.parametrize(("batch", "length", "heads"), [(2, 20, 4), (1, 512, 8), (8, 256, 8), (1, 513, 4)])
def test_outputs_have_the_same_bits_with_and_without_gradients(name, batch, length, heads):
    torch.manual_seed(0)
    layer = posenc.Attention(32, heads, encoding=name)
    x = torch.randn(batch, length, 32)
    trained = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), trained)
        assert torch.equal(layer(x), trained)  # with what was kept


@pytest.mark.parametrize("learned", [False, True])
def test_gradients_of_fully_masked_queries_are_zero(learned):
    q, k, v = (x.requires_grad_() for x in tensors(batch=1, queries=12, keys=5))
    slopes = torch.rand(4, requires_grad=learned)
    plan = Plan(Positions((-7, 12), 5), slopes=slopes)
    for options in ({"causal": True}, {"key_mask": torch.zeros(1, 5, dtype=torch.bool)}):
        ours, truth = (
            torch.autograd.grad(attend(q, k, v, plan, engine=engine, **options).square().sum(), (q, k, v))
            for engine in ("auto", "reference")
        )
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_fully_masked_queries_have_the_same_bits_with_and_without_gradients():
    padded = torch.ones(2, 12, dtype=torch.bool)
    padded[1, :6] = False
    for queries, keys, options in (
        (12, 12, {"causal": True, "window": 3, "key_mask": padded}),
        (19, 12, {"causal": True}),
    ):
        q, k, v = tensors(queries=queries, keys=keys, size=32)
        plan = Plan(Positions((keys - queries, queries), keys), slopes=torch.rand(4))
        trained = attend(q.clone().requires_grad_(), k, v, plan, **options)
        with torch.no_grad():
            for _ in range(3):  # the later ones with what was kept
                assert torch.equal(attend(q, k, v, plan, **options), trained)


@pytest.mark.parametrize("block", [1, 300, 700])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_gradients_are_made_in_blocks_of_rows_and_heads(block, kv_heads, monkeypatch):
    """One head of keys after another, several heads, or several batch rows at once."""
    monkeypatch.setattr(dense, "BLOCK", block)
    q, k, v = (x.double().requires_grad_() for x in tensors(batch=3, kv_heads=kv_heads, queries=7))
    bias, table = torch.randn(4, 6, requires_grad=True), torch.randn(1, 6, 8, requires_grad=True)
    key_mask = torch.ones(3, 12, dtype=torch.bool)
    key_mask[1, 9:] = False
    leaves = {"shared": [q, k, v, bias], "content": [q, k, v, bias, table], "padding": [q, k, v, bias]}
    for name, wanted in leaves.items():
        lookup = Lookup(index.clip(3, 2), bias=bias.double(), dot_query=table.double() if name == "content" else None)
        plan = Plan(Positions((5, 7), 12), lookups=(lookup,))
        options = {"key_mask": key_mask} if name == "padding" else {}
        ours, truth = (
            torch.autograd.grad(attend(q, k, v, plan, engine=engine, **options).square().sum(), wanted)
            for engine in ("cpu", "reference")
        )
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)


def masks_of(kind: str, batch: int, queries: int, keys: int) -> dict:
    """Every kind of mask; the first queries of the second row see nothing where padding meets causality."""
    generator = torch.Generator().manual_seed(1)
    key_mask = torch.ones(batch, keys, dtype=torch.bool)
    key_mask[1, : keys // 2] = False
    key_mask[0, -2:] = False
    drawn = torch.rand(batch, 1, queries, keys, generator=generator) > 0.4
    drawn[0, 0, 0] = False
    ids = torch.arange(keys) * 3 // keys
    return {
        "padding": {"key_mask": key_mask},
        "documents": {"documents": (ids[None, keys - queries :], ids[None])},
        "bool": {"mask": drawn},
        "float": {"mask": torch.randn(1, 4, queries, keys, generator=generator).masked_fill(~drawn[:1], float("-inf"))},
        "rows": {"mask": drawn[..., :1]},
        "window": {"window": (4, 2)},
        "all": {
            "key_mask": key_mask,
            "mask": drawn,
            "window": 5,
            "documents": (ids[None, keys - queries :], ids[None]),
        },
    }[kind]


@pytest.mark.parametrize("window", [(None, 0), (None, 1), (0, None), (3, 0), (None, None), 0, 5])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (1, 8), (4, 20)])
def test_windows_without_terms_are_those_of_the_reference(queries, keys, window):
    """(None, 0) is causality by another name."""
    q, k, v = (x.requires_grad_() for x in tensors(queries=queries, keys=keys))
    for causal in (False, True):
        options = {"window": window, "causal": causal}
        found = [attend(q, k, v, engine=engine, **options) for engine in ("auto", "reference")]
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in found]
        for a, b in zip(*([out, *own] for out, own in zip(found, grads, strict=True)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


MASKED = ("padding", "documents", "bool", "float", "rows", "window", "all")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*plans(), "shaw", "shaw by head"])
@pytest.mark.parametrize("kind", MASKED)
def test_masks_have_the_results_and_gradients_of_the_reference(kind, name, causal):
    for queries, keys, kv_heads in ((12, 12, 4), (1, 20, 2), (5, 20, 4), (20, 40, 2)):
        q, k, v = (x.double().requires_grad_() for x in tensors(queries=queries, keys=keys, kv_heads=kv_heads))
        positions = Positions((keys - queries, queries), keys)
        leaves = [q, k, v]
        if name in ("shaw", "shaw by head"):
            table = torch.randn(1 if name == "shaw" else 4, 6, 8, dtype=torch.float64, requires_grad=True)
            plan = Plan(positions, lookups=(Lookup(index.clip(3, 2), dot_query=table),))
            leaves.append(table)
        else:
            plan = plans(queries=queries, keys=keys)[name]
        options = {"causal": causal, **masks_of(kind, 2, queries, keys)}
        ours, truth = attend(q, k, v, plan, **options), attend(q, k, v, plan, engine="reference", **options)
        torch.testing.assert_close(ours, truth, atol=1e-6, rtol=1e-6)
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (ours, truth)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(plans()))
@pytest.mark.parametrize("kind", MASKED)
def test_masked_outputs_have_the_same_bits_with_and_without_gradients(kind, name):
    for queries, keys, kv_heads in ((12, 12, 4), (1, 20, 2), (5, 20, 4), (20, 40, 2)):
        q, k, v = tensors(queries=queries, keys=keys, kv_heads=kv_heads)
        plan = plans(queries=queries, keys=keys)[name]
        options = {"causal": True, **masks_of(kind, 2, queries, keys)}
        trained = attend(q.clone().requires_grad_(), k, v, plan, **options)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(attend(q, k, v, plan, **options), trained), (queries, keys)


@pytest.mark.parametrize("kind", MASKED)
def test_biases_learn_under_every_mask(kind):
    q, k, v = (x.double().requires_grad_() for x in tensors(kv_heads=2))
    table, slopes = (torch.rand(*size, dtype=torch.float64, requires_grad=True) for size in ((4, 6), (4,)))
    plan = Plan(Positions(12), lookups=(Lookup(index.clip(3, 2), bias=table),), slopes=slopes)
    found = [
        torch.autograd.grad(
            attend(q, k, v, plan, engine=engine, causal=True, **masks_of(kind, 2, 12, 12)).square().sum(),
            (q, k, v, table, slopes),
        )
        for engine in ("auto", "reference")
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fully_masked_queries_give_zeros(dtype):
    q, k, v = tensors(queries=12, keys=12, dtype=dtype)
    for name, plan in plans().items():
        with torch.no_grad():
            out = plain_call.run(q, k, v, plan, True, {"causal": True, **masks_of("padding", 2, 12, 12)})
        assert out is not None, name
        assert not out[1, :, :6].any()
        assert out[1, :, 6:].any()


def test_hidden_nan_stays_hidden_under_every_mask():
    for kind in ("padding", "documents", "bool", "all"):
        (q, k, v), plan = tensors(), plans()["t5"]
        options = masks_of(kind, 2, 12, 12)
        truth = attend(q, k, v, plan, **options)
        visible = make_mask(q, k, **options).allowed(12, 12, q.device)
        unseen = ~visible.expand(2, 1, 12, 12).any(2)[:, 0]
        spoiled = [x.masked_fill(unseen[:, None, :, None], float("nan")) for x in (k, v)]
        torch.testing.assert_close(attend(q, *spoiled, plan, **options), truth, atol=1e-5, rtol=1e-5)


def test_a_token_after_padded_texts_and_several_tokens_keep_their_masks():
    """`KVCache` holds the padding: steps of one, four and twenty tokens are those of the whole text."""
    torch.manual_seed(0)
    x, real = torch.randn(3, 60, 32), torch.arange(60) >= torch.tensor([0, 9, 20])[:, None]
    for name in ("none", "rope", "alibi", "t5", "shaw"):
        layer = posenc.Attention(32, 4, encoding=None if name == "none" else name, causal=True, window=(40, 0)).eval()
        with torch.no_grad():
            whole, cache = layer(x, key_mask=real), posenc.KVCache()
            parts = [layer(x[:, :30], key_mask=real[:, :30], cache=cache)]
            for count in (1, 4, 20, 1, 4):
                at = cache.length
                parts.append(layer(x[:, at : at + count], cache=cache))
        torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["none", "alibi", "both"])
def test_masks_that_change_in_place_or_are_replaced_are_never_stale(name):
    """The joined mask of padding and documents is kept between calls; one of other values at the same address is not used."""
    q, k, v = tensors()
    plan, half = plans()[name], torch.arange(12) < 6
    padding, documents = torch.ones(2, 12, dtype=torch.bool), torch.zeros(2, 12, dtype=torch.long)
    changes = [
        lambda: padding[1, 8:].fill_(False),
        lambda: padding.data[0, 3:].fill_(False),
        lambda: documents[:, half].fill_(1),
        lambda: documents.numpy().fill(0),
        lambda: padding.fill_(False),  # fully masked
    ]
    for change in (lambda: None, *changes):
        change()
        for options in (
            {"key_mask": padding},
            {"key_mask": padding, "documents": documents},
            {"documents": documents, "window": 4},
        ):
            for causal in (False, True):
                truth = attend(q, k, v, plan, engine="reference", causal=causal, **options)
                for training in (True, False, True):
                    with torch.set_grad_enabled(training):
                        out = attend(q.clone().requires_grad_(training), k, v, plan, causal=causal, **options)
                    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)
    for number in range(80):
        attend(q, k, v, plan, key_mask=torch.rand(2, 12) < 0.5 + number / 1000)
    assert len(joined_masks._kept) <= joined_masks._kept.most


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5", "shaw"])
def test_dropout_keeps_the_mean_and_reaches_every_gradient(name):
    torch.manual_seed(0)
    layer = posenc.Attention(32, 4, encoding=None if name == "none" else name, dropout=0.5)
    x, real = torch.randn(400, 6, 32)[:1].expand(400, -1, -1), torch.tensor([[True] * 5 + [False]])
    for options in ({}, {"key_mask": real.expand(400, -1)}):
        outs = layer.train()(x, **options)
        assert not torch.equal(outs[0], outs[1])
        grads = torch.autograd.grad(outs.mean(0).square().sum(), tuple(layer.parameters()), allow_unused=True)
        layer.eval()
        truth = layer(x[:1], **{key: value[:1] for key, value in options.items()})
        allowed = 5 * outs.std(0) / 20 + 1e-6
        assert ((outs.mean(0) - truth[0]).abs() < allowed).all()
        assert all(one is not None and torch.isfinite(one).all() for one in grads)
    (q, k, v), plan = tensors(), plans()["t5"]
    seeded = Dropout(0.5, torch.tensor([7]))  # ranks that share a text draw by a hash
    assert explain(q, k, v, plan, dropout=0.5).engine == explain(q, k, v, plan, dropout=seeded).engine == "cpu"
    assert torch.equal(*(attend(q, k, v, plan, dropout=seeded) for _ in range(2)))
