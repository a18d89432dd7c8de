"""to_flex: the same scores as the reference, by the functions alone and by FlexAttention itself."""

import warnings

import pytest
import torch

import posenc
from posenc import Positions
from posenc.core.encoding import Kept
from tests.encodings.every import NAMES, layer, make
from tests.plans import plan_of, tensors

MASKS = {
    "none": {},
    "causal": dict(causal=True, window=(3, None)),
    "padding": dict(key_mask=torch.tensor([[True] * 7, [False] * 3 + [True] * 4])),
    "documents": dict(documents=(torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))),
    "bool": dict(mask=torch.rand(5, 7) < 0.8),
    "float": dict(mask=torch.randn(2, 1, 5, 7, dtype=torch.float64)),
}


def dense(flex, heads):
    """score_mod and mask_mod on all indices at once."""
    batch, lq, lk = flex.q.shape[0], flex.q.shape[2], flex.k.shape[2]
    sizes = (batch, heads, lq, lk)
    b, h, i, j = (torch.arange(n).view([-1 if a == c else 1 for c in range(4)]) for a, n in enumerate(sizes))
    k = flex.k.repeat_interleave(heads // flex.k.shape[1], 1)
    s = flex.score_mod(flex.q @ k.mT * flex.scale, b, h, i, j)
    if flex.mask_mod is not None:
        s = s.masked_fill(~flex.mask_mod(b, h, i, j), float("-inf"))
    return s.expand(sizes)


SLOTS = ["bias", "dot_query", "states", "dot_key", "slopes", "decay", "scale", "segments", "exact", "pair"]
CASES = [("bias", masks) for masks in MASKS] + [(slot, masks) for slot in SLOTS[1:] for masks in ("none", "causal")]


@pytest.mark.parametrize("slot, masks", CASES)
def test_every_slot_is_the_reference(slot, masks):
    q, k, v = tensors()
    plan, options = plan_of((slot,), q, k, v), MASKS[masks]
    flex = posenc.to_flex(q, k, v, plan, **options)
    torch.testing.assert_close(dense(flex, 4), posenc.scores(q, k, plan, **options), rtol=0, atol=1e-10)
    if slot == "bias":
        grads = [
            torch.autograd.grad(s.softmax(-1).nan_to_num().square().sum(), plan.lookups[0].bias)[0]
            for s in (dense(flex, 4), posenc.scores(q, k, plan, **options))
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_is_the_reference(name):
    host = layer(name).double()
    heads = host.kv_heads
    q, k, v = (torch.randn(2, n, 9, 4, dtype=torch.float64) for n in (4, heads, heads))
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    kept = host.encoding.keep(x)
    plan = host.encoding.plan(Positions(9), x=x, host=host, kept=None if kept is None else Kept(kept))
    if any(lookup.add_value is not None for lookup in plan.lookups):
        with pytest.raises(posenc.UnsupportedPlan, match="add_value"):
            posenc.to_flex(q, k, v, plan)
        return
    flex = posenc.to_flex(q, k, v, plan, causal=True)
    torch.testing.assert_close(dense(flex, 4), posenc.scores(q, k, plan, causal=True), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["t5", "alibi", "rope", "sinks", "fox", "fire"])
def test_flex_attention_runs_them(name):
    """Uncompiled, where it computes dense scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    encoding = make(name)
    q, k, v = torch.randn(3, 2, 4, 20, 4).unbind()
    plan = encoding.plan(Positions(20), x=torch.randn(2, 20, 16))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        flex = posenc.to_flex(q, k, v, plan, causal=True)
        block_mask = create_block_mask(flex.mask_mod, 2, 4, 20, 20, device="cpu")
        out, lse = flex_attention(
            flex.q, flex.k, flex.v, score_mod=flex.score_mod, block_mask=block_mask, scale=flex.scale, return_lse=True
        )  # fmt: skip
        expected = posenc.attend(q, k, v, plan, causal=True, engine="reference")
    torch.testing.assert_close(flex.finish(out, lse), expected, rtol=0, atol=1e-5)


def test_what_no_score_mod_expresses_is_refused():
    q, k, v = tensors()
    with pytest.raises(posenc.UnsupportedPlan, match="add_value"):
        posenc.to_flex(q, k, v, plan_of(("add_value",), q, k, v))
    with pytest.raises(posenc.UnsupportedPlan, match="dot_key"):
        posenc.to_flex(q, k, v, plan_of(("dot_key", "scale"), q, k, v))


def test_junk_is_named():
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    plan = posenc.create("alibi", heads=2).plan(posenc.Positions(4))
    with pytest.raises(ValueError, match="v must be a tensor"):
        posenc.to_flex(q, k, None, plan)
    with pytest.raises(TypeError, match="plan must be a Plan"):
        posenc.to_flex(q, k, v, "alibi")
