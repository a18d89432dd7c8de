"""LongT5 against transformers."""

import pytest
import torch

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_longt5 import KINDS, make


def batch():
    ids = torch.randint(2, 99, (3, 37))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :11]}


CASES = {
    f"longt5 {kind}": Case(
        lambda kind=kind: make(kind),
        batch,
        layers=6,
        way="override",
        generates={"greedy": {}, "beams": dict(num_beams=3)},
    )
    for kind in KINDS
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
