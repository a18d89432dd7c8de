"""WavLM against transformers: the gated bias, padding, both kinds of encoder layers."""

import pytest
import torch
from transformers import WavLMConfig, WavLMForCTC

from posenc import hf
from posenc.hf import wavlm
from posenc.nn import blocks
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import Case, inputs_of, outcome, pairs, run_check, scatter
from tests.hf.tiny import tiny_case
from tests.seeds import seed

pytestmark = [  # the original's
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def make_ctc():
    """Layers that normalise last, and a head."""
    torch.manual_seed(seed(1))
    config = WavLMConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=[8], conv_kernel=[4],
        conv_stride=[2], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_buckets=32, max_bucket_distance=40,
        feat_extract_norm="layer", vocab_size=12, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    return scatter(WavLMForCTC(config))


OPTIONS = dict(
    layers=2, way="override", paddings=("none", "right"), checkpoints=(False,),  # reentrant: the original recurses for ever
    pickles=False,  # PyTorch's weight norm
)  # fmt: skip
CASES = {
    "wavlm": tiny_case(wavlm, "wavlm", **OPTIONS),
    "wavlm ctc": Case(make_ctc, lambda: {"input_values": torch.randn(3, 120)}, **OPTIONS),
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("numbers", [64, 2 * 59 * 59 + 1])
def test_blocks_of_any_size(numbers, monkeypatch):
    model, inputs = make_ctc(), inputs_of(CASES["wavlm ctc"], "right")
    theirs, their_gradients = outcome(model, inputs)
    monkeypatch.setattr(blocks, "NUMBERS", numbers)
    ours, our_gradients = outcome(hf.accelerate(model), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("engine", ["blocked", "cpu"])
def test_a_named_engine_runs_the_plan(engine):
    model, inputs = make_ctc(), inputs_of(CASES["wavlm ctc"], "right")
    with torch.no_grad():
        theirs = model(**inputs)[0]
        hf.accelerate(model, engine=engine)
        assert {one.engine for one in hf.report(model).layers} == {engine}
        outputs_agree(model(**inputs)[0], theirs)


def test_output_attentions_are_the_originals():
    model, inputs = make_ctc(), inputs_of(CASES["wavlm ctc"], "right")
    with torch.no_grad():
        theirs = model(**inputs, output_attentions=True).attentions
        ours = hf.accelerate(model)(**inputs, output_attentions=True).attentions
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
