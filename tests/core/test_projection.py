"""Projected tables: what is served by kernels, and that they compute what the linear layers do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import posenc
from posenc.core import projection


def test_the_kernels_give_what_linear_layers_give():
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(posenc.__file__).parents[1]), str(root)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.projection_cases"], capture_output=True, text=True, env=env, timeout=300, cwd=root
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), (done.stdout + done.stderr)[-3000:]


def test_elsewhere_the_layers_are_called():
    rows, linear = torch.randn(5, 8), nn.Linear(8, 12)
    (out,) = projection.project_heads(rows, (linear,), 3)
    assert torch.equal(out, linear(rows).view(5, 3, 4).transpose(0, 1))


def test_what_is_not_a_plain_linear_layer_is_not_served(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    rows = torch.randn(5, 32, dtype=torch.bfloat16)

    def linear(**options):
        return nn.Linear(32, 16, **{"dtype": torch.bfloat16, **options})

    served = projection._find_weights
    assert served(rows, (linear(), linear(bias=False)))
    assert not served(rows.float(), (linear(dtype=torch.float32),))
    assert not served(rows, (linear(dtype=torch.float32),))
    assert not served(rows, (linear(), nn.Linear(32, 48, dtype=torch.bfloat16)))
    assert not served(rows[:, :24], (nn.Linear(24, 16, dtype=torch.bfloat16),))
    assert not served(rows, (nn.Sequential(linear()),))
    assert not served(rows.t().contiguous().t(), (linear(),))
    hooked, replaced, shaped = linear(), linear(), nn.utils.parametrizations.weight_norm(linear())
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x
    for one in (hooked, replaced, shaped):
        assert not served(rows, (one,))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        assert not served(rows, (linear(),))
    monkeypatch.setattr(projection, "MOST", 5 * 32 * 16 - 1)
    assert not served(rows, (linear(),))
