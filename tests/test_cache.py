import pytest
import torch

from posenc import KVCache


def filled(steps=3, batch=2):
    cache, k = KVCache(), torch.randn(batch, 2, steps, 4)
    for i in range(steps):
        cache.extend(k[:, :, i : i + 1], -k[:, :, i : i + 1])
    return cache, k


def test_extend_returns_everything_in_order():
    cache, k = filled(9)
    assert len(cache) == 9
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, -k)


def test_growing_copies_rarely():
    cache, _ = filled(64)
    stored = cache._k.data_ptr()
    cache.extend(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    moved = cache._k.data_ptr()
    for _ in range(60):
        cache.extend(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    assert stored != moved
    assert cache._k.data_ptr() == moved


def test_the_callers_first_keys_are_not_written_to():
    cache, first = KVCache(), torch.zeros(1, 1, 2, 4)
    cache.extend(first, first)
    cache.crop(1)
    cache.extend(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    assert first.abs().max() == 0


def test_gradients_flow_through():
    cache = KVCache()
    first, second = (torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(2))
    cache.extend(first, first)
    k, _ = cache.extend(second, second)
    k.sum().backward()
    assert first.grad.sum() == second.grad.sum() == 8


def test_reorder_and_crop():
    cache, k = filled(4)
    cache.mark("positions", torch.zeros(1, 0, dtype=torch.int64), torch.arange(8).view(2, 4))
    cache.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.k, k[[1, 1, 0]])
    assert cache.marks["positions"][:, 0].tolist() == [4, 4, 0]
    cache.crop(2)
    assert cache.k.shape[2] == 2
    assert cache.marks["positions"].shape == (3, 2)
    with pytest.raises(ValueError, match="cannot crop 2 tokens to 3"):
        cache.crop(3)


def test_another_batch_gets_a_sentence():
    cache, _ = filled()
    with pytest.raises(ValueError, match="one layer and one batch"):
        cache.extend(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
