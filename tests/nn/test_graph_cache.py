"""KVCache(max_length=...): steps in place, without copies; GraphCache: steps of fixed shapes and addresses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posenc import Attention, KVCache

ENCODINGS = ("none", "rope", "alibi", "t5", "clipped", "shaw", "transformer_xl", "sinusoidal")


class Written(TorchDispatchMode):
    """Numbers of elements that operations make or write, views aside."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        schema = function._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and not is_view and "index_copy" not in schema.name:
                self.largest = max(self.largest, one.numel())
        return out


def make_layer(encoding, **options):
    torch.manual_seed(0)
    layer = Attention(
        32, 4, kv_heads=2, encoding=None if encoding == "none" else encoding, causal=True, **options
    ).eval()
    return layer.requires_grad_(False)


@pytest.mark.parametrize("max_length", [None, 64])
def test_a_step_writes_its_own_token_only(max_length):
    cache = KVCache(max_length)
    slot = cache.layer(0)
    k, v = (torch.randn(2, 2, 20, 8) for _ in range(2))
    steps = [torch.randn(2, 2, 1, 8) for _ in range(12)]
    slot.extend(k, v)
    slot.extend(steps[0], steps[0])
    address, written = slot.k.data_ptr(), Written()
    with written:
        for step in steps[1:]:
            slot.extend(step, step)
    assert written.largest == steps[0].numel()
    assert slot.k.data_ptr() == address
    assert torch.equal(slot.k, torch.cat((k, *steps), 2))
    assert torch.equal(slot.v, torch.cat((v, *steps), 2))


def test_max_length_is_allocated_once_and_is_the_most():
    slot = KVCache(max_length=8).layer(0)
    prompt = torch.randn(1, 1, 5, 4)
    slot.extend(prompt, prompt)
    address = slot.k.data_ptr()
    assert address != prompt.data_ptr()
    for _ in range(3):
        slot.extend(prompt[:, :, :1], prompt[:, :, :1])
    assert slot.k.data_ptr() == address and slot.k.stride(1) == 8 * 4
    with pytest.raises(ValueError, match=r"holds 8 tokens of at most 8, got 1 more"):
        slot.extend(prompt[:, :, :1], prompt[:, :, :1])
    assert slot.length == 8
    with pytest.raises(ValueError, match="max_length=0 must be"):
        KVCache(max_length=0)


def test_a_copy_of_a_preallocated_cache_is_independent():
    cache = KVCache(max_length=8)
    token = torch.ones(1, 1, 1, 4)
    cache.layer(0).extend(token, token)
    other = cache.copy()
    cache.layer(0).extend(2 * token, token)
    other.layer(0).extend(3 * token, token)
    assert cache.layer(0).k[0, 0, :, 0].tolist() == [1, 2]
    assert other.layer(0).k[0, 0, :, 0].tolist() == [1, 3]
    assert other.max_length == other.layer(0).max_length == 8


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_steps_of_fixed_shapes_equal_the_whole_text(encoding):
    layer = make_layer(encoding)
    x = torch.randn(2, 9, 32)
    cache = KVCache(max_length=12)
    with torch.no_grad():
        parts = [layer(x[:, :5], cache=cache)]
        fixed = cache.fix_shapes()
        for n in range(5, 8):
            parts.append(layer(x[:, n : n + 1], cache=fixed))
            fixed.advance()
        parts.append(layer(x[:, 8:], cache=fixed.write_back()))
    assert cache.length == 9
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoding", ["rope", "t5"])
def test_fixed_shapes_with_padding_and_windows(encoding):
    layer = make_layer(encoding, window=(3, 0))
    x = torch.randn(2, 9, 32)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :2] = False
    cache = KVCache(max_length=9)
    with torch.no_grad():
        parts = [layer(x[:, :5], cache=cache, key_mask=real[:, :5])]
        fixed = cache.fix_shapes()
        for n in range(5, 9):
            parts.append(layer(x[:, n : n + 1], cache=fixed))
            fixed.advance()
        with pytest.raises(ValueError, match="the cache is full: 9 tokens"):
            layer(x[:, :1], cache=fixed)
    whole = layer(x, key_mask=real)
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-5, atol=1e-5)
    assert torch.equal(fixed.write_back().layer(layer).marks["key_mask"], real)


