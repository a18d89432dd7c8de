"""Inkling's text models against transformers."""

import importlib.util

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

from posenc.hf import inkling
from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_inkling import make
from tests.hf.tiny import tiny_case


def batch():
    return {"input_ids": torch.randint(3, 99, (3, 29))}


CASES = {
    "inkling": Case(
        make,
        batch,
        layers=2,
        way="interface, rel_logits_proj.forward replaced",
        with_head=lambda: make(InklingForCausalLM),
        generates={"greedy": {}, "beams": dict(num_beams=2)},
    )
}
if importlib.util.find_spec("transformers.models.inkling2"):  # since 5.23
    CASES["inkling2"] = tiny_case(inkling, "inkling2", layers=2, way="interface, rel_logits_proj.forward replaced")


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
