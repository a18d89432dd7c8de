"""KVCache and its slots alone; with layers: test_decoding.py."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import posenc
from posenc import KVCache
from posenc.nn.cache import LayerCache


def filled(steps=3, batch=2):
    slot, k = LayerCache(), torch.randn(batch, 2, steps, 4)
    for i in range(steps):
        slot.extend(k[:, :, i : i + 1], -k[:, :, i : i + 1])
    return slot, k


def ones(n=1):
    return torch.ones(2, 2, n, 4)


def test_extend_returns_everything_in_order():
    slot, k = filled(9)
    assert len(slot) == 9
    assert torch.equal(slot.k, k)
    assert torch.equal(slot.v, -k)


def test_growing_copies_rarely():
    slot, _ = filled(64)
    stored = slot._k.data_ptr()
    slot.extend(ones(), ones())
    moved = slot._k.data_ptr()
    for _ in range(60):
        slot.extend(ones(), ones())
    assert stored != moved
    assert slot._k.data_ptr() == moved


def test_the_callers_first_keys_are_not_written_to():
    slot, first = LayerCache(), torch.zeros(1, 1, 2, 4)
    slot.extend(first, first)
    slot.crop(1)
    slot.extend(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    assert first.abs().max() == 0


def test_gradients_flow_through():
    slot = LayerCache()
    first, second = (torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(2))
    slot.extend(first, first)
    k, _ = slot.extend(second, second)
    k.sum().backward()
    assert first.grad.sum() == second.grad.sum() == 8


def test_what_is_appended_is_the_slots_after_commit_only():
    slot, k = filled(5)
    appended = slot.append(ones(), ones())
    assert appended.k.shape[2] == 6
    assert torch.equal(slot.k, k)
    again = slot.append(2 * ones(), ones())  # after a failure: the same slot
    slot.commit(again, {})
    assert torch.equal(slot.k, torch.cat((k, 2 * ones()), 2))


def test_reorder_and_crop():
    slot, k = filled(4)
    slot.marks = {"positions": torch.arange(8).view(2, 4)}
    slot.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(slot.k, k[[1, 1, 0]])
    assert slot.marks["positions"][:, 0].tolist() == [4, 4, 0]
    slot.crop(2)
    assert slot.k.shape[2] == 2
    assert slot.marks["positions"].shape == (3, 2)
    with pytest.raises(ValueError, match="cannot crop 2 tokens to 3"):
        slot.crop(3)
    slot.crop(0)
    assert slot.marks == {}


@pytest.mark.parametrize(
    "k, words",
    [
        (torch.zeros(3, 2, 1, 4), "one layer and one batch"),
        (torch.zeros(2, 1, 1, 4), "one layer and one batch"),
        (torch.zeros(2, 2, 1, 5), "one layer and one batch"),
        (torch.zeros(2, 2, 1, 4).double(), "holds torch.float32 on cpu, got torch.float64"),
        (torch.zeros(2, 2, 1, 4, device="meta"), "got torch.float32 on meta"),
    ],
)
def test_another_layer_gets_a_sentence(k, words):
    slot, _ = filled()
    with pytest.raises(ValueError, match=words):
        slot.extend(k, k)
    assert len(slot) == 3


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_independent(how):
    cache = KVCache()
    cache.layer(0).extend(ones(3), ones(3))
    cache.layer(0).extend(ones(), ones())  # storage with room for two more
    cache.layer(0).marks = {"positions": torch.arange(8).view(2, 4)}
    other = how(cache)
    cache.layer(0).extend(2 * ones(), ones())
    other.layer(0).extend(3 * ones(), ones())
    other.layer("new").extend(ones(), ones())
    assert cache.layer(0).k[0, 0, :, 0].tolist() == [1, 1, 1, 1, 2]
    assert other.layer(0).k[0, 0, :, 0].tolist() == [1, 1, 1, 1, 3]
    assert len(cache.layers) == 1
    other.crop(1)
    cache.reorder(torch.tensor([1]))
    assert (len(cache), len(other)) == (5, 1)
    assert cache.layer(0).marks["positions"].shape == (1, 4)
    assert other.layer(0).marks["positions"].shape == (2, 1)


def test_a_copy_costs_nothing_until_one_goes_on():
    slot, _ = filled(5)
    other = copy.copy(slot)
    assert other._k.data_ptr() == slot._k.data_ptr()
    other.extend(ones(), ones())
    assert other._k.data_ptr() != slot._k.data_ptr()


def test_everything_is_for_all_layers():
    cache = KVCache()
    for n in range(3):
        cache.layer(n).extend(ones(4) * n, ones(4))
    assert (len(cache), cache.length) == (4, 4)
    cache.crop(2)
    cache.reorder(torch.tensor([0]))
    assert [tuple(slot.k.shape) for slot in cache.layers] == [(1, 2, 2, 4)] * 3
    assert "2 tokens, 3 layers" in repr(cache)
    cache.layer(1).extend(ones()[:1], ones()[:1])
    assert len(cache) == 2  # what every layer holds


def test_a_reorder_that_fails_changes_no_layer():
    cache = KVCache()
    cache.layer(0).extend(torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2))
    cache.layer(1).extend(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    with pytest.raises(IndexError):
        cache.reorder(torch.tensor([2, 1]))
    assert [slot.k.shape[0] for slot in cache.layers] == [3, 1]


def test_an_empty_slot_is_no_layer():
    cache = KVCache()
    assert cache.layer(0).k is None
    assert cache.layers == ()
    assert len(cache) == 0
    cache.crop(0)
    cache.reorder(torch.tensor([0]))


@pytest.mark.parametrize("first, then", [(a, b) for a in range(3) for b in range(3) if a != b])
def test_a_cache_goes_on_in_another_mode(first, then):
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    slot, k = LayerCache(), torch.randn(2, 2, 9, 4)
    for start in range(9):
        mode = modes[first if start < 4 else then if start < 7 else first]
        with mode():
            new = k[:, :, start : start + 1].clone()
            slot.extend(new, -new)
            if start == 5:
                slot.reorder(torch.tensor([0, 1]))
    assert torch.equal(slot.k, k)
    assert torch.equal(slot.v, -k)


def test_a_cache_keeps_no_model_alive():
    layer, cache = posenc.Attention(8, 2), KVCache()
    layer(torch.zeros(1, 3, 8), cache=cache)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    assert len(cache) == 3
