"""Inkling's text model against transformers."""

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_inkling import make


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


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
