"""BLOOM and MPT against transformers: padded prompts, caches, generation."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, BloomModel, MptConfig, MptForCausalLM, MptModel

from posenc import hf
from tests.seeds import seed

MODELS = {
    "bloom": (BloomModel, BloomForCausalLM, BloomConfig, dict(hidden_size=36, n_layer=2, n_head=6)),
    "mpt": (MptModel, MptForCausalLM, MptConfig, dict(d_model=36, n_layers=2, n_heads=6, max_seq_len=64)),
}


def make(family, head=False):
    torch.manual_seed(seed(1))
    model, with_head, config, sizes = MODELS[family]
    made = (with_head if head else model)(config(vocab_size=99, **sizes, pad_token_id=0, eos_token_id=1)).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def batch(holes=False):
    torch.manual_seed(seed(2))
    ids = torch.randint(2, 99, (3, 23))
    mask = torch.ones(3, 23, dtype=torch.long)
    mask[1, 15:] = 0
    mask[2, :6] = 0
    if holes:
        mask[0, 4:9] = 0
    return ids, mask


@pytest.mark.parametrize("family", MODELS)
def test_output_attentions_falls_back(family):
    ids, mask = batch()
    model = make(family)
    inputs = dict(input_ids=ids, attention_mask=mask)
    theirs = model(**inputs, output_attentions=True).attentions
    hf.accelerate(model)
    for a, b in zip(model(**inputs, output_attentions=True).attentions, theirs, strict=True):
        assert torch.equal(a, b)
    assert model(**inputs).attentions is None
