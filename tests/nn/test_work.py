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


def make_contest(name: str, what: str):
    if what == "token":
        past = 24 + 32 * list(uses_layers.BY_HAND).index(name)  # positions that no other encoding has asked for
        return uses_layers.one_token(name, past, "cpu", torch.float32)
    return uses_layers.whole_text(name, 1, 16, what == "step", "cpu", torch.float32)


def work(name: str, what: str) -> tuple[int, int, int]:
    contest = make_contest(name, what)
    contest.prepare.get("posenc", lambda: None)()
    for _ in range(3):
        contest.ours()
    with Count() as count:
        contest.ours()
    return count.operations, count.allocations, count_calls(contest.ours)


LAYERS: dict[str, dict[str, tuple[int, int, int]]] = {
    "none": {"forward": (19, 6, 11), "step": (58, 19, 11), "token": (21, 6, 16)},
    "sinusoidal": {"forward": (21, 7, 15), "step": (60, 20, 15), "token": (23, 7, 20)},
    "learned": {"forward": (21, 7, 13), "step": (63, 22, 13), "token": (23, 7, 18)},
    "rope": {"forward": (30, 10, 19), "step": (76, 27, 45), "token": (28, 10, 23)},
    "xpos": {"forward": (37, 12, 22), "step": (86, 31, 76), "token": (35, 12, 25)},
    "alibi": {"forward": (22, 7, 17), "step": (62, 20, 27), "token": (23, 6, 17)},
    "t5": {"forward": (20, 6, 16), "step": (96, 30, 42), "token": (23, 6, 17)},
    "clipped": {"forward": (20, 6, 16), "step": (94, 29, 41), "token": (23, 6, 17)},
    "shaw": {"forward": (26, 7, 17), "step": (107, 32, 43), "token": (28, 8, 26)},
    "deberta": {"forward": (56, 18, 130), "step": (186, 65, 173), "token": (55, 18, 116)},
    "transformer_xl": {"forward": (41, 13, 47), "step": (142, 45, 61), "token": (40, 12, 52)},
    "relative_logits": {"forward": (49, 15, 41), "step": (155, 51, 55), "token": (40, 11, 42)},
}  # fmt: skip


@pytest.mark.parametrize("name", list(uses_layers.BY_HAND))
def test_the_work_of_a_repeated_call(name):
    found = {what: work(name, what) for what in ("forward", "step", "token")}
    for what, numbers in LAYERS[name].items():
        for kind, now, most in zip(("operations", "allocations", "calls"), found[what], numbers, strict=True):
            assert now <= most * SLACK + 2, f"{name}, {what}: {now} {kind}, {most} are pinned; all of it: {found}"


def test_every_encoding_is_pinned():
    assert set(LAYERS) == set(uses_layers.BY_HAND)


GPU = {
    "none": {"forward": (19, 6, 11), "step": (58, 19, 11), "token": (21, 6, 16)},
    "sinusoidal": {"forward": (21, 7, 15), "step": (60, 20, 15), "token": (23, 7, 20)},
    "learned": {"forward": (21, 7, 13), "step": (63, 22, 13), "token": (23, 7, 18)},
}
"""What a GPU's layer does where PyTorch's attention has nothing to add: what a CPU's does."""


@pytest.mark.parametrize("name", list(GPU))
def test_the_work_of_a_layer_on_a_gpu(name, monkeypatch):
    """Tensors that say they are on a GPU: only the host's work is counted. No plan is made."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.delattr(posenc.Plan, "__init__")
    for what, numbers in GPU[name].items():
        found = work(name, what)
        for kind, now, most in zip(("operations", "allocations", "calls"), found, numbers, strict=True):
            assert now <= most * SLACK + 2, f"{name}, {what}: {now} {kind}, {most} are pinned; all of it: {found}"


@pytest.mark.parametrize("name", ["none", "alibi", "t5", "clipped", "rope"])
def test_a_layer_does_no_more_than_one_written_by_hand(name):
    """Operations of a text and of a token; hand-written code has no reason to be shorter."""
    for what in ("forward", "token"):
        contest = make_contest(name, what)
        counted = {}
        for who, call in {"posenc": contest.ours, **contest.others}.items():
            contest.prepare.get(who, lambda: None)()
            for _ in range(3):
                call()
            with Count() as count:
                call()
            counted[who] = count.operations
        assert counted["posenc"] <= min(counted.values()), counted


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5"])
def test_a_padded_layer_does_no_more_than_one_written_by_hand(name):
    """One operation more is allowed: whether the output holds NaN, which a masked key may hide."""
    for contest in (
        uses_layers.whole_text(name, 2, 16, False, "cpu", torch.float32, "padded"),
        uses_layers.one_token(name, 48, "cpu", torch.float32, 2, 1, True),
    ):
        counted = {}
        for who, call in {"posenc": contest.ours, **contest.others}.items():
            contest.prepare.get(who, lambda: None)()
            for _ in range(3):
                call()
            with Count() as count:
                call()
            counted[who] = count.operations
        assert counted.pop("posenc") <= min(counted.values()) + 1, counted
