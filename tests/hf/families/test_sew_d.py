"""SEW-D against transformers."""

import pytest

from posenc.hf import sew_d
from tests.hf.compare import attentions_agree
from tests.hf.harness import inputs_of, pairs, run_check
from tests.hf.tiny import tiny_case

CASES = {
    "sew_d": tiny_case(
        sew_d, "sew_d", layers=2, way="override", paddings=("none", "right"),  # the original counts real samples
        pickles=False,  # PyTorch's weight norm
        checkpoints=(False,),  # reentrant, the original raises: all layers share a graph outside of them
    )
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("by", ["argument", "configuration"])
def test_output_attentions_are_the_originals(by):
    model, inputs = CASES["sew_d"].make(), inputs_of(CASES["sew_d"], "right")
    attentions_agree(model, inputs, by)
