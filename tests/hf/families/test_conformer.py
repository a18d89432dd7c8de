"""Speech encoders against transformers: wav2vec2-conformer, wav2vec2-BERT, Seamless v1 and v2."""

import pytest
import torch

from tests.hf.harness import Case, pairs, run_check
from tests.hf.test_conformer import MODELS, make

EAGER = ("conformer", "bert relative_key")


def batch():
    return {"x": torch.randn(3, 37, 32)}


CASES = {
    f"speech {name}": Case(
        lambda name=name: make(name, "eager" if name in EAGER else "sdpa"),
        batch,
        layers=2,
        way="interface, forward replaced",
        checkpoints=(),
        pickles=name not in ("conformer", "rotary"),  # their convolution's weight is parametrized
    )
    for name in MODELS
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
