"""A call leaves nothing on modules or on the caller's tensors; what is prepared for the next call is kept outside of them."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import posenc
from posenc.core import encoding as base
from tests.encodings import every

KINDS = ("none", "sinusoidal", "rope", "xpos", "alibi", "t5", "clipped", "shaw")
"""Encodings of which something is kept, and one without anything."""
SIZE = 16


def attributes(model, *tensors):
    """Every attribute of every module and every tensor, by the identity of its value."""
    modules = {name: {key: id(value) for key, value in vars(m).items()} for name, m in model.named_modules()}
    inside = {
        (name, group): {key: id(value) for key, value in vars(m)[group].items()}
        for name, m in model.named_modules()
        for group in ("_parameters", "_buffers", "_modules")
    }
    return modules, inside, [sorted(vars(x)) for x in (*tensors, *model.parameters(), *model.buffers())]


def decode(layer, x, first=8):
    """The last tokens of x [B, L, d], one by one after the first ones."""
    cache = posenc.KVCache()
    layer(x[:, :first], cache=cache)
    return torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(first, x.shape[1])], dim=1)


@pytest.mark.parametrize("name", every.NAMES)
def test_a_call_leaves_modules_and_tensors_as_they_were(name):
    layer = every.layer(name).eval()
    x = torch.randn(2, 16, SIZE)
    before = attributes(layer, x)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        if not layer.encoding.embeds_whole:
            decode(layer, x)
    layer.train()
    layer(x.requires_grad_()).sum().backward()
    layer.eval()
    assert attributes(layer, x) == before


@pytest.mark.parametrize("name", every.NAMES)
def test_what_is_kept_goes_with_the_encoding(name):
    layer, x = every.layer(name).eval(), torch.randn(2, 16, SIZE)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
            if not layer.encoding.embeds_whole:
                decode(layer, x)
    encoding = weakref.ref(layer.encoding)
    del layer
    gc.collect()
    assert encoding() is None
    assert all(one is not None for one in base._prepared)


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_pickles_begin_anew(name):
    layer, x = every.layer(name).eval(), torch.randn(2, 16, SIZE)
    with torch.no_grad():
        truth = decode(layer, x)
        assert name == "none" or layer.encoding.prepared()
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert not other.encoding.prepared()
            assert torch.equal(decode(other, x), truth)
            for parameter in other.encoding.parameters():
                parameter.add_(1.0)
            decode(other, x)
        assert torch.equal(decode(layer, x), truth)


@pytest.mark.parametrize("name", KINDS)
def test_threads_at_different_positions(name):
    """Rows of different lengths and positions, one encoding: each thread gets what it gets alone."""
    layer = every.layer(name).eval()
    firsts = (3, 8, 19, 30)
    texts = [torch.randn(1, first + 12, SIZE) for first in firsts]

    def run(text, first):
        with torch.no_grad():
            return [decode(layer, text, first) for _ in range(6)]

    truths = [run(text, first)[-1] for text, first in zip(texts, firsts, strict=True)]
    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(run, texts, firsts))
    for outs, truth in zip(found, truths, strict=True):
        for out in outs:
            assert torch.allclose(out, truth, atol=1e-6)


def test_an_attribute_that_is_assigned_while_a_thread_computes_wins():
    """What was computed with the old attribute goes into the old dict, which nobody reads any more."""
    rope = posenc.create("rope", head_dim=8)
    rotation, q, k = rope.rotation, *torch.randn(2, 1, 2, 4, 8).unbind()

    class Slow(posenc.RoPE):
        def rotation(self, positions):
            made = rotation(positions)
            if self.layout == "half":
                self.layout = "interleaved"  # as another thread would
            return made

    slow = Slow(head_dim=8)
    slow.rotates_by_rows = True
    with torch.no_grad():
        slow.rotate_run(q, k, q, 0)
    assert "phases" not in slow.prepared()


@pytest.mark.parametrize("name", KINDS)
def test_what_inference_mode_prepares_serves_training_and_the_other_way_round(name):
    layer, x = every.layer(name).eval(), torch.randn(2, 16, SIZE)
    fresh = copy.deepcopy(layer)
    with torch.inference_mode():
        kept = [layer(x), decode(layer, x)]
    for model in (layer, fresh):
        model(x).square().sum().backward()
    for (at, ours), exact in zip(layer.named_parameters(), fresh.parameters(), strict=True):
        assert (ours.grad is None) == (exact.grad is None), at
        assert ours.grad is None or torch.equal(ours.grad, exact.grad), at
    decode(layer, x).square().sum().backward()
    with torch.no_grad():
        assert torch.equal(layer(x), kept[0])
        assert torch.equal(decode(layer, x), kept[1])
    with torch.inference_mode():
        assert torch.equal(layer(x), kept[0])


@pytest.mark.parametrize("name", ["rope", "t5", "alibi"])
def test_compiled_and_eager_calls_of_one_layer(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer, x = every.layer(name).eval(), torch.randn(2, 16, SIZE)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        truth = layer(x)
        for _ in range(3):
            assert torch.allclose(compiled(x), truth, atol=1e-6)
            assert torch.equal(layer(x), truth)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", every.NAMES)
def test_an_ensemble_of_layers_in_one_vmap(name):
    """PyTorch's recipe for ensembles: the parameters of several layers stacked, and one call for all of them."""
    layers = [every.layer(name).eval() for _ in range(2)]
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(1.3)
    x = torch.randn(2, 16, SIZE)
    parameters, buffers = torch.func.stack_module_state(layers)
    with torch.no_grad():
        wanted = torch.stack([layer(x) for layer in layers])  # what is kept now must not be read by the ensemble
        found = torch.func.vmap(lambda *state: torch.func.functional_call(layers[0], state, (x,)))(parameters, buffers)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(layers[0](x), wanted[0])
