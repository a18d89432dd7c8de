"""extend: transformers' numbers for every scaling, through save and load; right with a cache where theirs is not."""

import inspect
import logging

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MixtralConfig,
    MoshiConfig,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from posenc import hf, scaling
from posenc.hf import layer
from tests.hf.compare import outputs_agree, shape_of
from tests.seeds import generator, seed

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2)
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)
LATENT = dict(
    n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=16, kv_lora_rank=8,
    q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
)  # fmt: skip
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
    "phi3": lambda **more: Phi3Config(**{**SIZES, **GROUPED, "pad_token_id": 0, **more}),
    "mixtral": lambda **more: MixtralConfig(**{**SIZES, **GROUPED, "num_local_experts": 2, **more}),
    "qwen2_moe": lambda **more: Qwen2MoeConfig(**{**SIZES, **GROUPED, **EXPERTS, **more}),
    "qwen3_moe": lambda **more: Qwen3MoeConfig(**{**SIZES, **GROUPED, **EXPERTS, "head_dim": 8, **more}),
    "gemma2": lambda **more: Gemma2Config(**{**SIZES, **GROUPED, "head_dim": 8, **more}),
    # neighbouring channels, half as many numbers, a part of the channels, and a rotation in every layer
    "cohere": lambda **more: CohereConfig(**{**SIZES, **GROUPED, **more}),
    "gpt_oss": lambda **more: GptOssConfig(
        **{**SIZES, **GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **more}
    ),
    "deepseek_v3": lambda **more: DeepseekV3Config(**{**SIZES, **LATENT, **more}),
    "moshi": lambda **more: MoshiConfig(**{**SIZES, "head_dim": 8, "ffn_dim": 32, "sliding_window": 99, **more}),
}
SCALINGS = {
    "linear": scaling.Linear(factor=4.0),
    "ntk": scaling.NTK(factor=4.0),
    "yarn": scaling.YaRN(factor=4.0, original=16),
    "llama3": scaling.Llama3(factor=4.0, low=1.0, high=4.0, original=16),
    "mixed": scaling.MixedNTK(factor=4.0),
}
GPTJ = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=16, n_inner=37)
DYNAMIC = {
    "dynamic": scaling.DynamicNTK(factor=2.0, original=16),
    "longrope": scaling.LongRoPE(short=(1.0,) * 4, long=(1.0, 2.0, 3.0, 4.0), original=16, factor=4.0),
}


def make(family, **more):
    torch.manual_seed(seed(1))
    config = GPTJConfig(**{**GPTJ, **more}) if family == "gptj" else CONFIGS[family](**more)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


IDS = torch.randint(2, 64, (2, 40), generator=generator(3))


