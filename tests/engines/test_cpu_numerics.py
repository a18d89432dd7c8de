"""The cpu engine's rounding, memory and behaviour under torch.compile."""

import shutil
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from posenc.core.index import clip, exact, log_buckets
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines.cpu import block_sizes
from posenc.functional import attend
from tests import budget, seeds

B, H, D = 1, 2, 32
LENGTHS = [1, 7, 63, 129, 600, pytest.param(1000, marks=pytest.mark.slow)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BUCKETS = log_buckets(32, 128, causal=False)
PLANS = ["bias", "slopes", "keys and values", "both sides", "exact"]


def make(name, positions, dtype=torch.float32):
    """A plan of leaves, the same ones for the same name, shape and dtype."""
    generator = seeds.generator(1)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype).requires_grad_()

    if name == "bias":
        return Plan(positions, lookups=(Lookup(BUCKETS, bias=draw(H, 32)),))
    if name == "slopes":
        return Plan(positions, slopes=draw(H).detach().abs().requires_grad_())
    if name == "keys and values":
        return Plan(positions, lookups=(Lookup(clip(16, 16), dot_query=draw(1, 33, D), add_value=draw(1, 33, D)),))
    if name == "both sides":
        return Plan(positions, lookups=(Lookup(clip(20, 20), dot_query=draw(H, 41, D), dot_key=draw(H, 41, D)),))
    span = exact(positions)
    return Plan(positions, lookups=(Lookup(span, dot_query=draw(H, span.n, D), bias=draw(H, span.n)),))


def tensors(batch, length, dtype=torch.float32):
    return tuple(torch.randn(batch, H, length, D).to(dtype).requires_grad_() for _ in range(3))


def results(attention, q, k, v, plan, g):
    """The output and every gradient, by the names that budgets have."""
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    out = attention(q, k, v, plan)
    return {"out": out.detach(), **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", PLANS)
def test_every_number_is_within_its_budget(name, length, dtype, monkeypatch):
    """Whether all sequences count as short, or none does."""
    for constant, value in dict(MANY_BATCH_ROWS=1, LIGHT_PRODUCTS=1 << 30).items():
        monkeypatch.setattr(block_sizes, constant, value)
    q, k, v = tensors(B, length, dtype)
    plan, g = make(name, Positions(length), dtype), torch.randn(B, H, length, D).to(dtype)
    expected, allowed = budget.expect(q, k, v, plan, g)
    for short_keys in (block_sizes.SHORT_KEYS, 0) if length > block_sizes.SHORT_KEYS else (block_sizes.SHORT_KEYS,):
        monkeypatch.setattr(block_sizes, "SHORT_KEYS", short_keys)
        for number, ours in results(partial(attend, engine="cpu"), q, k, v, plan, g).items():
            budget.assert_within(ours, expected[number], allowed[number], number)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [7, 129, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLANS)
def test_the_log_sum_exp_is_within_its_budget(name, length, dtype):
    """And the gradients of output and log-sum-exp together, with grouped queries, padding and fully masked rows."""
    q, _, _ = tensors(2, length, dtype)
    k, v = (torch.randn(2, 1, length, D).to(dtype).requires_grad_() for _ in range(2))
    plan = make(name, Positions(length), dtype)
    g, g_lse = torch.randn(2, H, length, D).to(dtype), torch.randn(2, H, length)
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, : length // 3] = False
    real[1, length // 2 :: 3] = False
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    out, lse = attend(q, k, v, plan, causal=True, key_mask=real, engine="cpu", return_lse=True)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (g, g_lse))
    exp = 0.0 if dtype == torch.float32 else budget.HALF_EXP
    expected, allowed = budget.expect(q, k, v, plan, g, g_lse, causal=True, key_mask=real, exp=exp)
    assert lse.isneginf()[0, :, : length // 3].all() and lse.isneginf().sum() == H * (length // 3)
    for number, ours in {"out": out, "lse": lse, **dict(zip(leaves, grads))}.items():
        budget.assert_within(ours, expected[number], allowed[number], number)


@pytest.fixture(params=[0, 200], ids="short {}".format)
def poisoned(request, monkeypatch):
    """Fresh memory holds NaN, and an operation that could give another result next time raises."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    for name, value in dict(
        QUERY_BLOCK=64,
        EDGE_BLOCK=16,
        MIN_FAR_KEYS=8,
        DECODE_ROWS=3,
        SKEW_ROWS=24,
        DIAGONAL_ROWS=28,
        SCORE_ROWS=30,
        SHORT_ROWS=25,
        MANY_BATCH_ROWS=1,
        SHORT_KEYS=request.param,
    ).items():
        monkeypatch.setattr(block_sizes, name, value)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("causal", [False, True])
def test_poisoned_memory_and_the_same_bits_twice(name, causal, poisoned):
    length = 129
    q, k, v = tensors(2, length)
    plan, g = make(name, Positions(length)), torch.randn(2, H, length, D)
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, 100:] = False
    attention = partial(attend, causal=causal, key_mask=real, engine="cpu")
    first, second = (results(attention, q, k, v, plan, g) for _ in range(2))
    for number, ours in first.items():
        assert ours.isfinite().all()
        assert torch.equal(ours, second[number])


def test_positions_past_a_million():
    positions, near = Positions((10**6, 60), (10**6 - 20, 80)), Positions((20, 60), 80)
    q, k, v = torch.randn(B, H, 60, D), torch.randn(B, H, 80, D), torch.randn(B, H, 80, D)
    for name in PLANS:
        outs = [attend(q, k, v, make(name, one), causal=True, engine="cpu") for one in (positions, near)]
        assert torch.equal(*outs)


@pytest.mark.parametrize(
    "name, backend",
    [
        ("bias", "aot_eager"),
        ("keys and values", "aot_eager"),
        ("exact", "aot_eager"),
        pytest.param("bias", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiles_without_a_graph_break(name, backend):
    if backend == "inductor" and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler on a CPU")
    q, k, v = tensors(B, 40)
    plan, g = make(name, Positions(40)), torch.randn(B, H, 40, D)

    def attention(q, k, v, plan):
        return attend(q, k, v, plan, causal=True, engine="cpu")

    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    expected, allowed = budget.expect(q, k, v, plan, g, causal=True)
    for number, ours in results(compiled, q, k, v, plan, g).items():
        budget.assert_within(ours, expected[number], allowed[number], number)


def test_the_operator_keeps_pytorchs_rules():
    from posenc.engines.cpu import ops

    q, k, v = (torch.randn(B, H, 9, D, requires_grad=True) for _ in range(3))
    bias = torch.randn(H, 3, requires_grad=True)
    for right, split in ((0, False), (ops.NO_LIMIT, True)):
        band = [9, 9, 0, -1, 1, ops.NO_LIMIT, right]
        torch.library.opcheck(ops._forward, ([q, k, v, bias], [0, 1, 2, 3], band, 0.2, split))


def test_extra_memory_is_a_fraction_of_a_dense_bias():
    """Counted by PyTorch's own allocations, against the float32 [H, L, L] bias that the textbook makes."""
    from posenc.bench.measure import peak_bytes

    length = 2048
    q, k, v = (torch.randn(1, H, length, D) for _ in range(3))
    dense = H * length * length * 4
    plan = make("bias", Positions(length))
    with torch.no_grad():
        plain = peak_bytes(lambda: scaled_dot_product_attention(q, k, v))
        ours = peak_bytes(lambda: attend(q, k, v, plan, engine="cpu"))
    assert ours - plain <= 0.04 * dense
