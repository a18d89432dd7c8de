"""Every family on a GPU against the original there: float32 to the CPU's tolerances, bfloat16 to an error budget.

`make test-gpu`, or `python -m tests.hf.test_gpu [-j 8] [families]`: the same without pytest, in 8 processes.
"""

import argparse
import copy
import multiprocessing
import sys
import time
import traceback
from contextlib import contextmanager
from math import nan

import pytest
import torch

from posenc import hf
from posenc.engines.choose import ENGINES
from posenc.hf import rules
from tests.hf.cases import EVERY, once
from tests.hf.compare import gradients_agree, outputs_agree, run
from tests.hf.harness import check_cache, outcome
from tests.hf.table import longer

pytestmark = pytest.mark.gpu
IN_WINDOWS = ("longt5", "inkling", "gemma2")
"""Models with layers in which a padded token sees neighbours only: far from real ones it sees no key. (Gemma 2's dense scores give it
zeros on a GPU, its original a mean: exactly the tokens without a real one within the window differ.)"""
CAUSAL = ("falcon", "pix2struct")
"""Models in which padding on the left sees no key. All its scores are the lowest number of the dtype, and what a kernel makes of them
(a mean over other keys, zeros, neither) is not defined: Llama's own "eager" and "sdpa" differ there by as much as its outputs, and
nowhere else. No real token reads it, so it alone is not compared; padding on the right, which sees real keys, is."""
DENSE = dict(rules.DENSE_ON_GPU)


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
    return {
        n: x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x
        for n, x in inputs.items()
    }


def error(low, truth):
    return ((low.float() - truth).square().mean().sqrt() / truth.std()).item()


def check(name, device="cuda"):
    """One family, convolutions in float32; returns (float32 difference, bfloat16 error, the original's); NaN where the original takes no bfloat16."""
    torch.backends.cudnn.allow_tf32 = False
    rules.ON_GPU = rules.DENSE_ON_GPU = {}  # posenc's kernels, whatever is faster
    model, (inputs, mask) = once(EVERY[name])
    model, inputs = model.to(device).eval(), moved(inputs, device)
    low, low_inputs = copy.deepcopy(model).to(torch.bfloat16), moved(inputs, device, torch.bfloat16)
    everywhere, _ = run(model, inputs, None, backward=False)
    mask = mask.to(device) if mask is not None and mask.shape == everywhere.shape[:2] else None
    truth, gradients = run(model, inputs, mask)
    hf.accelerate(model)  # the first of a family compares a tiny model on the CPU
    with record_engines() as names:
        ours, our_gradients = run(model, inputs, mask)
    assert device == "cpu" or names <= {"triton", "sdpa"}, names
    outputs_agree(ours, truth)
    gradients_agree(our_gradients, gradients)
    for _ in range(
        3
    ):  # recorded calls take no short ways; these do: first of its kind, recorded launches, replayed ones
        ours, our_gradients = run(model, inputs, mask)
        outputs_agree(ours, truth)
        gradients_agree(our_gradients, gradients)
    if not name.startswith(IN_WINDOWS):  # what the original computes at padding, too
        found, wanted = run(model, inputs, None, backward=False)[0], everywhere
        if name.startswith(CAUSAL) and mask is not None:
            sees = mask.cumsum(1) > 0
            found, wanted = found[sees], wanted[sees]
        outputs_agree(found, wanted)
    difference = (ours - truth).abs().max().item()
    if name.startswith(tuple(DENSE)):
        rules.DENSE_ON_GPU = DENSE
        dense, dense_gradients = run(model, inputs, mask)
        outputs_agree(dense, truth)
        gradients_agree(dense_gradients, gradients)
    if device == "cuda":
        check_longer(name, device)
        if EVERY[name].generates is not None:
            check_cache(EVERY[name], device)
    try:
        theirs, _ = run(low, low_inputs, mask)
    except RuntimeError as problem:
        if not any(word in str(problem) for word in ("same dtype", "scalar type")):
            raise
        return difference, nan, nan
    with record_engines() as names:
        reduced, reduced_gradients = run(hf.accelerate(low), low_inputs, mask)
    assert device == "cpu" or names <= {"triton", "sdpa"}, names
    assert all(torch.isfinite(g).all() for g in reduced_gradients.values())
    found, allowed = error(reduced, truth), 2.0 * error(theirs, truth)
    assert found <= allowed, f"bfloat16 error {found:.2e}, twice the original's is {allowed:.2e}"
    return difference, found, allowed / 2.0


def check_longer(name, device):
    """Eight times as many tokens, where the positions of the model allow that: found on a CPU, where an index out of range is
    an error that one survives."""
    model, (inputs, _) = once(EVERY[name])
    inputs = longer(inputs)
    try:
        run(model, inputs, None, backward=False)
    except (IndexError, ValueError, RuntimeError):
        return
    model, inputs = (
        once(EVERY[name])[0].to(device),
        moved(inputs, device),
    )  # anew: some keep tensors of their first device
    theirs, their_gradients = outcome(model, inputs)
    ours, our_gradients = outcome(hf.accelerate(model), inputs)
    outputs_agree(ours, theirs, terms=512)
    gradients_agree(our_gradients, their_gradients, terms=512)


@pytest.mark.parametrize("name", EVERY)
def test_same_numbers(name):
    check(name)


def attempt(name):
    """(name, what happened, whether it failed), for a process of its own."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        found = check(name, "cuda" if torch.cuda.is_available() else "cpu")
        text, failed = "float32 differs by {:.1e}; bfloat16 error {:.1e}, the original's {:.1e}".format(*found), False
    except ModuleNotFoundError as problem:
        text, failed = f"not in this release: {problem}", not str(problem.name).startswith("transformers.models")
    except Exception as problem:
        lines = [one.lineno for one in traceback.extract_tb(problem.__traceback__) if one.filename == __file__]
        text, failed = f"FAILED {type(problem).__name__} at {lines}: {str(problem)[:600]}", True
    return f"{name:<26} {time.perf_counter() - start:5.1f} s  {text}", failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("-j", type=int, default=1)
    given = parser.parse_args()
    names = given.families or list(EVERY)
    failures = 0
    with multiprocessing.get_context("spawn").Pool(given.j) as pool:
        for line, failed in pool.imap_unordered(attempt, names):
            failures += failed
            print(line, flush=True)
    print(f"{len(names)} cases, {failures} failed")
    sys.exit(failures > 0)
