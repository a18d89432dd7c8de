"""The Gluon backward kernels with a content term over every distance, without a GPU: their source in an emulator, against float64."""

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import gluon
from posenc.engines.gluon import rolling_backward_launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton.arguments import GRADIENTS, kernel_arguments
from posenc.engines.triton.launch import run_backward
from tests import budget
from tests.engines import gluon_emulator
from tests.engines.test_gluon_backward import LOG2E, emulate
from tests.plans import mapped

DEFAULTS = rolling_backward_launch.RollingSchedule()


@pytest.fixture(scope="module")
def kernel():
    return gluon_emulator.load("rolling_prepare.py", "rolling_backward.py", "rolling_backward_keys.py")


def check(
    module, monkeypatch, lengths, start=0, heads=(2, 2), batch=1, bias=True, masks=None, programs=3, **options
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
    monkeypatch.setattr(rolling_backward_launch.RollingSchedule.__new__, "__defaults__", tuple(
        options.get(name, value) for name, value in DEFAULTS._asdict().items()
    ))  # fmt: skip
    forced = {
        "refuse_device": lambda device: None,
        "refuse_slower": lambda x, num: None,
        "SHORTEST": 1,
        "FEWEST": 1,
    }
    for name, value in forced.items():
        monkeypatch.setattr(gluon, name, value)
    wanted = {name: getattr(x, name) is not None for name in GRADIENTS}
    with torch.no_grad():
        grads = run_backward(
            emulate(module), do, None, expected["out"].to(q.dtype), lse, None, x, num, scale, 0.0, wanted
        )
    grads = dict(zip(GRADIENTS, grads, strict=True))
    x.table.backward(grads["table"].to(x.table.dtype), retain_graph=True)
    if bias:
        x.bias.backward(grads["bias"])
    found = {name: grads[name] for name in "qkv"} | {name: y.grad for name, y in plan.tensors()}
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
    check(
        kernel,
        monkeypatch,
        (300, 300),
        stages=3,
        ring=6,
        turns=False,
        key_stages=3,
        key_ring=5,
        key_turns=False,
        **options,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_masks(kernel, monkeypatch, causal):
    at = torch.arange(448)
    real = torch.stack((at < 300, at >= 140, at % 7 != 3, at < 0))
    masks = {"key_mask": real, "causal": causal}
    check(kernel, monkeypatch, (400, 448), 48, batch=4, heads=(1, 1), masks=masks)
    check(kernel, monkeypatch, (500, 500), masks={"window": (250, 0 if causal else 100)})
    check(kernel, monkeypatch, (400, 400), masks={"documents": at[None, :400] // 150, "causal": causal})


def test_where_it_is_chosen(monkeypatch):
    monkeypatch.setattr(gluon, "refuse_device", lambda device: None)

    def reason(length=4096, size=64, shared=False, dropout=0.0, span=None, strided=False):
        q = torch.empty(8, 4, length, size, dtype=torch.bfloat16)
        spot = index.clip(span, span) if span else index.exact(Positions(length))
        plan = Plan(Positions(length), lookups=(Lookup(spot, dot_query=torch.zeros(1 if shared else 4, spot.n, size)),))
        x, num, scale = kernel_arguments(q, q, q, lower_plan(q, q, q, plan, make_mask(q, q, causal=True)))
        return gluon.refuse_rolling_backward(x, num, scale, dropout, q.mT if strided else q)

    assert reason() is None
    assert "head sizes are 64, got 128" in reason(size=128)
    assert "a table for each head" in reason(shared=True)
    assert "ends within the text" in reason(span=64)
    assert "no dropout" in reason(dropout=0.1)
    assert "needs 512 queries" in reason(length=256)
    assert "output's gradient" in reason(strided=True)
    assert reason(length=1024) is None
