"""attend and merge: attention over parts of the keys is attention over all of them."""

import pytest
import torch

from posenc import Lookup, Plan, Positions, attend, index, merge, scores
from tests.plans import plan_of, tensors

ENGINES = ("reference", "auto")


@pytest.mark.parametrize("engine", ENGINES)
def test_lse_is_of_the_scores(engine, monkeypatch):
    from posenc.engines.cpu import sizes

    monkeypatch.setattr(sizes, "FEWEST", 3)  # several blocks of queries
    monkeypatch.setattr(sizes, "SCORES", 1)
    q, k, v = (x.requires_grad_() for x in tensors(lq=10, lk=12))
    plan = plan_of(("bias", "dot_query", "add_value", "decay"), q, k, v)
    out, lse = attend(q, k, v, plan, causal=True, engine=engine, return_lse=True)
    s = scores(q, k, plan, causal=True)
    torch.testing.assert_close(out, attend(q, k, v, plan, causal=True, engine="reference"))
    torch.testing.assert_close(lse, s.logsumexp(-1))
    g = torch.randn_like(lse)
    ours, theirs = (torch.autograd.grad(x, (q, k), g, retain_graph=True) for x in (lse, s.logsumexp(-1)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_merge_into_the_whole(engine):
    q, k, v = (x.requires_grad_() for x in tensors(lq=6, lk=20))
    k.data[0, 0, 3] = 9.0  # one part far above the others
    table = torch.randn(4, 41, dtype=torch.float64).requires_grad_()
    mask = torch.rand(2, 20) > 0.3
    mask[1] = False  # nothing to see anywhere

    def plan(begin, length):
        return Plan(Positions((14, 6), (begin, length)), lookups=(Lookup(index.clip(20, 20), bias=table),))

    whole = attend(q, k, v, plan(0, 20), key_mask=mask, engine=engine)
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 20), (20, 20)):
        at = slice(begin, end)
        parts.append(
            attend(
                q,
                k[:, :, at],
                v[:, :, at],
                plan(begin, end - begin),
                key_mask=mask[:, at],
                engine=engine,
                return_lse=True,
            )
        )
    out, lse = merge(parts)
    torch.testing.assert_close(out, whole)
    assert (lse[1] == float("-inf")).all() and lse[0].isfinite().all() and not out[1].any()
    g = torch.randn_like(out)
    leaves = (q, k, v, table)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, g), torch.autograd.grad(whole, leaves, g))


def test_what_does_not_fit_gets_a_sentence():
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    with pytest.raises(ValueError, match=r"all alike, got \[\(\[1, 2, 3, 4\], \[1, 2, 3\]\), \(\[1, 2, 2, 4\]"):
        merge([(out, lse), (out[:, :, :2], lse[:, :, :2])])
