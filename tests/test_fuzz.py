"""The random examination itself: it passes where the library is right, and notices and shrinks planted faults."""

import dataclasses
import runpy
from random import Random

import pytest
import torch

import posenc
from posenc.engines import reference
from tests import budget
from tests.fuzz import engines, layers
from tests.fuzz.case import Case, Table, draw, features, names
from tests.fuzz.render import render
from tests.fuzz.runner import Setting, examine, main
from tests.fuzz.shrink import shrink, simpler


class Planted:
    """The reference engine with one fault."""

    def __init__(self, fault):
        self.fault = fault

    def supports(self, lowered):
        return None

    def run(self, q, k, v, lowered):
        return self.fault(q, k, v, lowered.plan, lowered.mask, lowered.dropout)


def bias_row_off_by_one(q, k, v, plan, mask, dropout):
    lookups = [dataclasses.replace(x, bias=None if x.bias is None else x.bias.roll(1, 1)) for x in plan.lookups]
    return reference.attention(q, k, v, dataclasses.replace(plan, lookups=tuple(lookups)), mask, dropout)


def dropped_scale(q, k, v, plan, mask, dropout):
    return reference.attention(q, k, v, dataclasses.replace(plan, scale=None), mask, dropout)


def missing_gradient(q, k, v, plan, mask, dropout):
    return reference.attention(q, k.detach(), v, plan, mask, dropout)


def one_key_too_many(q, k, v, plan, mask, dropout):
    wider = dataclasses.replace(mask, causal=False, window=(None, 1)) if mask.causal else mask
    return reference.attention(q, k, v, plan, wider, dropout)


def heads_in_another_order(q, k, v, plan, mask, dropout):
    return reference.attention(q, k.flip(1), v, plan, mask, dropout)


def half_precision_scores(q, k, v, plan, mask, dropout):
    q = q + (q.detach().bfloat16().to(q.dtype) - q.detach())
    return reference.attention(q, k, v, plan, mask, dropout)


PLANTED = {
    bias_row_off_by_one: lambda case: len(case.tables) == 1 and case.tables[0].slots == ("bias",),
    dropped_scale: lambda case: case.scale is not None,
    missing_gradient: lambda case: case.wanted is None or "k" in case.wanted,
    one_key_too_many: lambda case: case.causal,
    heads_in_another_order: lambda case: case.kv_heads > 1,
    half_precision_scores: lambda case: case.dtype not in ("bfloat16",),
}


@pytest.mark.parametrize("engine, seed, count", [("reference", 11, 30), ("auto", 12, 30)])
def test_draws_pass(engine, seed, count):
    setting = Setting(engine=engine, seed=seed)
    for number in setting.numbers(0, count):
        result = examine(setting, number, shrinking=False)
        assert result.state != "failed", result.report


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_shrunk(fault, monkeypatch):
    monkeypatch.setitem(posenc.ENGINES, "planted", Planted(fault))
    setting = Setting(engine="planted", seed=5)
    for number in range(60):
        result = examine(setting, number, shrinking=False)
        if result.state == "failed":
            break
    else:
        pytest.fail("60 draws did not find it")
    case = setting.drawn(number)
    small = shrink(case, lambda one: bool(engines.check(one, "planted")), simpler)
    assert engines.check(small, "planted")
    assert PLANTED[fault](small), small
    assert small.batch * small.heads * small.lq * small.lk <= 16, small
    assert small.dropout == 0.0 and small.padding == small.documents == small.mask == ""
    text = engines.script(small, "planted", "cpu")
    compile(text, "script", "exec")
    assert "attend" in text


