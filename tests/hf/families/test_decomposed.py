"""SAM, ViTDet, SegGPT and the copies of SAM's vision encoder against transformers: windows and whole images."""

import pytest
import torch

from posenc import hf
from posenc.hf import decomposed
from posenc.nn import blocks
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import outcome, pairs, run_check
from tests.hf.tiny import tiny_case

CASES = {
    folder: tiny_case(
        decomposed, folder, layers=2, way="override", paddings=("none",),
        checkpoints=() if folder in ("vitdet", "seggpt") else (False,),
    )
    for folder in (*decomposed.ENCODERS, "seggpt", "vitdet")
}  # fmt: skip
QUICK = ("sam", "seggpt", "vitdet")
"""The others' layers are SAM's, word for word; `accelerate` compares each with its original before it is used."""


@pytest.mark.parametrize(("case", "check"), pairs({name: CASES[name] for name in QUICK}))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("case", [name for name in CASES if name not in QUICK])
def test_copies_of_sam(case):
    pytest.importorskip(f"transformers.models.{case}", reason="not in this release of transformers")
    run_check(CASES[case], "padding none")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("numbers", [64, 2 * 25 * 7, 1 << 20])
def test_blocks_of_any_size(attention, numbers, monkeypatch):
    """Some rows of an image, a whole one, all of them; one with windows that do not divide it."""
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    torch.manual_seed(1)
    config = SamVisionConfig(
        hidden_size=16, output_channels=8, num_hidden_layers=2, num_attention_heads=2, image_size=10, patch_size=2,
        window_size=3, global_attn_indexes=[1], mlp_dim=16, attn_implementation=attention,
    )  # fmt: skip
    model = decomposed.scatter(SamVisionEncoder(config)).eval()
    inputs = {"pixel_values": torch.randn(3, 3, 10, 10)}
    theirs, their_gradients = outcome(model, inputs)
    monkeypatch.setattr(blocks, "NUMBERS", numbers)
    ours, our_gradients = outcome(hf.accelerate(model), inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


@pytest.mark.parametrize("folder", QUICK)
def test_a_named_engine_runs_the_plan(folder):
    model, inputs = CASES[folder].make(), CASES[folder].batch()
    with torch.no_grad():
        theirs = model(**inputs)[0]
        hf.accelerate(model, engine="blocked")
        assert {one.engine for one in hf.report(model).layers} == {"blocked"}
        outputs_agree(model(**inputs)[0], theirs)


def test_second_derivatives():
    torch.manual_seed(1)
    q, bias = (torch.randn(shape, requires_grad=True, dtype=torch.float64) for shape in ((2, 1, 4, 2), (1, 1, 4, 4)))
    k, v = torch.randn(2, 2, 1, 4, 2, dtype=torch.float64).unbind(0)

    def attend(q, bias):
        return blocks.attend_blocks(q, k, v, lambda images, rows, x: x[:, :, rows], (bias,), scale=0.5)

    assert torch.autograd.gradcheck(attend, (q, bias))
    assert torch.autograd.gradgradcheck(attend, (q, bias))