def test_slots_that_are_not_filled_hold_zeros():
    """A step of fixed shapes reads them with weight 0, and 0 times NaN is NaN."""
    layer, cache = make_layer("t5"), KVCache(max_length=512)
    torch.full((64, 512, 32), torch.nan)  # memory that the next allocations may get
    with torch.no_grad():
        layer(torch.randn(2, 4, 32), cache=cache)
    stored = cache.layer(layer)._k
    assert stored.shape[2] == 512 and not stored[:, :, 4:].any()


def test_a_fixed_step_runs_the_same_operations_on_the_same_memory_each_time():
    """What a CUDA graph needs: no shape, number or address depends on the length."""
    layer = make_layer("t5", engine="reference")  # the CPU engine reads positions, which costs it nothing

    def describe(x):
        if isinstance(x, (tuple, list)):
            return [describe(one) for one in x]
        return tuple(x.shape) if isinstance(x, torch.Tensor) else x

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls.append((str(function), describe(args)))
            return function(*args, **(kwargs or {}))

    cache, x = KVCache(max_length=16), torch.randn(2, 1, 32)
    with torch.no_grad():
        layer(torch.randn(2, 4, 32), cache=cache)
        fixed, address, records = cache.fix_shapes(), cache.layer(layer).k.data_ptr(), []
        for _ in range(3):
            with Record() as record:
                layer(x, cache=fixed)
                fixed.advance()
            records.append(record.calls)
    assert records[0] == records[1] == records[2]
    assert not any("_local_scalar_dense" in name for name, _ in records[0])  # nothing is read from the device
    assert fixed.write_back().layer(layer).k.data_ptr() == address


def test_what_fixed_shapes_cannot_serve_raises():
    layer, x = make_layer("rope"), torch.randn(1, 4, 32)
    with pytest.raises(ValueError, match=r"KVCache\(max_length=...\) with a prompt"):
        KVCache(max_length=8).fix_shapes()
    grown = KVCache()
    layer(x, cache=grown)
    with pytest.raises(ValueError, match="got max_length=None and 4 tokens"):
        grown.fix_shapes()
    cache = KVCache(max_length=8)
    layer(x, cache=cache, positions=torch.arange(4) * 2)
    with pytest.raises(ValueError, match="was given with positions"):
        cache.fix_shapes()
    cache = KVCache(max_length=8)
    layer(x, cache=cache)
    fixed = cache.fix_shapes()
    with pytest.raises(ValueError, match="one token without gradients"):
        layer(x[:, :2], cache=fixed)
    with pytest.raises(ValueError, match="takes only x and the cache"):
        layer(x[:, :1], cache=fixed, key_mask=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="no keys of this layer"):
        make_layer("rope")(x[:, :1], cache=fixed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("encoding", ["none", "rope", "alibi", "t5", "clipped", "shaw"])
def test_a_captured_step_equals_the_whole_text(encoding):
    torch.manual_seed(0)
    named = None if encoding == "none" else encoding
    layer = Attention(256, 4, kv_heads=2, encoding=named, causal=True).eval().requires_grad_(False).cuda().bfloat16()
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    cache, token = KVCache(max_length=512), x[:, 290:291].clone()
    with torch.no_grad():
        layer(x[:, :290], cache=cache)
        fixed, side = cache.fix_shapes(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                layer(token, cache=fixed)  # kernels are compiled; without advance() the token is written twice
        torch.cuda.current_stream().wait_stream(side)
        graph, parts = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            out = layer(token, cache=fixed)
            fixed.advance()
        for n in range(290, 300):
            token.copy_(x[:, n : n + 1])
            graph.replay()
            parts.append(out.clone())
        assert fixed.write_back().length == 300
        exact = layer.double()(x.double(), cache=None)[:, 290:]
    error = (torch.cat(parts, 1).double() - exact).norm() / exact.norm()
    assert error < 2e-2