def test_a_script_runs_by_itself(tmp_path, capsys):
    case = Case(data=3, dtype="float32", table_dtype="float32", heads=2, lq=3, lk=5, size=4, v_size=3, causal=True,
                tables=(Table("log", (8, 20, 1), ("bias", "dot_key")),), dropout=0.5, lse=True)  # fmt: skip
    path = tmp_path / "script.py"
    path.write_text(engines.script(case, "auto", "cpu"))
    runpy.run_path(str(path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["out", "lse", *names(case)]
    assert all(float(line.split()[-4]) <= 1.0 for line in lines)


def test_a_case_comes_from_its_seed_and_number_alone():
    first, again = (draw(Random("engines 1 2")) for _ in range(2))
    assert first == again
    torch.manual_seed(99)
    ours, theirs = {}, {}
    exec(render(first), ours)
    torch.manual_seed(7)
    exec(render(first), theirs)
    assert all(torch.equal(ours["leaves"][name], theirs["leaves"][name]) for name in ours["leaves"])


def test_draws_hold_every_feature():
    found = set()
    for number in range(600):
        found |= features(draw(Random(f"features {number}")))
    wanted = {
        "bias", "dot_query", "states", "dot_key", "add_value", "clip", "rows", "log", "deberta", "exact", "axis", "grid",
        "slopes", "random", "gates", "scale", "shift", "half", "interleaved", "rotated values", "pair", "causal", "window",
        "right", "left", "holes", "empty", "shared", "sorted", "shuffled", "foreign", "bool", "added", "infinite", "run",
        "starts", "tensor", "gaps", "repeated", "BL", "length first", "channels first", "slice", "every other", "one row",
        "one token", "float32", "float64", "bfloat16", "float16", "grouped", "cross", "wanted", "summed", "lse", "dropout",
        "blocks", "poison",
    }  # fmt: skip
    assert wanted <= found, wanted - found


def test_the_command_counts_and_reports(monkeypatch, capsys):
    assert main(["--engine", "reference", "--count", "3", "--seed", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 draws, 0 failures, seed 8"
    monkeypatch.setitem(posenc.ENGINES, "planted", Planted(missing_gradient))
    assert main(["--engine", "planted", "--count", "20", "--seed", "8", "--most", "1", "--only", "small"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("--seed 8 --start" in line for line in lines)
    assert lines[-1].endswith("1 failures, seed 8")


def test_a_layer_that_forgets_is_found():
    case = layers.Case(encoding="t5", heads=2, steps=(("feed", 3), ("feed", 2)))
    assert layers.check(case) == []
    taken = layers._Sequence._take

    def forget(self, step):
        taken(self, step)
        self.cache.crop(self.cache.length - 1)

    layers._Sequence._take = forget
    try:
        assert layers.check(case)
    finally:
        layers._Sequence._take = taken


def test_a_cancelled_gradient_neither_fails_nor_hides():
    """Each query's dS sum to zero: with one table row for all distances its gradient is nothing but rounding."""
    torch.manual_seed(0)
    case = Case(dtype="float32", table_dtype="float32", heads=2, kv_heads=2, lq=40, lk=40, size=16, v_size=16,
                tables=(Table("rows", (0, 0, 1), ("bias",)),))  # fmt: skip
    space = {}
    exec(render(case), space)
    leaves = {name: x.requires_grad_() for name, x in space["leaves"].items()}
    call = (leaves["q"], leaves["k"], leaves["v"], space["plan_of"](leaves))
    expected, allowed = budget.expect(*call, space["g"])
    name = "lookups[0].bias"
    out = posenc.attend(*call, engine="reference")
    (gradient,) = torch.autograd.grad(out, leaves[name], space["g"])
    assert gradient.abs().max() > 0 and expected[name].abs().max() < 1e-12
    budget.assert_within(gradient, expected[name], allowed[name], name)
    with pytest.raises(AssertionError, match="times its budget"):  # as if dS were p dp, without its mean
        budget.assert_within((space["g"] * out).sum((0, 2, 3))[:, None], expected[name], allowed[name], name)


def test_budgets_are_refused_for_other_shapes_and_numbers_that_are_not():
    one = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="has shape"):
        budget.assert_within(one[:1], one, one + 1, "x")
    with pytest.raises(AssertionError, match="x\\[0, 0\\] is nan"):
        budget.assert_within(one + float("nan"), one, one + 1, "x")
    budget.assert_within(None, one, one, "x")


def test_draws_for_hopper_reach_its_kernel(monkeypatch):
    """Those that do not have strides or a scale that it refuses, or nothing to compute."""
    pytest.importorskip("triton")
    from posenc.core.mask import make_mask
    from posenc.engines import gluon
    from posenc.engines.lowering import lower_plan
    from posenc.engines.triton.arguments import kernel_arguments

    for name in ("SHORTEST", "FEWEST"):
        monkeypatch.setattr(gluon, name, 1)
    reasons = []
    for number in range(60):
        space: dict = {}
        exec(compile(render(Setting(hopper=True).drawn(number), "cpu"), "<case>", "exec"), space)
        leaves = space["leaves"]
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        mask = make_mask(q, k, **space["options_of"](leaves))
        given = kernel_arguments(q, k, v, lower_plan(q, k, v, space["plan_of"](leaves), mask))
        reasons.append(gluon.refuse_call(*given, 0.0, gluon.READS | {"table", "states", "key_table", "value"}))
    assert reasons.count(None) > 30
    assert all(
        reason is None or "strides" in reason or "scale" in reason or "it needs 1" in reason for reason in reasons
    ), reasons
