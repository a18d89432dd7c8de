"""The kernels of stick-breaking, of contextual counts and of PaTH, on Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from posenc.contextual import cope, launch, stick_breaking
from posenc.engines import triton


def interpreted(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_within_budgets_of_float64():
    only = "cope with few,documents,bfloat16|path with gates,both,bfloat16"
    assert "2 checked, 0 failed" in interpreted("-m", "tests.gpu.contextual", "--device", "cpu", "--only", only)


@pytest.mark.slow
def test_every_case_is_within_budgets_of_float64():
    assert ", 0 failed" in interpreted("-m", "tests.gpu.contextual", "--device", "cpu")


COMPILED = """
import torch
from tests.engines import interpreter
from posenc.contextual import cope, path, stick_breaking

interpreter.mend()
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
table, w, beta = torch.randn(6, 16), torch.nn.functional.normalize(torch.randn(1, 2, 20, 16), dim=-1), torch.rand(1, 2, 20)
for run in (lambda q, k, v: stick_breaking(q, k, v)[0], lambda q, k, v: cope(q, k, v, table), lambda q, k, v: path(q, k, v, w, beta)):
    eager, compiled = run(q, k, v), torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(eager, compiled)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (eager, compiled))):
        assert torch.equal(a, b)
"""


@pytest.mark.slow
def test_compiled_in_one_graph():
    interpreted("-c", COMPILED)


def test_calls_that_take_plain_operations(monkeypatch):
    monkeypatch.setattr(triton, "INTERPRETED", True)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    assert launch.supports(q, k, v)
    assert not launch.supports(q.double(), k.double(), v.double())
    assert not launch.supports(q, k.double(), v)
    assert not launch.supports(q[:, :, :0], k, v)
    wide = torch.randn(1, 2, 5, 80)
    assert (
        launch.supports_path(q, k, v)
        and launch.supports(wide, wide, wide)
        and not launch.supports_path(wide, wide, wide)
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert not launch.supports(q, k, v)  # their gradients are added by atomics
        with torch.no_grad():
            assert launch.supports(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)

    def loss(q):
        return stick_breaking(q, k, v)[0].sum() + cope(q, k, v, torch.ones(4, 8)).sum()

    assert torch.func.grad(loss)(q).shape == q.shape
