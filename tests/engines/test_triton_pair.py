"""Functions of both positions on the triton engine, interpreted: dense biases of blocks, and their gradient's own kernel."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

import posenc
from posenc import Plan, Positions
from posenc.engines import triton

B, H, SIZE = 2, 2, 8
CASES = {
    "causal": lambda lq, lk: dict(causal=True),
    "window": lambda lq, lk: dict(window=(6, 2)),
    "padding": lambda lq, lk: dict(causal=True, key_mask=torch.arange(lk) < torch.tensor([[lk], [lk - 9]])),
    "fully masked": lambda lq, lk: dict(key_mask=torch.arange(lk) < torch.tensor([[0], [lk]])),
    "documents": lambda lq, lk: dict(documents=torch.arange(lk)[None] // 11),
    "bool mask": lambda lq, lk: dict(mask=torch.arange(lk) % 3 > 0),
}


def waves(weight, rows, shares_heads):
    """A function with a learned weight [H]; rows: another bias for each row of the batch."""

    def pair(p_q, p_k):
        r = (p_k[None, :] - p_q[:, None]).to(weight.dtype)
        bias = weight[:, None, None] * (r / 3).sin() * (p_q[:, None] + 1.0).log()
        bias = bias.sum(0, keepdim=True) if shares_heads else bias
        return torch.stack([bias * (b + 1) for b in range(B)]) if rows else bias

    return pair


def compare(dtype, block, lengths=(24, 24), rows=False, shares_heads=False, mask=None, **options):
    """Output, log-sum-exp and every gradient, the additive mask's included, against the reference in float64."""
    from posenc.engines.triton import pair as blocks

    generator = torch.Generator().manual_seed(0)
    q_length, k_length = lengths
    shapes = [(B, H, q_length, SIZE), (B, 1, k_length, SIZE), (B, 1, k_length, SIZE + 4), (H,)]
    shapes += [] if mask is None else [(1, H, q_length, k_length)]
    leaves = [torch.randn(shape, generator=generator) for shape in shapes]
    g = [torch.randn(B, H, q_length, SIZE + 4, generator=generator), torch.randn(B, H, q_length, generator=generator)]
    found = []
    blocks.ROWS, blocks.KEPT, blocks.SMALL = block, 1, 1
    for engine, kind in (("triton", dtype), ("reference", torch.float64)):
        own = [x.to(dtype).to(kind) for x in leaves[:3]] + [
            x.to(max(kind, torch.float32, key=lambda t: t.itemsize)) for x in leaves[3:]
        ]
        own = [x.requires_grad_() for x in own]  # what the function reads is not rounded: it computes in its own dtype
        plan = Plan(
            Positions((k_length - q_length, q_length), k_length), pair=waves(own[3], rows, shares_heads), scale=0.3
        )
        more = {} if mask is None else {"mask": own[4]}
        out, lse = posenc.attend(*own[:3], plan, engine=engine, return_lse=True, **options, **more)
        lse = lse.masked_fill(lse.isinf(), 0.0)
        grads = torch.autograd.grad((out, lse), own, [x.to(y.dtype) for x, y in zip(g, (out, lse))])
        found.append([out, lse, *grads])
    bound = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).abs().max() <= bound * exact.abs().max().clamp(min=1.0)


def some_cases():
    compare(torch.float32, 10, lengths=(12, 20), mask="learned", **CASES["padding"](12, 20))
    compare(torch.bfloat16, 64, lengths=(16, 16), shares_heads=True, **CASES["fully masked"](16, 16))
    for _ in range(4):  # the second forward pass is recorded, the others replay it
        compare(torch.float32, 64, lengths=(10, 11), causal=True)


def other_cases():
    for make in CASES.values():
        compare(torch.float32, 10, **make(24, 24))
    compare(torch.float32, 10, mask="learned")
    for rows, shares_heads in product((True, False), repeat=2):
        compare(torch.bfloat16, 64, rows=rows, shares_heads=shares_heads, causal=True)
    compare(torch.float32, 10, lengths=(5, 30), causal=True)
    compare(torch.float32, 10, lengths=(1, 30), causal=True)


def constant_has_no_gradient():
    """A number that all keys get cancels in the softmax. In half precision its gradient was a sum of the output's rounding errors."""
    q, k, v = torch.randn(3, 1, 1, 40, 16).bfloat16().unbind()
    number = torch.zeros((), requires_grad=True)
    plan = Plan(Positions(40), pair=lambda p_q, p_k: number.expand(1, 1, len(p_q), len(p_k)))
    out = posenc.attend(q, k, v, plan, causal=True, engine="triton")
    (grad,) = torch.autograd.grad(out, [number], torch.randn(40, 16).bfloat16().expand_as(out))
    assert abs(grad) < 1e-4


