"""The kernels of core/projection.py under Triton's interpreter. Run by test_projection.py in a fresh process."""

import os
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import nn

from posenc.core import projection
from tests.engines import interpreter

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
"""Of a result's norm: the order of sums, or one rounding of inputs and results each."""


def results(function, table, linears, needs_rows, grads):
    """Outputs and all gradients."""
    outs = function(table if needs_rows else table.detach(), slice(2, -3))
    leaves = [*([table] if needs_rows else []), *(x for linear in linears for x in linear.parameters())]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def projected(linears, table, rows):
    return projection.project_heads(table, linears, 4, rows)


def called(linears, table, rows):
    return [linear(table[rows]).unflatten(1, (4, -1)).transpose(0, 1) for linear in linears]


def main() -> None:
    interpreter.mend()
    projection._find_weights = lambda table, linears: [x for linear in linears for x in (linear.weight, linear.bias)]
    torch.Tensor.is_cuda = property(lambda self: True)
    cases = (
        (70, 96, 128, (False, True), True, torch.bfloat16),
        (33, 64, 64, (True,), False, torch.float32),
        (255, 80, 48, (False, False), True, torch.float32),
    )
    for n, size, width, biases, needs_rows, dtype in cases:
        torch.manual_seed(n)
        table = nn.Parameter(torch.randn(n + 5, size, dtype=dtype))
        linears = [nn.Linear(size, width, bias=bias, dtype=dtype) for bias in biases]
        wide = [nn.Linear(size, width, bias=bias, dtype=torch.float64) for bias in biases]
        for one, other in zip(wide, linears, strict=True):
            one.load_state_dict({name: x.double() for name, x in other.state_dict().items()})
        grads = [torch.randn(4, n, width // 4, dtype=dtype) for _ in biases]
        ours = results(partial(projected, linears), table, linears, needs_rows, grads)
        exact = nn.Parameter(table.detach().double())
        truth = results(partial(called, wide), exact, wide, needs_rows, [g.double() for g in grads])
        for number, (one, other) in enumerate(zip(ours, truth, strict=True)):
            assert one.shape == other.shape and one.dtype == dtype
            error = ((one - other).norm() / other.norm()).item()
            assert error <= ALLOWED[dtype], f"{n} {size} {width}: result {number} is off by {error}"
        # a second derivative, and one of two results without a gradient
        (dw,) = torch.autograd.grad(
            projection.project_heads(table, linears, 4, slice(3, 8))[0].square().sum(),
            linears[0].weight,
            create_graph=True,
        )
        (second,) = torch.autograd.grad(dw.square().sum(), linears[0].weight)
        assert second.isfinite().all()
    print("passed")


main()
