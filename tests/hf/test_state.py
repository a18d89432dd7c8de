"""A call of an accelerated model leaves its modules and its inputs as they were, but for what the original itself keeps."""

import pytest
import torch

from posenc import hf
from tests.hf.cases import CASES, EVERY
from tests.hf.harness import inputs_of, real_output
from tests.nn.test_state import attributes


def changes(model, inputs):
    """The attributes that a call and a training step add or replace, by module."""
    tensors = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        real_output(model, inputs)  # what a first call sets up is not of that call alone
    before = attributes(model, *tensors)
    with torch.no_grad():
        real_output(model, inputs)
    real_output(model, inputs).sum().backward()
    after = attributes(model, *tensors)
    assert after[1:] == before[1:]
    return {
        f"{name}.{key}"
        for name, found in after[0].items()
        for key in found.keys() | before[0][name].keys()
        if found.get(key) != before[0][name].get(key)
    }


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's original
@pytest.mark.parametrize("name", CASES)
def test_a_call_leaves_a_model_as_it_was(name):
    case = EVERY[name]
    model, inputs = case.make(), inputs_of(case, "mixed" if case.paddings != ("none",) else "none")
    own = changes(model, inputs)
    hf.accelerate(model)
    assert changes(model, inputs) <= own
