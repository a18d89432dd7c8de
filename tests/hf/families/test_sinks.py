"""Attention sinks (gpt-oss and others) against transformers: through the interface, beside windows, padding and caches."""

import importlib
import importlib.util

import pytest
import torch
import transformers

from posenc import hf
from tests.hf.compare import outputs_agree
from tests.hf.harness import Case, inputs_of, pairs, run_check, scatter
from tests.seeds import seed

SIZES = dict(
    vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1, sliding_window=7)
MODELS = {
    "gpt_oss": ("GptOss", dict(EXPERTS, layer_types=["sliding_attention", "full_attention"])),
    "flint": ("Flint", {}),
    "granite_swa": ("GraniteSWA", dict(sliding_window=7)),
    "granitemoe_swa": ("GraniteMoeSWA", EXPERTS),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        dict(
            sliding_window=7, n_routed_experts=2, num_experts_per_tok=1, v_head_dim=8, swa_head_dim=8, swa_v_head_dim=8,
            swa_num_attention_heads=4, swa_num_key_value_heads=2,
        ),
    ),
    "openai_privacy_filter": ("OpenAIPrivacyFilter", EXPERTS),
    "hy_v4": ("HYV4", {}),
    "deepseek_v4": ("DeepseekV4", {}),
}  # fmt: skip


def make(folder, kind="Model"):
    name, options = MODELS[folder]
    torch.manual_seed(seed(1))
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    found = {key.lower(): value for key, value in vars(modeling).items()}
    config = found[f"{name}Config".lower()]
    std = (
        0.1 if folder == "hy_v4" else 0.2
    )  # its mixing of streams between layers lets rounding errors grow with the weights
    model = scatter(found[f"{name}{kind}".lower()](config(**SIZES, **options)), std)
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    assert sinks
    for p in sinks:
        torch.nn.init.normal_(p)
    return model


def case(folder, **options):
    return Case(
        lambda: make(folder), lambda: {"input_ids": torch.randint(3, 99, (3, 29))}, layers=2, way="interface", **options
    )


CASES = {
    "gpt_oss": case(
        "gpt_oss", with_head=lambda: make("gpt_oss", "ForCausalLM"), compiles=False, checkpoints=(False,),
        generates={"greedy": {}, "beams": dict(num_beams=3), "static": dict(cache_implementation="static")},
    )
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("folder", [folder for folder in MODELS if folder != "gpt_oss"])
def test_other_models_with_sinks(folder):
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        pytest.skip(f"transformers {transformers.__version__} has no {folder}")
    run_check(case(folder), "padding holes")


@pytest.mark.parametrize("folder", MODELS)
def test_attention_weights_are_the_models_own(folder):
    """gpt-oss's leave room for the sink, Granite's do not."""
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        pytest.skip(f"transformers {transformers.__version__} has no {folder}")
    model, inputs = make(folder), inputs_of(case(folder), "left")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(**inputs, output_attentions=True)
        ours = hf.accelerate(model)(**inputs, output_attentions=True)
    real = inputs["attention_mask"].bool()
    outputs_agree(ours[0][real], theirs[0][real])
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        outputs_agree(a.transpose(1, 2)[real], b.transpose(1, 2)[real])
