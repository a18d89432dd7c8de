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
    "none": {"forward": (25, 6, 19), "step": (70, 19, 19), "token": (27, 6, 33)},
    "sinusoidal": {"forward": (26, 7, 24), "step": (71, 20, 24), "token": (29, 7, 46)},
    "learned": {"forward": (27, 7, 21), "step": (75, 22, 21), "token": (29, 7, 40)},
    "rope": {"forward": (35, 10, 38), "step": (90, 27, 57), "token": (38, 10, 73)},
    "xpos": {"forward": (39, 12, 56), "step": (98, 31, 90), "token": (78, 38, 106)},
    "alibi": {"forward": (28, 6, 28), "step": (74, 19, 78), "token": (29, 6, 40)},
    "t5": {"forward": (27, 6, 25), "step": (116, 35, 91), "token": (30, 6, 39)},
    "clipped": {"forward": (26, 6, 25), "step": (110, 32, 79), "token": (29, 6, 39)},
    "shaw": {"forward": (38, 8, 74), "step": (123, 37, 82), "token": (42, 10, 75)},
    "deberta": {"forward": (62, 18, 113), "step": (196, 65, 133), "token": (79, 28, 424)},
    "transformer_xl": {"forward": (62, 17, 129), "step": (178, 54, 132), "token": (74, 22, 118)},
    "relative_logits": {"forward": (57, 14, 86), "step": (163, 52, 94), "token": (63, 19, 90)},
}  # fmt: skip


@pytest.mark.parametrize("name", list(uses_layers.BY_HAND))
def test_the_work_of_a_repeated_call(name):
    found = {what: work(name, what) for what in ("forward", "step", "token")}
    for what, numbers in LAYERS[name].items():
        for kind, now, most in zip(("operations", "allocations", "calls"), found[what], numbers, strict=True):
            assert now <= most * SLACK + 2, f"{name}, {what}: {now} {kind}, {most} are pinned; all of it: {found}"


def test_every_encoding_is_pinned():
    assert set(LAYERS) == set(uses_layers.BY_HAND)
