"""attn_implementation="posenc": the interfaces of transformers, and the masks that come through them."""

import copy
import importlib
import importlib.util

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from transformers import masking_utils as theirs

from posenc import hf
from posenc.hf import interface, interface_mask, rules
from posenc.hf.interface import Mask, make_mask
from tests.hf.compare import outputs_agree
from tests.hf.harness import mask_of, scatter
from tests.seeds import seed

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
    interface_mask._known.cache_clear()
    try:
        assert "sliding_window_overlay" not in interface_mask._known()
    finally:
        interface_mask._known.cache_clear()


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


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_output_attentions(kind):
    """gpt2 does not pass output_attentions on to its layers."""
    ids = torch.randint(2, 99, (3, 12))
    if kind == "llama":
        model = llama(attn_implementation="eager")
    else:
        sizes = dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4)
        model = scatter(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="eager")))
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


MLA = dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, q_lora_rank=16, kv_lora_rank=16, n_routed_experts=2, num_experts_per_tok=1)  # fmt: skip
INDEXED = dict(
    **MLA, n_group=1, topk_group=1, index_topk=4, index_head_dim=16, index_n_heads=2, first_k_dense_replace=1
)
BLOCKS = dict(
    head_dim=8, dense_intermediate_size=24, shared_intermediate_size=24, num_local_experts=2, num_experts_per_tok=1, index_block_size=4,
    index_topk_blocks=2, index_n_heads=2, index_head_dim=8, layer_types=["full_attention", "minimax_m3_sparse"],
)  # fmt: skip
OWN_MASKS = {
    "glm_moe_dsa": ("GlmMoeDsa", dict(INDEXED, num_key_value_heads=4)),
    "hy_v4": ("HYV4", dict(INDEXED, num_key_value_heads=4)),
    "minimax_m3_vl": ("MiniMaxM3VL", BLOCKS),
    "deepseek_v4": (
        "DeepseekV4",
        dict(
            MLA,
            head_dim=16,
            num_key_value_heads=1,
            index_topk=4,
            index_n_heads=2,
            layer_types=["compressed_sparse_attention"] * 2,
        ),
    ),
    "git": ("Git", dict(vision_config=dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))),
}
"""Models that select keys for each query or add the mask to the scores themselves, with so few that it matters."""


@pytest.mark.parametrize("folder", OWN_MASKS)
def test_models_that_change_the_mask_themselves(folder):
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        pytest.skip(f"transformers {transformers.__version__} has no {folder}")
    name, options = OWN_MASKS[folder]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kind = getattr(modeling, f"{name}ForCausalLM")
    torch.manual_seed(seed(1))
    model = scatter(
        kind(
            kind.config_class(**SIZES | dict(pad_token_id=0, intermediate_size=40, moe_intermediate_size=16) | options)
        ),
        0.1,
    )
    ids = torch.randint(2, 99, (3, 29))
    mask = mask_of(ids, "right")
    model.set_attn_implementation("eager")
    wanted = model(ids, mask, use_cache=False).logits[mask.bool()]
    model.set_attn_implementation("posenc")
    outputs_agree(model(ids, mask, use_cache=False).logits[mask.bool()], wanted)


def test_a_mask_of_other_keys_raises():
    """Joined keys that the mask does not know would be visible to every query."""
    mask = make_mask(batch_size=1, q_length=5, kv_length=5)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    with pytest.raises(ValueError, match="for 5 queries and 5 keys, and this layer has 5 and 7"):
        interface.attention(torch.nn.Module(), q, k, k, mask)


def test_a_mask_is_used_as_a_tensor():
    mask = make_mask(batch_size=2, q_length=5, kv_length=5)
    whole, other = torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5), torch.rand(2, 1, 5, 5) > 0.5
    assert torch.equal(~mask, ~whole) and torch.equal(mask & other, whole & other)
    assert torch.equal(mask | other, whole | other) and torch.equal(other & mask, whole & other)
    assert torch.equal(torch.cat([mask, other], dim=-1), torch.cat([whole, other], dim=-1))
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    added = scores.masked_fill(~whole, torch.finfo(torch.float64).min)
    for summed in (scores + mask, mask + scores, torch.add(scores, mask)):  # True would be 1
        assert torch.equal(summed.softmax(-1), added.softmax(-1))


