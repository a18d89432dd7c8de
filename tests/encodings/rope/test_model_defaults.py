"""What transformers' own classes define where a file does not, and published files read as it reads them."""

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import posenc
from posenc.encodings.rope.model_defaults import BASES, BY_LAYER, INTERLEAVED, KEYLESS, LAYERED

MODELS = Path(transformers.models.__file__).parent


def test_interleaved_models_are_those_of_transformers():
    """By their source: which model files rotate neighbouring channels."""
    found = set()
    for file in MODELS.glob("*/modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        if "rotary" not in source:
            continue
        for function in re.finditer(
            r"^def (rotate_\w+|apply_\w*rotary\w*)\(.*?(?=^(?:def|class|@))", source, re.S | re.M
        ):
            body = function.group(0)
            if "::2]" in body or "0::2" in body or "view_as_complex" in body or "interleave" in function.group(1):
                found.add(file.stem.removeprefix("modeling_"))
    images = {"efficientloftr", "lightglue", "sam2_video", "sam3", "sam3_tracker_video", "edgetam_video"}
    assert {name.removesuffix("_text") for name in INTERLEAVED} - {"roformer"} == found - images


def test_bases_are_those_of_transformers():
    """Every configuration class that has a rotation, made without arguments."""
    flat, layered, by_layer = {}, {}, set()
    for file in MODELS.glob("*/configuration_*.py"):
        if "default_theta" not in (source := file.read_text(encoding="utf-8")) and "rope_parameters" not in source:
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__ or not hasattr(cls, "default_theta"):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = cls()
            rope = getattr(config, "rope_parameters", None) or {}
            if hasattr(config, "image_size") or rope.get("rope_type") == "axial":
                continue
            nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
            if nested and cls.model_type in LAYERED:
                layered[cls.model_type] = {key: value["rope_theta"] for key, value in nested.items()}
            elif nested:
                by_layer.add(cls.model_type)
            elif rope and cls.default_theta != 10000.0:
                flat[cls.model_type] = cls.default_theta
    assert flat == BASES
    assert layered == LAYERED
    assert by_layer == BY_LAYER


def test_types_that_rotate_are_those_of_transformers():
    """By their configurations: which classes have rope_parameters of their own."""
    found = set()
    for file in MODELS.glob("*/configuration_*.py"):
        if "rope_parameters" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__ and cls.__dict__.get("model_type"):
                named = {*inspect.signature(cls.__init__).parameters, *inspect.get_annotations(cls)}
                found |= {cls.model_type} if "rope_parameters" in named else set()
    older = {
        "codegen",
        "gptj",
        "roformer",
        "cohere2_moe",
        "mistral_large4",
    }  # rotations of their own, or by inheritance
    assert found | older == KEYLESS
    assert not {"bert", "gpt2", "t5", "opt", "bloom", "xlnet", "deberta-v2"} & KEYLESS


FACTORS = [1.0 + c / 10 for c in range(48)]
YARN = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "type": "yarn"}
PUBLISHED = {
    "Llama 2": ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096,
                          "rope_scaling": None}),
    "Llama 3.1": ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072,
                            "rope_theta": 500000.0,
                            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
    "Llama 3.2": ("llama", {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64,
                            "max_position_embeddings": 131072, "rope_theta": 500000.0,
                            "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
    "Qwen2.5 with YaRN": ("qwen2", {"hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 131072,
                                    "rope_theta": 1000000.0, "rope_scaling": {
                                        "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}),
    "Qwen3": ("qwen3", {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "rope_scaling": None,
                        "max_position_embeddings": 40960, "rope_theta": 1000000}),
    "DeepSeek-V2-Lite": ("deepseek_v2", {
        "hidden_size": 2048, "num_attention_heads": 16, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "DeepSeek-V3": ("deepseek_v3", {
        "hidden_size": 7168, "num_attention_heads": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "Phi-3 mini 128k": ("phi3", {
        "hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072, "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"short_factor": FACTORS, "long_factor": [2 * x for x in FACTORS], "type": "longrope"}}),
    "Phi-2": ("phi", {"hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4,
                      "max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None}),
    "gpt-oss": ("gpt_oss", {
        "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64, "initial_context_length": 4096,
        "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False}}),
    "GLM-4": ("glm", {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "partial_rotary_factor": 0.5,
                      "rope_theta": 10000.0, "max_position_embeddings": 131072}),
    "Pythia": ("gpt_neox", {"hidden_size": 2048, "num_attention_heads": 8, "rotary_pct": 0.25,
                            "rotary_emb_base": 10000, "max_position_embeddings": 2048}),
    "Cohere": ("cohere", {"hidden_size": 8192, "num_attention_heads": 64, "rope_theta": 8000000.0,
                          "max_position_embeddings": 8192}),
    "Command R, file without base": ("cohere", {"hidden_size": 8192, "num_attention_heads": 64}),
    "Mixtral, file without base": ("mixtral", {"hidden_size": 4096, "num_attention_heads": 32}),
    "Llama 4": ("llama4_text", {
        "hidden_size": 5120, "num_attention_heads": 40, "head_dim": 128, "max_position_embeddings": 10485760,
        "rope_theta": 500000.0, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"}}),
    "InternLM2": ("llama", {"hidden_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 32768,
                            "rope_theta": 1000000, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
}  # fmt: skip


def rotary_class(kind: str):
    module = importlib.import_module(
        f"transformers.models.{kind.removesuffix('_text')}.modeling_{kind.removesuffix('_text')}"
    )
    names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    return getattr(module, names[0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_what_transformers_computes(name):
    kind, file = PUBLISHED[name]
    rope = posenc.rope.from_config({"model_type": kind, **file})
    config = transformers.AutoConfig.for_model(kind, **file)
    theirs = rotary_class(kind)(config=config)
    inverse = theirs.inv_freq.double() if hasattr(theirs, "inv_freq") else None
    assert rope.frequencies() == pytest.approx(inverse.tolist(), rel=4e-7)
    assert rope.attention_factor == pytest.approx(getattr(theirs, "attention_scaling", 1.0), rel=1e-6)
    again = posenc.rope.from_config(config)  # the class, not the file
    assert (again.base, again.rotary_dim, again.layout) == (rope.base, rope.rotary_dim, rope.layout)
    assert again.frequencies() == rope.frequencies()
    written = posenc.rope.from_config(posenc.rope.to_config(rope))  # and back
    assert (written.rotary_dim, written.layout, written.scaling) == (rope.rotary_dim, rope.layout, rope.scaling)
    assert written.frequencies(2**17) == rope.frequencies(2**17)


TEXT = {"hidden_size": 1536, "num_attention_heads": 12, "max_position_embeddings": 32768, "rope_theta": 1000000.0}
WITH_IMAGES = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", {**TEXT, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "mrope_section": [16, 24, 24]}}),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", {"text_config": {
        **TEXT, "head_dim": 128, "rope_theta": 5000000, "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}}),
    "glm4v": ("Glm4vTextRotaryEmbedding", {"text_config": {
        "model_type": "glm4v_text", "hidden_size": 4096, "num_attention_heads": 32, "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0, "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_published_files_of_images_and_text(kind):
    name, file = WITH_IMAGES[kind]
    text = {key: value for key, value in file.get("text_config", file).items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(f"{kind}_text", **text)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    at = posenc.rope.mixed_positions([3, (3, 4), 2, (3, 2, 2), 4])
    for given in ({"model_type": kind, "vision_config": {"patch_size": 14, "image_size": 1}, **file}, config):
        rope = posenc.MRoPE.from_config(given)
        x = torch.randn(1, 2, at.shape[1], rope.head_dim)
        cos, sin = getattr(module, name)(config=config)(x, at.movedim(-1, 0))
        theirs = module.apply_rotary_pos_emb(x, x, cos, sin)[0]
        torch.testing.assert_close(rope.rotation(posenc.Positions(at)).rotate_q(x), theirs, atol=4e-6, rtol=1e-6)
    ernie = {"model_type": "ernie4_5_vl_moe_text", "head_dim": 128, "rope_parameters": {"mrope_section": [22, 22, 20]}}
    with pytest.raises(ValueError, match="Ernie"):
        posenc.MRoPE.from_config(ernie)


def test_published_files_with_layers():
    gemma = {"model_type": "gemma3", "vision_config": {"patch_size": 14}, "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "head_dim": 256,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}}  # fmt: skip
    older = {**gemma["text_config"], "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
    bert = {"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0}  # fmt: skip
    four = {"model_type": "gemma4_text", "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            }}  # fmt: skip
    for file, kind, class_name in (
        (gemma, "gemma3_text", "Gemma3RotaryEmbedding"), (older, "gemma3_text", "Gemma3RotaryEmbedding"),
        (bert, "modernbert", "ModernBertRotaryEmbedding"), (four, "gemma4_text", "Gemma4TextRotaryEmbedding"),
    ):  # fmt: skip
        text = file.get("text_config", file)
        config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in text.items() if k != "model_type"})
        module = kind.removesuffix("_text")
        cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), class_name)
        theirs = cls(config=config)
        for layer_type in ("full_attention", "sliding_attention"):
            inverse = getattr(theirs, f"{layer_type}_inv_freq").tolist()
            for given in (file, config):
                rope = posenc.rope.from_config(given, layer_type=layer_type)
                assert rope.frequencies() == pytest.approx(inverse, rel=4e-7), (kind, layer_type)
    with pytest.raises(ValueError, match="AutoConfig"):
        posenc.rope.from_config({"model_type": "gemma4_text", "head_dim": 256}, layer_type="full_attention")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for more, words in (({"full_attention": {**yarn, "truncate": False}}, "ignores the truncate"),
                        ({"full_attention": yarn, "rope_type": "yarn"}, "next to the rotations"),
                        ({"full_attention": yarn, "rope_theta": 1e6}, "next to the rotations")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            posenc.rope.from_config({"head_dim": 64, "rope_parameters": more}, layer_type="full_attention")
    stray = {"head_dim": 64, "rope_parameters": {"full_attention": yarn, "rope_type": "default", "rope_theta": None}}
    assert isinstance(posenc.rope.from_config(stray, layer_type="full_attention").scaling, posenc.scaling.YaRN)
    without = {"head_dim": 64, "rope_parameters": {"a": {"rope_type": "default"}, "b": None}}
    with pytest.raises(ValueError, match="no rotation"):
        posenc.rope.from_config(without, layer_type="b")


@pytest.mark.parametrize(("config", "words"), [
    ({"head_dim": 64, "rope_thta": 1e6}, "did you mean 'rope_theta'"),
    ({"head_dim": 64, "rope_ratio": 500}, "rope_ratio"),
    ({"model_type": "omni", "thinker_config": {"head_dim": 64}, "talker_config": {}}, "one of thinker_config"),
    (transformers.PixtralVisionConfig(), "AxialRoPE"),
    (transformers.DINOv3ViTConfig(), "AxialRoPE"),
    (transformers.Ministral3Config(), "scale the queries"),
    (transformers.Qwen2VLTextConfig(rope_parameters={"rope_type": "default", "mrope_section": [16, 24, 24]}), "MRoPE"),
])  # fmt: skip
def test_what_is_not_a_plain_rotation_raises(config, words):
    with pytest.raises(ValueError, match=words):
        posenc.rope.from_config(config)


def test_layout_values_and_sections_are_written_too():
    for rope in (
        posenc.RoPE(head_dim=64, layout="interleaved", values=True),
        posenc.MRoPE(head_dim=64, sections=(8, 12, 12), interleaved=False, base=1e6),
        posenc.MRoPE(head_dim=128, sections=(24, 20, 20), interleaved=True, base=5e6, layout="interleaved"),
    ):
        keys = posenc.rope.to_config(rope)
        again = (posenc.MRoPE.from_config if isinstance(rope, posenc.MRoPE) else posenc.rope.from_config)(keys)
        assert repr(again) == repr(rope)
        assert again.layout == rope.layout
        assert getattr(again, "values", False) == getattr(rope, "values", False)
        q = torch.randn(1, 2, 5, rope.head_dim)
        positions = posenc.Positions(5)
        torch.testing.assert_close(again.rotation(positions).rotate_q(q), rope.rotation(positions).rotate_q(q))
    with pytest.raises(ValueError, match="values"):
        posenc.rope.to_config(posenc.RoPE(head_dim=64, values=True), "vllm")
