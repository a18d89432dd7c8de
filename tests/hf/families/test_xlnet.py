"""XLNet against transformers."""

import pytest
import torch

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_xlnet import make


def batch(segmented=False):
    ids = torch.randint(2, 99, (3, 21))
    segments = (torch.arange(21)[None, :] > torch.tensor([[5], [9], [12]])).long()
    return {"input_ids": ids, "token_type_ids": segments} if segmented else {"input_ids": ids}


CASES = {
    "xlnet": Case(make, batch, layers=2, way="override", checkpoints=()),
    "xlnet segments": Case(make, lambda: batch(True), layers=2, way="override", checkpoints=()),
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
