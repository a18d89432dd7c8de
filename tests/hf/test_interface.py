"""attn_implementation="posenc": the doors of transformers, and the masks that come through them."""

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from transformers import masking_utils as theirs

from posenc import hf
from posenc.hf import interface, rules
from posenc.hf.interface import Mask, make_mask
from tests.hf.compare import outputs_agree
from tests.hf.harness import mask_of, scatter

SIZES = dict(
    vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip

T5_SIZES = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)


def llama(**options):
    return scatter(LlamaForCausalLM(LlamaConfig(**SIZES, **options)))


def test_every_door(tmp_path):
    """from_pretrained, from_config and set_attn_implementation, without accelerate."""
    model, ids = llama(), torch.randint(2, 99, (3, 29))
    mask = mask_of(ids, "left")
    wanted = model(ids, mask).logits[mask.bool()]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="posenc")
    made = AutoModelForCausalLM.from_config(model.config, attn_implementation="posenc")
    made.load_state_dict(model.state_dict())
    model.set_attn_implementation("posenc")
    for one in (model, loaded.eval(), made.eval()):
        assert {layer.way for layer in hf.report(one).layers} == {"interface"}
        outputs_agree(one(ids, mask).logits[mask.bool()], wanted)
    model.set_attn_implementation("sdpa")
    assert hf.report(model).layers == []


def test_t5_without_accelerate_adds_its_dense_bias(tmp_path):
    model, ids = scatter(T5EncoderModel(T5Config(**T5_SIZES))), torch.randint(2, 99, (3, 29))
    mask = mask_of(ids, "holes")
    wanted = model(ids, mask).last_hidden_state[mask.bool()]
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="posenc").encoder.eval()
    outputs_agree(loaded(ids, mask).last_hidden_state[mask.bool()], wanted)
    hf.accelerate(model)
    model.set_attn_implementation("eager")  # the replaced method steps aside
    outputs_agree(model(ids, mask).last_hidden_state[mask.bool()], wanted)


FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(4),
    "window both ways": theirs.sliding_window_bidirectional_mask_function(3),
    "packed": theirs.and_masks(
        theirs.causal_mask_function, theirs.packed_sequence_mask_function(torch.arange(33).reshape(3, 11) // 3)
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_is_the_one_of_transformers(name, padded):
    given = dict(batch_size=3, q_length=11, kv_length=11, mask_function=FUNCTIONS[name])
    given["attention_mask"] = mask_of(torch.zeros(3, 11), "left").bool() if padded else None
    mask = make_mask(**given)
    assert isinstance(mask, Mask)
    assert mask.kept is None
    wanted = theirs.sdpa_mask(**given, allow_is_causal_skip=False)
    assert torch.equal(mask.whole(), wanted)
    assert torch.equal(torch.where(mask, 1, 0), wanted.long())
    assert torch.equal(mask[:, :, :, :5], wanted[..., :5])
    assert mask.dtype == torch.bool
    assert mask.dim() == 4


def test_a_step_of_a_cache_and_a_window_that_slides():
    full = make_mask(2, 3, 11, q_offset=8, kv_offset=0, mask_function=theirs.causal_mask_function)
    assert full.positions.offset == -8
    sliding = dict(q_offset=20, kv_offset=15, mask_function=theirs.sliding_window_causal_mask_function(5))
    mask = make_mask(2, 1, 6, **sliding, attention_mask=torch.ones(2, 21, dtype=torch.bool))
    assert torch.equal(mask.whole(), theirs.sdpa_mask(2, 1, 6, **sliding, allow_is_causal_skip=False))


@pytest.mark.parametrize(
    "function",
    [
        theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 3),
        lambda b, h, q, k: k <= q,
    ],
)
def test_other_masks_are_dense(function):
    given = dict(batch_size=2, q_length=9, kv_length=9, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(make_mask(**given), theirs.sdpa_mask(**given))


def test_a_function_that_changed_its_meaning_is_not_read(monkeypatch):
    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    sliding_window_overlay.__module__ = theirs.__name__
    monkeypatch.setattr(theirs, "sliding_window_overlay", sliding_window_overlay)
    interface._known.cache_clear()
    try:
        assert "sliding_window_overlay" not in interface._known()
    finally:
        interface._known.cache_clear()


def test_packed_texts_are_as_if_alone(monkeypatch):
    """position_ids that start again: transformers packs, posenc gets documents and no dense mask."""
    model = llama()
    ids = torch.randint(2, 99, (1, 20))
    positions = torch.cat((torch.arange(7), torch.arange(13)))[None]
    alone = torch.cat([model(part).logits for part in ids.split((7, 13), dim=1)], dim=1)
    monkeypatch.setattr(rules, "DOCUMENTS", 1 << 26)
    calls, attend = [], interface.attend
    monkeypatch.setattr(interface, "attend", lambda *a, **k: calls.append(k) or attend(*a, **k))
    packed = hf.accelerate(model)(ids, position_ids=positions, use_cache=False).logits
    outputs_agree(packed, alone)
    assert calls == []  # on a CPU a dense mask is faster, made once
    monkeypatch.setattr(rules, "DOCUMENTS", 0)
    outputs_agree(model(ids, position_ids=positions, use_cache=False).logits, alone)
    assert ["documents" in one and "mask" not in one for one in calls] == [True, True]


def test_no_dense_mask_is_made_for_padding_or_a_window(monkeypatch):
    made = []
    monkeypatch.setattr(Mask, "dense", lambda self: made.append(self))
    ids = torch.randint(2, 99, (3, 29))
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=7)).eval()
    for padding in ("none", "left", "right", "holes"):
        hf.accelerate(model)(ids, attention_mask=mask_of(ids, padding))
    assert made == []


