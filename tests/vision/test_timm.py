"""posenc.timm against timm: tiny models of every kind it knows, forward and backward."""

import copy
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from posenc import timm
from posenc.nn import blocks
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import scatter
from tests.seeds import generator, seed

MEANS = ("IMAGENET_DEFAULT_MEAN", "IMAGENET_DEFAULT_STD", "IMAGENET_INCEPTION_MEAN", "IMAGENET_INCEPTION_STD",
         "OPENAI_CLIP_MEAN", "OPENAI_CLIP_STD")  # fmt: skip

SIGNS = re.compile(
    "rel_pos|relative_position|attention_bias|\\brope\\b|Rotary|RotAttention|RelPos|HaloAttn|LambdaLayer|GPSA|halo_size"
)
"""What positional terms inside attention are called in timm."""


def models(name):
    """A file of timm.models. timm lies beside the environment, for it needs torchvision; of that, its models need two names."""
    folder = Path(sys.prefix) / "timm" / "timm"
    if not folder.is_dir():
        pytest.skip("needs timm")
    before = dict(sys.modules)
    shells = {
        "timm": dict(__path__=[str(folder)], __version__="0"),
        "timm.models": dict(__path__=[str(folder / "models")]),
        "timm.data": dict.fromkeys(MEANS, (0.5, 0.5, 0.5)),
        "torchvision": dict(__path__=[]),
        "torchvision.ops": dict(__path__=[]),
        "torchvision.ops.misc": dict(FrozenBatchNorm2d=nn.BatchNorm2d),
    }
    try:
        for path, names in shells.items():
            sys.modules[path] = types.ModuleType(path)
            vars(sys.modules[path]).update(names)
        return importlib.import_module(f"timm.models.{name}")
    finally:
        for path in set(sys.modules) - set(before):
            if path.split(".")[0] in ("timm", "torchvision"):
                del sys.modules[path]
        sys.modules.update(before)


def swin():
    model = models("swin_transformer").SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5
    )
    return model, 32, {"WindowAttention._get_rel_pos_bias"}


def swin_v2():
    model = models("swin_transformer_v2").SwinTransformerV2(
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5
    )
    return model, 32, {"WindowAttention.forward"}


def swin_v2_cr():
    model = models("swin_transformer_v2_cr").SwinTransformerV2Cr(
        img_size=(32, 32), patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5
    )
    return model, 32, {"WindowMultiHeadAttention._relative_positional_encodings"}


def gcvit():
    model = models("gcvit").GlobalContextVit(
        img_size=64,
        window_size=(4, 4),
        window_ratio=(4, 2),
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 4),
        num_classes=5,
    )
    return model, 64, {"RelPosBias.get_bias"}


def beit():
    model = models("beit").Beit(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5, use_rel_pos_bias=True
    )
    return model, 16, {"Attention._get_rel_pos_bias"}


def vit_relpos(kind="bias"):
    model = models("vision_transformer_relpos").VisionTransformerRelPos(
        img_size=16,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=5,
        rel_pos_type=kind,
        class_token=True,
    )
    return model, 16, {"RelPosBias.get_bias"} if kind == "bias" else {"RelPosMlp.get_bias"}


def maxvit(kind="bias"):
    module = models("maxxvit")
    config = module.MaxxVitCfg(
        embed_dim=(8, 16), depths=(1, 1), block_type=("M", "M"), stem_width=8,
        conv_cfg=module.MaxxVitConvCfg(block_type="convnext"),
        transformer_cfg=module.MaxxVitTransformerCfg(dim_head=4, window_size=(4, 4), grid_size=(4, 4), rel_pos_type=kind),
    )  # fmt: skip
    name = {"bias": "RelPosBias", "bias_tf": "RelPosBiasTf", "mlp": "RelPosMlp"}[kind]
    return module.MaxxVit(config, img_size=32, num_classes=5), 32, {f"{name}.get_bias"}


def sam():
    model = models("vision_transformer_sam").VisionTransformerSAM(
        img_size=20, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5, use_rel_pos=True, window_size=3,
        global_attn_indexes=(1,), neck_chans=8,
    )  # fmt: skip
    return model, 20, {"Attention.forward"}