def eager_only(name):
    """Models that are written for "eager" alone, and inputs with padding."""
    ids = torch.randint(2, 99, (3, 12))
    mask = mask_of(ids, "right")
    if name == "nllb_moe":  # its experts read the mask
        config = transformers.NllbMoeConfig(
            vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=32, decoder_ffn_dim=32, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1,
        )  # fmt: skip
        return transformers.NllbMoeModel(config), dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    config = transformers.BridgeTowerConfig(  # is_causal where both sides are visible, and an image without a mask
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        text_config=dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=99),
        vision_config=dict(hidden_size=64, num_hidden_layers=2, patch_size=8, image_size=32),
    )  # fmt: skip
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=torch.randn(3, 3, 32, 32))
    return transformers.BridgeTowerModel(config), inputs


@pytest.mark.parametrize(
    ("folder", "config", "alone"),
    [("llama", None, False), ("gpt_oss", None, False), ("gemma2", None, False), ("informer", None, True), ("git", None, True),
     ("gemma4", "Gemma4AudioConfig", True), ("gemma4", "Gemma4TextConfig", False)],
)  # fmt: skip
def test_which_models_are_written_for_eager_alone(folder, config, alone):
    """Not those with sinks or capped scores, which "sdpa" cannot run, nor those of a file whose other model is."""
    file = f"transformers.models.{folder}.modeling_{folder}"
    modeling = importlib.import_module(file)
    if config == "Gemma4AudioConfig" and modeling.Gemma4AudioModel._supports_sdpa:
        pytest.skip(f"transformers {transformers.__version__} reads boolean masks there")
    assert interface_mask.is_eager_only(file, config) is alone


@pytest.mark.parametrize("name", ["nllb_moe", "bridgetower"])
def test_models_written_for_eager_alone(name):
    torch.manual_seed(seed(1))
    model, inputs = eager_only(name)
    scatter(model)
    with torch.no_grad():
        wanted = model(**inputs)
        model.set_attn_implementation("posenc")
        found = model(**inputs)
    which = 1 if name == "bridgetower" else 0  # the image, which reads the text
    outputs_agree(found[which], wanted[which])
    if name == "bridgetower":  # its weights are there without a request
        outputs_agree(found.attentions[0][1], wanted.attentions[0][1])


def test_a_model_without_the_interface_gets_the_mask_that_it_adds():
    """MPNet takes any name, and adds its mask to its scores: a boolean one would be a bias of 1."""
    torch.manual_seed(0)
    config = MPNetConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ids, mask = torch.randint(3, 30, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    model = MPNetModel._from_config(config, attn_implementation="eager").eval()
    named = MPNetModel._from_config(copy.deepcopy(config), attn_implementation="posenc").eval()
    named.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(named(ids, attention_mask=mask)[0], model(ids, attention_mask=mask)[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_an_argument_that_nobody_has_read_runs_the_eager_attention(monkeypatch, compiled):
    """A term that a later release passes by a new name is not dropped in silence."""
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def with_a_new_term(module, query, key, value, attention_mask, scaling, dropout=0.0, novelty=None, **kwargs):
        return eager(module, query + novelty, key, value, attention_mask, scaling, dropout, **kwargs)

    model, ids = llama(), torch.randint(2, 99, (2, 9))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_a_new_term)
    model.set_attn_implementation("eager")
    run = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad():
        theirs = model(ids, novelty=0.3).logits
        assert (theirs - model(ids, novelty=0.0).logits).abs().max() > 1e-3
        ours = hf.accelerate(model) and run(ids, novelty=0.3).logits
    outputs_agree(ours, theirs)
