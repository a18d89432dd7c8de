"""xPos against rotary-embedding-torch, and its factors at the ends of its range."""

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding

import posenc
from posenc import Positions
from tests import budget


def test_scores_equal_the_oracle():
    q, k = torch.randn(2, 2, 3, 40, 16)
    theirs = RotaryEmbedding(16, use_xpos=True, xpos_scale_base=512)
    rotated = theirs.rotate_queries_and_keys(q, k)
    expected = rotated[0] @ rotated[1].transpose(-1, -2) / 4.0
    ours = posenc.scores(q, k, posenc.XPos(head_dim=16).plan(posenc.Positions(40)))
    # the original's phases and factors are of float32: an angle of 40 is off by three roundings of its size
    longest = q.norm(dim=-1).max() * k.norm(dim=-1).max()
    allowed = budget.unit(torch.float32) * (3 * 40 + budget.c(16)) * 2 * longest.item() / 4.0
    torch.testing.assert_close(ours, expected, rtol=0, atol=allowed)


def test_fades_as_written():
    xpos, rope = posenc.XPos(head_dim=8).double(), posenc.RoPE(head_dim=8, layout="interleaved").double()
    q = k = torch.eye(8, dtype=torch.float64)[:, None, None, :].expand(8, 1, 40, 8)
    ours = posenc.scores(q, k, xpos.plan(posenc.Positions(40)))
    plain = posenc.scores(q, k, rope.plan(posenc.Positions(40)))
    zeta = torch.tensor([0.285714285714, 0.464285714286, 0.642857142857, 0.821428571429], dtype=torch.float64)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    for channel in range(8):
        torch.testing.assert_close(
            ours[channel, 0], plain[channel, 0] * zeta[channel // 2] ** (distance.double() / 512), atol=1e-9, rtol=1e-9
        )


@pytest.mark.parametrize("max_length", [8192, 65000])
def test_no_factor_leaves_its_range(max_length):
    xpos = posenc.XPos(head_dim=64, max_length=max_length)
    q, k = torch.randn(2, 1, 1, 4, 64)
    for start in (0, max_length // 2, max_length - 4):
        rotation = xpos.rotation(posenc.Positions((start, 4)))
        for cos, sin in (rotation.q, rotation.k):
            assert torch.isfinite(cos).all()
            assert torch.hypot(cos.double(), sin.double()).amin() > 1e-37  # a normal float32
        here = posenc.scores(q, k, xpos.plan(posenc.Positions((start, 4))))
        torch.testing.assert_close(here, posenc.scores(q, k, xpos.plan(posenc.Positions(4))), atol=1e-5, rtol=1e-5)
    if max_length == 8192:
        assert float(rotation.q[0].abs().max()) < 65504


def test_keys_may_be_cached():
    attention = posenc.Attention(32, 2, encoding="xpos", causal=True)
    x, cache = torch.randn(2, 12, 32), posenc.KVCache()
    steps = torch.cat([attention(x[:, i : i + 1], cache=cache) for i in range(12)], dim=1)
    torch.testing.assert_close(steps, attention(x), atol=1e-5, rtol=1e-5)


def test_out_of_range_raises():
    xpos = posenc.XPos(head_dim=16, max_length=64)
    for positions in (65, (60, 5), torch.tensor([0, 64]), torch.tensor([-1, 3])):
        with pytest.raises(ValueError, match="larger max_length"):
            xpos.plan(posenc.Positions(positions))
    with pytest.raises(ValueError, match="float32"):
        posenc.XPos(head_dim=64, max_length=100_000)
    posenc.XPos(head_dim=64, max_length=100_000, scale_base=2048)


@pytest.mark.parametrize("max_length", [8192, 20_000])
def test_float16_without_room_is_refused(max_length):
    encoding = posenc.XPos(head_dim=8, max_length=max_length)
    q = torch.randn(1, 2, 4, 8).half()
    with pytest.raises(ValueError, match="float16 ends at 65504.*use bfloat16 or float32"):
        posenc.attend(q, q, q, encoding.plan(Positions((max_length - 4, 4))), causal=True)
    layer = posenc.Attention(16, 2, encoding=encoding, causal=True).half()
    for cache in (None, posenc.KVCache()):
        with pytest.raises(ValueError, match="float16 ends at 65504"):
            layer(torch.randn(1, 4, 16).half(), cache=cache)


@pytest.mark.parametrize("dtype, max_length, size", [
    (torch.float16, 4096, 200.0), (torch.bfloat16, 8192, 1000.0), (torch.bfloat16, 60_000, 1000.0),
    (torch.float32, 60_000, 1000.0),
])  # fmt: skip
@pytest.mark.parametrize("at", ["start", "middle", "end"])
def test_large_numbers_at_both_ends(dtype, max_length, size, at):
    """Factors of both sides at their largest, with large queries and keys: nothing overflows."""
    torch.manual_seed(0)
    encoding = posenc.XPos(head_dim=8, max_length=max_length)
    start = {"start": 0, "middle": max_length // 2, "end": max_length - 16}[at]
    q, k = (torch.randn(1, 2, 16, 8).clamp(-1, 1) * (size if dtype != torch.float16 else 30.0) for _ in range(2))
    v = torch.randn(1, 2, 16, 8)
    q[..., 0] = size if dtype == torch.float16 else q[..., 0]
    plan = encoding.plan(Positions((start, 16)))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    rotated = plan.rotate.rotate_qk(q, k)
    assert all(x.isfinite().all() for x in rotated)
    out = posenc.attend(q, k, v, plan, causal=True)
    assert out.isfinite().all()
    exact = posenc.scores(
        q.double(), k.double(), posenc.XPos(head_dim=8, max_length=max_length).double().plan(plan.positions)
    )
    found = posenc.scores(q, k, plan)
    size = (q.double().norm(dim=-1)[..., :, None] * k.double().norm(dim=-1)[..., None, :]) / 8**0.5
    earlier = torch.ones(16, 16).tril().bool()
    error = ((found.double() - exact).abs() / size)[..., earlier].max()
    assert error < 4 * torch.finfo(dtype).eps
