"""The reference engine against plain loops, slot by slot, and its gradients by finite differences."""

import itertools

import pytest
import torch

import posenc
from posenc import Plan, Positions
from tests import budget, naive
from tests.plans import SLOTS, grid_plan, plan_of, tensors


def check(q, k, v, plan, allowed=None, added=None, **masks):
    expected = naive.attend(q, k, v, plan, allowed, added)
    torch.testing.assert_close(posenc.attend(q, k, v, plan, engine="reference", **masks), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slot", SLOTS)
def test_each_slot_is_the_formula(slot):
    q, k, v = tensors()
    check(q, k, v, plan_of((slot,), q, k, v))


@pytest.mark.parametrize("pair", list(itertools.combinations(SLOTS, 2))[::4])
def test_slots_add_up(pair):
    q, k, v = tensors(lq=3, lk=4)
    check(q, k, v, plan_of(pair, q, k, v))


def test_everything_at_once_with_shared_tables_and_explicit_positions():
    q, k, v = tensors(v_size=6)
    k_positions = torch.randint(0, 50, (2, 7))
    positions = Positions(k_positions[:, 2:], k_positions)
    check(q, k, v, plan_of(tuple(s for s in SLOTS if s != "exact"), q, k, v, positions, per_head=False))


def test_grid():
    q, k, v = tensors(heads=2, lq=6, lk=6)
    check(q, k, v, grid_plan())


def test_masks():
    q, k, v = tensors()
    plan = plan_of(("bias", "add_value"), q, k, v)
    slot = torch.arange(7)[None, :] - (torch.arange(5)[:, None] + 2)
    key_mask = torch.rand(2, 7) > 0.4
    documents = torch.randint(0, 2, (2, 7))
    extra = torch.rand(2, 4, 5, 7) > 0.3
    added = torch.randn(1, 4, 5, 7, dtype=torch.float64)
    full = torch.ones(2, 4, 5, 7, dtype=torch.bool)
    check(q, k, v, plan, full & (slot <= 0), causal=True)
    check(q, k, v, plan, full & (slot <= 1) & (slot >= -2), window=(2, 1))
    check(q, k, v, plan, full & (slot <= 0) & (slot >= -2), window=2, causal=True)
    check(q, k, v, plan, full & key_mask[:, None, None], key_mask=key_mask)
    same = documents[:, 2:, None] == documents[:, None]
    check(q, k, v, plan, full & same[:, None], documents=(documents[:, 2:], documents))
    check(q, k, v, plan, extra, mask=extra)
    check(q, k, v, plan, None, added.expand(2, 4, 5, 7), mask=added)
    check(q, k, v, plan, full & (slot <= 0) & key_mask[:, None, None], causal=True, key_mask=key_mask)


@pytest.mark.parametrize("slots", [SLOTS[:5], SLOTS[5:]], ids=["lookups", "others"])
def test_gradients(slots):
    q, k, v = tensors(batch=2, heads=2, kv_heads=1, lq=2, lk=3, size=3)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    plan = plan_of(slots, q, k, v)
    inputs = [t for _, t in plan.tensors()]

    def run(q, k, v, *_):
        return posenc.attend(q, k, v, plan, causal=True, engine="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, *inputs))


def test_a_fully_masked_query_gives_zero_and_no_gradient():
    q, k, v = tensors()
    q.requires_grad_()
    key_mask = torch.zeros(2, 7, dtype=torch.bool)
    key_mask[1] = True
    out = posenc.attend(q, k, v, key_mask=key_mask, engine="reference")
    assert out[0].abs().max() == 0
    out.sum().backward()
    assert q.grad[0].abs().max() == 0
    assert torch.isfinite(q.grad).all()
    minus = torch.full((5, 7), float("-inf"), dtype=torch.float64)
    assert posenc.attend(q, k, v, mask=minus, engine="reference").abs().max() == 0


def test_low_precision_is_computed_in_float32():
    q, k, v = tensors(dtype=torch.bfloat16)
    plan = plan_of(("bias", "dot_query", "dot_key", "add_value", "slopes"), q, k, v)
    out = posenc.attend(q, k, v, plan, engine="reference")
    assert out.dtype == torch.bfloat16
    # the same inputs in float32: what is in float32 all through is rounded once more, at the end
    expected, allowed = budget.expect(q.float(), k.float(), v.float(), plan)
    once = budget.unit(torch.bfloat16) * (expected["out"].abs() + allowed["out"])
    budget.assert_within(out, expected["out"], allowed["out"] + once, "out")


@pytest.mark.parametrize("lq, lk", [(0, 3), (3, 0), (0, 0)])
def test_empty(lq, lk):
    q, k, v = tensors(lq=lq, lk=lk)
    out = posenc.attend(q, k, v, Plan(Positions(lq, lk)), engine="reference")
    assert out.shape == (2, 4, lq, 8)
    assert out.abs().sum() == 0


def test_dropout_acts_before_both_sums_and_keeps_the_mean():
    q, k, v = tensors(batch=64, lq=32, lk=32, dtype=torch.float32)
    plan = plan_of(("add_value",), q, k, v)
    kept = torch.stack([posenc.attend(q, k, v, plan, dropout=0.5, engine="reference") for _ in range(20)]).mean(0)
    plain = posenc.attend(q, k, v, plan, engine="reference")
    assert (kept - plain).abs().mean() < 0.1
    assert not torch.equal(kept, plain)


@pytest.mark.parametrize("engine", ["blocked", "reference"])
def test_a_pair_function_may_read_every_axis(engine, monkeypatch):
    """Rows and columns of an image: the Euclidean distance, which no table of a grid's axes holds."""
    from posenc.engines import blocked

    monkeypatch.setattr(blocked, "SCORES", 1)
    monkeypatch.setattr(blocked, "FEWEST", 2)
    q, k, v = tensors(lq=6, lk=6)
    at = torch.stack((torch.arange(6) // 3, torch.arange(6) % 3), -1)[None].expand(2, 6, 2)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def pair(p_q, p_k):
        assert p_q.shape[-1] == p_k.shape[-1] == 2
        distance = (p_q[..., :, None, :] - p_k[..., None, :, :]).double().norm(dim=-1)
        return weight[:, None, None] * distance[:, None]

    plan = Plan(Positions(at), pair=pair, pair_axes=True)
    expected = q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + pair(at, at)
    out = posenc.attend(q, k, v, plan, engine=engine)
    torch.testing.assert_close(out, expected.softmax(-1) @ v.repeat_interleave(2, 1))
    grad = torch.autograd.grad(out.sum(), weight)[0]
    assert grad.abs().min() > 0
    with pytest.raises(ValueError, match="pair must return"):
        posenc.attend(q, k, v, Plan(Positions(at), pair=lambda a, b: torch.zeros(4, 6), pair_axes=True), engine=engine)
