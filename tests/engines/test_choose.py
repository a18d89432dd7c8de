"""Which engine `auto` tries first, by facts alone."""

from dataclasses import replace

import pytest
import torch

import posenc
from posenc import Lookup, Plan, Positions, attend, explain, index
from posenc.core.mask import make_mask
from posenc.core.memo import Memo
from posenc.engines import dense_bias, sdpa
from posenc.engines.choose import ENGINES, order_engines
from posenc.engines.lowering import LoweredPlan, lower_plan
from tests.plans import plan_of, tensors


def _facts(plan, q, k, v, device):
    return lower_plan(q, k, v, plan, make_mask(q, k)).facts._replace(device=torch.device(device))


def test_on_a_gpu_plans_without_terms_are_pytorchs():
    q, k, v = tensors()
    assert order_engines(_facts(Plan(Positions(q.shape[2], k.shape[2])), q, k, v, "cuda"))[0] == "sdpa"
    for slot in ("bias", "dot_query", "dot_key", "add_value", "slopes", "decay", "scale"):
        assert order_engines(_facts(plan_of((slot,), q, k, v), q, k, v, "cuda"))[0] == "triton"


def test_tables_over_a_grid_are_a_dense_bias_on_a_gpu_alone():
    q, k, v, plan = grid_call()
    assert order_engines(_facts(plan, q, k, v, "cuda"))[0] == "sdpa"
    names = order_engines(_facts(plan, q, k, v, "cpu"))
    assert names.index("cpu") < names.index("sdpa") < names.index("blocked")


def test_every_engine_is_tried():
    q, k, v = tensors()
    for device in ("cpu", "cuda", "mps"):
        for plan in (Plan(Positions(q.shape[2], k.shape[2])), plan_of(("bias",), q, k, v)):
            assert set(order_engines(_facts(plan, q, k, v, device))) == set(ENGINES)


