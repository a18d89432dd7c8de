"""TUPE, CAPE and PoPE: by their formulas, and PoPE against x-transformers."""

import pytest
import torch

import posenc
from posenc import Plan, Positions
from tests.plans import tensors


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_tupe_is_its_formula(class_token, relative):
    """As the authors' code writes it: products of all rows, then the class token's row and column are replaced."""
    n, heads, size = 9, 2, 4
    encoding = posenc.TUPE(
        d_model=8, heads=heads, max_length=12, class_token=class_token, relative=(8, 6) if relative else None, std=0.7
    ).double()  # fmt: skip
    rows = encoding.projection(encoding.norm(encoding.table)).view(13, 2, heads, size)
    a, b = rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)
    bias = (a @ b.mT) * (2 * size) ** -0.5
    first, second = bias[:, 0, 0], bias[:, 1, 1]
    if class_token:
        bias = bias[:, 1:, 1:].clone()
        bias[:, :, 0] = second[:, None]
        bias[:, 0, :] = first[:, None]
    bias = bias[:, :n, :n].clone()
    if relative:
        r = torch.arange(n) - torch.arange(n)[:, None]
        buckets = posenc.index.log_buckets(8, 6, causal=False).lookup(r)
        if class_token:
            buckets[:, 0] = 8
            buckets[0, :] = 4
        bias = bias + encoding.buckets[buckets].permute(2, 0, 1)
    q, k, v = torch.randn(3, 2, heads, n, size, dtype=torch.float64).unbind()
    scores = q @ k.mT * (2 * size) ** -0.5 + bias
    for positions in (Positions(n), Positions(torch.arange(n)[None].expand(2, n))):
        for engine in ("auto", "reference"):
            out, lse = posenc.attend(q, k, v, encoding.plan(positions), engine=engine, return_lse=True)
            close(out, scores.softmax(-1) @ v)
            close(lse, scores.logsumexp(-1))
    with pytest.raises(ValueError, match="TUPE's table is for 0 to 11"):
        encoding.plan(Positions(13))


def test_tupe_runs_fused():
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    for options in ({}, {"class_token": True}, {"relative": (32, 128)}):
        plan = posenc.TUPE(d_model=16, heads=2, **options).plan(Positions(40))
        assert posenc.explain(q, k, v, plan).engine in ("sdpa", "cpu")


def test_appended_channels_are_checked():
    q, k, v = tensors()
    more = torch.randn(1, 4, 5, 3, dtype=torch.float64), torch.randn(2, 1, 7, 3, dtype=torch.float64)
    plan = Plan(Positions(5, 7), append=more, scale=0.5)
    wide = torch.cat((q, more[0].expand(2, 4, 5, 3)), -1), torch.cat((k, more[1].expand(2, 2, 7, 3)), -1)
    close(posenc.attend(q, k, v, plan), posenc.attend(*wide, v, Plan(Positions(5, 7), scale=0.5)))
    for wrong, message in (
        (dict(scale=None), "give the plan a scale"),
        (dict(append=(more[0], more[1][..., :2])), "adds 3 channels to q and 2 to k"),
        (dict(append=(more[1], more[0])), "must be"),
        (dict(lookups=(posenc.Lookup(posenc.index.clip(1, 1), dot_key=torch.zeros(1, 3, 8)),)), "multiplied with q or k"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            posenc.attend(q, k, v, posenc.core.plan.replace(plan, **wrong))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_pope_is_x_transformers(dtype, tolerance):
    from x_transformers import x_transformers as m

    original = m.PolarEmbedding(8, 4)
    torch.nn.init.uniform_(original.learned_bias, -7.0, 0.5)  # some outside their bounds
    encoding = posenc.PoPE(head_dim=8, heads=4).to(dtype)
    with torch.no_grad():
        encoding.bias.copy_(original.learned_bias)
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=dtype).unbind()
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:  # it computes in float32
            original = original.double()
            original.inv_freq.copy_(10000 ** -(torch.arange(8).double() / 8))
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        freqs, bias = original(torch.arange(9))
        a, b = m.apply_polar_pos_emb(q, freqs), m.apply_polar_pos_emb(k, freqs + bias)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected = (a @ b.mT * 8**-0.5).masked_fill(future, float("-inf")).softmax(-1) @ v
    for engine in ("auto", "reference"):
        close(posenc.attend(q, k, v, encoding.plan(Positions(9)), causal=True, engine=engine), expected, tolerance)


def test_pope_shares_keys_among_heads():
    encoding = posenc.PoPE(head_dim=4, heads=4, kv_heads=2, spread=True).double()
    layer = posenc.Attention(16, 4, kv_heads=2, encoding=encoding, causal=True).double()
    x, cache = torch.randn(2, 6, 16, dtype=torch.float64), posenc.KVCache()
    steps = [layer(x[:, i : i + 2], cache=cache) for i in (0, 2, 4)]
    close(torch.cat(steps, 1), layer(x))
    assert cache.layers[0].k.shape[-1] == 4  # as narrow as keys are


def test_cape_moves_positions_in_training_alone():
    encoding = posenc.Cape(d_model=8, shift=3.0, jitter=0.5, rescale=1.5).double()
    x, positions = torch.zeros(4, 6, 8, dtype=torch.float64), Positions(torch.arange(6)[None].expand(4, 6))
    plain = posenc.Sinusoidal(d_model=8).double().embed(x, positions)
    assert torch.equal(encoding.eval().embed(x, positions), plain)
    moved = torch.atan2(*encoding.train().embed(x, positions)[..., :2].unbind(-1))  # p' of the first pair, up to 2π
    steps = moved.diff(dim=-1).remainder(2 * torch.pi)
    assert (steps >= (1 - 0.5) / 1.5 - 1e-9).all() and (steps <= (1 + 0.5) * 1.5 + 1e-9).all()
    assert moved[:, 0].unique().numel() == 4  # each sequence has its own
    plain_steps = posenc.Cape(d_model=8, jitter=0.0).double().embed(x, positions)
    shifts = torch.atan2(*plain_steps[..., :2].unbind(-1)).diff(dim=-1).remainder(2 * torch.pi)
    close(shifts, torch.ones_like(shifts))


def test_cape_centres_a_whole_input():
    encoding = posenc.Cape(d_model=4, centre=True).double().eval()
    x = torch.zeros(1, 5, 4, dtype=torch.float64)
    expected = posenc.encodings.absolute.sinusoid(torch.arange(-2, 3), 4)
    close(encoding.embed(x, Positions(5))[0], expected)
    layer = posenc.Attention(4, 1, encoding=encoding, causal=True).double().eval()
    cache = posenc.KVCache()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="a whole input at once"):
        layer(x, cache=cache)
