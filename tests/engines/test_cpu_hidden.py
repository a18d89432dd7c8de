"""Masked keys and values do not reach the output, NaN and inf included; visible ones do."""

import pytest
import torch

from posenc.core.index import clip
from posenc.core.mask import make_mask
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines.cpu import block_sizes
from posenc.functional import attend

B, H, D = 2, 2, 4
NAN, INF = float("nan"), float("inf")
NAMES = ["limits alone", "bias", "keys and values", "both sides", "decay"]


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make(name, positions):
    lookup = {
        "bias": dict(bias=draw(H, 8)),
        "keys and values": dict(dot_query=draw(1, 8, D), add_value=draw(1, 8, D)),
        "both sides": dict(dot_query=draw(H, 8, D), dot_key=draw(H, 8, D)),
    }
    if name in lookup:
        return Plan(positions, lookups=(Lookup(clip(4, 3), **lookup[name]),))
    decay = (draw(B, H, positions.q_length), draw(B, H, positions.k_length)) if name == "decay" else None
    return Plan(positions, decay=decay)


def compare(plan, engine, train, of, fault, at, **options):
    """The output with a fault in one key or value, row by row: that without it, or NaN where the key is visible."""
    positions = plan.positions
    q, k, v = (draw(B, H, length, D) for length in (positions.q_length, positions.k_length, positions.k_length))
    hidden = {"window": None, "key_mask": None, "causal": False, **options}
    allowed = make_mask(q, k, documents=None, mask=None, **hidden).allowed(
        positions.q_length, positions.k_length, q.device
    )
    visible = allowed.expand(B, 1, positions.q_length, positions.k_length)[0, 0, :, at]
    clean = attend(q, k, v, plan, engine="reference", **options)
    (k if of == "key" else v)[0, 1, at] = fault
    out = attend(q.requires_grad_(train), k, v, plan, engine=engine, **options).detach()
    assert out.requires_grad is False
    for ours, theirs in ((out[1], clean[1]), (out[0, 0], clean[0, 0]), (out[0, 1][~visible], clean[0, 1][~visible])):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    if fault != fault or of == "value":
        assert not out[0, 1][visible].isfinite().any()
    return visible


@pytest.fixture(params=["long", "short"])
def tiles(request, monkeypatch):
    """Tiny blocks: sequences have every kind of tile, or materialised scores."""
    short_keys = 0 if request.param == "long" else 200
    for name, value in dict(
        QUERY_BLOCK=24,
        EDGE_BLOCK=8,
        MIN_FAR_KEYS=4,
        DECODE_ROWS=3,
        SKEW_ROWS=5,
        DIAGONAL_ROWS=6,
        SCORE_ROWS=11,
        SHORT_ROWS=10,
        MANY_BATCH_ROWS=1,
        SHORT_KEYS=short_keys,
    ).items():
        monkeypatch.setattr(block_sizes, name, value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", [NAN, INF, -INF])
@pytest.mark.parametrize("of", ["key", "value"])
def test_outside_the_limits(name, fault, of, tiles):
    for q_length, options in ((29, {"causal": True}), (33, {"window": (6, 2)})):
        positions = Positions((33 - q_length, q_length), 33)
        for train in (False, True):
            visible = compare(make(name, positions), "cpu", train, of, fault, 30 - 3 * train, **options)
            assert visible.any() and not visible.all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of", ["key", "value"])
def test_padding(name, of, tiles):
    real = torch.ones(B, 33, dtype=torch.bool)
    real[0, 12] = False
    for options in ({}, {"causal": True}):
        for train in (False, True):
            compare(make(name, Positions(33)), "cpu", train, of, NAN, 12, key_mask=real, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of", ["key", "value"])
@pytest.mark.parametrize("rows", [1, 5])
def test_decoding(name, of, rows):
    real = torch.ones(B, 33, dtype=torch.bool)
    real[0, 12] = False
    positions = Positions((33 - rows, rows), 33)
    compare(make(name, positions), "cpu", False, of, NAN, 12, key_mask=real, causal=True)
    compare(make(name, positions), "cpu", False, of, NAN, 31, causal=True)


@pytest.mark.parametrize("engine", ["reference", "blocked"])
@pytest.mark.parametrize("fault", [NAN, INF, -INF])
def test_the_formula_itself(engine, fault):
    plan = Plan(Positions(torch.randperm(9)), lookups=(Lookup(clip(4, 3), bias=draw(H, 8)),))
    for of in ("key", "value"):
        compare(plan, engine, False, of, fault, 5, causal=True)


def test_pytorchs_own_attention_masks_future_keys():
    """Plans without terms are PyTorch's call as it is; a NaN in a future value reaches rows of its kernel's block there."""
    compare(Plan(Positions(33)), "auto", False, "key", NAN, 30, causal=True)


@pytest.mark.parametrize("content", [None, "dot_query", "dot_key"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [20, 300])
def test_a_table_may_hide_all_keys_of_a_query(content, trained, causal, length):
    """Zeros and zero gradients, as behind a mask; in short texts and in tiles."""
    table = torch.randn(H, 7, dtype=torch.float64)
    table[0, : 4 if causal else 7] = -INF
    leaves = [torch.randn(B, H, length, D, dtype=torch.float64).requires_grad_() for _ in range(3)]
    terms = {"bias": table.requires_grad_(trained)}
    if content is not None:
        terms[content] = draw(H, 7, D).requires_grad_()
    plan = Plan(Positions(length), lookups=(Lookup(clip(3, 3), **terms),))
    leaves += [x for x in terms.values() if x.requires_grad]
    found = []
    for engine in ("cpu", "reference"):
        out = attend(*leaves[:3], plan, causal=causal, engine=engine)
        found.append([out, *torch.autograd.grad(out.cos().sum(), leaves)])
    assert not found[0][0][:, 0].any()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
