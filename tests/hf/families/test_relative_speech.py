"""FastSpeech2-Conformer's encoder and Parakeet's against transformers."""

import inspect

import pytest
import torch
from transformers import ParakeetEncoder
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention

from posenc.hf import relative_speech
from tests.hf.harness import Case, pairs, run_check
from tests.hf.tiny import batch, make


class Frames(ParakeetEncoder):
    """Real frames only: a padded one sees nothing in the original, but has gradients."""

    def forward(self, input_features, attention_mask, **kwargs):
        found = super().forward(input_features, attention_mask, **kwargs)
        return (found.last_hidden_state * found.attention_mask[..., None],)


def frames():
    model = make(relative_speech, "parakeet")
    found = Frames(model.config).eval()
    found.load_state_dict(model.state_dict())
    return found


CASES = {
    "fastspeech2_conformer": Case(
        lambda: make(relative_speech, "fastspeech2_conformer"), lambda: {"input_ids": torch.randint(2, 30, (3, 61))},
        layers=2, way="override", checkpoints=(),  # the original has none
    ),
    "parakeet": Case(
        frames, lambda: batch(relative_speech, "parakeet"), layers=2, way="interface, forward replaced",
        paddings=("none", "right"),  # the original counts real frames
    ),
}  # fmt: skip
if "finfo" not in inspect.getsource(ParakeetEncoderAttention.forward):  # until transformers 5.16 padded frames gave NaN
    del CASES["parakeet"]


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