@pytest.mark.parametrize(
    "family, name",
    [(f, "yarn") for f in CONFIGS]
    + [("llama", n) for n in (*SCALINGS, *DYNAMIC) if n != "yarn"]
    + [("gemma3_text", n) for n in ("linear", *DYNAMIC)]
    + [("phi", "dynamic"), ("gpt_neox", "dynamic"), ("cohere", "mixed"), ("deepseek_v3", "linear")]
    + [("phi3", n) for n in ("linear", "ntk", "llama3", "mixed", "longrope")]
    + [(f, "dynamic") for f in ("mixtral", "qwen2_moe", "qwen3_moe")],
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
    written = loaded.config.rope_parameters
    if family == "gemma3_text":
        assert written["sliding_attention"] == config["sliding_attention"]
        written = written["full_attention"]
    listed = name == "mixed" or (family == "phi3" and name != "ntk")  # no word of its own: a divisor for each pair
    assert written["rope_type"] == ("default" if name == "ntk" else "longrope" if listed else name)
    outputs_agree(ours, loaded(IDS, use_cache=False).logits)
    hf.restore(model)
    assert shape_of(model) == before
    assert (model.config.rope_parameters, model.config.max_position_embeddings) == (config, 16)
    assert torch.equal(model(IDS).logits, plain)


UNROTATED = [
    (f, n)
    for f in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma3_text")
    for n in DYNAMIC
]
ONE_LAYER = {"gptj": dict(n_layer=1), "gemma3_text": dict(sliding_window=7)}


@pytest.mark.parametrize(
    "family, name",
    [*UNROTATED, ("phi", "dynamic"), ("phi3", "longrope"), ("gpt_neox", "dynamic"), ("gptj", "dynamic")],
)
def test_a_cache_changes_nothing_where_the_rotation_follows_the_length(family, name):
    """One layer whose rotation depends on the length: its keys do not depend on earlier ones, so each step must equal a whole
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


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_texts_keep_their_positions(use_cache, tmp_path):
    """Two texts in a row, as a trainer packs them: positions begin anew, and transformers' mask keeps them apart."""
    model = hf.extend(make("llama"), DYNAMIC["dynamic"])
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    positions = torch.cat((torch.arange(17), torch.arange(23)))[None]
    text = torch.arange(40) >= 17
    visible = (text[:, None] == text) & torch.ones(40, 40, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 40, 40).masked_fill(~visible, -1e9)
    ours, wanted = (
        one(IDS[:1], position_ids=positions, attention_mask=mask, use_cache=use_cache).logits for one in (model, theirs)
    )
    outputs_agree(ours, wanted)


@pytest.mark.parametrize("padded", [0, 4])
@pytest.mark.parametrize("family, more", [("llama", {}), ("mistral", dict(sliding_window=7)), ("gptj", {})])
def test_a_static_cache_gives_the_same_tokens(family, more, padded):
    """Its slots are there before their tokens are, and a window's move once it is full."""
    model = hf.extend(make(family, **more), DYNAMIC["dynamic"])
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :padded] = 0
    growing, static = (
        model.generate(
            IDS[:, :6], attention_mask=mask, max_new_tokens=14, do_sample=False, return_dict_in_generate=True,
            output_logits=True, cache_implementation=kind,
        )
        for kind in (None, "static")
    )  # fmt: skip
    assert torch.equal(growing.sequences, static.sequences)
    outputs_agree(torch.stack(static.logits), torch.stack(growing.logits))


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
    layer._logged.clear()
    model = make("gptj")
    before, plain = shape_of(model), model(IDS[:, :16]).logits
    keys = list(model.state_dict())
    with caplog.at_level(logging.WARNING, logger="posenc.hf"):
        hf.extend(model, {**SCALINGS, **DYNAMIC}[name], max_length=40)
    assert "no field for a scaling" in caplog.text
    assert (list(model.state_dict()), model.config.max_position_embeddings) == (keys, 40)
    ours = model(IDS, use_cache=False).logits
    theirs = make("gptj", n_positions=40)
    more = {"yarn": dict(factor=4.0, original_max_position_embeddings=16), "linear": dict(factor=4.0)}
    for block in theirs.transformer.h:
        block.attn.embed_positions = their_table(40, name, **more.get(name, dict(factor=2.0)))
    outputs_agree(ours, theirs(IDS, use_cache=False).logits)
    with pytest.raises(hf.UnsupportedModel, match="already extended"):
        hf.extend(model, SCALINGS["linear"])
    hf.restore(model)
    assert (shape_of(model), model.config.max_position_embeddings) == (before, 16)
    assert torch.equal(model(IDS[:, :16]).logits, plain)


TEXT = {**SIZES, **GROUPED, "head_dim": 8, "pad_token_id": 0}
SECTIONS = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
SEEING = {
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "llama", **TEXT}, image_token_index=60,
            vision_config={"model_type": "pixtral", **VISION, "image_size": 16, "patch_size": 8},
        )
    ),
    "qwen2_vl": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={"model_type": "qwen2_vl_text", **TEXT, "rope_parameters": SECTIONS}, image_token_id=60,
            vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=4), video_token_id=61,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family, name", [("llava", "yarn"), ("llava", "dynamic"), ("qwen2_vl", "yarn")])
def test_of_a_model_that_sees_only_the_text_is_extended(family, name, tmp_path):
    torch.manual_seed(seed(1))
    model = SEEING[family]().eval()
    vision, plain = model.config.vision_config.to_diff_dict(), model(IDS, use_cache=False).logits
    hf.extend(model, {**SCALINGS, **DYNAMIC}[name])
    ours = model(IDS, use_cache=False).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    outputs_agree(ours, loaded(IDS, use_cache=False).logits)
    assert loaded.config.vision_config.to_diff_dict() == {**vision, "dtype": "float32"}
    if family == "qwen2_vl":  # an image's three axes
        positions = torch.randint(0, 40, (3, 2, 9))
        both = (one.model.language_model.rotary_emb(torch.zeros(1), positions) for one in (model, loaded))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*both, strict=True))
    assert torch.equal(hf.restore(model)(IDS, use_cache=False).logits, plain)