def grid_call(dtype=torch.float64):
    """Windows of 3 x 4 with a table over the grid."""
    from posenc import Lookup, index

    q, k, v = (torch.randn(5, 2, 12, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    rows, columns = torch.arange(12) // 4, torch.arange(12) % 4
    table = torch.randn(2, 5 * 7, dtype=dtype, requires_grad=True)
    grid = index.Grid((index.Index(-2, 2, axis=1), index.Index(-3, 3, axis=2)))
    positions = Positions(12, 12, more=[(rows, rows), (columns, columns)])
    return q, k, v, Plan(positions, lookups=(Lookup(grid, bias=table),))


def test_a_dense_bias_is_the_reference_with_every_gradient():
    q, k, v, plan = grid_call()
    leaves = (q, k, v, plan.lookups[0].bias)
    g = torch.randn(q.shape, dtype=q.dtype)
    results = []
    for engine in ("sdpa", "reference"):
        out = attend(q, k, v, plan, engine=engine)
        results.append((out, *torch.autograd.grad(out, leaves, g)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_positions_that_change_in_place_are_read_again():
    q, k, v, plan = grid_call()
    first = attend(q, k, v, plan, engine="sdpa")
    rows = plan.positions.q_axes[1]
    rows.copy_(rows.flip(0))
    expected = attend(q, k, v, plan, engine="reference")
    assert not torch.allclose(first, expected)
    torch.testing.assert_close(attend(q, k, v, plan, engine="sdpa"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slot", ["dot_query", "slopes", "decay", "add_value"])
def test_other_terms_are_refused_with_the_reason(slot):
    q, k, v = tensors()
    plan = plan_of((slot,), q, k, v)
    assert "dense bias only" in explain(q, k, v, plan).reasons.get("sdpa", "dense bias only")


@pytest.mark.parametrize("class_token", [False, True])
def test_windows_of_numbered_patches_are_a_dense_bias(class_token):
    encoding = posenc.create("grid_bias", heads=2, window=(3, 4), class_token=class_token).double()
    length = 12 + class_token
    q, k, v = (torch.randn(3, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = []
    for engine in ("sdpa", "reference"):
        plan = encoding.plan(Positions(length))
        out = attend(q, k, v, plan, engine=engine)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, encoding.table))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
    assert encoding.plan(Positions(length)).positions is plan.positions
    assert order_engines(_facts(plan, q, k, v, "cuda"))[0] == "sdpa"


def test_only_an_export_takes_plain_operators(monkeypatch):
    """Before PyTorch 2.13, torch.compiler.is_exporting() is True under torch.compile too."""
    q = torch.randn(1, 2, 8, 16)
    plan = posenc.create("t5", heads=2).plan(posenc.Positions(8))
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert posenc.explain(q, q, q, plan).engine == "cpu"
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert posenc.explain(q, q, q, plan).engine == "reference"


@pytest.mark.parametrize("lengths", [(20, 20), (12, 20), (1, 20)])
def test_causality_is_part_of_a_dense_bias(lengths, monkeypatch):
    """On a GPU alone; its tensors are made here and added by hand."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q_length, k_length = lengths
    encoding = posenc.create("grid_bias", heads=2, window=(4, 5), std=1.0).double()
    q = torch.randn(3, 2, q_length, 8, dtype=torch.float64)
    k, v = (torch.randn(3, 2, k_length, 8, dtype=torch.float64) for _ in range(2))
    plan = encoding.plan(Positions((k_length - q_length, q_length), k_length))
    lowered = lower_plan(q, k, v, plan, make_mask(q, k, causal=True))
    assert "on a CPU" in (sdpa.supports(lowered) or "")
    on_gpu = LoweredPlan(plan, lowered.mask, lowered.facts._replace(device=torch.device("cuda")), 0.0, False)
    assert dense_bias.supports(on_gpu) is None
    bias = dense_bias.make_bias(q, lowered)
    ours = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(ours, attend(q, k, v, plan, causal=True, engine="reference"), rtol=0, atol=1e-12)


def test_a_row_that_many_pairs_read_is_summed_in_parts(monkeypatch):
    encoding = posenc.create("grid_bias", heads=2, window=(4, 5), std=1.0).double()
    q, k, v = torch.randn(3, 2, 2, 20, 8, dtype=torch.float64).unbind()
    monkeypatch.setattr(dense_bias, "WIDTH", 3)
    monkeypatch.setattr(dense_bias, "_kept", Memo(8, 8))
    grads = []
    for engine in ("sdpa", "reference"):
        out = attend(q, k, v, encoding.plan(Positions(20)), engine=engine)
        grads.append(torch.autograd.grad(out.square().sum(), encoding.table)[0])
    (pairs,) = (found[0] for found, _ in dense_bias._kept._entries.values())
    assert pairs.readers.shape[1] == 3
    assert pairs.parts is not None
    assert pairs.parts.shape[1] == 7  # 20 pairs of a patch with itself
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_a_table_of_more_digits_is_trained_as_a_dense_bias_by_the_kernels():
    for window, dtype, table, worth in (
        ((12, 16), torch.bfloat16, torch.float32, True),
        ((12, 16), torch.float32, torch.float32, False),
        ((3, 4), torch.bfloat16, torch.float32, False),  # small windows are faster one pair after the other
    ):
        encoding = posenc.create("grid_bias", heads=2, window=window).to(table)
        length = window[0] * window[1]
        q, k, v = torch.randn(3, 2, 2, length, 8, dtype=dtype).unbind()
        plan = encoding.plan(Positions(length))
        assert dense_bias.is_worth(lower_plan(q, k, v, plan, make_mask(q, k))) is worth
        padded = make_mask(q, k, key_mask=torch.ones(2, length, dtype=torch.bool))
        assert not dense_bias.is_worth(lower_plan(q, k, v, plan, padded))
        with torch.no_grad():
            assert not dense_bias.is_worth(lower_plan(q, k, v, encoding.plan(Positions(length)), make_mask(q, k)))


def test_windows_like_earlier_ones_are_not_lowered_again():
    """What a GPU does (`plain_call._run_on_gpu`), on a CPU: nothing at first, then the same numbers and gradients."""
    from posenc.engines import plain_call

    rows, columns = (x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"))
    positions = Positions(rows, rows, more=[(columns, columns, (-4, 4))], reach=(-3, 3))
    grid = index.Grid((index.clip(3, 3, axis=0), index.clip(4, 4, axis=1)))
    table = torch.randn(2, grid.n, requires_grad=True)
    q, k, v = torch.randn(3, 3, 2, 20, 8).unbind()
    plan = Plan(positions, lookups=(Lookup(grid, bias=table),), scale=0.3)
    assert plain_call._run_on_gpu(q, k, v, plan, False) is None
    expected = attend(q, k, v, plan, engine="sdpa")
    found = plain_call._run_on_gpu(q, k, v, plan, False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), table), torch.autograd.grad(expected.square().sum(), table)
    )
    for other in (
        replace(plan, slopes=torch.ones(2)),
        replace(plan, lookups=plan.lookups * 2),
        replace(plan, lookups=(Lookup(grid, bias=table.double()),)),
        replace(plan, lookups=(Lookup(grid, bias=table, dot_key=torch.randn(2, grid.n, 8)),)),
    ):
        assert plain_call._run_on_gpu(q, k, v, other, False) is None
    assert plain_call._run_on_gpu(q[:, :, :19], k, v, plan, False) is None
    assert plain_call._run_on_gpu(q, k, v, plan, True) is None
    rows.add_(0)  # a new version: positions may be others
    assert plain_call._run_on_gpu(q, k, v, plan, False) is None
