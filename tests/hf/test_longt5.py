"""LongT5 against transformers: local and transient-global encoders, the decoder."""

import logging

import pytest
import torch
from transformers import LongT5Config, LongT5EncoderModel, LongT5ForConditionalGeneration

from posenc import hf
from posenc.hf import layer
from tests.hf.compare import same

SIZES = dict(
    vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, local_radius=6, global_block_size=5, decoder_start_token_id=0, pad_token_id=0,
    eos_token_id=1,
)  # fmt: skip


def make(kind, model=LongT5ForConditionalGeneration):
    torch.manual_seed(1)
    made = model(LongT5Config(**SIZES, encoder_attention_type=kind)).eval()
    for name, parameter in made.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return made


def batch(length=37):
    torch.manual_seed(2)
    ids = torch.randint(2, 99, (3, length))
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, 20:] = 0
    mask[2, :9] = 0
    return ids, mask


@pytest.mark.parametrize("kind, layers", [("local", 6), ("transient-global", 4)])
def test_outputs_gradients_and_restore(kind, layers):
    ids, mask = batch()
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :11])
    same(make(kind), inputs, None, layers=layers)


@pytest.mark.parametrize("length", [1, 7, 64])
def test_local_encoder(length):
    ids = torch.randint(2, 99, (2, length))
    same(make("local", LongT5EncoderModel), dict(input_ids=ids), None, layers=2)


@pytest.mark.parametrize("options", [{}, dict(num_beams=3)])
@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_generate(kind, options):
    ids, mask = batch()
    model = make(kind)
    options = dict(max_new_tokens=8, do_sample=False, **options)
    theirs = model.generate(input_ids=ids, attention_mask=mask, **options)
    hf.accelerate(model)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **options), theirs)


def test_output_attentions_falls_back():
    ids, mask = batch()
    model = make("local")
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5], output_attentions=True)
    theirs = model(**inputs)
    ours = hf.accelerate(model)(**inputs)
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for a, b in zip(getattr(ours, kind), getattr(theirs, kind), strict=True):
            assert torch.equal(a, b)


def test_what_stays_is_said(caplog):
    layer._said.clear()
    with caplog.at_level(logging.WARNING, logger="posenc.hf"):
        hf.accelerate(make("transient-global"))
    assert "transient-global encoder layers stay as they are" in caplog.text
