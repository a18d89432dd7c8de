"""Content-conditioned logits against Inkling's."""

import pytest
import torch

import posenc
from posenc import Positions
from tests import oracle
from tests.oracle import copy


@pytest.mark.parametrize("extent, length, past", [(4, 9, 0), (16, 9, 0), (5, 3, 8)])
def test_the_bias_is_inklings(extent, length, past):
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

    oracle = InklingRelativeLogits(6, extent).double()
    torch.nn.init.normal_(oracle.proj)
    encoding = posenc.RelativeLogits(d_model=8, heads=2, head_dim=4, d_rel=6, max_distance=extent).double()
    copy(encoding.bank, oracle.proj)
    states = torch.randn(2, length, 2, 6, dtype=torch.float64)
    positions = Positions((past, length), past + length)
    expected = oracle(states, positions.q_positions(), positions.k_positions())
    zero = lambda n: torch.zeros(2, 2, n, 4, dtype=torch.float64)  # noqa: E731
    plan = encoding.plan_states(positions, states.transpose(1, 2))
    torch.testing.assert_close(posenc.scores(zero(length), zero(past + length), plan), expected)


@pytest.mark.parametrize("floor", [None, 4])
def test_the_layer_is_inklings(floor):
    """Its q and k go through norms and short convolutions first, so they are taken from a hook on its attention; its
    softmax and its temper are in float32, so they are widened."""
    from transformers.models.inkling import modeling_inkling as m
    from transformers.models.inkling.configuration_inkling import InklingTextConfig

    config = InklingTextConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, d_rel=6, rel_extent=5,
        num_hidden_layers=1, layer_types=["hybrid"], log_scaling_n_floor=floor, log_scaling_alpha=0.3,
    )  # fmt: skip
    given = {}

    def eager(module, query, key, value, attention_mask, **options):
        given.update(key=key, value=value)
        given["out"] = m.eager_attention_forward(module, query, key, value, attention_mask, **options)
        return given["out"]

    m.ALL_ATTENTION_FUNCTIONS.register("posenc_test", eager)
    config._attn_implementation = "posenc_test"
    original = m.InklingAttention(config, 0).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    with oracle.wide(m), torch.no_grad():
        original(x, torch.zeros(1, 1, 11, 11).double().masked_fill(future, torch.finfo(torch.float64).min))
        query = original.q_norm(original.q_proj(x).view(2, 11, 4, 8)).transpose(1, 2)
    encoding = posenc.RelativeLogits(
        d_model=16, heads=4, head_dim=8, d_rel=6, max_distance=5, scale=original.scaling,
        temper=None if floor is None else (0.3, floor),
    ).double()  # fmt: skip
    copy(encoding.bank, original.rel_logits_proj.proj)
    encoding.r_proj.load_state_dict(original.r_proj.state_dict())

    def run(encoding, x):
        q, k, v = (y.to(x.dtype) for y in (query, given["key"], given["value"]))
        return posenc.attend(q, k, v, encoding.plan(Positions(11), x=x), causal=True).transpose(1, 2)

    oracle.check_layer(encoding, run, x, given["out"][0], terms=16)
    assert encoding.absolute == (floor is not None)


@pytest.mark.parametrize("options", [dict(d_rel=0), dict(max_distance=0), dict(temper=(0.1, 0)), dict(temper=(0.1,))])
def test_bad_options(options):
    with pytest.raises(posenc.OptionError):
        posenc.RelativeLogits(d_model=8, heads=2, head_dim=4, **options)


def test_it_needs_the_input():
    with pytest.raises(ValueError, match="x=input"):
        posenc.RelativeLogits(d_model=8, heads=2, head_dim=4).plan(Positions(3))
