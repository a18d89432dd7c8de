"""Models whose attention has no positional term of its own: through the attention interface, with compact masks."""

import pytest
import torch
import transformers

from tests.hf.harness import Case, pairs, run_check, scatter

TEXT = dict(vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4)
GQA = dict(TEXT, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0)
GREEDY = {"greedy": {}, "beams": dict(num_beams=3), "static": dict(cache_implementation="static")}


def tokens():
    return {"input_ids": torch.randint(2, 99, (3, 29))}


def case(name, options, layers=2, config=None, **more):
    model = getattr(transformers, name)
    config = getattr(transformers, config or f"{name.split('For')[0].removesuffix('Model')}Config")
    make = lambda: scatter(model(config(**options)))  # noqa: E731
    return Case(make, more.pop("batch", tokens), layers=layers, way="interface", **more)


def image():
    return {"pixel_values": torch.randn(3, 3, 16, 16)}


def summary():
    ids = torch.randint(2, 99, (3, 29))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :9]}


CASES = {
    "llama": case("LlamaForCausalLM", GQA, generates=GREEDY),
    "mistral window": case("MistralForCausalLM", dict(GQA, sliding_window=7), generates=GREEDY),
    "gemma2 softcap": case("Gemma2ForCausalLM", dict(GQA, sliding_window=7, query_pre_attn_scalar=8, attn_implementation="eager"), generates=GREEDY),
    "gemma3": case("Gemma3ForCausalLM", dict(GQA, sliding_window=7, layer_types=["sliding_attention", "full_attention"]), config="Gemma3TextConfig", generates=GREEDY),
    "gpt2": case("GPT2Model", dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "bert": case("BertModel", TEXT),
    "bart": case(
        "BartModel",
        dict(vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
             decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=64),
        layers=6, batch=summary,
    ),
    "vit": case(
        "ViTModel", dict(hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4),
        paddings=("none",), batch=image,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
