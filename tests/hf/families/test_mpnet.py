"""MPNet against transformers."""

import pytest
import torch

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_mpnet import make


def batch():
    return {"input_ids": torch.randint(3, 99, (3, 150))}


CASES = {"mpnet": Case(make, batch, layers=2, way="override", checkpoints=())}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