MODELS = {
    "swin": swin, "swin v2": swin_v2, "swin v2 cr": swin_v2_cr, "gcvit": gcvit, "beit": beit, "vit relpos": vit_relpos, "vit relpos mlp": lambda: vit_relpos("mlp"),
    "maxvit": maxvit, "maxvit tf": lambda: maxvit("bias_tf"), "maxvit mlp": lambda: maxvit("mlp"), "sam": sam,
}  # fmt: skip


def make(name):
    torch.manual_seed(seed(1))
    model, size, methods = MODELS[name]()
    return scatter(model), torch.randn(3, 3, size, size), methods


def outcome(model, images):
    model.zero_grad()
    out = model(images)
    (out * torch.randn(out.shape, generator=generator(5))).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("numbers", [64, 1 << 20])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, numbers, monkeypatch):
    model, images, methods = make(name)
    monkeypatch.setattr(blocks, "NUMBERS", numbers)
    theirs, their_gradients = outcome(model, images)
    with torch.no_grad():
        quiet = model(images)
    keys = list(model.state_dict())
    assert timm.accelerate(model) is model
    assert set(timm.report(model).values()) == methods
    ours, our_gradients = outcome(model, images)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)
    with torch.no_grad():
        for _ in range(2):  # the second time with the biases that were kept
            outputs_agree(model(images), quiet)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", ["swin v2", "sam"])
def test_as_on_a_gpu(name, monkeypatch):
    """Without blocks: on a CPU, as if it were none."""
    model, images, _ = make(name)
    theirs, their_gradients = outcome(model, images)
    timm.accelerate(model)
    monkeypatch.setattr(blocks, "on_cpu", lambda x: False)
    monkeypatch.setattr(blocks, "cut", lambda *a: pytest.fail("runs in blocks"))
    ours, our_gradients = outcome(model, images)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("name", ["swin v2 cr", "vit relpos mlp", "maxvit mlp"])
def test_networks_that_make_biases_have_dropout(name):
    """A model in training, as create_model returns it, is accelerated, and its biases are drawn anew in every call."""
    model, images, _ = make(name)
    timm.accelerate(model.train())
    assert all(module.training for module in model.modules())
    first = next(module for module in model.modules() if "posenc_replaced" in module.__dict__)
    biases = [getattr(first, first.__dict__["posenc_replaced"])() for _ in range(2)]
    with torch.no_grad():
        biases += [getattr(first, first.__dict__["posenc_replaced"])() for _ in range(2)]
    assert not any(torch.equal(biases[i], biases[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("name", ["swin", "swin v2", "swin v2 cr", "maxvit", "sam"])
def test_copies_restore_and_changed_parameters(name):
    model, images, _ = make(name)
    with torch.no_grad():
        theirs = model(images)
        ours = timm.accelerate(model)(images)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.mul_(1.3)
        changed = model(images)
        assert torch.equal(twin(images), ours)
        outputs_agree(changed, timm.restore(model)(images))
        assert timm.report(model) == {}
        outputs_agree(timm.restore(twin)(images), theirs)


def test_every_file_with_a_positional_term_is_in_the_survey():
    folder = Path(sys.prefix) / "timm" / "timm" / "models"
    if not folder.is_dir():
        pytest.skip("needs timm")
    page = (Path(__file__).parents[2] / "docs" / "timm-survey.md").read_text(encoding="utf-8")
    listed = {name for line in page.splitlines() if line.startswith("| ") for name in line.split("|")[1].split(", ")}
    found = {file.stem for file in folder.glob("[a-z]*.py") if SIGNS.search(file.read_text(encoding="utf-8"))}
    assert found <= {name.strip() for name in listed}


def test_accelerate_twice_and_what_has_no_bias():
    model, images, methods = make("swin")
    timm.accelerate(timm.accelerate(model))
    assert set(timm.report(model).values()) == methods
    with pytest.raises(ValueError, match="no relative position bias"):
        timm.accelerate(nn.Linear(2, 2))