def test_a_dense_mask_is_made_once_for_all_layers(monkeypatch):
    made, dense = [], Mask.dense
    monkeypatch.setattr(rules, "MASKED", 384 * 384)
    monkeypatch.setattr(Mask, "dense", lambda self: made.append(self.kept) or dense(self))
    ids = torch.randint(2, 99, (3, 29))
    hf.accelerate(llama())(ids, attention_mask=mask_of(ids, "left"))
    assert made == [None]


def test_a_mask_of_the_users_own():
    model, ids = llama(), torch.randint(2, 99, (2, 12))
    visible = torch.ones(12, 12, dtype=torch.bool).tril() & ~torch.eye(12, dtype=torch.bool).roll(-3, 1)
    mask = torch.zeros(2, 1, 12, 12).masked_fill(~visible, torch.finfo(torch.float32).min)
    wanted = model(ids, attention_mask=mask).logits
    outputs_agree(hf.accelerate(model)(ids, attention_mask=mask).logits, wanted)


def test_output_attentions():
    model, ids = llama(attn_implementation="eager"), torch.randint(2, 99, (2, 12))
    wanted = model(ids, output_attentions=True)
    model.set_attn_implementation("posenc")
    ours = model(ids, output_attentions=True)
    outputs_agree(ours.logits, wanted.logits)
    for a, b in zip(ours.attentions, wanted.attentions, strict=True):
        outputs_agree(a, b)


def test_a_static_cache_without_padding():
    """transformers makes no mask for the start of a text in an empty static cache."""
    ids = torch.randint(2, 99, (2, 11))
    for model in (llama(), scatter(T5ForConditionalGeneration(T5Config(**T5_SIZES, decoder_start_token_id=0)))):
        options = dict(max_new_tokens=6, do_sample=False, cache_implementation="static")
        if model.config.is_encoder_decoder:
            options["decoder_input_ids"] = ids[:, :5]
        wanted = model.generate(ids, **options)
        assert torch.equal(hf.accelerate(model).generate(ids, **options), wanted)
