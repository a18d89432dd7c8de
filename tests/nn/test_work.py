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
    "none": {"forward": (19, 6, 15), "step": (58, 19, 15), "token": (21, 6, 25)},
    "sinusoidal": {"forward": (21, 7, 19), "step": (60, 20, 19), "token": (23, 7, 29)},
    "learned": {"forward": (21, 7, 17), "step": (63, 22, 17), "token": (23, 7, 27)},
    "rope": {"forward": (30, 10, 30), "step": (76, 27, 49), "token": (28, 10, 39)},
    "xpos": {"forward": (37, 12, 37), "step": (86, 31, 80), "token": (35, 12, 45)},
    "alibi": {"forward": (22, 7, 29), "step": (62, 20, 31), "token": (23, 6, 43)},
    "t5": {"forward": (21, 6, 27), "step": (104, 35, 54), "token": (24, 6, 42)},
    "clipped": {"forward": (20, 6, 27), "step": (98, 32, 42), "token": (23, 6, 42)},
    "shaw": {"forward": (31, 8, 32), "step": (110, 37, 45), "token": (35, 10, 44)},
    "deberta": {"forward": (56, 18, 119), "step": (184, 65, 139), "token": (58, 18, 99)},
    "transformer_xl": {"forward": (40, 13, 47), "step": (136, 45, 60), "token": (54, 19, 65)},
    "relative_logits": {"forward": (48, 15, 41), "step": (149, 53, 54), "token": (46, 14, 52)},
}  # fmt: skip


@pytest.mark.parametrize("name", list(uses_layers.BY_HAND))
def test_the_work_of_a_repeated_call(name):
    found = {what: work(name, what) for what in ("forward", "step", "token")}
    for what, numbers in LAYERS[name].items():
        for kind, now, most in zip(("operations", "allocations", "calls"), found[what], numbers, strict=True):
            assert now <= most * SLACK + 2, f"{name}, {what}: {now} {kind}, {most} are pinned; all of it: {found}"


def test_every_encoding_is_pinned():
    assert set(LAYERS) == set(uses_layers.BY_HAND)
