"""A small network of many single numbers: in blocks and by kernels what its formula says."""

import pytest
import torch

from posenc import create
from posenc.core import scalar_network
from posenc.core.scalar_network import apply_network
from tests.core.interpreted import run_interpreted

CASES = [(8, 32, 5000), (3, 5, 700), (20, 48, 1031), (1, 64, 513)]
"""(heads, hidden, numbers): one block and several, full and not."""


def network(heads, hidden, shape, dtype=torch.float64):
    sizes = (shape, (hidden,), (hidden,), (heads, hidden), (heads,))
    return [torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(scalar_network, "LEAST", 1)
    monkeypatch.setattr(scalar_network, "BLOCK", 256)


def check_kernels(device):
    """Output and gradients of the kernels in float32, against the formula in float64."""
    from posenc.core import scalar_network_kernel as kernels

    for heads, hidden, count in CASES:
        given = network(heads, hidden, (count,), torch.float32)
        exact = [x.detach().double().requires_grad_() for x in given]
        grad = torch.randn(heads, count)
        out = scalar_network._by_formula(*exact)
        expected = out, *torch.autograd.grad(out, exact, grad.double())
        with torch.no_grad():
            own = [x.to(device) for x in given]
            assert kernels.supports(own[0], tuple(own[1:]))
            found = kernels.forward(*own), *kernels.gradients(own[0], grad.to(device), *own[1:])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert (ours.cpu() - theirs).norm() < 1e-6 * theirs.norm(), (heads, hidden, count)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on the device")
def test_the_kernels_by_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("from tests.core.test_scalar_network import check_kernels as c; c('cpu')")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_on_the_device():
    check_kernels("cuda")


@pytest.mark.parametrize("shape", [(700,), (3, 300), (2, 17, 19), (0,), ()], ids=str)
@pytest.mark.parametrize("heads", [1, 5])
def test_blocks_are_the_formula(heads, shape, few):
    given = network(heads, 12, shape)
    ours, theirs = apply_network(*given), scalar_network._by_formula(*given)
    assert ours.shape == (heads, *shape)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    grad = torch.randn(*shape, heads, dtype=torch.float64).movedim(-1, 0)
    for a, b in zip(torch.autograd.grad(ours, given, grad), torch.autograd.grad(theirs, given, grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_first_and_second_derivatives(few):
    given = network(2, 4, (3, 5))
    assert torch.autograd.gradcheck(apply_network, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(apply_network, given, fast_mode=True)


def test_what_the_gradient_is_of(few):
    """Only of what wants one; and nothing of the size of the hidden numbers is kept."""
    x, *weights = network(3, 8, (1000,))
    weights = [w.detach() for w in weights[:2]] + weights[2:]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = apply_network(x, *weights)
    assert sum(kept) < 2000
    for create_graph in (False, True):
        d_x, d_last = torch.autograd.grad(
            out.square().sum(), (x, weights[2]), create_graph=create_graph, retain_graph=True
        )
        assert d_x.shape == x.shape
        assert d_last.shape == (3, 8)


def test_autocast_does_not_round(few):
    given = network(3, 8, (300,), torch.float32)
    plain = apply_network(*given)
    with torch.autocast("cpu", torch.bfloat16):
        ours = apply_network(*given)
        grads = torch.autograd.grad(ours.sum(), given)
    assert torch.equal(ours, plain)
    for a, b in zip(grads, torch.autograd.grad(plain.sum(), given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("what", ["vmap", "jvp", "compile", "subclass"])
def test_transforms_get_the_formula(what, few):
    x, *weights = (t.detach() for t in network(3, 8, (2, 300)))
    expected = scalar_network._by_formula(x, *weights)
    if what == "vmap":
        ours = torch.vmap(lambda t: apply_network(t, *weights), out_dims=1)(x)
    elif what == "jvp":
        ours, tangent = torch.func.jvp(lambda t: apply_network(t, *weights), (x,), (torch.ones_like(x),))
        assert tangent.any()
    elif what == "compile":
        ours = torch.compile(apply_network, fullgraph=True, backend="aot_eager")(x, *weights)
    else:
        own = type("Own", (torch.Tensor,), {})
        ours = apply_network(x.as_subclass(own), *weights).as_subclass(torch.Tensor)
    torch.testing.assert_close(ours, expected)


def test_fire_reads_it(monkeypatch):
    """Past its threshold, for each block of queries."""
    counts = []
    monkeypatch.setattr(
        "posenc.encodings.fire.apply_network", lambda x, *w: counts.append(x.numel()) or apply_network(x, *w)
    )
    layer = create("fire", heads=2, threshold=4.0)
    bias = layer.pair(torch.arange(40), torch.arange(50))
    assert bias.shape == (1, 2, 40, 50)
    assert layer.pair(torch.arange(40).expand(3, -1), torch.arange(50)).shape == (3, 2, 40, 50)
    assert counts == [2000, 6000]
