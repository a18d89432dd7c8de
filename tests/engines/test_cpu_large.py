"""The cpu engine where numbers are large: decays that grow with the length, scores that leave one key per query."""

import pytest
import torch

import posenc
from posenc.core.index import clip
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines.cpu import block_sizes
from posenc.engines.cpu.forward import TileRunner
from posenc.functional import attend
from tests import budget

B, H, D = 1, 2, 16
EPS = torch.finfo(torch.float32).eps


def gates(length, strength):
    """c: log-gates added up, in steps of 1/256, so that differences are exact also far from 0."""
    return -(torch.rand(B, H, length) * strength * 256).round().cumsum(-1) / 256


def small(monkeypatch):
    for name, value in dict(
        QUERY_BLOCK=24, EDGE_BLOCK=8, MIN_FAR_KEYS=4, DECODE_ROWS=3, SKEW_ROWS=5, SCORE_ROWS=11, SHORT_ROWS=10
    ).items():
        monkeypatch.setattr(block_sizes, name, value)


def results(q, k, v, plan, **options):
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors())]
    leaves = [x for x in leaves if x.requires_grad]
    out = attend(q, k, v, plan, engine="cpu", **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *(torch.autograd.grad((out * weight).sum(), leaves) if leaves else ())]


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 0)}, {}], ids=str)
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("rows", [1, 9, 61])
def test_only_the_difference_of_decays_counts(options, table, rows, monkeypatch):
    """The same bits however far from 0 the decays are: where a cache starts does not matter."""
    small(monkeypatch)
    c = gates(61, 3.0)
    q, k, v = (torch.randn(B, H, length, D) for length in (rows, 61, 61))
    lookups = (Lookup(clip(4, 4), bias=torch.randn(H, 9), dot_query=torch.randn(1, 9, D)),) if table else ()
    for train in (False, True):
        found = []
        for start in (0.0, -4096.0):
            decay = (c[..., -rows:] + start, c + start)
            plan = Plan(Positions((61 - rows, rows), 61), lookups=lookups, decay=decay)
            for x in (q, k, v, *decay) if train else ():
                x.requires_grad_()
            found.append(results(q, k, v, plan, **options))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("length", [40, 700])
def test_error_of_decay_is_that_of_its_difference(length, strength):
    """Budgets: every sum over the sizes of its terms, times the rounding of one."""
    c = gates(length, strength)
    given = [torch.randn(B, H, length, D) for _ in range(3)] + [c]
    weight = torch.linspace(-1, 1, B * H * length * D).view(B, H, length, D)
    ours = [x.clone().requires_grad_() for x in given]
    plan = Plan(Positions(length), decay=(c.clone(), ours[3]))
    out = attend(*ours[:3], plan, causal=True, engine="cpu")
    found = [out, *torch.autograd.grad((out * weight).sum(), ours)]

    q, k, v, c = true = [x.double().requires_grad_() for x in given]
    out = attend(q, k, v, Plan(Positions(length), decay=(c.detach(), c)), causal=True, engine="reference")
    truth = [out, *torch.autograd.grad((out * weight).sum(), true)]

    with torch.no_grad():
        far = c[..., :, None] - c[..., None, :]
        hidden = torch.ones(length, length).triu(1).bool()
        p = (q @ k.mT * D**-0.5 + far).masked_fill(hidden, float("-inf")).softmax(-1)
        q, k, v, g = q.abs(), k.abs(), v.abs(), weight.double().abs()
        size = q @ k.mT * D**-0.5 + far.abs()
        p = p * (1 + size + (p * size).sum(-1, keepdim=True))
        ds = g @ v.mT
        ds = p * (ds + (p * ds).sum(-1, keepdim=True))
        terms = [p @ v, ds @ k * D**-0.5, ds.mT @ q * D**-0.5, p.mT @ g, ds.sum(-2)]
    for number, (a, b, of) in enumerate(zip(found, truth, terms, strict=True)):
        assert (a - b).norm() <= EPS * of.norm(), (number, ((a - b).norm() / of.norm() / EPS).item())


@pytest.mark.parametrize("engine", ["reference", "blocked", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 24])
def test_decays_in_half_precision_are_subtracted_in_float32(engine, dtype, rows):
    """For one query too, which the cpu engine has another way for."""
    q, k, v = (torch.randn(B, H, length, D).to(dtype) for length in (rows, 24, 24))
    decay = tuple((100 * torch.rand(B, H, length)).to(dtype) for length in (rows, 24))
    plan = Plan(Positions((24 - rows, rows), 24), decay=decay)
    expected, allowed = budget.expect(q, k, v, plan, exp=budget.HALF_EXP)
    budget.assert_within(attend(q, k, v, plan, engine=engine), expected["out"], allowed["out"], "out")