def fire_at_its_threshold():
    """Past it FIRE is a function of both positions."""
    torch.manual_seed(0)
    encoding = posenc.Fire(heads=2, threshold=20.0)
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()
    plan = encoding.plan(Positions(30))
    assert posenc.explain(q, k, v, plan, causal=True).engine == "triton"
    leaves = list(encoding.parameters())
    results = []
    for engine in ("triton", "reference"):
        out = posenc.attend(q, k, v, encoding.plan(Positions(30)), causal=True, engine=engine)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def tables_over_a_grid():
    """A table in float32 for queries in half precision: one dense bias where it is trained."""
    from posenc.engines import dense_bias

    dense_bias.LEAST = 1
    for name, causal, class_token in (
        ("grid_bias", True, False),
        ("grid_bias", False, True),
        ("continuous_bias", False, False),
    ):
        torch.manual_seed(0)
        more = {"class_token": True} if class_token else {}
        encoding = posenc.create(name, heads=2, head_dim=16, window=(3, 5), **more)
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        length = 15 + class_token
        inputs = [torch.randn(3, 2, length, 16).bfloat16() for _ in range(3)]
        g, results = torch.randn(3, 2, length, 16), []
        for engine, kind in (("triton", torch.bfloat16), ("reference", torch.float64)):
            own = [x.to(kind).requires_grad_() for x in inputs]
            out = posenc.attend(*own, encoding.plan(Positions(length)), causal=causal, engine=engine)
            results.append([out, *torch.autograd.grad(out, [*own, *encoding.parameters()], g.to(kind))])
        for ours, exact in zip(*results, strict=True):
            assert (ours.double() - exact).norm() <= 1e-2 * exact.norm()


def gates_that_accumulate():
    """FoX's gates sum the decays' gradients over all later tokens. Rounding of delta, which is the same for all keys of a query, must
    cancel between the sums over keys and over queries; it left 1.7 times the gradient at 2048 tokens."""
    torch.manual_seed(0)
    length = 96
    encoding = posenc.FoX(d_model=16, heads=1)
    x, g = torch.randn(1, length, 16), torch.randn(1, 1, length, 16)
    inputs = [torch.randn(1, 1, length, 16).bfloat16() for _ in range(3)]
    results = []
    for engine, kind in (("triton", torch.bfloat16), ("reference", torch.float64)):
        own = [y.to(kind) for y in inputs]
        out = posenc.attend(*own, encoding.plan(Positions(length), x=x), causal=True, engine=engine)
        found = torch.autograd.grad(out, list(encoding.parameters()), g.bfloat16().to(kind))
        results.append(torch.cat([one.flatten() for one in found]))
    assert (results[0] - results[1]).norm() <= 6e-3 * results[1].norm()


def compiled():
    encoding = posenc.Fire(heads=2, threshold=20.0)
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()

    def step(q):
        return posenc.attend(q, k, v, encoding.plan(Positions(30)), causal=True)

    leaves = list(encoding.parameters())
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out = function(q.requires_grad_())
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, *leaves])])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "cases",
    [
        "fire_at_its_threshold() tables_over_a_grid() gates_that_accumulate() constant_has_no_gradient() some_cases()",
        pytest.param("other_cases()", marks=pytest.mark.slow),
        pytest.param("compiled()", marks=pytest.mark.slow),  # fire_at_its_threshold() in one graph
    ],
)
def test_interpreted(cases):
    """In one process: each takes seconds to begin."""
    if not triton.INSTALLED:
        pytest.skip("needs Triton")
    command = (
        "from tests.engines import interpreter; from tests.engines.test_triton_pair import *; interpreter.mend()\n"
    )
    command += cases.replace(" ", "\n")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_reasons(monkeypatch):
    monkeypatch.setattr(triton, "INTERPRETED", True)
    monkeypatch.setattr(triton, "INSTALLED", True)
    q = torch.randn(1, 2, 8, 4)
    pair = lambda p_q, p_k: torch.zeros(8, 8)  # noqa: E731
    beside = Plan(Positions(8), pair=pair, slopes=torch.ones(2))
    with pytest.raises(posenc.UnsupportedPlan, match="beside other terms; put all of them into the function"):
        posenc.attend(q, q, q, beside, engine="triton")
    with pytest.raises(posenc.UnsupportedPlan, match="no dropout"):
        posenc.attend(q, q, q, Plan(Positions(8), pair=pair), engine="triton", dropout=0.5)
