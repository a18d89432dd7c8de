"""The cpu engine with a few queries, as in decoding: one fused call with a mask made for it."""

import pytest
import torch

from posenc.core.index import clip, deberta_buckets, log_buckets
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines.cpu import block_sizes, decode
from posenc.functional import attend
from tests import budget, seeds

H, D = 4, 8
BUCKETS = log_buckets(8, 20, causal=True)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def tensors(rows, keys, kv_heads=H, dtype=torch.float64, batch=2):
    return tuple(draw(batch, heads, n, D, dtype=dtype) for heads, n in ((H, rows), (kv_heads, keys), (kv_heads, keys)))


def plans(positions, dtype=torch.float64, size=1.0):
    def make(*shape):
        return (draw(*shape) * size).to(dtype)

    both = Lookup(deberta_buckets(8, 16), dot_query=make(H, 16, D), dot_key=make(H, 16, D))
    shared = Lookup(clip(6, 1), dot_key=make(1, 8, D), bias=make(1, 8))
    states = Lookup(clip(9, 1), dot_query=make(1, 11, 3), states=make(2, H, positions.q_length, 3))
    decay = (make(2, H, positions.q_length), make(2, H, positions.k_length))
    return {
        "limits alone": Plan(positions),
        "bias": Plan(positions, lookups=(Lookup(BUCKETS, bias=make(H, 8)),), scale=1.0),
        "two biases and slopes": Plan(
            positions,
            lookups=(Lookup(BUCKETS, bias=make(H, 8)), Lookup(clip(3, 2), bias=make(1, 6))),
            slopes=make(H).abs(),
        ),
        "both sides": Plan(positions, lookups=(both,), scale=0.2),
        "shared keys": Plan(positions, lookups=(shared,)),
        "states": Plan(positions, lookups=(states,), scale=0.7),
        "decay": Plan(positions, decay=decay, slopes=make(H).abs()),
    }


@pytest.fixture
def taken(monkeypatch):
    """How often the path was taken."""
    calls, real = [], decode.run
    monkeypatch.setattr(decode, "run", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 40), (3, 40), (9, 9)])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (4, 2)}, {"window": (5, None)}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
def test_equals_the_reference(rows, keys, options, padded, kv_heads, taken):
    key_mask = None
    if padded:
        key_mask = torch.ones(2, keys, dtype=torch.bool)
        key_mask[0, keys // 3 : keys // 2 + 1] = False
    given = plans(Positions((keys - rows, rows), keys))
    for name, plan in given.items():
        q, k, v = tensors(rows, keys, kv_heads)
        ours, theirs = (
            attend(q, k, v, plan, key_mask=key_mask, engine=engine, **options) for engine in ("cpu", "reference")
        )
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    if rows == 1:
        assert len(taken) == len(given)
    else:
        # limits, biases; the others as in training; as many queries as keys are a short text (dense.py)
        assert len(taken) == (0 if padded or rows == keys else 3)


def test_steps_past_powers_of_two_and_far_positions(taken):
    """The rows that are kept serve the next step, and never the wrong one."""
    table = draw(H, 8)
    q, k, v = tensors(1, 140)
    for start in (0, 1_000_000_007):
        for keys in (1, 2, 3, 31, 32, 33, 127, 128, 129, 64):
            plan = Plan(Positions((start + keys - 1, 1), (start, keys)), lookups=(Lookup(BUCKETS, bias=table),))
            ours, theirs = (
                attend(q, k[:, :, :keys], v[:, :, :keys], plan, causal=True, engine=engine)
                for engine in ("cpu", "reference")
            )
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    assert len(taken) == 20


@pytest.mark.parametrize("size", [1, 3, 16, 128])
@pytest.mark.parametrize("index", [clip(3, 2), clip(0, 0), BUCKETS, clip(40, 40), deberta_buckets(4, 8)], ids=str)
def test_blocks_are_copied_to_the_right_distances(size, index, monkeypatch, taken):
    """Far, near and far again, in parts of a block, in one, in several; the query before, among and after its keys."""
    monkeypatch.setattr(block_sizes, "COPY_BLOCK", size)
    lookups = (Lookup(index, bias=draw(H, index.n)), Lookup(index, dot_query=draw(1, index.n, D)))
    q, k, v = tensors(1, 37)
    for position in (-300, -16, -1, 0, 5, 17, 36, 40, 1_000_003):
        plan = Plan(Positions((position, 1), 37), lookups=lookups)
        ours, theirs = (attend(q, k, v, plan, engine=engine) for engine in ("cpu", "reference"))
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    assert len(taken) == 9


def test_several_queries_give_the_same_bits_as_in_training():
    positions = Positions((31, 9), 40)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, 25:] = False
    for name, plan in plans(positions).items():
        for key_mask in (None, real):
            q, k, v = tensors(9, 40)
            alone = attend(q, k, v, plan, causal=True, key_mask=key_mask, engine="cpu")
            trained = attend(q.requires_grad_(), k, v, plan, causal=True, key_mask=key_mask, engine="cpu")
            assert torch.equal(alone, trained), name


