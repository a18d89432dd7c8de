"""T5, mT5 and UMT5 against transformers: padded, cached, trained, generated."""

import io
import logging

import pytest
import torch
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from posenc import hf
from posenc.hf import interface, layer
from tests.hf.compare import batch, outputs_agree, run
from tests.seeds import seed

SIZES = dict(
    vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
FAMILIES = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}


def make(family, attn="eager", **options):
    config, model = FAMILIES[family]
    torch.manual_seed(seed(1))
    made = model(config(**{**SIZES, **options}, attn_implementation=attn)).eval()
    for name, parameter in made.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter, std=1.0)  # a bias that matters
    return made


@pytest.mark.parametrize("length", [1, 7, 129])
def test_encoder_of_awkward_lengths(length):
    torch.manual_seed(seed(3))
    model = T5EncoderModel(T5Config(**SIZES)).eval()
    ids = torch.randint(2, 99, (2, length))
    theirs, _ = run(model, dict(input_ids=ids), None, backward=False)
    hf.accelerate(model)
    outputs_agree(model(ids).last_hidden_state, theirs)
    outputs_agree(model.encoder(ids, torch.ones_like(ids)).last_hidden_state, theirs)


def test_no_dense_mask_reaches_a_layer(monkeypatch):
    ids, mask = batch()
    model, calls = hf.accelerate(make("t5")), []
    attend, by_kernel = interface.attend, interface._by_kernel
    monkeypatch.setattr(interface, "_by_kernel", lambda *a: calls.append({"sizes": a[3].shape[2]}) or by_kernel(*a))
    monkeypatch.setattr(interface, "attend", lambda *a, **k: calls.append(k) or attend(*a, **k))
    model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    assert all(given.get("mask") is None for given in calls)
    assert ["key_mask" in given for given in calls] == [True, True, False, False, False, False]
    assert [given.get("causal") for given in calls] == [False, False, True, None, True, None]
    assert [given.get("sizes") for given in calls] == [None, None, None, 1, None, 1]  # cross-attention: padding alone


def test_a_dense_mask_of_the_users_own_is_kept():
    ids, _ = batch()
    window = (torch.arange(37)[:, None] - torch.arange(37)).abs() < 5
    model = T5EncoderModel(T5Config(**SIZES)).eval()
    inputs = dict(input_ids=ids, attention_mask=torch.zeros(3, 1, 37, 37).masked_fill(~window, -1e9))
    theirs, _ = run(model, inputs, None, backward=False)
    outputs_agree(run(hf.accelerate(model), inputs, None, backward=False)[0], theirs)


def test_output_attentions_falls_back_for_that_call_and_says_so_once(caplog):
    ids, mask = batch()
    model = make("t5")
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    theirs = model(**inputs, output_attentions=True)
    hf.accelerate(model)
    layer._logged.clear()
    with caplog.at_level(logging.WARNING, logger="posenc.hf"):
        ours = model(**inputs, output_attentions=True)
        model(**inputs, output_attentions=True)
    assert len([r for r in caplog.records if "output_attentions" in r.message]) == 1
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for a, b in zip(getattr(ours, kind), getattr(theirs, kind), strict=True):
            outputs_agree(a, b)
    assert len(model(**inputs, output_hidden_states=True).encoder_hidden_states) == 3


def test_dropout_acts_in_training_and_a_model_learns():
    ids, mask = batch()
    model = hf.accelerate(make("t5")).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    attention, x = model.encoder.block[0].layer[0].SelfAttention, torch.randn(1, 9, 32)
    assert not torch.equal(attention(x)[0], attention(x)[0])
    attention.eval()
    assert torch.equal(attention(x)[0], attention(x)[0])


def test_pickle_and_save_pretrained(tmp_path):
    ids, mask = batch()
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    model = hf.accelerate(make("t5"))
    ours, _ = run(model, inputs, None, backward=False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert len(hf.report(again).layers) == 6
    assert torch.equal(run(again, inputs, None, backward=False)[0], ours)
    assert hf.report(hf.restore(again)).layers == []
    model.save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert type(loaded.encoder.block[0].layer[0].SelfAttention).__module__.startswith("transformers")
    outputs_agree(run(loaded, inputs, None, backward=False)[0], ours)
