"""Configurations of every dialect: read strictly, written back, and different where the readers differ."""

import copy
import math
import random

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import posenc
from posenc.encodings.rope.scaling import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    Linear,
    Llama3,
    LongRoPE,
    MixedNTK,
    Proportional,
    YaRN,
    from_config,
    to_config,
)

ONES, TWOS = (1.0,) * 16, tuple(1.0 + c for c in range(16))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(("dialect", "extension"), [
    *(("hf", x) for x in (
        None, Linear(factor=2.0), DynamicNTK(factor=2.0, original=512), YaRN(factor=4.0, original=512),
        YaRN(factor=4.0, original=512, truncate=False, mscale=0.7, mscale_all_dim=1.0),
        YaRN(factor=4.0, original=512, attention_factor=1.5), Proportional(fraction=0.25, factor=2.0),
        LongRoPE(short=ONES, long=TWOS, original=512, factor=4.0), Llama3(factor=4.0, original=512),
        LongRoPE(short=ONES, long=TWOS, original=512, attention_factor=1.1),
    )),
    *(("vllm", x) for x in (
        None, Linear(factor=2.0), NTK(factor=2.0), DynamicNTK(factor=2.0, original=512, freeze_at=1024),
        MixedNTK(factor=8.0), MixedNTK(factor=8.0, b=0.625),
        YaRN(factor=40.0, original=4096, mscale=1.0, mscale_all_dim=1.0, scale_scores=True),
        YaRN(factor=4.0, original=512), YaRN(factor=4.0, original=512, attention_factor=1.5), Llama3(),
        LongRoPE(short=ONES, long=TWOS, original=512, attention_factor=1.2, freeze_at=2048, factor=4.0),
    )),
    *(("deepseek", x) for x in (
        None, Linear(factor=2.0), DynamicNTK(factor=2.0, original=512),
        YaRN(factor=40.0, original=4096, mscale=0.707, mscale_all_dim=0.707, scale_scores=True),
    )),
    *(("llama.cpp", x) for x in (
        None, Linear(factor=2.0), YaRN(factor=4.0, original=512), YaRN(factor=4.0, original=512, attention_factor=1.5),
        LongRoPE(short=ONES, long=TWOS, original=512, attention_factor=1.2, freeze_at=2048),
        YaRN(factor=40.0, original=4096, mscale=0.707, mscale_all_dim=0.707, scale_scores=True),
    )),
])  # fmt: skip
def test_round_trip(dialect, extension):
    assert from_config(to_config(extension, dialect), dialect) == extension
    rope = posenc.RoPE(head_dim=64, rotary_dim=32, base=50000.0, scaling=extension)
    if not isinstance(extension, Proportional):
        again = posenc.rope.from_config(posenc.rope.to_config(rope, dialect), dialect, layout="half")
        assert (again.head_dim, again.rotary_dim, again.base, again.scaling) == (64, 32, 50000.0, extension)


def test_fixed_frequencies_survive_where_the_scaling_has_no_name():
    for dialect, extension in (("hf", NTK(factor=4.0)), ("llama.cpp", NTK(factor=4.0)), ("llama.cpp", Llama3())):
        rope = posenc.RoPE(head_dim=64, base=500000.0, scaling=extension)
        again = posenc.rope.from_config(posenc.rope.to_config(rope, dialect), dialect, layout="half")
        assert again.frequencies() == pytest.approx(rope.frequencies(), rel=1e-12)
        assert not again.length_dependent


def test_dialects_differ_where_the_readers_do():
    dynamic = {"max_position_embeddings": 512, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert from_config(dynamic) == DynamicNTK(factor=4.0, original=512)
    assert from_config(dynamic, "vllm") == DynamicNTK(factor=4.0, original=512, freeze_at=2048)
    deepseek = {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}}
    assert from_config(deepseek).magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert from_config(deepseek, "deepseek").magnitude == pytest.approx(0.07 * math.log(4) + 1)
    both = {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    assert from_config(both).score_factor == 1.0
    assert from_config(both, "deepseek").score_factor == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    long = {"max_position_embeddings": 4096, "rope_scaling": {
        "rope_type": "longrope", "short_factor": ONES, "long_factor": TWOS, "original_max_position_embeddings": 512}}  # fmt: skip
    assert from_config(long).length_dependent
    assert from_config(long, "vllm", length=400).freeze_at == 400


def gguf(architecture: str) -> dict:
    keys = {"type": "yarn", "factor": 40.0, "original_context_length": 4096}
    return {f"{architecture}.rope.scaling.{key}": value for key, value in keys.items()}


def test_deepseek_is_the_same_model_in_every_dialect():
    """V2 (0.707) and V3 (1): cos and sin are not scaled, all scores are."""
    for all_dims in (0.707, 1.0):
        scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                   "mscale": all_dims, "mscale_all_dim": all_dims}  # fmt: skip
        model = {"model_type": "deepseek_v3", "rope_scaling": scaling}
        ours = from_config(model, "deepseek")
        assert ours.score_factor == pytest.approx((0.1 * all_dims * math.log(40) + 1) ** 2)
        assert ours.magnitude == 1.0
        assert from_config(model, "vllm") == ours
        stored = {
            **gguf("deepseek2"),
            "deepseek2.rope.scaling.yarn_log_multiplier": float(torch.tensor(0.1 * all_dims)),
        }
        assert from_config(stored, "llama.cpp") == ours


