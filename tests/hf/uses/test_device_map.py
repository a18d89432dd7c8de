"""Models that accelerate has dispatched to devices (device_map), whose hooks take the place of every module's forward."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import attach_execution_device_hook, remove_hook_from_submodules

from posenc import hf
from posenc.hf.family import first
from tests.hf.cases import EVERY, once
from tests.hf.compare import outputs_agree

NAMES = ("t5", "swin", "speech conformer", "deberta v3", "bloom", "gptj", "inkling", "llama")


def output(model, inputs, mask, **options):
    with torch.no_grad():
        found = first(model(**copy.deepcopy(inputs), **options))
    return found if mask is None or mask.shape != found.shape[:2] else found[mask.bool()]


@pytest.mark.parametrize("name", NAMES)
def test_accelerated_after_dispatch(name):
    model, (inputs, mask) = once(EVERY[name])
    model.eval()
    theirs = output(model, inputs, mask)
    attach_execution_device_hook(model, torch.device("cpu"))
    hooked = sum("_old_forward" in module.__dict__ for module in model.modules())
    hf.accelerate(model)
    outputs_agree(output(model, inputs, mask), theirs)
    hf.restore(model)
    outputs_agree(output(model, inputs, mask), theirs)
    assert sum("_old_forward" in module.__dict__ for module in model.modules()) == hooked


@pytest.mark.parametrize("name", NAMES)
def test_dispatched_after_acceleration(name):
    model, (inputs, mask) = once(EVERY[name])
    model.eval()
    theirs = output(model, inputs, mask)
    hf.accelerate(model)
    attach_execution_device_hook(model, torch.device("cpu"))
    outputs_agree(output(model, inputs, mask), theirs)
    if name == "gptj":  # which computes them in the original's way
        outputs_agree(output(model, inputs, mask, output_attentions=True), theirs)
    remove_hook_from_submodules(model)
    outputs_agree(output(model, inputs, mask), theirs)
    hf.restore(model)
    outputs_agree(output(model, inputs, mask), theirs)


def test_offloaded_weights():
    """Those that are read without calling the module that has them are refused; other models run."""
    model, (inputs, mask) = once(EVERY["bloom"])
    theirs = output(model.eval(), inputs, mask)
    outputs_agree(output(hf.accelerate(cpu_offload(model, torch.device("cpu"))), inputs, mask), theirs)
    model = cpu_offload(once(EVERY["t5"])[0], torch.device("cpu"))
    with pytest.raises(hf.UnsupportedModel, match="load it without offloading"):
        hf.accelerate(model)
