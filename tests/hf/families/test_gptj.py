"""GPT-J and CodeGen against transformers: rotary, without the attention interface."""

import pytest
import torch
from transformers import CodeGenForCausalLM, GPTJForCausalLM

from posenc import hf
from posenc.hf import gptj
from tests.hf.compare import outputs_agree
from tests.hf.harness import inputs_of, pairs, run_check, scatter
from tests.hf.tiny import make, tiny_case

HEADS = {"gptj": GPTJForCausalLM, "codegen": CodeGenForCausalLM}
CASES = {
    folder: tiny_case(
        gptj, folder, layers=2, way="override", generates={"greedy": {}, "beams": dict(num_beams=3)},
        with_head=lambda folder=folder: scatter(HEADS[folder](make(gptj, folder).config)),
    )
    for folder in HEADS
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("folder", HEADS)
def test_output_attentions_are_the_originals(folder):
    model, inputs = make(gptj, folder), inputs_of(CASES[folder], "left")
    with torch.no_grad():
        theirs = model(**inputs, output_attentions=True).attentions
        ours = hf.accelerate(model)(**inputs, output_attentions=True).attentions
    for a, b in zip(ours, theirs, strict=True):
        outputs_agree(a, b)
