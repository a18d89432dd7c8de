"""torch.func, forward-mode differentiation, second derivatives and torch.compile with sizes left open."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import posenc
from posenc.core.errors import UnsupportedPlan
from posenc.core.index import clip
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.functional import attend, explain

B, H, L, D = 2, 2, 5, 4
INDEX = clip(2, 1)


def tensors():
    return [torch.randn(shape, dtype=torch.float64) for shape in ((B, H, L, D),) * 3 + ((H, 4), (1, 4, D))]


def attention(bare, engine="auto"):
    def run(q, k, v, bias, table):
        lookups = () if bare else (Lookup(INDEX, bias=bias, dot_query=table, add_value=table),)
        return attend(q, k, v, Plan(Positions(L), lookups=lookups), causal=True, engine=engine)

    return run


@pytest.mark.parametrize("bare", [False, True])
def test_every_transform_agrees_with_autograd(bare):
    given = tensors()
    run, true = attention(bare), attention(bare, "reference")
    for wanted in range(3 if bare else 5):

        def loss(*given, run=run):
            return run(*given).square().sum()

        leaf = given[wanted].clone().requires_grad_()
        there = [*given[:wanted], leaf, *given[wanted + 1 :]]
        (expected,) = torch.autograd.grad(true(*there).square().sum(), leaf)
        torch.testing.assert_close(grad(loss, argnums=wanted)(*given), expected)

        step = torch.randn_like(given[wanted])
        slope = (expected * step).sum()

        def along(x, wanted=wanted, loss=loss):
            return loss(*given[:wanted], x, *given[wanted + 1 :])

        torch.testing.assert_close(jvp(along, (given[wanted],), (step,))[1], slope)
        with forward_ad.dual_level():
            dual = along(forward_ad.make_dual(given[wanted], step))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope)
    stacked = torch.stack([given[0], -given[0]])
    both = vmap(run, in_dims=(0, None, None, None, None))(stacked, *given[1:])
    torch.testing.assert_close(both, torch.stack([run(x, *given[1:]) for x in stacked]))
    each = vmap(grad(lambda *given: run(*given).square().sum()), in_dims=(0, None, None, None, None))
    torch.testing.assert_close(each(stacked, *given[1:])[0], grad(lambda *x: run(*x).square().sum())(*given))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's kernel, one row of a jacobian at a time
@pytest.mark.parametrize("bare", [False, True])
def test_jacobian_and_hessian(bare):
    q, *others = (x[:1] if n < 3 else x for n, x in enumerate(tensors()))

    def run(q):
        return attention(bare)(q, *others).square().sum((0, 1, 3))

    jacobian = torch.autograd.functional.jacobian(
        lambda q: attention(bare, "reference")(q, *others).square().sum((0, 1, 3)), q
    )
    torch.testing.assert_close(jacrev(run)(q), jacobian)
    second = hessian(lambda q: run(q).sum())(q)
    expected = torch.autograd.functional.hessian(
        lambda q: attention(bare, "reference")(q, *others).square().sum(), q
    )  # fmt: skip
    torch.testing.assert_close(second, expected)


def test_a_layer_with_functional_call():
    layer = posenc.Attention(8, 2, encoding="shaw", causal=True).double()
    x = torch.randn(B, L, 8, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x[None],)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for name, gradient in each.items():
        total = torch.autograd.grad(layer(x).square().sum(), parameters[name])[0]
        torch.testing.assert_close(gradient.sum(0), total, msg=lambda text, name=name: f"{name}: {text}")


def test_a_named_engine_refuses_torch_func():
    given = tensors()
    chosen = []

    def run(q):
        chosen.append(explain(q, *given[1:3], Plan(Positions(L), lookups=(Lookup(INDEX, bias=given[3]),))).engine)
        return attention(False, "cpu")(q, *given[1:]).sum()

    with pytest.raises(UnsupportedPlan, match="does not support torch.func .*; the reference engine does"):
        grad(run)(given[0])
    assert chosen == ["reference"]


def test_second_derivatives_say_which_engine_has_them():
    q, *others = tensors()
    q.requires_grad_()
    (first,) = torch.autograd.grad(attention(False)(q, *others).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only; for second ones use engine='reference'"):
        first.sum().backward()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "encoding, kv_heads", [pytest.param("none", 2, marks=pytest.mark.slow), ("none", 1), ("rope", 2), ("shaw", 2)]
)
def test_a_second_length_compiles(encoding, dynamic, kv_heads):
    options = {} if encoding == "none" else {"encoding": encoding}
    layer = posenc.Attention(16, 2, kv_heads=kv_heads, causal=True, **options)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (6, 9, 1):
        x = torch.randn(2, length, 16, requires_grad=True)
        results = []
        for run in (compiled, layer):
            out = run(x)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_compiled_gradient_of_torch_func():
    q, *others = tensors()

    def loss(q):
        return attention(False)(q, *others).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), grad(loss)(q))
