"""attn_implementation="posenc" at construction of classes that look their attention up by name."""

import copy
import re

import pytest
import torch
import transformers
from transformers.models.sam.modeling_sam import SamVisionEncoder

from posenc import hf
from posenc.hf import construction
from tests.hf import survey
from tests.hf.compare import outputs_agree

TEXT = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
MODELS = {
    "falcon": ("FalconModel", "FalconConfig", dict(TEXT, alibi=True, multi_query=False, parallel_attn=False)),
    "falcon rotary": ("FalconModel", "FalconConfig", TEXT),
    "gptj": ("GPTJModel", "GPTJConfig", dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)),
    "gpt_neo": (
        "GPTNeoModel", "GPTNeoConfig",
        dict(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=5),
    ),
    "data2vec": (
        "Data2VecVisionModel", "Data2VecVisionConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20, image_size=16, patch_size=8),
    ),
    "sam": (
        "SamVisionModel", "SamVisionConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_dim=20, image_size=16, patch_size=4,
             output_channels=8, window_size=2, global_attn_indexes=[1], num_pos_feats=4),
    ),
}  # fmt: skip
OVERRIDDEN = ("falcon", "gptj", "sam")


def make(name, implementation):
    model, config, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**options)
    return getattr(transformers, model)._from_config(config, attn_implementation=implementation).eval()


def inputs(name):
    torch.manual_seed(1)
    if name in ("sam", "data2vec"):
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    ids = torch.randint(3, 60, (2, 17))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def real(model, given):
    with torch.no_grad():
        found = model(**given)[0]
    return found[given["attention_mask"].bool()] if "attention_mask" in given else found


@pytest.mark.parametrize("name", MODELS)
def test_constructed_by_name_and_accelerated(name, tmp_path):
    given, original = inputs(name), make(name, None)
    model = make(name, "posenc")
    assert model.state_dict().keys() == original.state_dict().keys()
    outputs_agree(real(model, given), real(original, given))
    if name in OVERRIDDEN:
        assert hf.report(hf.accelerate(model)).layers
        outputs_agree(real(model, given), real(original, given))
    original.save_pretrained(tmp_path)
    loaded = type(original).from_pretrained(tmp_path, attn_implementation="posenc")
    outputs_agree(real(loaded, given), real(original, given))


def test_every_file_with_such_a_dict_is_known():
    """[config._attn_implementation](...) in the sources of the installed release."""
    called = re.compile(r"_CLASSES\[[\w.]*attn_implementation\]\(")
    found = {
        f"{path.parent.name}.{path.stem}"
        for path in survey.models_folder().glob("*/modeling_*.py")
        if called.search(path.read_text(encoding="utf-8"))
    }
    assert found <= set(construction.FILES), found - set(construction.FILES)


def test_an_encoder_of_its_own():
    config = copy.deepcopy(make("sam", None).config)
    config._attn_implementation = "posenc"
    assert {type(layer.attn).__name__ for layer in SamVisionEncoder(config).layers} == {"SamVisionSdpaAttention"}
