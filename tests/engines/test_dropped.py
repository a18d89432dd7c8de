"""Dropout on a CPU: what is dropped is the same in every engine, in blocks, with and without gradients, and when it is computed again."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import posenc
from posenc import Positions, attend, explain
from posenc.core.dropout import Dropout
from posenc.engines import rules_cpu
from posenc.engines.cpu import dropped
from tests.engines.test_plain_call import plans, tensors


def dropped_cases():
    """(name, plan, masks, key heads) over 12 tokens: each kind of term and of mask."""
    real = torch.arange(12) < torch.tensor([[12], [7]])
    documents = (torch.arange(12) // 5).expand(2, -1)
    wide = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    learned = posenc.create("deberta", d_model=32, heads=4)
    every: dict[str, dict] = {
        "all": {}, "causal": {"causal": True}, "window": {"window": (3, 1)}, "padding": {"key_mask": real},
        "hidden text": {"key_mask": real & torch.tensor([[True], [False]])}, "documents": {"documents": documents}, "mask": {"mask": wide},
        "all masks": {"causal": True, "key_mask": real, "documents": documents, "mask": wide > -1.0},
    }  # fmt: skip
    both = {**plans(), "deberta": learned.double().plan(Positions(12))}
    return [
        pytest.param(plan, masks, kv_heads, id=f"{name}, {kind}, {kv_heads}")
        for name, plan in both.items() for kind, masks in every.items() for kv_heads in (4, 2)
    ]  # fmt: skip


def in_double(plan):
    """Leaves of a plan's tables, and the plan with them."""
    lookups, leaves = [], []
    for lookup in plan.lookups:
        given = {name: x.detach().double().requires_grad_() for name, x in lookup.tensors()}
        leaves += given.values()
        lookups.append(replace(lookup, **given))
    slopes = None if plan.slopes is None else plan.slopes.double().requires_grad_()
    return replace(plan, lookups=tuple(lookups), slopes=slopes), leaves + ([] if slopes is None else [slopes])


@pytest.fixture(params=[(1 << 15, 1 << 17), (0, 1 << 17), (0, 60)], ids=["few", "whole", "blocks"])
def form(request, monkeypatch):
    monkeypatch.setattr(dropped, "FEW", request.param[0])
    monkeypatch.setattr(dropped, "BLOCK", request.param[1])
    return "few" if request.param[0] else "function"


@pytest.mark.parametrize("plan, masks, kv_heads", dropped_cases())
def test_dropout_is_that_of_the_reference(form, plan, masks, kv_heads):
    """One seed drops the same in every engine, by PyTorch's gradients, whole or in blocks; the output has the same bits without
    gradients."""
    plan, leaves = in_double(plan)
    q, k, v = (x.requires_grad_() for x in tensors(kv_heads=kv_heads, dtype=torch.float64))
    g = torch.randn(q.shape, dtype=torch.float64)
    found = []
    for engine in ("auto", "cpu", "blocked", "reference"):
        if engine == "cpu" and explain(q, k, v, plan, dropout=0.3, **masks).engine != "cpu":
            continue  # a table for keys that several heads share
        torch.manual_seed(3)
        out = attend(q, k, v, plan, dropout=0.3, engine=engine, **masks)
        found.append((out, *torch.autograd.grad(out, [q, k, v, *leaves], g)))
        with torch.no_grad():
            torch.manual_seed(3)
            assert torch.equal(out, attend(q, k, v, plan, dropout=0.3, engine=engine, **masks))
    for results in found[:-1]:
        for ours, exact in zip(results, found[-1], strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["none", "t5"])
@pytest.mark.parametrize(
    "masks", [{"window": (1, 0)}, {"window": (2, 3), "key_mask": torch.arange(12)[None] > 8}], ids=str
)
def test_keys_before_a_window_count_among_the_slots(name, masks):
    """The shortcut leaves them out."""
    q, k, v = tensors(queries=5, dtype=torch.float64)
    plan, masks = plans(queries=5)[name], {key: x.expand(2, -1) if key == "key_mask" else x for key, x in masks.items()}
    found = []
    for engine in ("auto", "cpu", "blocked", "reference"):
        torch.manual_seed(3)
        found.append(attend(q, k, v, plan, dropout=0.3, engine=engine, **masks))
    for out in found[:-1]:
        torch.testing.assert_close(out, found[-1], rtol=1e-6, atol=1e-6)


def test_gradients_with_dropout(form):
    q, k, v = (x.requires_grad_() for x in tensors(queries=5, keys=5, kv_heads=2, dtype=torch.float64))
    (plan, (table,)), mask = in_double(plans(queries=5, keys=5)["t5"]), torch.randn(1, 4, 5, 5, dtype=torch.float64)
    seeded = Dropout(0.4, torch.tensor([5]))

    def run(q, k, v, table, mask):
        lookup = replace(plan.lookups[0], bias=table)
        return attend(q, k, v, replace(plan, lookups=(lookup,)), dropout=seeded, mask=mask)

    assert torch.autograd.gradcheck(run, (q, k, v, table, mask.requires_grad_()))
    assert torch.autograd.gradcheck(run, (q, k, v, table, None))
    if form == "few":
        assert torch.autograd.gradgradcheck(run, (q, k, v, table, None))
        return
    out = run(q, k, v, table, None)
    (d_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        d_q.sum().backward()


def test_dropout_is_drawn_once_whatever_runs():
    """NaN in padding leads from the shortcut to the formula in blocks, which drops what the shortcut would have dropped; checkpointed
    layers drop in backward what they dropped before."""
    real = torch.arange(12) < torch.tensor([[12], [7]])
    q, k, v = (x.requires_grad_() for x in tensors())
    broken = v.detach().clone()
    broken[1, :, 9] = float("nan")
    results = []
    for values in (v, broken):
        torch.manual_seed(2)
        results.append(attend(q, k, values, plans()["t5"], dropout=0.5, key_mask=real))
    torch.testing.assert_close(*results)

    def run(q):
        return attend(q, k, v, plans()["t5"], dropout=0.5, key_mask=real)

    grads = []
    for call in (run, lambda q: checkpoint(run, q, use_reentrant=False)):
        torch.manual_seed(2)
        grads.append(torch.autograd.grad(call(q).square().sum(), q)[0])
    assert torch.equal(*grads)


def test_long_texts_with_dropout_keep_no_probabilities():
    for length, engine in ((1024, "cpu"), (2048, "blocked")):
        q = torch.empty(1, 8, length, 8)
        assert explain(q, q, q, plans(8, length, length)["t5"], dropout=0.1).engine == engine


def test_batches_of_short_texts_keep_their_probabilities():
    """They are fast; the memory of a long text stays small."""
    assert rules_cpu.keeps_dropped(16, 12, 512, 512)
    assert not rules_cpu.keeps_dropped(1, 12, 2048, 2048)
    assert not rules_cpu.keeps_dropped(64, 12, 512, 512)
