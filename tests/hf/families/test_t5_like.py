"""Switch Transformers, Pop2Piano, Pix2Struct's decoder and UDOP against transformers."""

from dataclasses import replace

import pytest
import torch

from posenc import hf
from posenc.hf import t5_like
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import inputs_of, outcome, pairs, run_check
from tests.hf.tiny import make, tiny_case


def make_switch():
    model = make(t5_like, "switch_transformers")
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.input_dtype = torch.float32  # the original sets it in its first call
    return model


OPTIONS = dict(way="interface, compute_bias replaced")
CASES = {
    "switch_transformers": replace(
        tiny_case(t5_like, "switch_transformers", layers=6, compiles=False, **OPTIONS), make=make_switch
    ),
    "pop2piano": tiny_case(t5_like, "pop2piano", layers=6, checkpoints=(False,), **OPTIONS),
    "pix2struct": tiny_case(t5_like, "pix2struct", layers=4, **OPTIONS),
    "udop": tiny_case(t5_like, "udop", layers=6, **OPTIONS),
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


def test_pix2struct_attends_to_an_image():
    """Its cross-attention, whose dense zeros are gone."""
    model = CASES["pix2struct"].make()
    inputs = inputs_of(CASES["pix2struct"], "right")
    inputs["encoder_hidden_states"] = torch.randn(3, 7, 16)
    theirs, their_gradients = outcome(model, inputs)
    ours, our_gradients = outcome(hf.accelerate(model), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)
