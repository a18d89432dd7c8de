"""BEiT and Data2VecVision against transformers: tables per layer and shared, images of other sizes, both attentions."""

import pytest
import torch
from transformers import BeitConfig, BeitModel, Data2VecVisionConfig, Data2VecVisionModel

from posenc import hf
from posenc.hf import beit
from posenc.nn import blocks
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import outcome, pairs, run_check, scatter
from tests.hf.tiny import tiny_case

OPTIONS = dict(layers=2, paddings=("none",), checkpoints=(False,))
CASES = {
    "beit": tiny_case(beit, "beit", way="interface", **OPTIONS),
    "data2vec": tiny_case(beit, "data2vec", way="override", **OPTIONS),
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize(("size", "image"), [(8, 8), (8, 12), ((8, 12), (8, 12))])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("config", "model"), [(BeitConfig, BeitModel), (Data2VecVisionConfig, Data2VecVisionModel)])
def test_tables_and_sizes(config, model, shared, attention, size, image):
    if config is Data2VecVisionConfig and size != 8:
        pytest.skip("its configuration takes square images")
    torch.manual_seed(1)
    made = scatter(
        model(
            config(
                vocab_size=9, image_size=size, patch_size=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=16, use_relative_position_bias=not shared, use_shared_relative_position_bias=shared,
                attn_implementation=attention,
            )
        )
    )  # fmt: skip
    shape = image if isinstance(image, tuple) else (image, image)
    inputs = {"pixel_values": torch.randn(2, 3, *shape)}
    theirs, their_gradients = outcome(made, inputs)
    ours, our_gradients = outcome(hf.accelerate(made), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("folder", ["beit", "data2vec"])
def test_as_on_a_gpu(folder, monkeypatch):
    """The bias is one for the batch, with gradients and without: on a CPU, as if it were none."""
    model, inputs = CASES[folder].make(), CASES[folder].batch()
    theirs, their_gradients = outcome(model, inputs)
    hf.accelerate(model)
    monkeypatch.setattr(blocks, "on_cpu", lambda x: False)
    ours, our_gradients = outcome(model, inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)
    shapes = []
    for module in model.modules():
        if type(module).__name__ == "BeitAttention":
            module.register_forward_pre_hook(lambda m, a, k: shapes.append(k["attention_mask"].shape), with_kwargs=True)
    with torch.no_grad():
        outputs_agree(model(**inputs)[0], theirs)
    assert all(shape[0] == 1 for shape in shapes)
