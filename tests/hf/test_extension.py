"""extend: transformers' numbers for every scaling, through save and load; right with a cache where theirs is not."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTJConfig,
    GPTJModel,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from posenc import hf, scaling
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
    "gpt_neox": lambda **more: GPTNeoXConfig(**{**SIZES, **more}),
}
SCALINGS = {
    "linear": scaling.Linear(factor=4.0),
    "ntk": scaling.NTK(factor=4.0),
    "yarn": scaling.YaRN(factor=4.0, original=16),
    "llama3": scaling.Llama3(factor=4.0, low=1.0, high=4.0, original=16),
}
DYNAMIC = {
    "dynamic": scaling.DynamicNTK(factor=2.0, original=16),
    "longrope": scaling.LongRoPE(short=(1.0,) * 4, long=(1.0, 2.0, 3.0, 4.0), original=16, factor=4.0),
}


def make(family, **more):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**more)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


IDS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "family, name", [(f, "yarn") for f in CONFIGS] + [("llama", n) for n in (*SCALINGS, *DYNAMIC) if n != "yarn"]
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
    assert loaded.config.rope_parameters["rope_type"] == ("default" if name == "ntk" else name)
    outputs_agree(ours, loaded(IDS, use_cache=False).logits)
    hf.restore(model)
    assert shape_of(model) == before
    assert (model.config.rope_parameters, model.config.max_position_embeddings) == (config, 16)
    assert torch.equal(model(IDS).logits, plain)


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_a_cache_changes_nothing_where_the_rotation_follows_the_length(family, name):
    """One layer: its keys do not depend on earlier lengths, so each step must equal a whole forward."""
    model = hf.extend(make(family, num_hidden_layers=1), DYNAMIC[name])
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


def test_left_padding_and_generate_with_a_length_dependent_rotation():
    model = hf.extend(make("llama"), DYNAMIC["dynamic"])
    alone = model.generate(IDS[:1, :14], max_new_tokens=10, do_sample=False)
    padded = torch.cat((torch.zeros(1, 6, dtype=torch.long), IDS[:1, :14]), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :6] = 0
    both = model.generate(padded, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(both[:, 6:], alone)


def test_what_cannot_be_extended_says_why():
    with pytest.raises(hf.UnsupportedModel, match="GPT-J keeps a table"):
        hf.extend(GPTJModel(GPTJConfig(vocab_size=9, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)), SCALINGS["yarn"])
    with pytest.raises(hf.UnsupportedModel, match="keys must be cached unrotated"):
        hf.extend(make("phi"), DYNAMIC["dynamic"])
    model = hf.extend(make("llama"), SCALINGS["yarn"])
    with pytest.raises(hf.UnsupportedModel, match="extended already"):
        hf.extend(model, SCALINGS["linear"])
