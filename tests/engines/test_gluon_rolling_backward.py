"""The Gluon backward kernels with a content term over every distance, without a GPU: their source in an emulator, against float64."""

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines.gluon import rolling_backward_launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton.arguments import kernel_arguments
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.test_gluon_backward import LOG2E, emulate
from tests.plans import mapped


@pytest.fixture(scope="module")
def kernel():
    return gluon_emulator.load("rolling_backward_prepare.py", "rolling_backward.py", "rolling_backward_keys.py")


def check(
    module, monkeypatch, lengths, start=0, heads=(2, 2), batch=1, bias=True, masks=None, programs=3, with_lse=False, **options
):  # fmt: skip
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=programs)
    )
    (lq, lk), masks = lengths, masks or {}
    q, do = (torch.randn(batch, heads[0], lq, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, heads[1], lk, 64, dtype=torch.bfloat16) for _ in range(2))
    positions = Positions((start, lq), lk)
    spot = index.exact(positions)
    lookup = Lookup(
        spot,
        dot_query=torch.randn(heads[0], spot.n, 64, dtype=torch.bfloat16) / 2,
        bias=torch.randn(heads[0], spot.n) if bias else None,
    )
    plan = mapped(Plan(positions, lookups=(lookup,)), lambda name, x: x.requires_grad_())
    x, num, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **masks)))
    x = gluon_emulator.with_bounds(x)
    expected, allowed = budget.expect(q, k, v, plan, do, **masks)
    lse = torch.full((batch, heads[0], -(-lq // 64) * 64), float("nan"))
    lse[..., :lq] = torch.where(expected["lse"] == float("-inf"), float("inf"), expected["lse"] * LOG2E)
    dq, dk, dv = (torch.full_like(y, float("nan")) for y in (q, k, v))
    with torch.no_grad():
        d_table, d_bias = rolling_backward_launch.run_backward(
            emulate(module), do, None, expected["out"].to(q.dtype), lse, x, num, scale, dq, dk, dv,
            rolling_backward_launch.RollingSchedule(**options),
        )  # fmt: skip
    x.table.backward(d_table.to(x.table.dtype), retain_graph=True)
    if bias:
        x.bias.backward(d_bias)
    found = {"q": dq, "k": dk, "v": dv} | {name: y.grad for name, y in plan.tensors()}
    for name, ours in found.items():
        budget.assert_within(ours, expected[name], allowed[name], name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [(400, 400), (1, 1), (63, 65), (64, 128), (129, 127), (200, 700), (700, 200), (1, 500)]
)
def test_lengths(kernel, monkeypatch, lengths, causal):
    check(kernel, monkeypatch, lengths, max(lengths[1] - lengths[0], 0), masks={"causal": causal})


@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_schedules(kernel, monkeypatch, causal):
    options = {"heads": (4, 2), "batch": 2, "programs": 9, "masks": {"causal": causal}}
    check(kernel, monkeypatch, (300, 450), 7, bias=False, **options)
    check(kernel, monkeypatch, (300, 300), stages=3, ring=6, key_stages=3, key_ring=5, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_masks(kernel, monkeypatch, causal):
    at = torch.arange(448)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    masks = {"key_mask": real, "causal": causal}
    check(kernel, monkeypatch, (400, 448), 48, batch=4, heads=(1, 1), masks=masks)
    check(kernel, monkeypatch, (500, 500), masks={"window": (250, 0 if causal else 100)})
    check(kernel, monkeypatch, (400, 400), masks={"documents": at[None, :400] // 150, "causal": causal})
