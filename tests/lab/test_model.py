"""The model: models that differ in their scheme are equal elsewhere; extensions change positions, not weights."""

import pytest
import torch

import posenc
from posenc.lab import positions
from posenc.lab.errors import LabError
from posenc.lab.model import Transformer

SIZES = dict(vocabulary=11, width=16, heads=2, layers=2, causal=True, longest=20)


def make(scheme, **changes):
    return Transformer(scheme, **{**SIZES, **changes})


@pytest.mark.parametrize("scheme", posenc.names())
def test_every_scheme_trains_in_it(scheme):
    grid = ":columns=4" if scheme in ("axial", "sinusoidal_2d") else ""
    try:
        model = make(scheme + grid)
    except posenc.OptionError as error:
        pytest.skip(f"needs options: {error}")
    logits = model(torch.randint(11, (2, 9)))
    assert logits.shape == (2, 9, 11)
    logits.logsumexp(-1).sum().backward()
    own = {id(p) for p in positions.position_parameters(model)}  # XLNet's segment term has nothing to say here
    assert all(p.grad is not None for p in model.parameters() if id(p) not in own)
    assert not own or any(p.grad is not None and p.grad.any() for p in positions.position_parameters(model))


def test_only_the_encoding_differs():
    first = dict(make("none").named_parameters())
    for scheme in ("alibi", "t5", "learned", "shaw", "rope", "sinusoidal", "transformer_xl"):
        model = make(scheme)
        own = {id(p) for p in positions.position_parameters(model)}
        others = {name: p for name, p in model.named_parameters() if id(p) not in own}
        assert others.keys() == first.keys()
        assert all(torch.equal(p, first[name]) for name, p in others.items()), scheme
    assert not torch.equal(make("none", seed=1).head.weight, first["head.weight"])


def test_a_causal_model_sees_no_future_and_an_encoder_does():
    tokens = torch.randint(11, (1, 9))
    later = tokens.clone()
    later[0, 6] = (later[0, 6] + 1) % 11
    for scheme in ("none", "t5", "shaw", "rope", "sinusoidal"):
        model = make(scheme)
        assert torch.allclose(model(tokens)[:, :6], model(later)[:, :6], atol=1e-6)
        model = make(scheme, causal=False)
        assert not torch.allclose(model(tokens)[:, :6], model(later)[:, :6], atol=1e-6)


def test_absolute_positions_enter_once_at_the_input():
    model = make("sinusoidal")
    assert isinstance(model.position, posenc.Sinusoidal)
    assert all(type(block.attention.position) is posenc.Scheme for block in model.blocks)
    assert make("alibi").position is None


def test_t5_shares_its_table_and_divides_like_the_others():
    model = make("t5:buckets=8,max_distance=16")
    schemes = {id(block.attention.position) for block in model.blocks}
    assert len(schemes) == 1
    scheme = model.blocks[0].attention.position
    assert scheme.scale is None and scheme.causal and scheme.buckets == 8
    assert len({id(block.attention.position) for block in make("clipped").blocks}) == 2


def test_extensions_keep_the_weights_and_change_the_positions():
    tokens = torch.randint(11, (1, 40))
    model = make("rope:base=5000")
    before, weights = model(tokens), {k: v.clone() for k, v in model.state_dict().items()}
    outputs = []
    for extension in ("linear:4", "ntk:8", "dynamic", "yarn:4,beta_fast=4", "dynamic:2"):
        model.extend("rope:base=5000", extension, longest=20)
        scheme = model.blocks[0].attention.position
        assert scheme.base == 5000 and scheme.scaling is not None
        outputs.append(model(tokens))
        assert not torch.allclose(outputs[-1], before, atol=1e-4)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    model.extend("rope:base=5000", "dynamic", longest=20)
    assert torch.allclose(model(tokens[:, :20]), make("rope:base=5000")(tokens[:, :20]), atol=1e-5)


@pytest.mark.parametrize(
    "word, extension, says",
    [("alibi", "ntk:8", "rope only"), ("rope", "ntq:8", "they are linear"), ("rope", "ntk", "rope\\+ntk:8"),
     ("rope", "ntk:8,wrong=2", "wrong")],
)  # fmt: skip
def test_wrong_extensions(word, extension, says):
    with pytest.raises(LabError, match=says):
        positions.extended(word, extension, width=16, heads=2, longest=20)
