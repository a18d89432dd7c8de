"""Conformer encoders against transformers: relative and relative_key, padded."""

import pytest
import torch
from transformers import SeamlessM4TConfig, SeamlessM4Tv2Config, Wav2Vec2BertConfig, Wav2Vec2BertModel
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TConformerEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2ConformerEncoder
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerEncoder,
)

from posenc import hf
from posenc.hf import interface
from tests.hf.compare import outputs_agree
from tests.seeds import seed

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, layerdrop=0.0,
    conv_depthwise_kernel_size=5, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
)  # fmt: skip
SPEECH = dict(
    hidden_size=32, speech_encoder_layers=2, speech_encoder_attention_heads=4, speech_encoder_intermediate_size=37,
    speech_encoder_layerdrop=0.0, conv_depthwise_kernel_size=5,
)  # fmt: skip


def bert(kind):
    return Wav2Vec2BertModel(
        Wav2Vec2BertConfig(
            **SIZES,
            position_embeddings_type=kind,
            feature_projection_input_dim=32,
            left_max_position_embeddings=9,
            right_max_position_embeddings=4,
            apply_spec_augment=False,
            add_adapter=False,
        )
    ).encoder


MODELS = {
    "conformer": lambda: Wav2Vec2ConformerEncoder(
        Wav2Vec2ConformerConfig(**SIZES, position_embeddings_type="relative")
    ),
    "rotary": lambda: Wav2Vec2ConformerEncoder(Wav2Vec2ConformerConfig(**SIZES, position_embeddings_type="rotary")),
    "bert relative": lambda: bert("relative"),
    "bert relative_key": lambda: bert("relative_key"),
    "seamless": lambda: SeamlessM4TConformerEncoder(SeamlessM4TConfig(**SPEECH, position_embeddings_type="relative")),
    "seamless v2": lambda: SeamlessM4Tv2ConformerEncoder(
        SeamlessM4Tv2Config(
            **SPEECH,
            position_embeddings_type="relative_key",
            left_max_position_embeddings=9,
            right_max_position_embeddings=4,
            speech_encoder_chunk_size=10**6,
        )
    ),
    "seamless v2 chunks": lambda: SeamlessM4Tv2ConformerEncoder(
        SeamlessM4Tv2Config(
            **SPEECH,
            position_embeddings_type="relative_key",
            speech_encoder_chunk_size=8,
            speech_encoder_left_chunk_num=1,
        )
    ),
}


class Whole(torch.nn.Module):
    """The encoder on a copy of its input: the original writes into it."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x, attention_mask):
        out = self.encoder(x.clone(), attention_mask=attention_mask.bool())
        return (out if isinstance(out, torch.Tensor) else out[0],)


def make(name, attn="sdpa"):
    torch.manual_seed(seed(1))
    encoder = MODELS[name]()
    encoder.config._attn_implementation = attn
    for parameter in encoder.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return Whole(encoder).eval()


@pytest.mark.parametrize("name", ["conformer", "bert relative_key", "seamless v2"])
def test_layers_get_the_padding_itself(name, monkeypatch):
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 20:] = False
    model, calls = hf.accelerate(make(name)), []
    attend = interface.attend
    monkeypatch.setattr(interface, "attend", lambda *a, **k: calls.append(k) or attend(*a, **k))
    model(torch.randn(2, 30, 32), mask)
    assert [(one["key_mask"].shape, one.get("mask")) for one in calls] == [((2, 30), None)] * 2


@pytest.mark.parametrize("kind", ["relative", "relative_key"])
def test_output_attentions_falls_back(kind):
    torch.manual_seed(seed(1))
    model = Wav2Vec2BertModel(bert(kind).config).eval()
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:] = 0
    inputs = dict(input_features=torch.randn(2, 30, 32), attention_mask=mask)
    model.set_attn_implementation("eager")
    theirs = model(**inputs, output_attentions=True).attentions
    assert len(theirs) == 2
    hf.accelerate(model)
    for a, b in zip(model(**inputs, output_attentions=True).attentions, theirs, strict=True):
        outputs_agree(a, b)
    assert not any(model(**inputs).attentions or ())


def test_report_names_the_encodings():
    assert {one.encoding for one in hf.report(hf.accelerate(make("bert relative_key"))).layers} == {"shaw"}
    assert {one.encoding for one in hf.report(hf.accelerate(make("bert relative"))).layers} == {"transformer_xl"}
