"""Tables whose numbers do not lie side by side: encodings store [rows, heads] as checkpoints do and transpose it."""

import pytest
import torch

import posenc
from posenc import Index, Lookup, Plan, Positions


def transposed(*shape):
    """[.., a, b] with strides of [.., b, a]."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=torch.float64).transpose(-1, -2).requires_grad_()


@pytest.mark.parametrize("lengths", [(40, 40), (1, 40), (300, 300)])
@pytest.mark.parametrize("reach", [6, 400])
def test_the_cpu_engine_reads_them_by_their_strides(lengths, reach):
    lq, lk = lengths
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (lq, lk, lk))
    n = 2 * reach + 1
    lookup = Lookup(
        Index(-reach, reach), bias=transposed(2, n), dot_query=transposed(2, n, 8), dot_key=transposed(2, n, 8)
    )
    for one in (Lookup(lookup.index, bias=lookup.bias), lookup):
        plan = Plan(Positions((lk - lq, lq), lk), lookups=(one,))
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                out = posenc.attend(q, k, v, plan, causal=True, engine="cpu")
                exact = posenc.attend(q, k, v, plan, causal=True, engine="reference")
            torch.testing.assert_close(out, exact, rtol=0, atol=1e-10)
        tables = [x for _, x in one.tensors()]
        for ours, theirs in zip(
            torch.autograd.grad(out.cos().sum(), tables), torch.autograd.grad(exact.cos().sum(), tables)
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_lowered_tables_lie_side_by_side():
    from posenc.core.mask import OPEN
    from posenc.engines.lowering import lower_plan

    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    lookup = Lookup(Index(-4, 4), bias=transposed(2, 9), dot_query=transposed(2, 9, 4))
    lowered = lower_plan(q, k, v, Plan(Positions(5), lookups=(lookup,)), OPEN)
    assert lowered.bias_table(-4, 4).stride(-1) == 1
    assert lowered.query_table(q, -4, 4)[0].stride(-1) == 1
