"""The budgets of whole layers and models: correct computations are within them, wrong ones and lost digits are not."""

import pytest
import torch

import posenc
from tests import budget, rounding
from tests.fuzz import layers


def attention(x, weights, g, change=lambda p: p):
    """Softmax attention and its gradients by autograd; `change` is what is done to the probabilities."""
    leaves = [w.detach().clone().requires_grad_() for w in (x, *weights)]
    x, q, k, v, bias = leaves
    p = ((x @ q) @ (x @ k + bias).mT).softmax(-1)
    y = change(p) @ (x @ v)
    names = ("x", "q", "k", "v", "bias")
    return {"y": y, **dict(zip(names, torch.autograd.grad(y, leaves, g), strict=True))}


def draw(length=12, size=8):
    make = lambda *shape: torch.randn(*shape).double()  # noqa: E731
    # numbers of float32, so that nothing is rounded before
    x, *weights, bias = (n.float().double() for n in (make(length, size), *(make(size, size) * 0.4 for _ in range(3)), make(size)))  # fmt: skip
    return x, [*weights, bias], make(length, size).float().double()


@pytest.mark.parametrize("length", [1, 2, 40])
def test_float32_and_other_orders_are_within(length):
    x, weights, g = draw(length)
    exact, allowed = rounding.expect(lambda: attention(x, weights, g), torch.float32)
    ours = attention(x.float(), [w.float() for w in weights], g.float())
    turn = torch.randperm(length)
    other = attention(x[turn].float(), [w.float() for w in weights], g[turn].float())
    for name in exact:
        budget.assert_within(ours[name], exact[name], allowed[name], name)
        back = other[name][turn.argsort()] if name in ("x", "y") else other[name]
        budget.assert_within(back, exact[name], allowed[name], name)


WRONG = {
    "probabilities in bfloat16": lambda p: p.bfloat16().to(p.dtype),
    "one part in 10,000": lambda p: p * 1.0001,
    "a probability too many": lambda p: p + torch.eye(p.shape[0]).to(p) * 1e-4,
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_wrong_ones_are_found(change):
    x, weights, g = draw()
    exact, allowed = rounding.expect(lambda: attention(x, weights, g), torch.float32)
    wrong = attention(x.float(), [w.float() for w in weights], g.float(), change)
    assert budget.excess(wrong["y"], exact["y"], allowed["y"]) > 3


def test_a_gradient_that_cancels_has_the_budget_of_its_terms():
    """A bias of all keys moves every score of a query alike: its gradient is 0, and what is computed is rounding."""
    x, weights, g = draw(30)
    exact, allowed = rounding.expect(lambda: attention(x, weights, g), torch.float32)
    ours = attention(x.float(), [w.float() for w in weights], g.float())["bias"]
    assert exact["bias"].abs().max() < 1e-12 < ours.abs().max()
    budget.assert_within(ours, exact["bias"], allowed["bias"], "bias")
    assert allowed["bias"].max() < 1e-4 * exact["q"].abs().max()


def test_a_cache_that_keeps_no_gradient_is_found(monkeypatch):
    case = layers.Case(encoding="mrope", heads=2, head_dim=8, positions=True, steps=(("feed", 5), ("gradient", 2)))
    assert layers.check(case) == []
    append = posenc.nn.cache.LayerCache.append
    monkeypatch.setattr(
        posenc.nn.cache.LayerCache, "append",
        lambda self, k, v, **options: append(self, k.detach(), v.detach(), **options),
    )  # fmt: skip
    (first, *_) = layers.check(case)
    assert "gradient" in first
