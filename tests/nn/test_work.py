"""The work of a repeated call, counted: PyTorch operations, tensors that they allocate, and calls of this package's functions.

Clocks differ from machine to machine; these numbers do not, and host time grows with them. A change that raises one on purpose
changes it here. `LAYERS`: one layer of 16 tokens forward, a training step of it, and one token after some.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import posenc
from posenc.bench import uses_layers

PACKAGE = str(Path(posenc.__file__).parent)
SLACK = 1.1
"""Releases of PyTorch differ by an operation here and there; a call that finds less kept makes a few calls more."""


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = self.allocations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        self.allocations += sum(
            isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given for x in tree_leaves(out)
        )
        return out


def count_calls(run) -> int:
    """Functions of this package, the bench's own left out."""
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and name.startswith(PACKAGE) and "/bench/" not in name

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def work(name: str, what: str) -> tuple[int, int, int]:
    if what == "token":
        past = 24 + 32 * list(uses_layers.BY_HAND).index(name)  # positions that no other encoding has asked for
        contest = uses_layers.one_token(name, past, "cpu", torch.float32)
    else:
        contest = uses_layers.whole_text(name, 1, 16, what == "step", "cpu", torch.float32)
    contest.prepare.get("posenc", lambda: None)()
    for _ in range(3):
        contest.ours()
    with Count() as count:
        contest.ours()
    return count.operations, count.allocations, count_calls(contest.ours)


LAYERS: dict[str, dict[str, tuple[int, int, int]]] = {
    "none": {"forward": (27, 7, 13), "step": (73, 20, 13), "token": (32, 6, 32)},
    "sinusoidal": {"forward": (28, 8, 18), "step": (74, 21, 18), "token": (34, 7, 40)},
    "learned": {"forward": (29, 8, 15), "step": (78, 23, 15), "token": (34, 7, 34)},
    "rope": {"forward": (37, 11, 32), "step": (93, 28, 51), "token": (47, 10, 67)},
    "xpos": {"forward": (41, 13, 48), "step": (101, 32, 82), "token": (87, 38, 99)},
    "alibi": {"forward": (30, 8, 23), "step": (78, 21, 71), "token": (36, 6, 41)},
    "t5": {"forward": (29, 7, 23), "step": (119, 36, 82), "token": (37, 6, 42)},
    "clipped": {"forward": (28, 7, 23), "step": (113, 33, 70), "token": (36, 6, 42)},
    "shaw": {"forward": (40, 9, 73), "step": (126, 38, 80), "token": (46, 10, 82)},
    "deberta": {"forward": (64, 19, 104), "step": (199, 66, 123), "token": (83, 28, 423)},
    "transformer_xl": {"forward": (64, 18, 128), "step": (181, 55, 127), "token": (78, 22, 118)},
    "relative_logits": {"forward": (59, 16, 83), "step": (167, 54, 90), "token": (67, 19, 96)},
}  # fmt: skip


@pytest.mark.parametrize("name", list(uses_layers.BY_HAND))
def test_the_work_of_a_repeated_call(name):
    found = {what: work(name, what) for what in ("forward", "step", "token")}
    for what, numbers in LAYERS[name].items():
        for kind, now, most in zip(("operations", "allocations", "calls"), found[what], numbers, strict=True):
            assert now <= most * SLACK + 2, f"{name}, {what}: {now} {kind}, {most} are pinned; all of it: {found}"


def test_every_encoding_is_pinned():
    assert set(LAYERS) == set(uses_layers.BY_HAND)
