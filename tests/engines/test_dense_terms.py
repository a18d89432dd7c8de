"""The terms of a dense mask and their gradients (engines/cpu/dense_terms.py), against the plain formulas."""

import pytest
import torch

from posenc import index
from posenc.core.index import Index
from posenc.engines.cpu import dense, dense_terms

F64 = torch.float64
INDICES = {
    "clip": index.clip(2, 3),
    "buckets": index.log_buckets(8, 6, causal=False),
    "wide": index.clip(40, 40),
    "one row": Index(0, 0),
    "narrow": index.clip(1, 0),
}
LENGTHS = [(5, 5), (3, 9), (1, 4), (12, 12)]


def distances(offset, queries, keys):
    return torch.arange(keys) - torch.arange(queries)[:, None] + offset


@pytest.mark.parametrize("name", list(INDICES))
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("few", [0, 1 << 13])  # summed by diagonals, or pair by pair
def test_biases(name, queries, keys, few, monkeypatch):
    monkeypatch.setattr(dense_terms, "FEW_PAIRS", few)
    rows, offset, heads = INDICES[name], queries - keys, 3
    tables = [torch.randn(n, rows.n, dtype=F64, requires_grad=True) for n in (heads, 1)]
    slopes = torch.rand(heads, dtype=F64, requires_grad=True)
    r = distances(offset, queries, keys)

    def make(*tables):
        return dense_terms.make_bias(tables, (rows, rows), offset, queries, keys, None, None, F64)

    truth = sum(table[:, rows.lookup(r)] for table in tables) - slopes[:, None, None] * r.abs()
    torch.testing.assert_close(make(*tables, slopes)[0], truth)
    torch.autograd.gradcheck(make, (*tables, slopes), fast_mode=True)


@pytest.mark.parametrize("name", list(INDICES))
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_products_with_a_table(name, queries, keys, heads, batch):
    rows, offset = INDICES[name], queries - keys
    states = torch.randn(batch, 2, queries, 4, dtype=F64, requires_grad=True)
    table = torch.randn(heads, rows.n, 4, dtype=F64, requires_grad=True)
    r = distances(offset, queries, keys)

    def multiply(states, table):
        return dense_terms.multiply_by_distance(states, table, rows, offset - queries + 1, keys, 0.7, F64)

    each = table[:, rows.lookup(r)].expand(2, -1, -1, -1)
    truth = 0.7 * torch.einsum("bhie,hije->bhij", states, each)
    torch.testing.assert_close(multiply(states, table), truth)
    torch.autograd.gradcheck(multiply, (states, table), fast_mode=True)
    torch.autograd.gradcheck(lambda table: multiply(states.detach(), table), (table,), fast_mode=True)
    torch.autograd.gradcheck(lambda states: multiply(states, table.detach()), (states,), fast_mode=True)


@pytest.mark.parametrize(("heads", "batch"), [(2, 1), (2, 3)])
def test_attention_with_biases_that_learn(heads, batch):
    """float64 against the formula, and second derivatives are refused, not zero."""
    rows = INDICES["clip"]
    q, k, v = (torch.randn(batch, heads, 6, 8, dtype=F64, requires_grad=True) for _ in range(3))
    table = torch.randn(heads, rows.n, dtype=F64, requires_grad=True)
    facts = 0, 6, 6, None, 0, F64

    def attend(q, k, v, table):
        return dense.attend_with_bias(q, k, v, (table,), (rows,), facts, None, 0.5)

    def formula(q, k, v, table):
        r = distances(0, 6, 6)
        scores = 0.5 * q @ k.mT + table[:, rows.lookup(r)]
        return scores.masked_fill(r > 0, float("-inf")).softmax(-1) @ v

    inputs = (q, k, v, table)
    torch.testing.assert_close(attend(*inputs), formula(*inputs))
    weights = torch.randn_like(q)
    ours = torch.autograd.grad((attend(*inputs) * weights).sum(), inputs)
    theirs = torch.autograd.grad((formula(*inputs) * weights).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    (first,) = torch.autograd.grad((attend(*inputs) * weights).sum(), table, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.sum().backward()


@pytest.mark.parametrize("moved", [1, 1 << 20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("before, columns, after", [(0, 12, 0), (3, 9, 0), (0, 1, 11), (5, 1, 6), (5, 2, 5), (4, 5, 3)])
def test_sums_by_distance_are_the_transpose_of_reading_by_distance(
    before, columns, after, transposed, moved, monkeypatch
):
    monkeypatch.setattr(dense_terms, "MOVED", moved)
    rows, keys = 6, 7
    products = torch.randn(3, 2, rows, columns, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 3, rows, keys, dtype=torch.float64).transpose(0, 1) if transposed else torch.randn(3, 2, rows, keys, dtype=torch.float64)  # fmt: skip
    at = (torch.arange(keys) - torch.arange(rows)[:, None] + rows - 1 - before).clamp(0, columns - 1)
    read = products.gather(-1, at.expand(3, 2, -1, -1))
    torch.testing.assert_close(dense_terms.by_pair(products, before, after, keys), read, rtol=0, atol=0)
    (expected,) = torch.autograd.grad(read, products, grad)
    found = dense_terms.sum_pairs(grad, before, after, columns)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