def test_longer_than_what_is_kept(monkeypatch):
    monkeypatch.setattr(block_sizes, "CACHED_DISTANCES", 16)
    plan = Plan(Positions((39, 1), 40), lookups=(Lookup(BUCKETS, bias=draw(H, 8)),), slopes=draw(H))
    ours, theirs = (attend(*tensors_of(plan), plan, causal=True, engine=engine) for engine in ("cpu", "reference"))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def tensors_of(plan):
    generator = seeds.generator(3)
    shapes = (
        (2, H, plan.positions.q_length, D),
        (2, H, plan.positions.k_length, D),
        (2, H, plan.positions.k_length, D),
    )
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def test_a_changed_table_counts(taken):
    """Nothing learned is kept between calls, also where a change leaves no trace."""
    table = draw(H, 8).requires_grad_()
    plan = Plan(Positions((39, 1), 40), lookups=(Lookup(BUCKETS, bias=table),))
    given = tensors_of(plan)
    with torch.no_grad():
        before = attend(*given, plan, causal=True, engine="cpu")
        table.data.mul_(-2.0)
        after = attend(*given, plan, causal=True, engine="cpu")
        torch.testing.assert_close(after, attend(*given, plan, causal=True, engine="reference"), atol=1e-9, rtol=1e-9)
    assert len(taken) == 2
    assert (before - after).abs().max() > 1e-3


def test_gradients_use_the_operator(taken):
    """One query, and every gradient as the reference has it."""
    positions = Positions((39, 1), 40)
    for name in ("bias", "two biases and slopes", "both sides", "states", "decay"):
        plan = plans(positions)[name]
        leaves = [*tensors(1, 40), *(tensor for _, tensor in plan.tensors())]
        for leaf in leaves:
            leaf.requires_grad_()
        found = [
            torch.autograd.grad(
                attend(*leaves[:3], plan, causal=True, engine=engine).square().sum(), leaves, allow_unused=True
            )
            for engine in ("cpu", "reference")
        ]
        for leaf, ours, theirs in zip(leaves, *found, strict=True):
            ours, theirs = (torch.zeros_like(leaf) if x is None else x for x in (ours, theirs))
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    assert not taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bias", "two biases and slopes", "both sides", "states"])
def test_every_number_is_within_its_budget(name, dtype, taken):
    positions = Positions((199, 1), 200)
    q, k, v = tensors(1, 200, dtype=dtype)
    plan = plans(positions, dtype, size=0.3)[name]
    expected, allowed = budget.expect(q, k, v, plan, causal=True)
    out = attend(q, k, v, plan, causal=True, engine="cpu")
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    assert len(taken) == 1


def test_positions_leave_the_cached_rows_usable_in_inference_mode_and_out():
    decode._distance_blocks.cache_clear()
    plan = Plan(Positions((39, 1), 40), lookups=(Lookup(BUCKETS, bias=draw(H, 8)),))
    given = tensors_of(plan)
    with torch.inference_mode():
        first = attend(*given, plan, causal=True, engine="cpu")
    leaf = given[0].requires_grad_()
    torch.testing.assert_close(attend(leaf, *given[1:], plan, causal=True, engine="cpu").detach(), first.clone())
