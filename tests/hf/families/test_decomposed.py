"""SAM, ViTDet, SegGPT and the copies of SAM's vision encoder against transformers: windows and whole images."""

import pytest
import torch

from posenc import hf
from posenc.hf import decomposed
from posenc.nn import blocks
from tests.hf.compare import gradients_agree, outputs_agree
from tests.hf.harness import inputs_of, outcome, pairs, run_check, scatter
from tests.hf.tiny import tiny_case
from tests.seeds import seed

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
    model = scatter(SamVisionEncoder(config))
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


@pytest.mark.parametrize("widest", [blocks.WIDEST, 8])
@pytest.mark.parametrize("folder", QUICK)
def test_as_on_a_gpu(folder, widest, monkeypatch):
    """Image rows and columns as channels, and with too many of them as a dense bias: on a CPU, as if it were none."""
    model, inputs = CASES[folder].make(), CASES[folder].batch()
    theirs, their_gradients = outcome(model, inputs)
    hf.accelerate(model)
    monkeypatch.setattr(blocks, "on_cpu", lambda x: False)
    monkeypatch.setattr(blocks, "WIDEST", widest)
    monkeypatch.setattr(blocks, "cut", lambda *a: pytest.fail("runs in blocks"))
    ours, our_gradients = outcome(model, inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


def test_image_rows_and_columns_as_channels(monkeypatch):
    """In float64, heads of 5 channels, an image of 3 x 4: widths that kernels do not like. Tables of another size are interpolated."""
    torch.manual_seed(seed(3))
    double = dict(dtype=torch.float64, requires_grad=True)
    tensors = [torch.randn(2, 2, 12, 5, **double) for _ in range(3)]
    tensors += [torch.randn(rows, 5, **double) for rows in (5, 9)]
    q, k, v, *tables = tensors
    bias = blocks.add_axes(slice(0), slice(0), *blocks.decompose(q, (3, 4), *tables))
    wanted = (0.7 * q @ k.mT + bias).softmax(-1) @ v
    monkeypatch.setattr(blocks, "on_cpu", lambda x: False)
    found = blocks.attend_axes(q, k, v, (3, 4), *tables, scale=0.7)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weight = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(found, tensors, weight), torch.autograd.grad(wanted, tensors, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_second_derivatives():
    torch.manual_seed(1)
    q, bias = (torch.randn(shape, requires_grad=True, dtype=torch.float64) for shape in ((2, 1, 4, 2), (1, 1, 4, 4)))
    k, v = torch.randn(2, 2, 1, 4, 2, dtype=torch.float64).unbind(0)

    def attend(q, bias):
        return blocks.attend_blocks(q, k, v, lambda images, rows, x: x[:, :, rows], (bias,), scale=0.5)

    assert torch.autograd.gradcheck(attend, (q, bias))
    assert torch.autograd.gradgradcheck(attend, (q, bias))


@pytest.mark.parametrize("case", CASES)
def test_attention_weights_that_hooks_collect(case):
    """Some models pass no output_attentions on: transformers collects what their layers return."""
    pytest.importorskip(f"transformers.models.{case}.modeling_{case}")  # one may not be in this release
    model, inputs = CASES[case].make(), inputs_of(CASES[case], "none")
    with torch.no_grad():
        theirs = getattr(model(**inputs, output_attentions=True), "attentions", None)
        ours = getattr(hf.accelerate(model)(**inputs, output_attentions=True), "attentions", None)
    assert (ours is None) == (theirs is None)
    for one, other in zip(ours or (), theirs or (), strict=True):
        outputs_agree(one, other)
