"""No encoding ends on dense scores on a GPU: the fused engine supports every plan."""

import pytest
import torch

import posenc
from posenc import Positions
from posenc.core.mask import make_mask
from posenc.engines import triton
from posenc.engines.lowering import lower_plan
from tests.encodings.every import NAMES, layer

LENGTHS = {"grid_bias": 16, "continuous_bias": 16, "decomposed": 16}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("sinusoidal", "sinusoidal_2d", "learned", "cape")]
)
def test_the_fused_engine_supports_every_encoding(name, monkeypatch):
    if not triton.INSTALLED:
        pytest.skip("needs Triton")
    monkeypatch.setattr(triton, "INTERPRETED", True)  # as if the tensors were on a GPU
    length = LENGTHS.get(name, 40)
    attn = layer(name)
    x = torch.randn(2, length, 16)
    q, k, v = (torch.randn(2, heads, length, 4) for heads in (4, attn.kv_heads, attn.kv_heads))
    plan = attn.encoding.plan(Positions(length), x=x, host=attn)
    lowered = lower_plan(q, k, v, plan, make_mask(q, k, causal=True), 0.0, plan.sinks is not None)
    assert triton.supports(lowered) is None
    if plan.append is None and plan.rotate is None:
        assert lowered.facts.head_dim == 4


def test_fire_runs_fused_up_to_its_threshold(monkeypatch):
    monkeypatch.setattr(triton, "INTERPRETED", True)
    q, k, v = torch.randn(3, 1, 2, 512, 4).unbind()
    plan = posenc.Fire(heads=2).plan(Positions(512))
    assert triton.supports(lower_plan(q, k, v, plan, make_mask(q, k, causal=True))) is None


def test_facts_know_the_width_after_the_pre_pass():
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    widths = {"pope": 8, "tupe": 8}
    for name, width in widths.items():
        plan = posenc.create(name, d_model=8, heads=2).plan(Positions(8))
        assert lower_plan(q, k, v, plan, make_mask(q, k)).facts.head_dim == width


@pytest.mark.parametrize("encoding, heads, length, engine", [
    (posenc.Tempered(head_dim=8), 2, 40, "cpu"),
    (posenc.Tempered(head_dim=8, encoding=posenc.T5(heads=2)), 2, 40, "cpu"),
    (posenc.Decomposed(head_dim=8, grid=(14, 14)), 2, 196, "cpu"),
    (posenc.GridBias(heads=2, window=(7, 7)), 2, 49, "cpu"),
    (posenc.GridBias(heads=2, window=(4, 4), class_token=True), 2, 17, "cpu"),
    (posenc.ContinuousBias(heads=2, window=(8, 8)), 2, 64, "cpu"),
    (posenc.TUPE(d_model=16, heads=2, class_token=True, relative=(32, 128)), 2, 40, "cpu"),
    (posenc.PoPE(heads=2, head_dim=8), 2, 40, "sdpa"),
])  # fmt: skip
def test_they_run_fused_on_a_cpu(encoding, heads, length, engine):
    q, k, v = torch.randn(3, 2, heads, length, 8).unbind()
    plan = encoding.plan(Positions(length))
    for causal in (False, True):
        assert posenc.explain(q, k, v, plan, causal=causal).engine == engine
        expected = posenc.attend(q.double(), k.double(), v.double(), plan, causal=causal, engine="reference")
        torch.testing.assert_close(posenc.attend(q, k, v, plan, causal=causal).double(), expected, rtol=0, atol=1e-5)
