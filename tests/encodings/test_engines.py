"""Every encoding in a layer, by every engine that takes it, against the reference: outputs and gradients in float64 and float32."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import posenc
from tests.encodings.every import BOTH_SIDES, NAMES, layer

LENGTH = 13
MASKS = {
    "causal": {},
    "window": {},
    "padding": dict(key_mask=torch.arange(LENGTH)[None] >= torch.tensor([[0], [4]])),
    "documents": dict(documents=torch.arange(LENGTH)[None].div(5, rounding_mode="floor").expand(2, -1)),
}


def results(attn, engine, x, masks):
    """Output and the gradients of the input and every parameter."""
    attn.engine = engine
    x = x.clone().requires_grad_()
    out = attn(x, **masks)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    leaves = [x, *attn.parameters()]
    return [out, *torch.autograd.grad(out, leaves, g, allow_unused=True)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_engines_are_the_reference(name, kind):
    causal = kind != "padding" or name not in BOTH_SIDES
    attn = layer(name, causal=causal, **({"window": (4, 0 if causal else 3)} if kind == "window" else {})).double()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    wanted = results(attn, "reference", x, MASKS[kind])
    tried = 0
    for engine in ("auto", "blocked", "cpu", "sdpa"):
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            copy = attn if dtype == torch.float64 else layer_as(attn, dtype)
            try:
                ours = results(copy, engine, x.to(dtype), MASKS[kind])
            except posenc.UnsupportedPlan:
                continue
            tried += 1
            for one, other in zip(ours, wanted, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    size = max(1.0, float(other.detach().abs().max()))
                    torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * size)
    assert tried >= 4  # auto and blocked, both precisions


def layer_as(attn, dtype):
    import copy

    return copy.deepcopy(attn).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 7))
def test_the_gpus_kernels_are_the_reference(part):
    """Interpreted, in processes of their own: Triton reads its variable once."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gpu.encodings", "--device", "cpu", "--length", "64", "--what", "errors"]
    done = subprocess.run(
        [*command, "--part", f"{part}/6"], cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