def test_the_original_length_of_a_gguf_file_defaults_to_its_context_length():
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.context_length": 2048}
    assert from_config(keys, "llama.cpp") == YaRN(factor=4.0, original=2048)


def test_older_files_of_phi_3_do_not_name_their_scaling():
    keys = {"phi3.rope.scaling.original_context_length": 512, "phi3.rope.scaling.attn_factor": 1.19,
            "phi3.context_length": 4096, "rope_factors_short.weight": ONES, "rope_factors_long.weight": TWOS}  # fmt: skip
    wanted = LongRoPE(short=ONES, long=TWOS, original=512, attention_factor=1.19, freeze_at=4096)
    assert from_config(keys, "llama.cpp") == wanted
    assert from_config(keys, "llama.cpp", length=256).freeze_at == 256


def test_mistral_stores_the_multiplier_itself():
    stored = {**gguf("mistral3"), "mistral3.rope.scaling.yarn_log_multiplier": 0.5}
    found = from_config(stored, "llama.cpp")
    assert found.magnitude == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert found.score_factor == 1.0


@pytest.mark.parametrize("b", [None, 0.625])
def test_ntk_of_vllm(b):
    """Its two branches, as its code computes them in float32."""
    factor, size, base = 8.0, 64, 10000.0
    pairs = torch.arange(0, size, 2).double()
    if b is None:
        theirs = (base * factor) ** (-pairs / size) / factor ** (2 / size)
    else:
        a = math.log(factor) / (size / 2) ** b
        theirs = base ** (-pairs / size) / (a * torch.arange(1, size // 2 + 1).double() ** b).exp()
    config = {"rope_type": "ntk", "factor": factor} | ({} if b is None else {"mixed_b": b})
    rope = posenc.RoPE(head_dim=size, scaling=from_config(config, "vllm"))
    assert rope.frequencies() == pytest.approx(theirs.tolist(), rel=1e-12)


@pytest.mark.parametrize(("config", "dialect", "words"), [
    ({**YARN, "attn_factor": 1.0}, "hf", "'attn_factor' .did you mean 'attention_factor'"),
    ({**YARN, "attention_factor": 1.0}, "vllm", "attention_factor"),
    ({**YARN, "short_factor": [1.0]}, "hf", "short_factor"),
    ({"rope_type": "linear"}, "hf", "needs factor"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "hf", "disagree"),
    ({"rope_type": "spiral", "factor": 2.0}, "hf", "its types are"),
    ({"factor": 2.0}, "hf", "without rope_type"),
    ({"rope_type": "dynamic", "factor": 2.0}, "hf", "whole config.json"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}, "hf",
     "high_freq_factor"),
    ({**YARN, "attention_factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "hf", "contradicts"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, "hf", "rope_theta"),
    ({"rope_parameters": YARN, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "hf", "disagree"),
    ({"original_max_position_embeddings": 64, "rope_parameters": YARN}, "hf", "original_max_position_embeddings"),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0], "long_factor": [1.0, 2.0],
      "factor": 2.0}, "hf", "each pair"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factr": 2.0}, "llama.cpp", "did you mean 'rope.scaling.factor'"),
    ({**gguf("qwen3"), "qwen3.rope.scaling.yarn_log_multiplier": 0.1}, "llama.cpp", "this is qwen3"),
    ({**gguf("llama"), "llama.rope.scaling.yarn_attn_factor": 0.8}, "llama.cpp", "overwritten since"),
    (gguf("deepseek2"), "llama.cpp", "dialect='deepseek'"),
    ({"rope.scaling.type": "linear"}, "llama.cpp", "needs rope.scaling.factor"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "llama.cpp", "original_context_length"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "hf", "must be a number"),
    ({}, "exllama", "'llama.cpp'"),
    ("config.json", "hf", "a dict or a transformers config"),
])  # fmt: skip
def test_strict(config, dialect, words):
    with pytest.raises(ValueError, match=words):
        from_config(config, dialect)


def test_a_frozen_dynamic_yarn_is_written_as_yarn():
    frozen = DynamicYaRN(original=512, freeze_at=2048)
    for dialect in ("hf", "vllm", "llama.cpp"):
        assert from_config(to_config(frozen, dialect), dialect) == YaRN(factor=4.0, original=512)
    with pytest.raises(ValueError, match="no key for it"):
        to_config(DynamicYaRN(original=512))


@pytest.mark.parametrize(("extension", "dialect", "words"), [
    (NTK(factor=2.0), "hf", "give the RoPE"),
    (YaRN(factor=2.0, original=64, ramp="paper"), "hf", "ramp"),
    (YaRN(factor=2.0, original=64, mscale_all_dim=1.0, scale_scores=True), "hf", "scores"),
    (DynamicNTK(original=64), "vllm", "freeze_at"),
    (DynamicNTK(original=64, freeze_at=128), "hf", "follows the length"),
    (DynamicNTK(original=64), "llama.cpp", "follow the length"),
    (LongRoPE(short=ONES, long=TWOS, original=64), "vllm", "freeze_at"),
    (Llama3(), "deepseek", "llama3"),
    (Llama3(), "llama.cpp", "give the RoPE"),
])  # fmt: skip
def test_what_a_dialect_cannot_say_raises(extension, dialect, words):
    with pytest.raises(ValueError, match=words):
        to_config(extension, dialect)


def test_transformers_configs():
    nested = Gemma3TextConfig()
    with pytest.raises(ValueError, match="layer_type"):
        from_config(nested)
    bases = {kind: posenc.rope.from_config(nested, layer_type=kind).base for kind in nested.rope_parameters}
    assert bases == {"sliding_attention": 10000.0, "full_attention": 1000000.0}
    with pytest.raises(ValueError, match="one rotation"):
        from_config(LlamaConfig(), layer_type="full_attention")
    lists = {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    phi = Phi3Config(
        hidden_size=96, num_attention_heads=2, original_max_position_embeddings=512, max_position_embeddings=2048,
        rope_scaling={"type": "longrope", **lists},
    )  # fmt: skip
    rope = posenc.rope.from_config(phi)
    assert rope.scaling.original == 512
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)))


