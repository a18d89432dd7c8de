"""Layers where the caller has another default device, or tensors without values, and afterwards: what layers keep is for all calls."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import posenc
from tests.encodings.every import BOTH_SIDES, NAMES
from tests.encodings.every import layer as make_layer

LENGTH = 13


def uses(layer, x, give=lambda tensor: tensor):
    """Outputs and a gradient. give: how the call gets its other tensors."""
    key_mask = torch.ones(2, LENGTH, dtype=torch.bool, device="cpu")
    key_mask[0, 0] = False
    documents = torch.zeros(2, LENGTH, dtype=torch.long, device="cpu")
    documents[:, 5:] = 1
    key_mask, documents = give(key_mask), give(documents)
    yield layer(x)
    with torch.no_grad():
        yield layer(x)
    yield layer(x, key_mask=key_mask)
    yield layer(x, documents=documents)
    states = x.clone().requires_grad_()
    yield torch.autograd.grad(layer(states).sum(), states)[0]
    if layer.causal and not layer.encoding.embeds_whole:
        cache = posenc.KVCache()
        yield torch.cat([layer(x[:, part], cache=cache) for part in (slice(0, 5), slice(5, 6), slice(6, 9))], dim=1)


def cases():
    return [(name, causal) for name in NAMES for causal in ((True, False) if name in BOTH_SIDES else (True,))]


@pytest.mark.parametrize("name, causal", cases())
def test_a_default_device_changes_nothing(name, causal):
    layer, x = make_layer(name, causal=causal).eval(), torch.randn(2, LENGTH, 16)
    with torch.device("meta"):
        inside = list(uses(layer, x))
    layer.engine = "reference"
    for ours, exact in zip(inside, uses(layer, x), strict=True):
        assert ours.device.type == "cpu"
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-4)
    layer.engine = "auto"
    for ours, exact in zip(uses(layer, x), inside, strict=True):  # what was kept
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_positions_that_are_given_may_meet_a_default_device():
    layer, x = posenc.Attention(16, 4, encoding="t5", causal=True), torch.randn(2, LENGTH, 16)
    positions = torch.arange(LENGTH) * 2
    for given in (positions, torch.arange(LENGTH), positions.expand(2, -1)):
        expected = layer(x, positions=given)
        with torch.device("meta"):
            assert torch.allclose(layer(x, positions=given), expected, atol=1e-5)
    start = torch.tensor([3, 5])
    with torch.device("meta"):
        assert posenc.Positions((start, 4), (start, 4)).reach == (-3, 3)


@pytest.mark.parametrize(
    "name, options", [("alibi", {"learnable": True}), ("fox", {"gate": "bias"}), ("mixed_rope", {})]
)
def test_parameters_are_reset_where_they_are(name, options):
    encoding = posenc.create(name, d_model=16, heads=4, head_dim=4, **options)
    with torch.device("meta"):
        encoding.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in encoding.parameters())


@pytest.mark.parametrize("name, causal", cases())
def test_tensors_without_values_leave_nothing_behind(name, causal):
    layer, x = make_layer(name, causal=causal).eval(), torch.randn(2, LENGTH, 16)
    expected = list(uses(layer, x))
    other = make_layer(name, causal=causal, window=LENGTH + 1).eval()  # prepares what it keeps with fake tensors
    other.load_state_dict(layer.state_dict())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for fake, real in zip(uses(other, mode.from_tensor(x), mode.from_tensor), expected, strict=True):
            assert fake.shape == real.shape and fake.dtype == real.dtype
    for ours, exact in zip(uses(other, x), expected, strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", posenc.list_encodings())
def test_parameters_assigned_to_a_layer_on_the_meta_device(name):
    x, real = torch.randn(1, 8, 16), make_layer(name)
    with torch.device("meta"):
        layer = make_layer(name)
    layer.load_state_dict(real.state_dict(), assign=True)
    torch.testing.assert_close(layer(x), real(x), rtol=0.0, atol=0.0)
