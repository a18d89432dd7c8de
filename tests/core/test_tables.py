"""Tables with a row for each distance, in compiled code."""

import torch
import torch._dynamo

from posenc.core import index, tables


def test_compiled_expansions_serve_every_length():
    """As on a GPU, where the gradient is summed in one order by an autograd function."""
    buckets, seen = index.log_buckets(8, 20, causal=False), []

    def expand(table, x):
        length = x.shape[0]
        return tables._Expand.apply(table, buckets, max(buckets.lo - 2, 1 - length), min(buckets.hi + 5, length - 1))

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(expand, backend=backend, fullgraph=True)
    table = torch.randn(3, 8, 2, requires_grad=True)
    for length in (9, 13, 40, 11, 30):
        x = torch.zeros(length)
        ours, truth = compiled(table, x), expand(table, x)
        g = torch.randn_like(ours)
        assert torch.equal(ours, truth)
        (d_ours,), (d_truth,) = (torch.autograd.grad(y, table, g) for y in (ours, truth))
        torch.testing.assert_close(d_ours, d_truth)
    assert len(seen) <= 2, "one for the first length, one for all others"
