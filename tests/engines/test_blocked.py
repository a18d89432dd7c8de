"""The blocked engine: which keys its blocks read. That its numbers are right is tested with the other engines' and by the fuzz."""

import pytest
import torch

import posenc
from posenc import Lookup, Plan, Positions, attend, index
from posenc.engines import blocked, reference

LIMITS = [
    dict(causal=True), dict(window=3), dict(window=(0, 5)), dict(window=(4, None)), dict(window=(None, 2)),
    dict(causal=True, window=(7, 7)), dict(window=0), dict(window=500), dict(),
]  # fmt: skip
LENGTHS = [(40, 40), (40, 61), (61, 40), (1, 50), (50, 1), (40, 0), (0, 40)]


@pytest.fixture
def few_rows(monkeypatch):
    for name, value in (("FEWEST", 8), ("SCORES", 1), ("LEAST", 1)):
        monkeypatch.setattr(blocked, name, value)


@pytest.fixture
def blocks(monkeypatch):
    """(rows, columns) of every block that is computed."""
    found, attention = [], reference.attention

    def record(q, k, v, plan, mask, dropout, rows=slice(None), columns=slice(None)):
        found.append((range(plan.positions.q_length)[rows], range(plan.positions.k_length)[columns]))
        assert q.shape[2] == len(found[-1][0]) and k.shape[2] == v.shape[2] == len(found[-1][1])
        return attention(q, k, v, plan, mask, dropout, rows, columns)

    monkeypatch.setattr(reference, "attention", record)
    return found


def make(lq, lk, batch=2):
    q, k, v = (torch.randn(batch, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (lq, lk, lk))
    bias, table = (torch.randn(2, 9, *size, dtype=torch.float64, requires_grad=True) for size in ((), (4,)))
    decay = [torch.randn(batch, 2, n, dtype=torch.float64, requires_grad=True) for n in (lq, lk)]
    lookup = Lookup(index.clip(4, 4), bias=bias, dot_key=table, dot_query=table, add_value=table)
    plan = Plan(
        Positions((lk - lq, lq), lk),
        lookups=(lookup,),
        slopes=torch.rand(2, dtype=torch.float64),
        decay=tuple(decay),
        pair=lambda p_q, p_k: 0.1 * (p_k[None, :] - p_q[:, None]).double().sin(),
        scale=torch.rand(batch, 2, lq, dtype=torch.float64),
    )
    return (q, k, v, plan), [q, k, v, bias, table, *decay]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("lq, lk", LENGTHS)
def test_a_block_reads_no_key_that_its_limits_hide(lq, lk, limits, few_rows, blocks):
    arguments, leaves = make(lq, lk)
    mask = torch.randn(1, 2, lq, lk, dtype=torch.float64, requires_grad=True)
    options = dict(limits, mask=mask, key_mask=torch.rand(2, lk) > 0.2)
    results = []
    for engine in ("blocked", "reference"):
        out, lse = attend(*arguments, engine=engine, return_lse=True, **options)
        loss = (out * torch.linspace(-1, 1, 4)).sum() + lse.masked_fill(lse.isinf(), 0.0).sin().sum()
        results.append((out, lse, *torch.autograd.grad(loss, [*leaves, mask])))
        if engine == "blocked":
            computed, blocks[:] = list(blocks), []
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)
    q, k = arguments[0], arguments[1]
    allowed = posenc.core.mask.make_mask(q, k, **limits).allowed(lq, lk, "cpu")
    for rows, columns in computed:
        seen = set(columns) if allowed is None else set(allowed[list(rows)].any(0).nonzero().flatten().tolist())
        assert set(columns) == seen or (not seen and len(columns) <= 1) or not rows
    assert {row for rows, _ in computed for row in rows} == set(range(lq))


def test_a_window_is_read_in_steps_and_one_query_reads_its_window(blocks):
    q, k, v = torch.randn(3, 1, 8, 1024, 4).unbind()
    attend(q, k, v, Plan(Positions(1024)), window=64, engine="blocked", dropout=0.5)
    assert len(blocks) > 8 and max(len(columns) for _, columns in blocks) <= 64 + 2 * 64
    blocks.clear()
    attend(q, k, v, Plan(Positions(1024)), causal=True, engine="blocked", dropout=0.5)
    assert sum(len(rows) * len(columns) for rows, columns in blocks) < 0.6 * 1024**2
    blocks.clear()
    attend(q[:, :, :1], k, v, Plan(Positions((1023, 1), 1024)), window=64, engine="blocked", dropout=0.5)
    assert blocks == [(range(1), range(1023 - 64, 1024))]
    blocks.clear()
    attend(q[:, :, :100], k[:, :, :100], v[:, :, :100], Plan(Positions(100)), causal=True, engine="blocked")
    assert len(blocks) == 1, "a few scores are not worth two blocks"


@pytest.mark.parametrize("name", ["q", "bias", "key_mask", "documents", "mask", "positions", "starts"])
def test_a_backward_pass_after_a_change_in_place_is_refused(name, few_rows):
    """Blocks are recomputed from what was given."""
    q, k, v = (torch.randn(2, 2, 40, 4, requires_grad=True) for _ in range(3))
    given = {
        "q": q, "bias": torch.randn(2, 9), "key_mask": torch.rand(2, 40) > 0.3, "documents": torch.zeros(2, 40, dtype=torch.int64),
        "mask": torch.randn(40, 40), "positions": torch.arange(40) * 2, "starts": torch.arange(2),
    }  # fmt: skip
    options = {key: given[key] for key in ("key_mask", "documents", "mask")}
    positions = Positions((given["starts"], 40), given["positions"])
    for changed in (False, True):
        plan = Plan(positions, lookups=(Lookup(index.clip(4, 4), bias=given["bias"] * 1),))
        out = attend(q, k, v, plan, engine="blocked", **options)
        if changed:
            with torch.no_grad():
                (plan.lookups[0].bias if name == "bias" else given[name]).zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()
