"""FastSpeech2-Conformer's encoder, Parakeet's and Nemotron's streaming one against transformers."""

import copy

import pytest
import torch
from transformers import NemotronAsrStreamingEncoder, ParakeetEncoder

from posenc import hf
from posenc.hf import relative_speech
from tests.hf.compare import outputs_agree
from tests.hf.harness import Case, pairs, run_check
from tests.hf.tiny import batch, make


class Frames:
    """Real frames only: a padded one sees nothing in the original, but has gradients."""

    def forward(self, input_features, attention_mask, **kwargs):
        found = super().forward(input_features, attention_mask, **kwargs)
        return (found.last_hidden_state.masked_fill(found.attention_mask[..., None] == 0, 0.0),)


class ParakeetFrames(Frames, ParakeetEncoder):
    pass


class StreamingFrames(Frames, NemotronAsrStreamingEncoder):
    def forward(self, input_features, attention_mask, **kwargs):
        return super().forward(input_features, attention_mask, num_lookahead_tokens=2, **kwargs)


def frames(folder="parakeet", cls=ParakeetFrames):
    model = make(relative_speech, folder)
    found = cls(model.config).eval()
    found.load_state_dict(model.state_dict())
    for module in found.modules():
        getattr(module, "left_pad", None)  # a property that the original keeps when it is first read
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
    "nemotron_asr_streaming": Case(
        lambda: frames("nemotron_asr_streaming", StreamingFrames), lambda: batch(relative_speech, "nemotron_asr_streaming"),
        layers=2, way="interface, forward replaced", paddings=("none", "right"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


def test_a_stream_of_chunks_continues_its_cache():
    """Three frames at a time, as a recogniser hears them: the original's caches, the original's frames."""
    model = make(relative_speech, "nemotron_asr_streaming")
    sound = torch.randn(2, 192, 16)
    found = []
    for one in (model, hf.accelerate(copy.deepcopy(model))):
        parts, caches = [], {}
        with torch.no_grad():
            for chunk in sound.split(24, dim=1):
                out = one(chunk, use_cache=True, num_lookahead_tokens=2, **caches)
                caches = {"past_key_values": out.past_key_values, "padding_cache": out.padding_cache}
                parts.append(out.last_hidden_state)
        found.append(torch.cat(parts, 1))
    assert found[0].shape[1] > 20
    outputs_agree(found[1], found[0])
