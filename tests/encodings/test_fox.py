"""Forgetting gates against flash-linear-attention and x-transformers, and their digits at great lengths."""

import pytest
import torch

import posenc
from posenc import KVCache, Positions
from posenc.core.encoding import Kept
from tests import budget
from tests.encodings.every import layer


def gates_of(length, heads=4, batch=2):
    x = torch.randn(batch, length, 16, dtype=torch.float64)
    encoding = posenc.FoX(d_model=16, heads=heads, std=0.5).double()
    return encoding, x, encoding.keep(x)


def test_attention_is_flas():
    naive = pytest.importorskip("fla.ops.forgetting_attn.naive", reason="needs fla-core").naive_forgetting_attn
    encoding, x, gates = gates_of(21)
    q = torch.randn(2, 4, 21, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 21, 8, dtype=torch.float64).unbind()
    swap = lambda y: y.transpose(1, 2)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        expected = swap(naive(swap(q), swap(k), swap(v), gates))
    ours = posenc.attend(q, k, v, encoding.plan(Positions(21), x=x), causal=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_the_bias_is_x_transformers():
    from x_transformers.x_transformers import DataDependentAlibi

    original = DataDependentAlibi(16, 4).double()
    encoding, x, _ = gates_of(9)
    encoding.load_state_dict(
        {"weight": original.to_forget_gates[0].weight, "bias": original.to_forget_gates[0].bias}
    )  # fmt: skip
    zero = torch.zeros(2, 4, 9, 8, dtype=torch.float64)
    ours = posenc.scores(zero, zero, encoding.plan(Positions(9), x=x))
    torch.testing.assert_close(ours, original(x), rtol=0, atol=1e-10)


def test_fixed_gates_are_alibis_slopes():
    encoding = posenc.FoX(d_model=16, heads=4, gate="fixed", timescales=(2.0, 16.0)).double()
    learned = posenc.FoX(d_model=16, heads=4, gate="bias", timescales=(2.0, 16.0)).double()
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64).unbind()
    x = torch.zeros(2, 12, 16, dtype=torch.float64)
    slopes = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16], dtype=torch.float64)
    expected = posenc.attend(q, k, v, posenc.Plan(Positions(12), slopes=slopes), causal=True)
    torch.testing.assert_close(posenc.attend(q, k, v, encoding.plan(Positions(12), x=x), causal=True), expected)
    ours = posenc.attend(q, k, v, learned.plan(Positions(12), x=x), causal=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)  # b is a float32 number at the start


@pytest.mark.parametrize("engine", ["cpu", "blocked"])
def test_sums_keep_their_digits_at_any_length(engine):
    """After a million tokens the sums are near a million, of which float32 keeps a sixteenth; their differences are exact."""
    heads, length, size = 2, 300, 8
    gates = -torch.rand(1, length, heads, dtype=torch.float64)
    gates[:, 0] = -1e6
    q, k, v = torch.randn(3, 1, heads, length, size).requires_grad_().unbind()
    encoding = posenc.FoX(d_model=4, heads=heads)
    plan = encoding.plan(Positions(length), kept=Kept(gates.requires_grad_()))
    ours = posenc.attend(q, k, v, plan, causal=True, engine=engine)
    exact = posenc.attend(q.double(), k.double(), v.double(), plan, causal=True, engine="reference")
    # every score is rounded a few times at its own size, which decays to some hundreds at most before it vanishes
    assert (ours - exact).abs().max() < 100 * budget.unit(torch.float32) * v.abs().max()
    for mine, theirs in zip(torch.autograd.grad(ours.sum(), [q, gates]), torch.autograd.grad(exact.sum(), [q, gates])):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, check_dtype=False)
    one = posenc.attend(q[:, :, -1:], k, v, encoding.plan(Positions((length - 1, 1), length), kept=Kept(gates)))
    torch.testing.assert_close(one, exact[:, :, -1:], rtol=0, atol=1e-5, check_dtype=False)


def test_documents_that_do_not_lie_together_and_padding():
    attn = layer("fox").double()
    x, documents = torch.randn(1, 9, 16, dtype=torch.float64), torch.tensor([[0, 1, 1, 0, 0, 2, 1, 0, 2]])
    real = torch.tensor([[True, True, False, True, True, True, True, True, False]])
    for cuts in ((9,), (4, 1, 4)):
        cache, parts, start = KVCache(), [], 0
        for cut in cuts:
            now = slice(start, start + cut)
            parts.append(attn(x[:, now], documents=documents[:, now], key_mask=real[:, now], cache=cache))
            start += cut
        packed = torch.cat(parts, 1)
        for number in range(3):
            chosen = (documents[0] == number) & real[0]
            torch.testing.assert_close(packed[:, chosen], attn(x[:, chosen]), rtol=0, atol=1e-10)


def test_a_cache_keeps_gates_through_crop_copy_and_reorder():
    attn = layer("fox").double()
    x, cache = torch.randn(2, 8, 16, dtype=torch.float64), KVCache()
    attn(x[:, :6], cache=cache)
    cache.crop(4)
    branch = cache.copy()
    attn(x[:, :3], cache=branch)
    cache.reorder(torch.tensor([1, 0]))
    rest = attn(x.flip(0)[:, 4:], cache=cache)
    torch.testing.assert_close(rest, attn(x.flip(0))[:, 4:], rtol=0, atol=1e-10)


def test_it_needs_one_sequence():
    encoding, x, _ = gates_of(5)
    with pytest.raises(ValueError, match="a gate for each key's token"):
        encoding.plan(Positions(5))
    with pytest.raises(ValueError, match="a context is another"):
        layer("fox").double()(x, torch.randn(2, 4, 16, dtype=torch.float64))
    with pytest.raises(posenc.OptionError, match="causal"):
        posenc.Attention(16, 4, encoding="fox")
    with pytest.raises(posenc.OptionError, match="timescales"):
        posenc.FoX(d_model=4, heads=2, timescales=3)
