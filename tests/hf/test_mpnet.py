"""MPNet against transformers."""

import torch
from transformers import MPNetConfig, MPNetModel

from posenc import hf
from tests.seeds import seed


def make():
    torch.manual_seed(seed(1))
    model = MPNetModel(
        MPNetConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=37,
            max_position_embeddings=200,
        )
    ).eval()
    torch.nn.init.normal_(model.encoder.relative_attention_bias.weight)
    return model


def test_output_attentions_falls_back():
    ids = torch.randint(3, 99, (2, 20))
    model = make()
    theirs = model(input_ids=ids, output_attentions=True).attentions
    for a, b in zip(hf.accelerate(model)(input_ids=ids, output_attentions=True).attentions, theirs, strict=True):
        assert torch.equal(a, b)
