"""torch.compile of an accelerated model: one graph for every length, and the original's numbers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.hf.uses.tiny import FAMILIES, inputs, logits_at_tokens, pair


def check(family, backend, lengths, dynamic):
    original, model = pair(family)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for length in lengths:
        given = inputs(family, length=length)
        with torch.no_grad():
            wanted = logits_at_tokens(family, original, given)
            found = logits_at_tokens(family, compiled, given)
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max().clamp(min=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_share_a_graph(family):
    counter = CompileCounter()
    check(family, counter, (17, 23, 31), dynamic=True)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_functional_operators(family):
    """What a compiler's backend gets: operators without effects, of ours too."""
    check(family, "aot_eager", (17,), dynamic=False)
