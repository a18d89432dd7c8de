"""extend: transformers' numbers for every scaling, through save and load; right with a cache where theirs is not."""

import logging

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    GemmaConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posenc import hf, scaling
from posenc.hf import layer
from tests.hf.compare import outputs_agree, shape_of

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2)
CONFIGS = {
    "llama": lambda **more: LlamaConfig(**{**SIZES, **GROUPED, **more}),
    "mistral": lambda **more: MistralConfig(**{**SIZES, **GROUPED, **more}),
    "qwen2": lambda **more: Qwen2Config(**{**SIZES, **GROUPED, **more}),
    "qwen3": lambda **more: Qwen3Config(**{**SIZES, **GROUPED, "head_dim": 8, **more}),
    "gemma": lambda **more: GemmaConfig(**{**SIZES, **GROUPED, "head_dim": 8, **more}),
    "phi": lambda **more: PhiConfig(**{**SIZES, **more}),
    "gemma3_text": lambda **more: Gemma3TextConfig(
        **{**SIZES, **GROUPED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], **more}
    ),
    "gpt_neox": lambda **more: GPTNeoXConfig(**{**SIZES, "hidden_size": 64, **more}),
}
SCALINGS = {
    "linear": scaling.Linear(factor=4.0),
    "ntk": scaling.NTK(factor=4.0),
    "yarn": scaling.YaRN(factor=4.0, original=16),
    "llama3": scaling.Llama3(factor=4.0, low=1.0, high=4.0, original=16),
}
GPTJ = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=16, n_inner=37)
DYNAMIC = {
    "dynamic": scaling.DynamicNTK(factor=2.0, original=16),
    "longrope": scaling.LongRoPE(short=(1.0,) * 4, long=(1.0, 2.0, 3.0, 4.0), original=16, factor=4.0),
}


def make(family, **more):
    torch.manual_seed(1)
    config = GPTJConfig(**{**GPTJ, **more}) if family == "gptj" else CONFIGS[family](**more)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


IDS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "family, name",
    [(f, "yarn") for f in CONFIGS]
    + [("llama", n) for n in (*SCALINGS, *DYNAMIC) if n != "yarn"]
    + [("gemma3_text", n) for n in ("linear", *DYNAMIC)]
    + [("phi", "dynamic"), ("gpt_neox", "dynamic")],
)
def test_save_and_load_gives_the_same_numbers(family, name, tmp_path):
    model = make(family)
    before, config = shape_of(model), dict(model.config.rope_parameters)
    plain = model(IDS).logits
    keys = list(model.state_dict())
    assert hf.extend(model, {**SCALINGS, **DYNAMIC}[name]) is model
    assert list(model.state_dict()) == keys
    ours = model(IDS, use_cache=False).logits
    assert (ours - plain).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    said = loaded.config.rope_parameters
    if family == "gemma3_text":
        assert said["sliding_attention"] == config["sliding_attention"]
        said = said["full_attention"]
    assert said["rope_type"] == ("default" if name == "ntk" else name)
    outputs_agree(ours, loaded(IDS, use_cache=False).logits)
    hf.restore(model)
    assert shape_of(model) == before
    assert (model.config.rope_parameters, model.config.max_position_embeddings) == (config, 16)
    assert torch.equal(model(IDS).logits, plain)


UNROTATED = [(f, n) for f in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text") for n in DYNAMIC]
ONE_LAYER = {"gptj": dict(n_layer=1), "gemma3_text": dict(sliding_window=7)}


@pytest.mark.parametrize("family, name", [*UNROTATED, ("phi", "dynamic"), ("gpt_neox", "dynamic"), ("gptj", "dynamic")])
def test_a_cache_changes_nothing_where_the_rotation_follows_the_length(family, name):
    """One layer that follows the length: its keys do not depend on earlier ones, so each step must equal a whole
    forward. Gemma 3 has a layer with a window before it, which keeps its rotation.
    """
    model = hf.extend(make(family, **ONE_LAYER.get(family, dict(num_hidden_layers=1))), DYNAMIC[name])
    with torch.no_grad():
        out = model(IDS[:, :10], use_cache=True)
        for end in range(11, 41, 3):
            out = model(IDS[:, out.past_key_values.get_seq_length() : end], past_key_values=out.past_key_values)
            outputs_agree(out.logits[:, -1], model(IDS[:, :end], use_cache=False).logits[:, -1])


def test_transformers_own_cache_is_inconsistent_there():
    """What the test above would catch."""
    model = make("llama", num_hidden_layers=1, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))
    with torch.no_grad():
        first = model(IDS[:, :20], use_cache=True)
        step = model(IDS[:, 20:40], past_key_values=first.past_key_values).logits[:, -1]
        assert (step - model(IDS, use_cache=False).logits[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("family, more", [("llama", {}), ("gemma3_text", dict(sliding_window=7))])
def test_left_padding_and_generate_with_a_length_dependent_rotation(family, more):
    model = hf.extend(make(family, **more), DYNAMIC["dynamic"])
    alone = model.generate(IDS[:1, :14], max_new_tokens=10, do_sample=False)
    padded = torch.cat((torch.zeros(1, 6, dtype=torch.long), IDS[:1, :14]), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :6] = 0
    both = model.generate(padded, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(both[:, 6:], alone)


def their_table(length, kind, **parameters):
    """GPT-J's [sines, cosines] from transformers' own frequencies."""
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, max_position_embeddings=16,
        rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **parameters),
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1) * factor


@pytest.mark.parametrize("name", ["linear", "yarn", "dynamic"])
def test_gptj(name, caplog):
    layer._said.clear()
    model = make("gptj")
    before, plain = shape_of(model), model(IDS[:, :16]).logits
    keys = list(model.state_dict())
    with caplog.at_level(logging.WARNING, logger="posenc.hf"):
        hf.extend(model, {**SCALINGS, **DYNAMIC}[name], max_length=40)
    assert "no word for a scaling" in caplog.text
    assert (list(model.state_dict()), model.config.max_position_embeddings) == (keys, 40)
    ours = model(IDS, use_cache=False).logits
    theirs = make("gptj", n_positions=40)
    more = {"yarn": dict(factor=4.0, original_max_position_embeddings=16), "linear": dict(factor=4.0)}
    for block in theirs.transformer.h:
        block.attn.embed_positions = their_table(40, name, **more.get(name, dict(factor=2.0)))
    outputs_agree(ours, theirs(IDS, use_cache=False).logits)
    with pytest.raises(hf.UnsupportedModel, match="extended already"):
        hf.extend(model, SCALINGS["linear"])
    hf.restore(model)
    assert (shape_of(model), model.config.max_position_embeddings) == (before, 16)
    assert torch.equal(model(IDS[:, :16]).logits, plain)


def test_what_cannot_be_extended_says_why():
    with pytest.raises(hf.UnsupportedModel, match="no rotary_emb to swap"):
        hf.extend(BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)), None)
    with pytest.raises(hf.UnsupportedModel, match="keys must be cached unrotated.*not for OlmoAttention"):
        hf.extend(AutoModelForCausalLM.from_config(OlmoConfig(**SIZES)), DYNAMIC["dynamic"])
    model = hf.extend(make("llama"), SCALINGS["yarn"])
    with pytest.raises(hf.UnsupportedModel, match="extended already"):
        hf.extend(model, SCALINGS["linear"])