def test_both_halves_of_an_encoder_decoder_are_extended(tmp_path):
    """Their configurations have different types, and the encoder sees, too."""
    torch.manual_seed(seed(1))
    half = {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    vision = {**VISION, "image_size": 16, "patch_size": 8}
    encoder = dict(text_config=half, vision_config=vision, image_token_index=60, mm_tokens_per_image=1)
    config = T5Gemma2Config(encoder=encoder, decoder=dict(half), image_token_index=60)
    model = hf.extend(T5Gemma2ForConditionalGeneration(config).eval(), SCALINGS["yarn"])
    for part in (model.config.encoder.text_config, model.config.decoder):
        assert part.rope_parameters["full_attention"]["rope_type"] == "yarn"
    model.save_pretrained(tmp_path)
    inputs = dict(input_ids=IDS % 58, decoder_input_ids=IDS[:, :20] % 58)
    loaded = T5Gemma2ForConditionalGeneration.from_pretrained(tmp_path).eval()
    outputs_agree(model(**inputs).logits, loaded(**inputs).logits)


def refused(model, scaled, match):
    """Nothing was changed."""
    before = (shape_of(model), model.config.to_dict())
    with pytest.raises(hf.UnsupportedModel, match=match):
        hf.extend(model, scaled)
    assert (shape_of(model), model.config.to_dict()) == before


def test_what_cannot_be_extended_says_why():
    refused(
        BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)), None,
        "no rotary_emb to swap",
    )  # fmt: skip
    refused(
        AutoModelForCausalLM.from_config(OlmoConfig(**SIZES)), DYNAMIC["dynamic"],
        "keys must be cached unrotated.*not for OlmoAttention",
    )  # fmt: skip
    refused(make("gemma2"), DYNAMIC["dynamic"], "not for Gemma2Attention")
    refused(make("llama"), scaling.DynamicYaRN(original=16), "hf cannot express DynamicYaRN")
    refused(make("phi3"), DYNAMIC["dynamic"], "Phi3Config refuses 'dynamic'.*must be one of")
    refused(
        AutoModelForCausalLM.from_config(PhimoeConfig(**SIZES, num_local_experts=2)), SCALINGS["yarn"],
        "refuses 'yarn'.*short_mscale",
    )  # fmt: skip
    deep = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=1.0)
    refused(
        make("deepseek_v3", rope_parameters=deep), SCALINGS["yarn"], "mscale_all_dim also changes every layer's scale"
    )
    part = dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5)
    refused(make("llama", rope_parameters=part), SCALINGS["yarn"], "which YaRN.*would replace; give Proportional")
    part = dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5
    )  # Llama reads it beside a scaling only, and then cannot run
    refused(
        make("llama", rope_parameters=part), SCALINGS["yarn"], "rotates 8 channels of each head.*configuration says 4"
    )
    with pytest.raises(ValueError, match="max_length=99 cannot go with DynamicNTK.*leave max_length out"):
        hf.extend(make("llama"), DYNAMIC["dynamic"], max_length=99)
    with pytest.raises(ValueError, match="max_length=9 is shorter than the original length of YaRN"):
        hf.extend(make("llama"), SCALINGS["yarn"], max_length=9)
    assert hf.extend(make("llama"), SCALINGS["yarn"], max_length=99).config.max_position_embeddings == 99
    flexible = make("llama")
    flexible.set_attn_implementation("flex_attention")
    refused(flexible, DYNAMIC["dynamic"], r"those of 'flex_attention'; call model.set_attn_implementation\('sdpa'\)")
    model = make("llama")
    model.model.another = type(model.model.rotary_emb)(model.config)
    refused(model, SCALINGS["yarn"], "model.another rotates too")
    model = hf.extend(make("llama"), SCALINGS["yarn"])
    refused(model, SCALINGS["linear"], "already extended")


@pytest.mark.slow  # transformers compiles flex attention's masks
def test_masks_that_the_layers_cannot_read_are_refused():
    changed = hf.extend(make("llama"), DYNAMIC["dynamic"])
    changed.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match=r"four dimensions.*got BlockMask"):
        changed(IDS)


@pytest.mark.parametrize("extended_first", [False, True])
def test_with_accelerate(extended_first):
    """Unrotated keys take the masks of attn_implementation="posenc" too."""
    ids = torch.randint(2, 64, (3, 40))
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    model = make("llama")
    before = shape_of(model)
    hf.extend(model, DYNAMIC["dynamic"])
    wanted = model(ids, attention_mask=mask).logits[mask.bool()]
    if not extended_first:
        hf.restore(model)
    hf.accelerate(model)
    if not extended_first:
        hf.extend(model, DYNAMIC["dynamic"])
    outputs_agree(model(ids, attention_mask=mask).logits[mask.bool()], wanted)
    assert shape_of(hf.restore(model)) == before


@pytest.mark.slow
def test_models_that_rotate_by_configuration():
    """Every sixth model type of the installed transformers, whatever it is, without weights: extended, or refused by name."""
    outcomes = {}
    for kind in sorted(CONFIG_MAPPING_NAMES)[::6]:
        try:
            config = CONFIG_MAPPING[kind]()
            parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
            for part in parts:
                if getattr(part, "num_hidden_layers", 0) > 2 and not getattr(part, "layer_types", None):
                    part.num_hidden_layers = 2
            with torch.device("meta"):
                model = AutoModel.from_config(config)
        except Exception:  # a configuration that has no model, or that its defaults do not build
            continue
        rotations = [one for name, one in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
        if not any("ROPE_INIT_FUNCTIONS" in inspect.getsource(type(one)) for one in rotations):
            continue
        try:
            hf.extend(model, scaling.YaRN(factor=4.0, original=4096))
            outcomes[kind] = "extended"
        except hf.UnsupportedModel as error:
            outcomes[kind] = str(error)
    extended = [kind for kind, outcome in outcomes.items() if outcome == "extended"]
    assert len(extended) >= 15, outcomes
    assert len(extended) >= 0.7 * len(outcomes), outcomes
