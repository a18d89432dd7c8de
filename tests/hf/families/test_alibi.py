"""BLOOM and MPT against transformers."""

import pytest
import torch

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_alibi import MODELS, make


def batch():
    return {"input_ids": torch.randint(2, 99, (3, 23))}


CASES = {
    name: Case(
        lambda name=name: make(name),
        batch,
        layers=2,
        way="override",
        with_head=lambda name=name: make(name, head=True),
        generates={"greedy": {}, "beams": dict(num_beams=3)},
    )
    for name in MODELS
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
