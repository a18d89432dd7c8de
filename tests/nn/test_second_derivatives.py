"""Gradients of gradients are those of the reference engine, or raise: they are never taken for zero in silence."""

import copy

import pytest
import torch

from tests.encodings.every import BOTH_SIDES, NAMES
from tests.encodings.every import layer as make_layer

LOSSES = {"squares": lambda y: y.square().sum(), "sum": lambda y: y.sum()}
"""With the second the gradient of the output is a constant."""


def second_derivatives(layer, x, loss, wanted):
    x = x.clone().requires_grad_()
    leaves = {"x": [x], "parameters": list(layer.parameters())}[wanted]
    grads = torch.autograd.grad(loss(layer(x)), leaves, create_graph=True, allow_unused=True)
    total = sum(grad.square().sum() for grad in grads if grad is not None)
    return torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.parametrize(("name", "causal"), [(name, True) for name in NAMES] + [(name, False) for name in BOTH_SIDES])
def test_right_or_refused(name, causal):
    torch.manual_seed(0)
    layer = make_layer(name, causal=causal).double()
    reference = copy.deepcopy(layer)
    reference.engine = "reference"
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    for loss in LOSSES.values():
        for wanted in ("x", "parameters"):
            try:
                found = second_derivatives(layer, x, loss, wanted)
            except (RuntimeError, NotImplementedError) as error:
                if "derivative" in str(error):  # of a kernel of PyTorch's, or of ours
                    continue
                raise
            exact = second_derivatives(reference, x, loss, wanted)
            for ours, theirs in zip(found, exact, strict=True):
                ours, theirs = (torch.zeros(()) if one is None else one for one in (ours, theirs))
                torch.testing.assert_close(ours.expand(theirs.shape), theirs.expand(ours.shape), rtol=1e-8, atol=1e-10)
