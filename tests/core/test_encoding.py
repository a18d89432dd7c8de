"""What every encoding survives: compilers, casts, devices, copies."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import posenc
from posenc import Positions
from tests.encodings.every import NAMES, furthest, layer, make
from tests.oracle import check_layer


def inputs(**options):
    return torch.randn(2, 9, 16, **options)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()
    attn = layer(name)
    x = inputs()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), attn(x), rtol=0, atol=1e-5)
    compiled(x).sum().backward()
    grads = {n: p.grad.clone() for n, p in attn.named_parameters() if p.grad is not None}
    attn.zero_grad()
    attn(x).sum().backward()
    for n, p in attn.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[n], p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiles_for_real():
    torch._dynamo.reset()
    attn = layer("shaw")
    x = inputs()
    torch.testing.assert_close(torch.compile(attn, fullgraph=True)(x), attn(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    attn = layer(name)
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attn(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_keeps_positions_exact(name):
    """Only weights are rounded: far from the origin the scores are those of the rounded weights in float64."""
    encoding = make(name).to(torch.bfloat16)
    far = Positions((furthest(name) - 9, 9))

    def run(encoding, given):
        q, k, x = given.chunk(3)
        if name in ("sinusoidal", "learned"):
            return encoding.embed(x, far)
        q, k = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in (q, k))
        return posenc.scores(q, k, encoding.plan(far, x=x)).to(given.dtype)

    given = torch.randn(6, 9, 16, dtype=torch.bfloat16).double()
    exact = copy.deepcopy(encoding).double()
    check_layer(exact, run, given, run(exact, given).detach(), terms=16, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("name", NAMES)
def test_meta_device_construction(name):
    with torch.device("meta"):
        attn = layer(name)
    assert all(p.is_meta for p in attn.parameters())
    assert attn(inputs(device="meta")).shape == (2, 9, 16)
    real = layer(name)
    attn = attn.to_empty(device="cpu")
    attn.load_state_dict(real.state_dict(), strict=True)
    x = inputs()
    torch.testing.assert_close(attn(x), real(x))
    attn.encoding.to_empty(device="cpu")
    if hasattr(attn.encoding, "reset_parameters"):
        attn.encoding.reset_parameters()
        assert all(torch.isfinite(p).all() for p in attn.encoding.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_strict_state_dicts(name):
    attn = layer(name)
    x = inputs()
    expected = attn(x)
    assert torch.equal(copy.deepcopy(attn)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(attn))(x), expected)
    fresh = layer(name)
    fresh.load_state_dict(attn.state_dict(), strict=True)
    assert torch.equal(fresh(x), expected)
    file = io.BytesIO()
    torch.save(attn.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    plain = set(posenc.Attention(16, 4).state_dict())
    assert {k for k in attn.state_dict() if not k.startswith("encoding.")} == plain
    for tensor in attn.state_dict().values():
        assert tensor.is_floating_point()


@pytest.mark.parametrize("name", NAMES)
def test_repr_shows_the_options(name):
    encoding = make(name)
    text = repr(encoding)
    for option, value in inspect.signature(type(encoding).__init__).parameters.items():
        if option != "self" and value.default not in (None, value.empty):
            assert f"{option}=" in text
    assert text == repr(copy.deepcopy(encoding)) == repr(pickle.loads(pickle.dumps(encoding)))


def test_repr_shows_what_was_given():
    assert repr(posenc.T5(heads=4, buckets=8, causal=True)) == (
        "T5(heads=4, buckets=8, max_distance=128, causal=True, scale=1.0, std=0.02)"
    )
    assert (
        repr(posenc.Learned(max_length=4, d_model=2).resize(8))
        == "Learned(max_length=8, d_model=2, offset=0, std=0.02)"
    )
    scaled = posenc.RoPE(head_dim=8, scaling=posenc.scaling.Linear(factor=2))
    assert "head_dim=8, base=10000.0" in repr(scaled)
    assert "scaling=Linear(factor=2)" in repr(scaled)
    assert "keys=False, values=True" in repr(posenc.Shaw(head_dim=4, keys=False, values=True))
    table = torch.nn.Parameter(torch.zeros(8, 4))
    assert "table" not in repr(posenc.DeBERTa(d_model=4, heads=2, max_distance=4, table=table))  # no setting


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(name):
    attn = layer(name)
    x = inputs(requires_grad=True)
    attn(x).square().sum().backward()
    grads = [p.grad.clone() for p in attn.parameters() if p.grad is not None]
    attn.zero_grad()
    checkpoint(attn, x, use_reentrant=False).square().sum().backward()
    for grad, p in zip(grads, (p for p in attn.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(grad, p.grad)


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode(name):
    attn = layer(name)
    x = inputs()
    with torch.inference_mode():
        inside = attn(x)
    torch.testing.assert_close(inside, attn(x))
    attn(x.requires_grad_()).sum().backward()  # nothing made under inference mode is kept


@pytest.mark.parametrize("name", NAMES)
def test_empty_and_single_inputs(name):
    attn = layer(name)
    assert attn(torch.randn(2, 1, 16)).shape == (2, 1, 16)
    assert attn(torch.randn(0, 3, 16)).shape == (0, 3, 16)
    assert attn(torch.randn(2, 0, 16)).shape == (2, 0, 16)


@pytest.mark.parametrize(
    "name", ["t5", "clipped", "shaw", "rope", "alibi", "xpos", "deberta", "transformer_xl", "none"]
)
def test_an_axis_that_nobody_reads_is_an_error(name):
    encoding = posenc.create(name, d_model=16, heads=4)
    two = torch.zeros(1, 3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="positions have 2 axes, and .* reads 1 axis"):
        encoding.plan(posenc.Positions(two))
    encoding.plan(posenc.Positions(two).axis(0))


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_an_axis_that_an_absolute_encoding_does_not_read(name):
    options = {"max_length": 8} if name == "learned" else {}
    encoding = posenc.create(name, d_model=16, **options)
    two = torch.zeros(1, 3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="axis|axes"):
        encoding.embed(torch.zeros(1, 3, 16), posenc.Positions(two))


def test_segments_are_an_axis_for_xlnet():
    encoding = posenc.create("xlnet", d_model=16, heads=4)
    segments = torch.zeros(1, 3, dtype=torch.int64)
    assert len(encoding.plan(posenc.Positions(3, more=[(segments, segments)])).lookups) == 2
    with pytest.raises(ValueError, match="3 axes"):
        encoding.plan(posenc.Positions(3, more=[(segments, segments)] * 2))
