"""Every family on a GPU against the original there: float32 to the CPU's tolerances, bfloat16 to an error budget.

`make test-gpu`, or `python -m tests.hf.test_gpu [families]`.
"""

import copy
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from posenc import hf
from posenc.engines.choose import ENGINES
from tests.hf.cases import CASES
from tests.hf.compare import gradients_agree, outputs_agree, run

pytestmark = pytest.mark.gpu


@contextmanager
def record_engines():
    """The names of the engines that `attend` calls."""
    names, before = set(), dict(ENGINES)

    class Recorded:
        def __init__(self, name):
            self.name, self.engine = name, before[name]

        def __getattr__(self, attribute):
            return getattr(self.engine, attribute)

        def run(self, q, k, v, lowered):
            names.add(self.name)
            return self.engine.run(q, k, v, lowered)

    ENGINES.update({name: Recorded(name) for name in before})
    try:
        yield names
    finally:
        ENGINES.update(before)


def moved(inputs, device, dtype=None):
    return {n: x.to(device, dtype if x.is_floating_point() else None) for n, x in inputs.items()}


def error(low, truth):
    return ((low.float() - truth).square().mean().sqrt() / truth.std()).item()


def check(name, device="cuda"):
    """One family; returns (float32 difference, bfloat16 error, the original's)."""
    model, (inputs, mask) = CASES[name]()
    model, inputs = model.to(device).eval(), moved(inputs, device)
    mask = None if mask is None else mask.to(device)
    low = copy.deepcopy(model).to(torch.bfloat16)
    low_inputs = moved(inputs, device, torch.bfloat16)
    truth, gradients = run(model, inputs, mask)
    everywhere, _ = run(model, inputs, None, backward=False)
    theirs, _ = run(low, low_inputs, mask)
    with record_engines() as names:
        ours, our_gradients = run(hf.accelerate(model), inputs, mask)
        reduced, reduced_gradients = run(hf.accelerate(low), low_inputs, mask)
    assert "triton" in names and names <= {"triton", "sdpa"}, names
    outputs_agree(ours, truth)
    gradients_agree(our_gradients, gradients)
    if not name.startswith(("longt5", "inkling")):  # what the original computes at padding, too
        outputs_agree(run(model, inputs, None, backward=False)[0], everywhere)
    assert all(torch.isfinite(g).all() for g in reduced_gradients.values())
    found, allowed = error(reduced, truth), 2.0 * error(theirs, truth)
    assert found <= allowed, f"bfloat16 error {found:.2e}, twice the original's is {allowed:.2e}"
    return (ours - truth).abs().max().item(), found, allowed / 2.0


@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name):
    check(name)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = 0
    for name in sys.argv[1:] or CASES:
        start = time.perf_counter()
        try:
            text = "float32 differs by {:.1e}; bfloat16 error {:.1e}, the original's {:.1e}".format(
                *check(name, device)
            )
        except Exception as problem:
            failed, text = failed + 1, f"FAILED {type(problem).__name__}: {str(problem)[:600]}"
        print(f"{name:<26} {time.perf_counter() - start:5.1f} s  {text}", flush=True)
    sys.exit(failed > 0)