def test_deepseek_puts_position_channels_first():
    config = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "rope_theta": 1e4, "model_type": "deepseek_v3",
              "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                               "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}  # fmt: skip
    rope = posenc.rope.from_config(config, "deepseek")
    assert (rope.head_dim, rope.rotary_dim, rope.layout, rope.attention_factor) == (192, 64, "interleaved", 1.0)


@pytest.mark.parametrize(("name", "width"), [("attention_head_dim", 160), ("kv_channels", 128)])
def test_heads_wider_than_their_share_of_the_model(name, width):
    """Zamba 2 and JetMoE, whose files name the head size otherwise."""
    config = {"hidden_size": 2560, "num_attention_heads": 32, "rope_theta": 10000.0, name: width}
    assert posenc.RoPE.from_config(config).head_dim == width


def random_llama(draw):
    """A configuration with one of transformers' scalings, mostly valid."""
    kind = draw.choice(["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"])
    head, longest, original = draw.choice([32, 80, 128]), draw.choice([512, 8192, 131072]), draw.choice([512, 4096])
    rope = {draw.choice(["rope_type", "type"]): kind}
    model = {"head_dim": head, "hidden_size": 4 * head, "num_attention_heads": 4, "max_position_embeddings": longest}
    part = draw.choice([None, 0.25, 0.5, 1.0])
    for name, value in (("rope_theta", draw.choice([1e4, 5e5])), ("partial_rotary_factor", part)):
        if value is not None:
            draw.choice([rope, model])[name] = value
    optional = {
        "longrope": {"factor": 8.0, "attention_factor": 1.2}, "proportional": {"factor": 2.0},
        "yarn": {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False},
    }  # fmt: skip
    rope |= {name: value for name, value in optional.get(kind, {}).items() if draw.random() < 0.4}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = draw.choice([1.0, 4, 40.0, "4"] if draw.random() < 0.1 else [1.0, 4, 40.0])
    if kind in ("yarn", "longrope", "llama3") and draw.random() < 0.8:
        draw.choice([rope, model])["original_max_position_embeddings"] = original
    if kind == "longrope":
        pairs = int(head * (part or 1.0)) // 2
        rope |= {f"{name}_factor": [draw.uniform(1.0, 4.0) for _ in range(pairs)] for name in ("short", "long")}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {**model, draw.choice(["rope_parameters", "rope_scaling"]): rope}, draw.choice([64, longest, 3 * longest])


def test_random_configurations_have_transformers_frequencies():
    draw, read = random.Random(0), 0
    for _ in range(200):
        config, total = random_llama(draw)
        try:
            rope = posenc.rope.from_config({"model_type": "llama", **copy.deepcopy(config)})
        except posenc.OptionError:
            continue
        theirs = LlamaConfig(**copy.deepcopy(config))
        frequencies, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu", seq_len=total)
        # theirs are powers in float32: the exponents of a base of 500,000 cost them some 40 roundings
        assert rope.frequencies(total) == pytest.approx(frequencies.tolist(), rel=40 * 2**-23), config
        assert rope.scaling.magnitude_at(total) == pytest.approx(factor), config
        read += 1
    assert read > 150
