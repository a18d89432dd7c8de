"""Which way a call takes on a CPU: the rules' answers, and that calls follow them. No clocks."""

import pytest
import torch
import transformers

from posenc import hf
from posenc.hf import interface, interface_mask, rules
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import mask_of, outcome, scatter

SIZES = dict(vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, sliding_window=9, max_position_embeddings=512, pad_token_id=0)  # fmt: skip
T5 = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.1)


@pytest.fixture(autouse=True)
def rules_as_they_are(engines_for_short_texts, monkeypatch):
    monkeypatch.undo()  # tests/hf/conftest.py


def original(length, kind="bias", *, gradient=False, drops=False, padded=False, queries=None):
    return rules.keeps_original(kind, queries or length, length, gradient, drops, padded)


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (dict(length=64), True),
        (dict(length=296), False),
        (dict(length=700, drops=True), True),
        (dict(length=296, kind="alibi", padded=True), True),
        (dict(length=600, kind="alibi", padded=True), False),
        (dict(length=296, kind="alibi"), False),
        (dict(length=130, kind="alibi", padded=True, queries=1), True),
        (dict(length=130, kind="alibi", queries=1), False),
        (dict(length=296, kind="disentangled", gradient=True), True),
        (dict(length=296, kind="disentangled"), False),
        (dict(length=296, kind="xlnet", gradient=True), True),
        (dict(length=512, kind="window", gradient=True), True),
        (dict(length=512, kind="transformer_xl", gradient=True), True),
        (dict(length=296, kind="transformer_xl"), True),
        (dict(length=1000, kind="transformer_xl", gradient=True), False),
    ],
)
def test_where_an_original_stays(facts, wanted):
    assert original(**facts) is wanted


def test_where_masks_and_biases_stay_dense():
    assert rules.keeps_dense_mask(1, 512 * 512, False) and not rules.keeps_dense_mask(1, 768 * 768, False)
    assert rules.keeps_dense_mask(2, 1024 * 1024, True)
    assert rules.keeps_dense_bias(296 * 296, True, False) and not rules.keeps_dense_bias(1000 * 1000, True, False)
    assert rules.keeps_dense_bias(512 * 512, False, False) and not rules.keeps_dense_bias(1000 * 1000, False, False)
    assert rules.keeps_dense_bias(1000 * 1000, True, True)


def model_of(name):
    torch.manual_seed(0)
    if name == "t5":
        return scatter(transformers.T5EncoderModel(transformers.T5Config(**T5)))
    if name == "gpt_oss":
        sizes = dict(SIZES, num_local_experts=2, num_experts_per_tok=1)
        return scatter(transformers.GptOssModel(transformers.GptOssConfig(**sizes, attn_implementation="eager")))
    config = transformers.Gemma2Config(**SIZES, query_pre_attn_scalar=8, attn_implementation="eager")
    return scatter(transformers.Gemma2Model(config))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("name", "length"), [("t5", 23), ("t5", 300), ("gpt_oss", 23), ("gemma2", 23), ("gemma2", 300)]
)
def test_short_calls_run_no_engine_and_agree(name, length, padding, monkeypatch):
    """Sinks, capped scores (from 256 tokens on in blocks) and T5's table, with gradients and without."""
    model, ids = model_of(name), torch.randint(2, 99, (3, length))
    inputs = {"input_ids": ids, "attention_mask": mask_of(ids, padding)}
    theirs, gradients = outcome(model, inputs)
    hf.accelerate(model)  # the first of a family compares a tiny model, with its engine too
    monkeypatch.setattr(interface, "attend", lambda *a, **k: pytest.fail("an engine runs"))
    ours, ours_gradients = outcome(model, inputs)
    outputs_agree(ours, theirs)
    gradients_agree(ours_gradients, gradients)
    with torch.no_grad():
        real = inputs["attention_mask"].bool()
        outputs_agree(model(**inputs)[0][real], theirs)


def test_a_kept_bias_follows_its_table():
    model, ids = model_of("t5"), torch.randint(2, 99, (2, 23))
    kept = hf.accelerate(model)(ids)[0]
    with torch.no_grad():
        model(ids)
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(2)
        ours = model(ids)[0]
        assert (ours - kept).abs().max() > 1e-3
        outputs_agree(ours, hf.restore(model)(ids)[0])


def test_masks_are_made_once_for_all_layers(monkeypatch):
    made, whole = [], interface_mask.as_summand
    monkeypatch.setattr(interface_mask, "as_summand", lambda *a: made.append(a) or whole(*a))
    ids = torch.randint(2, 99, (3, 23))
    hf.accelerate(model_of("gpt_oss"))(ids, attention_mask=mask_of(ids, "left"))
    assert len(made) == 2  # one for sliding layers, one for full ones


def test_rules_of_a_gpu():
    layer, gpu = torch.nn.Linear(1, 1), torch.device("cuda")
    assert interface.prefers_original(layer, 512, 512, gpu, kind="falcon")
    assert not interface.prefers_original(layer, 1024, 1024, gpu, kind="falcon")
    assert not interface.prefers_original(layer, 64, 64, gpu)
    assert interface.prefers_dense(layer, 512 * 512, gpu, "xlnet")
    assert not interface.prefers_dense(layer, 2048 * 2048, gpu, "xlnet")
    assert not interface.prefers_dense(layer, 512 * 512, torch.device("cpu"), "xlnet")
    layer.__dict__["posenc_engine"] = "triton"
    assert not interface.prefers_dense(layer, 512 * 512, gpu, "xlnet")
    assert not interface.prefers_original(layer, 512, 512, gpu, kind="falcon")
