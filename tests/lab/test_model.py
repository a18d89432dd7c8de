"""The model: models that differ in their encoding are equal elsewhere; extensions change positions, not weights."""

import pytest
import torch

import posenc
from posenc.core.errors import OptionError
from posenc.encodings import spec
from posenc.encodings.registry import OWN_ATTENTION
from posenc.lab import build_encoding
from posenc.lab.model import Transformer

SIZES = dict(vocabulary=11, width=16, heads=2, layers=2, causal=True, longest=20)


def make(encoding, **changes):
    return Transformer(encoding, **{**SIZES, **changes})


@pytest.mark.parametrize("encoding", posenc.list_encodings())
def test_every_encoding_trains(encoding):
    grid = ":columns=4" if encoding in ("axial", "sinusoidal_2d", "mixed_rope") else ""
    try:
        model = make(encoding + grid)
    except posenc.OptionError as error:
        pytest.skip(f"needs options: {error}")
    logits = model(torch.randint(11, (2, 9)))
    assert logits.shape == (2, 9, 11)
    logits.logsumexp(-1).sum().backward()
    own = {id(p) for p in build_encoding.position_parameters(model)}  # XLNet's segment term has no gradient here
    assert all(p.grad is not None for p in model.parameters() if id(p) not in own)
    assert not own or any(p.grad is not None and p.grad.any() for p in build_encoding.position_parameters(model))


def test_only_the_encoding_differs():
    first = dict(make("none").named_parameters())
    for encoding in ("alibi", "t5", "learned", "shaw", "rope", "sinusoidal", "transformer_xl"):
        model = make(encoding)
        own = {id(p) for p in build_encoding.position_parameters(model)}
        others = {name: p for name, p in model.named_parameters() if id(p) not in own}
        assert others.keys() == first.keys()
        assert all(torch.equal(p, first[name]) for name, p in others.items()), encoding
    assert not torch.equal(make("none", seed=1).head.weight, first["head.weight"])


def test_future_tokens_affect_an_encoder_and_not_a_causal_model():
    tokens = torch.randint(11, (1, 9))
    later = tokens.clone()
    later[0, 6] = (later[0, 6] + 1) % 11
    for encoding in ("none", "t5", "shaw", "rope", "sinusoidal"):
        model = make(encoding)
        assert torch.allclose(model(tokens)[:, :6], model(later)[:, :6], atol=1e-6)
        model = make(encoding, causal=False)
        assert not torch.allclose(model(tokens)[:, :6], model(later)[:, :6], atol=1e-6)


def test_absolute_positions_enter_once_at_the_input():
    model = make("sinusoidal")
    assert isinstance(model.encoding, posenc.Sinusoidal)
    assert all(type(block.attention.encoding) is posenc.Encoding for block in model.blocks)
    assert make("alibi").encoding is None


def test_t5_shares_its_table_and_divides_like_the_others():
    model = make("t5:buckets=8,max_distance=16")
    encodings = {id(block.attention.encoding) for block in model.blocks}
    assert len(encodings) == 1
    encoding = model.blocks[0].attention.encoding
    assert encoding.scale is None and encoding.causal and encoding.buckets == 8
    assert len({id(block.attention.encoding) for block in make("clipped").blocks}) == 2


def test_extensions_keep_the_weights_and_change_the_positions():
    tokens = torch.randint(11, (1, 40))
    model = make("rope:base=5000")
    before, weights = model(tokens), {k: v.clone() for k, v in model.state_dict().items()}
    outputs = []
    for extension in ("linear:4", "ntk:8", "dynamic", "yarn:4,beta_fast=4", "dynamic:2"):
        model.extend("rope:base=5000", extension, longest=20)
        encoding = model.blocks[0].attention.encoding
        assert encoding.base == 5000 and encoding.scaling is not None
        outputs.append(model(tokens))
        assert not torch.allclose(outputs[-1], before, atol=1e-4)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    model.extend("rope:base=5000", "dynamic", longest=20)
    assert torch.allclose(model(tokens[:, :20]), make("rope:base=5000")(tokens[:, :20]), atol=1e-5)


@pytest.mark.parametrize(
    "text, extension, message",
    [("alibi", "ntk:8", "rope only"), ("rope", "ntq:8", "the extensions are linear"), ("rope", "ntk", "rope\\+ntk:8"),
     ("rope", "ntk:8,wrong=2", "wrong")],
)  # fmt: skip
def test_wrong_extensions(text, extension, message):
    with pytest.raises(OptionError, match=message):
        build_encoding.build_extended(text, extension, width=16, heads=2, longest=20)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_attention_of_its_own_trains_and_is_causal(name):
    model = make(name)
    tokens = torch.randint(11, (1, 9))
    later = tokens.clone()
    later[0, 6] = (later[0, 6] + 1) % 11
    assert torch.allclose(model(tokens)[:, :6], model(later)[:, :6], atol=1e-5)
    assert not torch.allclose(model(tokens), model(later), atol=1e-5)
    model(tokens).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(OptionError, match="is causal"):
        make(name, causal=False)
    with pytest.raises(OptionError, match="posenc show"):
        make(f"{name}:nothing=1")


def test_contextual_layers_start_as_the_others():
    first = dict(make("none").named_parameters())
    for name in ("cope", "stick_breaking", "path"):
        model = make(name)
        own = {id(p) for p in build_encoding.position_parameters(model)}
        others = {key: p for key, p in model.named_parameters() if id(p) not in own}
        assert others.keys() == first.keys()
        assert all(torch.equal(p, first[key]) for key, p in others.items()), name
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():  # a table of zeros counts nothing
        assert torch.allclose(make("cope")(tokens), make("none")(tokens), atol=1e-5)


def test_the_command_knows_attention_of_its_own():
    for text in ("cope:counts=8", "stick_breaking", "path", "latent"):
        spec.check(text, own_attention=True)
        with pytest.raises(OptionError, match="is no encoding of a layer"):
            spec.check(text)
    with pytest.raises(OptionError, match="apply to rope only"):
        spec.check("cope+ntk:8", own_attention=True)
