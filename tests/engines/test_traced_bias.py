"""The dense bias of short compiled texts, against the reference; on a GPU tests/gpu/cases.py has them."""

import pytest
import torch

from posenc import Positions, attend
from posenc.core.mask import make_mask
from posenc.engines import sdpa, traced_bias
from posenc.engines.choose import order_engines
from posenc.engines.lowering import lower_plan
from tests.plans import plan_of, tensors


@pytest.mark.parametrize("masks", ["none", "causal", "padded", "causal, padded"])
@pytest.mark.parametrize("lengths", [(7, 7), (4, 9), (9, 4)])
def test_it_is_the_reference(lengths, masks):
    q, k, v = tensors(3, 2, 2, *lengths, 8)
    plan = plan_of(("bias",), q, k, v, Positions((lengths[1] - lengths[0], lengths[0]), lengths[1]))
    options = {"causal": "causal" in masks}
    if "padded" in masks:
        options["key_mask"] = torch.arange(lengths[1]) >= torch.tensor([0, 2, lengths[1]])[:, None]
    ours = traced_bias.run(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, **options)))
    torch.testing.assert_close(ours, attend(q, k, v, plan, engine="reference", **options), rtol=0, atol=1e-11)


def test_compiled_it_is_one_graph():
    q, k, v = tensors(3, 2, 2, 12, 12, 8, dtype=torch.float32)
    plan = plan_of(("bias",), q, k, v, Positions(12))
    real = torch.arange(12) >= torch.tensor([0, 2, 12])[:, None]

    def run(q, k, v):
        return traced_bias.run(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, key_mask=real)))

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v), rtol=1e-5, atol=1e-5)


def choice(q, k, v, plan, *, dynamic=False, compiled=True, dropout=0.0, **options):
    """The engine of a call on a GPU, as far as its facts and dtypes say: sdpa, or another."""

    def run(q, k, v):
        lowered = lower_plan(q, k, v, plan, make_mask(q, k, **options), dropout)
        lowered.facts = lowered.facts._replace(device=torch.device("cuda"))
        is_first = order_engines(lowered.facts)[0] == "sdpa"
        return q + 1, is_first and sdpa.supports(lowered) is None

    torch._dynamo.reset()
    run = torch.compile(run, backend="eager", fullgraph=True, dynamic=dynamic) if compiled else run
    return "sdpa" if run(q, k, v)[1] else "another"


def test_which_calls_it_runs():
    """Compiled ones of short texts whose length is known, if no bias is rounded and nothing but causality and padding masks."""
    half, single = torch.bfloat16, torch.float32
    q, k, v = tensors(2, 2, 2, 16, 16, 8, dtype=half)
    make = lambda *slots, dtype=half: plan_of(slots, q, k, v, Positions(16), dtype=dtype)  # noqa: E731
    bias = make("bias")
    real = torch.ones(2, 16, dtype=torch.bool)
    with torch.no_grad():
        assert choice(q, k, v, bias) == choice(q, k, v, bias, causal=True, key_mask=real, dropout=0.1) == "sdpa"
        assert choice(q, k, v, bias, compiled=False) == choice(q, k, v, bias, dynamic=True) == "another"
        assert choice(q, k, v, bias, window=3) == choice(q, k, v, bias, documents=real.long()) == "another"
        for slots, dtype in ((("bias",), single), (("bias", "dot_query"), half), (("dot_query", "dot_key"), half)):
            assert choice(q, k, v, make(*slots, dtype=dtype)) == "another"
        wide = tensors(2, 2, 2, 16, 16, 8, dtype=single)
        assert choice(*wide, bias) == "another"
        long = tensors(1, 1, 1, 160, 160, 8, dtype=half)
        assert choice(*long, plan_of(("bias",), *long, Positions(160), dtype=half)) == "another"
        one = q[:, :, -1:]
        assert choice(one, k, v, plan_of(("bias",), one, k, v, Positions((15, 1), 16), dtype=half)) == "another"
    assert choice(q, k, v, bias) == "another"


def test_a_length_that_is_not_known_needs_no_graph_of_its_own():
    counter = torch._dynamo.testing.CompileCounter()

    def run(q, k, v, plan):
        lowered = lower_plan(q, k, v, plan, make_mask(q, k))
        return q + traced_bias.applies(lowered.facts._replace(device=torch.device("cuda")))

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for length in (100, 120, 140, 200):
        q, k, v = tensors(1, 2, 2, length, length, 8, dtype=torch.bfloat16)
        compiled(q, k, v, plan_of(("bias",), q, k, v, Positions(length)))
    assert counter.frame_count == 1
