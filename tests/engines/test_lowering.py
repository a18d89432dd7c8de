"""The one lowering: facts without reading a tensor, and tables with a row for each distance."""

import pytest
import torch

from posenc import Index, Lookup, Mask, Plan, Positions, index
from posenc.engines.lowering import expand_table, lower_plan


@pytest.mark.parametrize(
    "given, lo, hi",
    [
        (index.clip(3, 2), -3, 2), (index.clip(3, 2), -40, 60), (index.clip(3, 2), -1, 1), (index.clip(3, 2), -40, 1),
        (index.log_buckets(8, 20, causal=False), -20, 20), (index.log_buckets(8, 20, causal=True), -90, 3),
        (Index(-2, 2, rows=(1, 0, 1, 0, 1), n=4), -2, 30),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, -1), (2, -1, 5)])
def test_an_expanded_table_and_its_gradient(given, lo, hi, shape):
    table = torch.randn([given.n if n < 0 else n for n in shape], dtype=torch.float64, requires_grad=True)
    rows = given.lookup(torch.arange(lo, hi + 1))
    plain, ours = table.index_select(1, rows), expand_table(table, given, lo, hi)
    assert torch.equal(ours, plain)
    grad = torch.randn_like(plain)
    expected, found = (torch.autograd.grad(x, table, grad, retain_graph=True)[0] for x in (plain, ours))
    torch.testing.assert_close(found, expected)
    grad.select(1, 0).fill_(float("nan"))  # reaches the row that this distance reads, and no other
    bad = torch.autograd.grad(ours, table, grad)[0].isnan().movedim(1, -1).flatten(0, -2).any(0)
    assert bad.nonzero().tolist() == [[rows[0].item()]]


def lowered(plan, length=7, mask=None, **options):
    q = torch.randn(2, 3, length, 4)
    return q, lower_plan(q, q, q, plan, mask or Mask(), **options)


def test_facts_are_hashable_and_the_same_for_other_numbers():
    def facts(scale):
        table = torch.randn(3, 5) * scale
        return lowered(Plan(Positions(7), lookups=(Lookup(index.clip(2, 2), bias=table),)))[1].facts

    assert facts(1.0) == facts(2.0) and hash(facts(1.0)) == hash(facts(2.0))
    assert facts(1.0).spans == ((-2, 2), None, None, None) and not facts(1.0).has_content


def test_lookups_over_different_spans_become_one_table():
    wide, narrow = torch.randn(3, 9), torch.randn(1, 3)
    plan = Plan(Positions(7), lookups=(Lookup(index.clip(4, 4), bias=wide), Lookup(index.clip(1, 1), bias=narrow)))
    _, low = lowered(plan)
    r = torch.arange(-6, 7)
    expected = wide[:, r.clamp(-4, 4) + 4] + narrow[:, r.clamp(-1, 1) + 1]
    torch.testing.assert_close(low.bias_table(-6, 6), expected)
    assert low.facts.spans[0] == (-4, 4)


def test_tables_for_q_and_for_states_are_one_product():
    own, other = torch.randn(3, 5, 4), torch.randn(1, 3, 2)
    states = torch.randn(2, 3, 7, 2)
    plan = Plan(
        Positions(7),
        lookups=(
            Lookup(index.clip(2, 2), dot_query=own),
            Lookup(index.clip(1, 1), dot_query=other, states=states),
        ),
    )
    q, low = lowered(plan)
    table, joined = low.query_table(q, -2, 2)
    r = torch.arange(-2, 3)
    expected = q @ own.mT + states @ other[:, r.clamp(-1, 1) + 1].mT
    torch.testing.assert_close(joined @ table.mT, expected)
    assert low.facts.states


def test_offset_of_explicit_consecutive_positions():
    ids = torch.arange(7)[None].expand(2, -1) + torch.tensor([[3], [50]])
    assert lowered(Plan(Positions(ids)))[1].offset == 0
    assert lowered(Plan(Positions(ids, ids.clone())))[1].offset == 0
    assert lowered(Plan(Positions(ids, torch.arange(7))))[1].offset is None
    assert lowered(Plan(Positions(torch.tensor([0, 1, 2, 9, 10, 11, 12]))))[1].offset is None
