"""CPM-Ant against transformers: buckets within a segment, pairs of segments, padding by tokens of 0."""

import pytest
import torch
from transformers import CpmAntForCausalLM

from posenc import hf
from posenc.hf import cpmant
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import Case, outcome, pairs, run_check, scatter
from tests.hf.tiny import batch, make

CASES = {
    "cpmant": Case(
        lambda: make(cpmant, "cpmant"), lambda: batch(cpmant, "cpmant"), layers=2, way="override", paddings=("none",),
        with_head=lambda: scatter(CpmAntForCausalLM(make(cpmant, "cpmant").config)),
        generates={"greedy": {}, "beams": dict(num_beams=2)}, checkpoints=(),  # the original has none
    )
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


def test_padding_and_attentions():
    model, inputs = make(cpmant, "cpmant"), batch(cpmant, "cpmant")
    inputs["input_ids"][1, :20] = 0
    inputs["input_ids"][2, :7] = 0
    real = inputs["input_ids"] != 0

    class Real(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return (self.model(input_ids).last_hidden_state[real],)

    theirs, their_gradients = outcome(Real(), inputs)
    maps = model(**inputs, output_attentions=True).attentions
    hf.accelerate(model)
    ours, our_gradients = outcome(Real(), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)
    for a, b in zip(model(**inputs, output_attentions=True).attentions, maps, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_in_float64():
    model, inputs = make(cpmant, "cpmant").double(), batch(cpmant, "cpmant")
    inputs["input_ids"][1, :20] = 0
    real = inputs["input_ids"] != 0
    with torch.no_grad():
        theirs = model(**inputs).last_hidden_state[real]
        ours = hf.accelerate(model)(**inputs).last_hidden_state[real]
    outputs_agree(ours, theirs)