def test_a_decay_that_rises_and_falls(monkeypatch):
    """No base lies between its rows and keys: far tiles are computed pair by pair."""
    small(monkeypatch)
    parts, real = [], TileRunner.split_decaying
    monkeypatch.setattr(TileRunner, "split_decaying", lambda self, tile: parts.append(real(self, tile)) or parts[-1])
    q, k, v = (torch.randn(B, H, 90, D, dtype=torch.float64) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    wave = 30 * torch.linspace(0, 40, 90, dtype=torch.float64).sin().expand(B, H, -1)
    plan = Plan(Positions(90), decay=(wave.clone().requires_grad_(), wave.flip(-1).clone().requires_grad_()))
    for options in ({}, {"causal": True}):
        ours = attend(q, k, v, plan, engine="cpu", **options)
        torch.testing.assert_close(ours, attend(q, k, v, plan, engine="reference", **options), atol=1e-9, rtol=1e-9)
    assert any(len(tiles) > 1 for tiles in parts)


ENCODINGS = {
    "t5": dict(heads=H),
    "shaw": dict(heads=H, head_dim=D),
    "transformer_xl": dict(heads=H, d_model=H * D),
    "deberta": dict(heads=H, d_model=H * D),
    "relative_logits": dict(heads=H, d_model=H * D),
}
CONTENT = [name for name in ENCODINGS if name != "t5"]


def encoding_plan(name, length):
    encoding = posenc.create(name, **ENCODINGS[name])
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    causal = name == "relative_logits"
    x = torch.randn(B, length, H * D)
    return encoding.plan(Positions(length), x=x) if name == "relative_logits" else encoding.plan(
        Positions(length)
    ), causal


@pytest.mark.parametrize(
    "name, size", [("t5", 1.0), ("t5", 1e3), *((n, s) for n in CONTENT for s in (1.0, 1e3, 1e5, 1e8))]
)
@pytest.mark.parametrize("length", [16, 70])
def test_probabilities_sum_to_one_in_the_backward_pass(name, size, length):
    """The columns of dv sum to the number of queries, where every query's gradient is 1, whatever the scores."""
    plan, causal = encoding_plan(name, length)
    q, k, v = ((torch.randn(B, H, length, D) * s).requires_grad_() for s in (size, size, 1.0))
    out = attend(q, k, v, plan, causal=causal, engine="cpu")
    gradients = torch.autograd.grad(out.sum(), [q, k, v, *(x for _, x in plan.tensors() if x.requires_grad)])
    assert all(x.isfinite().all() for x in (out, *gradients))
    # two sums of `length` numbers whose sizes add up to `length`; t5's weights are exp of scores less PyTorch's log-sums
    with torch.no_grad():
        logs = D * (q.norm(dim=-1).amax() * k.norm(dim=-1).amax() * D**-0.5).item() if name == "t5" else 0.0
    assert (gradients[2].sum(2) - length).abs().max() <= length * EPS * (length + logs)


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e8])
def test_one_key_per_query(name, size):
    """Orthogonal tokens: each attends to itself alone, so dv is the output's gradient, and the scores' are 0."""
    plan, causal = encoding_plan(name, D)
    tokens = torch.linalg.qr(torch.randn(B, H, D, D)).Q * size
    q, k, v = (x.clone().requires_grad_() for x in (tokens, tokens, torch.randn(B, H, D, D)))
    out = attend(q, k, v, plan, causal=causal, engine="cpu")
    weight = torch.randn(out.shape)
    dq, dk, dv = torch.autograd.grad((out * weight).sum(), (q, k, v))
    assert torch.equal(dv, weight)
    # dS is the difference of two dot products of D terms, times a key (a query, a table) and the scale
    terms = weight.norm(dim=-1) * out.norm(dim=-1)
    for gradient in (dq, dk):
        assert (gradient.norm(dim=-1) <= EPS * D * terms * (size + D) * D).all()


@pytest.mark.parametrize("far", [-1e2, -1e4, -1e9, float("-inf")])
@pytest.mark.parametrize("ends", ["left", "right", "both"])
@pytest.mark.parametrize("batch", [1, 2])
def test_far_biases_that_hide(far, ends, batch):
    """Far keys hidden by a bias, next to content: near scores keep their digits, forwards and backwards."""
    bias, table = torch.randn(H, 9), torch.randn(1, 9, D)
    bias[:, 0] = far if ends != "right" else 0.0
    bias[:, -1] = far if ends != "left" else 0.0
    given = [*(torch.randn(batch, H, 50, D) for _ in range(3)), bias, table]
    weight = torch.linspace(-1, 1, batch * H * 50 * D).view(batch, H, 50, D)
    found = []
    for engine, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        q, k, v, bias, table = leaves = [x.to(dtype).requires_grad_() for x in given]
        plan = Plan(Positions(50), lookups=(Lookup(clip(4, 4), bias=bias, dot_query=table, add_value=table),))
        out = attend(q, k, v, plan, window=(None, 30), engine=engine)
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    # scores are below 64: at most as many roundings of one, relative to what a weight is
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 64 * EPS * theirs.norm()
