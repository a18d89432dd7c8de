"""Randomised positions: sorted, distinct, and one draw for everything in a plan."""

import pytest
import torch

import posenc
from posenc.encodings.rope.convert import random_positions


def test_draws_are_sorted_distinct_and_uniform():
    drawn = random_positions(5, 20, batch=4000)
    assert drawn.shape == (4000, 5)
    assert (drawn.diff(dim=1) > 0).all()
    counts = torch.bincount(drawn.flatten(), minlength=20) / 4000
    torch.testing.assert_close(counts, torch.full((20,), 0.25), atol=0.05, rtol=0.0)
    assert torch.equal(random_positions(7, 7), torch.arange(7))
    with pytest.raises(ValueError, match="max_length"):
        random_positions(8, 7)


@pytest.mark.parametrize("name", ["rope", "t5", "alibi", "clipped"])
def test_is_the_encoding_at_other_positions(name):
    encoding = posenc.create(name, d_model=32, heads=2)
    wrapped = posenc.Randomized(encoding=encoding, max_length=100, seed=3)
    positions = wrapped.draw(posenc.Positions(9))
    assert torch.equal(positions.q, positions.k)
    assert int(positions.q.min()) >= 0 and int(positions.q.max()) < 100
    q, k = torch.randn(2, 1, 2, 9, 16)
    assert torch.equal(
        posenc.scores(q, k, wrapped.plan(posenc.Positions(9))),
        posenc.scores(q, k, encoding.plan(posenc.Positions(positions.q))),
    )


def test_draws_anew_without_a_seed():
    wrapped = posenc.Randomized(encoding=posenc.RoPE(head_dim=8), max_length=1000)
    drawn = [tuple(wrapped.draw(posenc.Positions(9)).q.tolist()) for _ in range(4)]
    assert len(set(drawn)) > 1
    assert wrapped.length_dependent


def test_a_step_with_cache_is_the_whole_of_that_length():
    encoding = posenc.Randomized(encoding=posenc.RoPE(head_dim=16), max_length=64, seed=0)
    attention = posenc.Attention(32, 2, encoding=encoding, causal=True)
    x, cache = torch.randn(2, 8, 32), posenc.KVCache()
    for i in range(8):
        step = attention(x[:, i : i + 1], cache=cache)
        torch.testing.assert_close(step[:, 0], attention(x[:, : i + 1])[:, -1], atol=1e-5, rtol=1e-5)


def test_too_many_tokens_raise():
    with pytest.raises(ValueError, match="larger max_length"):
        posenc.Randomized(encoding=posenc.RoPE(head_dim=8), max_length=8).plan(posenc.Positions(9))
