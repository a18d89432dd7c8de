"""Swin v1 and v2 and their copies against transformers: windows, shifted windows, images that windows do not divide."""

import copy

import pytest
import torch

from posenc import hf
from posenc.hf import swin
from posenc.nn import blocks
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import outcome, pairs, run_check
from tests.hf.tiny import tiny_case

FOLDERS = {"swin": 4, "donut": 4, "maskformer": 4, "clap": 4, "swinv2": 4, "swin2sr": 2}


CASES = {
    folder: tiny_case(
        swin, folder, layers=layers, way="interface, forward replaced" if folder == "swin" else "override", paddings=("none",),
        checkpoints=() if folder in ("clap", "swin2sr") else (False,),  # stages within stages: reentrant has no gradients
    )
    for folder, layers in FOLDERS.items()
}  # fmt: skip


def make(folder):
    return CASES[folder].make()


def batch(folder):
    return CASES[folder].batch()


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("folder", ["swin", "swinv2"])
@pytest.mark.parametrize("size", [(24, 40), (36, 24)])
def test_images_that_windows_do_not_divide(folder, size):
    model = make(folder)
    inputs = {"pixel_values": torch.randn(2, 3, *size), "interpolate_pos_encoding": True}
    theirs, their_gradients = outcome(model, inputs)
    ours, our_gradients = outcome(hf.accelerate(model), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("folder", ["swin", "donut", "swinv2"])
@pytest.mark.parametrize("numbers", [64, 4 * 16 * 16])
def test_small_blocks(folder, numbers, monkeypatch):
    """Blocks of one window's rows, and of a few windows, shifted or not."""
    model, inputs = make(folder), batch(folder)
    theirs, their_gradients = outcome(model, inputs)
    monkeypatch.setattr(blocks, "NUMBERS", numbers)
    ours, our_gradients = outcome(hf.accelerate(model), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("folder", ["swin", "donut", "swinv2"])
def test_as_on_a_gpu(folder, monkeypatch):
    """A window's whole bias in PyTorch's attention: on a CPU, as if it were none."""
    model, inputs = make(folder), batch(folder)
    theirs, their_gradients = outcome(model, inputs)
    hf.accelerate(model)
    monkeypatch.setattr(blocks, "on_cpu", lambda x: False)
    monkeypatch.setattr(blocks, "attend", lambda *a, **k: pytest.fail("an engine runs"))
    ours, our_gradients = outcome(model, inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("folder", ["swin", "clap", "swinv2"])
def test_a_named_engine_runs_the_plan(folder):
    model, inputs = make(folder), batch(folder)
    with torch.no_grad():
        theirs = model(**inputs)[0]
        hf.accelerate(model, engine="blocked")
        assert {one.engine for one in hf.report(model).layers} == {"blocked"}
        outputs_agree(model(**inputs)[0], theirs)


@pytest.mark.parametrize("folder", ["swin", "swinv2"])
def test_a_kept_bias_follows_its_parameters(folder):
    """Whichever way they are changed: in place, behind autograd's back, or loaded."""
    model, inputs = hf.accelerate(make(folder)), batch(folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        first = model(**inputs)[0]
        for parameter in other.parameters():
            parameter.data.mul_(1.5)
        model.load_state_dict(other.state_dict())
        second = model(**inputs)[0]
        assert not torch.equal(first, second)
        assert torch.equal(second, other(**inputs)[0])
        outputs_agree(second, hf.restore(model)(**inputs)[0])


def test_a_kept_bias_that_was_changed_is_made_anew():
    module, table = torch.nn.Identity(), torch.randn(4, 2)
    made = blocks.keep(module, "key", (table,), lambda: table.t().clone())
    assert blocks.keep(module, "key", (table,), lambda: table.t().clone()) is made
    made += 1.0
    assert torch.equal(blocks.keep(module, "key", (table,), lambda: table.t().clone()), table.t())


def test_output_attentions_are_the_originals():
    for folder in ("swinv2", "donut"):
        model, inputs = make(folder), batch(folder)
        with torch.no_grad():
            theirs = model(**inputs, output_attentions=True).attentions
            ours = hf.accelerate(model)(**inputs, output_attentions=True).attentions
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
