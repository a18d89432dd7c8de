"""Gradients for any subset of a plan's tensors: those that want one get the reference's, and the output knows of it."""

from itertools import chain, combinations

import pytest
import torch

from posenc.core.index import clip
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.functional import attend

B, H, D = 2, 2, 4
INDEX = clip(3, 2)
TENSORS = {
    "bias": [(H, 6)],
    "slopes": [(H,)],
    "decay": [(B, H, 7), (B, H, 9)],
    "states": [(H, 6, 3), (B, H, 7, 3)],
    "both sides": [(H, 6, D), (1, 6, D)],
    "values": [(1, 6, D)],
}


def make(name, tables):
    positions = Positions((2, 7), 9)
    if name == "slopes":
        return Plan(positions, slopes=tables[0])
    if name == "decay":
        return Plan(positions, decay=tuple(tables))
    names = {"bias": ["bias"], "states": ["dot_query", "states"], "both sides": ["dot_query", "dot_key"]}
    given = dict(zip(names.get(name, ["add_value"]), tables, strict=True))
    return Plan(positions, lookups=(Lookup(INDEX, **given),))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_subset(name, causal):
    shapes = [(B, H, 7, D), (B, H, 9, D), (B, H, 9, D), *TENSORS[name]]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    weight = torch.randn(B, H, 7, D, dtype=torch.float64)
    numbers = range(len(given))
    for some in chain.from_iterable(combinations(numbers, n) for n in range(1, len(given) + 1)):
        results = []
        for engine in ("cpu", "reference"):
            leaves = [x.clone().requires_grad_(n in some) for n, x in enumerate(given)]
            out = attend(*leaves[:3], make(name, leaves[3:]), causal=causal, engine=engine)
            assert out.requires_grad, (engine, some)
            results.append(torch.autograd.grad((out * weight).sum(), [leaves[n] for n in some]))
        for n, ours, theirs in zip(some, *results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9, msg=lambda m, at=(some, n): f"{at}: {m}")
