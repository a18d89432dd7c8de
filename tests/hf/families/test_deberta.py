"""DeBERTa v1, v2 and v3 against transformers."""

import pytest
import torch

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_deberta import make


def batch():
    return {"input_ids": torch.randint(2, 99, (3, 41))}


def case(name, checkpoints=(False, True)):
    return Case(lambda: make(name), batch, layers=2, way="override", checkpoints=checkpoints)


CASES = {
    "deberta v1": case("v1"),
    "deberta v2": case("v2"),
    "deberta v2 p2c": case("v2 p2c"),
    "deberta v3": case("v3", (False,)),  # reentrant, the original raises: all layers share a graph outside of them
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
