"""The budgets themselves: what they allow, and that they allow no more."""

from itertools import product

import pytest
import torch

import posenc
from tests import budget
from tests.fuzz import engines
from tests.fuzz.case import Case, Table


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1e-6, 0.5, 40.0, 700.0, 5000.0])
def test_a_probability_moves_as_far_as_its_scores_can_move_it(seed, size):
    """Against every corner of |d| <= e_s: each p is monotone in each score, so its extremes are corners."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, dtype=torch.float64, generator=generator) * size
    e_s = torch.rand(4, dtype=torch.float64, generator=generator) * size
    log_p = scores.log_softmax(-1)
    more = torch.zeros(4, dtype=torch.float64)
    found = budget._of_probabilities(log_p[None], e_s[None], more[None])[0]
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    most = ((scores + signs * e_s).softmax(-1) - log_p.exp()).abs().amax(0)
    assert torch.allclose(found, most, rtol=1e-9, atol=1e-13)


def test_a_key_far_behind_overtakes_where_the_scores_move_further():
    """e^-66 of the best one is lost in a sum with it, not in the sum over the others."""
    log_p = torch.tensor([0.0, -66.0, -9000.0], dtype=torch.float64).log_softmax(-1)
    nothing = torch.zeros(3, dtype=torch.float64)
    change = budget._of_probabilities(log_p, torch.full_like(log_p, 40.0), nothing)
    assert change[0] > 0.99 and change[1] > 0.99 and change[2] < 1e-30
    change = budget._of_probabilities(log_p, torch.full_like(log_p, 30.0), nothing)
    assert change[0] < 0.01


def test_a_number_is_infinite_only_where_its_dtype_holds_no_more():
    expected = torch.tensor([-60000.0, 60000.0, 60000.0, 0.0], dtype=torch.float64)
    bound = torch.tensor([6000.0, 6000.0, 5000.0, 6000.0], dtype=torch.float64)
    inf = float("inf")
    right = torch.tensor([-inf, inf, 61000.0, 1.0], dtype=torch.float16)
    assert budget.excess(right, expected, bound) <= 1.0
    for at, wrong in ((0, inf), (1, -inf), (2, inf), (3, inf), (0, float("nan"))):
        changed = right.clone()
        changed[at] = wrong
        assert budget.excess(changed, expected, bound) == inf
    assert budget.excess(right.float(), expected, bound) == inf  # float32 holds it


def test_terms_below_the_normal_numbers_may_vanish():
    """As in a matrix product that takes them for 0; nothing that a float32 holds may."""
    q, k, v = (torch.full((1, 1, n, 4), size) for n, size in ((1, 1e-3), (3, 1.0), (3, 1.0)))
    plan = posenc.Plan(posenc.Positions((2, 1), 3), slopes=torch.tensor([41.0]))
    g = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]])
    v[0, 0, 0] = 2.0
    expected, allowed = budget.expect(q, k, v, plan, g)
    tiny = torch.finfo(torch.float32).tiny
    assert 0 < expected["k"][0, 0, 0].abs().max() < tiny < allowed["k"][0, 0, 0].min()
    assert allowed["k"][0, 0, 0].max() < 2 * tiny


BESIDE = (Table("deberta", (4, 12), ("add_value",), True), Table("rows", (-2, 0, 9), ("dot_query", "dot_key")))
FAILED = {
    "a gradient beyond float16": Case(dtype="float16", table_dtype="float16", positions="run", ahead=1000000, slopes=True,
                                      wanted=("slopes",), lse=True),
    "two scores 66 apart of which each is off by hundreds": Case(
        data=1709092104, dtype="bfloat16", table_dtype="float32", heads=3, kv_heads=3, lq=32, lk=32, size=16, v_size=16,
        magnitude=100.0, axes=(4,), tables=BESIDE, scale="one", shift=True, wanted=("v",)),
    "a gradient below the normal numbers": Case(dtype="bfloat16", table_dtype="bfloat16", lk=216, size=25, v_size=16,
                                                slopes=True, wanted=("k",)),
    "a negative scale and causality alone": Case(lq=2, lk=2, size=16, v_size=16, scale=-0.5, causal=True),
    "gradients of several blocks beyond float16": Case(
        dtype="float16", table_dtype="float16", lq=17, positions="tensor", ahead=1000000, order="shuffled", slopes=True,
        wanted=("slopes",), lse=True, blocks=2),
    "dropout in several blocks": Case(lq=681, lk=681, tables=(Table(slots=("add_value",)),), causal=True, wanted=(),
                                      dropout=0.5),
}  # fmt: skip
"""Draws 242, 3463 and 10826 of seed 1117, 1066 and 4641 of 20261117 and 10855 of 1117, shrunk."""


@pytest.mark.parametrize("case", FAILED.values(), ids=FAILED)
def test_draws_that_failed(case):
    assert engines.check(case, "auto") == []
