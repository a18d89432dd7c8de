"""SpeechT5's encoder and VITS's text encoder against transformers."""

import pytest
import torch
from transformers import SpeechT5Config, SpeechT5Model, VitsPreTrainedModel

from posenc import hf
from posenc.hf import shaw
from tests.hf.harness import Case, inputs_of, pairs, run_check
from tests.hf.tiny import batch, make, tiny_case


class Text(VitsPreTrainedModel):
    """As the family's own, with the methods of a model."""

    def __init__(self, text):
        super().__init__(text.encoder.config)
        self.text_encoder = text.encoder

    forward = shaw.Text.forward
    encoder = property(lambda self: self.text_encoder)


CASES = {
    "speecht5": tiny_case(shaw, "speecht5", layers=2, way="override"),
    "vits": Case(
        lambda: Text(make(shaw, "vits")).eval(),
        lambda: batch(shaw, "vits"),
        layers=2,
        way="override",
        compiles=False,  # the original draws a number of NumPy for every layer
    ),
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("case", CASES)
def test_output_attentions_are_the_originals(case):
    model, inputs = CASES[case].make(), inputs_of(CASES[case], "right")
    if case == "vits":  # its text encoder takes two more arguments
        mask = inputs["attention_mask"]
        inputs, run = {**inputs, "padding_mask": mask[..., None].float()}, model.text_encoder
    else:
        run = model
    with torch.no_grad():
        theirs = run(**inputs, output_attentions=True).attentions
        hf.accelerate(model)
        ours = run(**inputs, output_attentions=True).attentions
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_decoder_stays():
    config = SpeechT5Config(
        hidden_size=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2
    )
    assert len(hf.report(hf.accelerate(SpeechT5Model(config))).layers) == 1
