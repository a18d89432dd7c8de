"""Transformer-XL and XLNet against the original models."""

import sys
from dataclasses import replace

import pytest
import torch

import posenc
from posenc import Index, Positions
from tests import oracle
from tests.oracle import cases, copy, tensor


@pytest.mark.parametrize("case", cases("transfo_xl"), ids=lambda c: f"clamp{c['clamp_len']}")
def test_transformer_xl_is_the_original(case):
    """Time-major there, with memory; [sin, cos] halves."""
    weights = {name: tensor(value, torch.float32) for name, value in case["weights"].items()}
    clamp = case["clamp_len"]
    encoding = posenc.TransformerXL(d_model=8, heads=2, clamp_length=clamp if clamp > 0 else None, causal=True)
    copy(encoding.content_bias, weights["r_w_bias"])
    copy(encoding.position_bias, weights["r_r_bias"])
    copy(encoding.position_proj.weight, weights["r_net.weight"])
    layer = posenc.Attention(8, 2, encoding=encoding, causal=True)
    for name, part in zip(("q_proj", "k_proj", "v_proj"), weights["qkv_net.weight"].chunk(3), strict=True):
        copy(getattr(layer, name).weight, part)
    copy(layer.o_proj.weight, weights["o_net.weight"])
    x, memory, expected = (tensor(case[n], torch.float32).transpose(0, 1) for n in ("x", "memory", "out"))
    torch.testing.assert_close(layer(x, memory=memory), expected, rtol=0, atol=1e-5)


def test_bidirectional_is_conformers():
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as m

    config = Wav2Vec2ConformerConfig(
        hidden_size=16, num_attention_heads=2, position_embeddings_type="relative", attention_dropout=0.0
    )
    config._attn_implementation = "eager"
    original = m.Wav2Vec2ConformerSelfAttention(config).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    encoding = posenc.TransformerXL(d_model=16, heads=2, layout="interleaved").double()
    copy(encoding.content_bias, original.pos_bias_u)
    copy(encoding.position_bias, original.pos_bias_v)
    copy(encoding.position_proj.weight, original.linear_pos.weight)
    layer = posenc.Attention(16, 2, encoding=encoding, bias=True).double()
    names = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "o_proj": "linear_out"}
    for ours, theirs in names.items():
        getattr(layer, ours).load_state_dict(getattr(original, theirs).state_dict())
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, 8:] = False
    mask = torch.zeros(2, 1, 11, 11, dtype=torch.float64).masked_fill(
        ~real[:, None, None], torch.finfo(torch.float64).min
    )
    with oracle.wide(m):  # its sinusoid is made in float32
        waves = m.Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    expected = original(x, attention_mask=mask, relative_position_embeddings=waves)[0]
    oracle.check_layer(layer, lambda layer, x: layer(x, key_mask=real), x, expected, terms=16)


def xlnet(**options):
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(
        vocab_size=20, d_model=16, n_layer=1, n_head=2, d_inner=32, dropout=0.0, untie_r=True, **options
    )
    model = XLNetModel(config).eval()
    original = model.layer[0].rel_attn
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, original


def xlnet_encoding(original, **options):
    encoding = posenc.XLNet(d_model=16, heads=2, **options)
    for ours, theirs in {
        "content_bias": "r_w_bias",
        "position_bias": "r_r_bias",
        "segment_bias": "r_s_bias",
        "segment_table": "seg_embed",
    }.items():
        copy(getattr(encoding, ours), getattr(original, theirs))
    copy(encoding.position_proj.weight, original.r.flatten(1).t())
    return encoding


@pytest.mark.parametrize(
    "attn_type, clamp, bi_data",
    [("bi", -1, False), ("uni", -1, False), ("bi", 3, False), ("bi", -1, True), ("uni", 4, True)],
)
@pytest.mark.parametrize("past", [0, 4])
def test_xlnet_is_transformers(attn_type, clamp, bi_data, past):
    model, original = xlnet(attn_type=attn_type, clamp_len=clamp, bi_data=bi_data)
    original = original.double()
    length, batch = 6, 2
    encoding = xlnet_encoding(original, attn_type=attn_type, clamp_length=clamp if clamp > 0 else None, bi_data=bi_data)
    layer = posenc.Attention(16, 2, encoding=encoding, causal=attn_type == "uni").double()
    for ours, theirs in {"q_proj": "q", "k_proj": "k", "v_proj": "v"}.items():
        copy(getattr(layer, ours).weight, getattr(original, theirs).flatten(1).t())
    copy(layer.o_proj.weight, original.o.flatten(1))
    x, memory = torch.randn(batch, length, 16, dtype=torch.float64), torch.randn(batch, past, 16, dtype=torch.float64)
    segments = torch.randint(0, 3, (batch, length))
    every = torch.cat((torch.zeros(batch, past, dtype=torch.int64), segments), 1)
    different = (segments[:, :, None] != every[:, None, :]).long()
    seg_mat = torch.nn.functional.one_hot(different, 2).permute(1, 2, 0, 3).double()
    with oracle.wide(sys.modules[type(model).__module__]):  # its sinusoid is made in float32
        waves = model.relative_positional_encoding(length, length + past, bsz=batch)
    assert waves.dtype == torch.float64
    real = torch.ones(batch, length + past, dtype=torch.bool)
    real[1, -1] = False
    masked = (~real)[:, None, :].expand(batch, length, length + past)
    if attn_type == "uni":
        masked = masked | torch.ones(length, length + past, dtype=torch.bool).triu(1 + past)
    attn_mask = masked.permute(1, 2, 0)[..., None].double()
    original.layer_norm = torch.nn.Identity()
    h = x.transpose(0, 1)
    out = original(h, None, attn_mask, None, waves, seg_mat, mems=memory.transpose(0, 1) if past else None)[0]
    expected = (out - h).transpose(0, 1)
    memory = memory if past else None

    def run(layer, x):
        given = None if memory is None else memory.to(x.dtype)
        return layer(x, memory=given, segments=every, key_mask=real)

    oracle.check_layer(layer, run, x, expected, terms=16)
    ours = run(layer, x)
    bounded = layer(x, memory=memory, segments=(every, (0, 2)), key_mask=real)
    assert torch.equal(bounded, ours)
    with pytest.raises(ValueError, match="are outside their bounds, 0 to 0"):
        layer(x, memory=memory, segments=(every.clamp(min=1), (0, 0)), key_mask=real)


def test_xlnet_uni_without_segments_is_transformer_xl():
    xl = posenc.TransformerXL(d_model=16, heads=2, causal=True).double()
    net = posenc.XLNet(d_model=16, heads=2, attn_type="uni").double()
    net.load_state_dict(xl.state_dict(), strict=False)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (4, 9, 9))
    positions = Positions((5, 4), 9)
    a, b = (posenc.attend(q, k, v, s.plan(positions), causal=True) for s in (xl, net))
    assert torch.equal(a, b)


def test_the_formula_by_loops():
    encoding = posenc.TransformerXL(d_model=6, heads=2, std=0.7).double()
    q, k = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(2))
    s = posenc.scores(q, k, encoding.plan(Positions(5)))
    for i in range(5):
        for j in range(5):
            wave = posenc.encodings.absolute.sinusoid(torch.tensor([i - j]), 6, layout="concatenated")[0]
            r = encoding.position_proj(wave).view(2, 3)
            for h in range(2):
                value = (q[0, h, i] + encoding.content_bias[h]) @ k[0, h, j] + (
                    q[0, h, i] + encoding.position_bias[h]
                ) @ r[h]
                torch.testing.assert_close(s[0, h, i, j], value / 3**0.5)


def test_u_and_v_can_be_shared_by_layers():
    first = posenc.TransformerXL(d_model=8, heads=2)
    second = posenc.TransformerXL(
        d_model=8, heads=2, content_bias=first.content_bias, position_bias=first.position_bias
    )
    assert second.content_bias is first.content_bias
    before = first.content_bias.clone()
    second.reset_parameters()
    assert torch.equal(first.content_bias, before)
    with pytest.raises(posenc.OptionError, match=r"\[heads, head_dim\] = \[4, 2\]"):
        posenc.TransformerXL(d_model=8, heads=4, content_bias=first.content_bias)


def test_dropout_acts_on_the_sinusoid_in_training_only():
    encoding = posenc.TransformerXL(d_model=8, heads=2, dropout=0.5)
    table = lambda: encoding.plan(Positions(5)).lookups[0].dot_query  # noqa: E731
    assert not torch.equal(table(), table())
    encoding.eval()
    assert torch.equal(table(), table())


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: posenc.TransformerXL(d_model=9, heads=2), "multiple of heads"),
        (lambda: posenc.TransformerXL(d_model=8, heads=2, layout="x"), "'concatenated' or 'interleaved'"),
        (lambda: posenc.TransformerXL(d_model=8, heads=2, clamp_length=0), "at least 1"),
        (lambda: posenc.XLNet(d_model=8, heads=2, attn_type="both"), "'bi' or 'uni'"),
        (lambda: posenc.XLNet(d_model=8, heads=2, bi_data=True).plan(Positions(3)), "give plan"),
        (
            lambda: posenc.XLNet(d_model=8, heads=2, bi_data=True).plan(Positions(3), x=torch.zeros(3, 3, 8)),
            "even batch",
        ),
    ],
)
def test_bad_options(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_kept_sinusoid_serves_training_after_inference():
    encoding = posenc.TransformerXL(d_model=8, heads=2)
    with torch.inference_mode():
        first = encoding.plan(Positions(11)).lookups[0].dot_query
    second = encoding.plan(Positions(11)).lookups[0].dot_query
    second.sum().backward()
    assert torch.equal(first, second) and encoding.position_proj.weight.grad.abs().sum() > 0
    assert encoding.double().plan(Positions(11)).lookups[0].dot_query.dtype == torch.float64


@pytest.mark.parametrize("name", ["transformer_xl", "xlnet"])
@pytest.mark.parametrize("scale", [0.3, 1.0, "tensor"])
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_another_scale_scales_every_term(name, scale, engine):
    """The second vector stands inside the scale, as the formula has it."""
    torch.manual_seed(0)
    encoding = posenc.create(name, d_model=8, heads=2, std=0.8).double()
    segments = torch.tensor([[0, 0, 1, 1, 0]])
    positions = Positions(5, more=[(segments, segments)]) if name == "xlnet" else Positions(5)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    plan = encoding.plan(positions)
    scale = torch.rand(1, 2, 5, dtype=torch.float64) + 0.5 if scale == "tensor" else scale
    factor = scale.unsqueeze(-1) if isinstance(scale, torch.Tensor) else scale
    expected = torch.softmax(posenc.scores(q, k, plan) * 2.0 * factor, dim=-1) @ v
    found = posenc.attend(q, k, v, replace(plan, scale=scale), engine=engine)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("clamp_length", [None, 1000])
def test_tokens_far_apart_need_no_long_table(causal, clamp_length):
    """The same numbers and gradients as a table with a row for every distance."""
    torch.manual_seed(0)
    encoding = posenc.TransformerXL(d_model=8, heads=2, std=0.8, causal=causal, clamp_length=clamp_length).double()
    p = torch.tensor([[0, 3, 40_000, 40_001], [7, 8, 9, 30_000]])
    positions = Positions(p)
    q, k, v = (torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    plan = encoding.plan(positions)
    if clamp_length is None:
        assert plan.lookups[0].dot_query.shape[1] <= 21
    dense = Index(max(-40_001, -(clamp_length or 40_001)), 0 if causal else min(40_001, clamp_length or 40_001))
    long = replace(plan, lookups=(encoding._positions(positions, dense),))
    leaves = [q, k, v, encoding.position_proj.weight, encoding.content_bias, encoding.position_bias]
    results = []
    for one in (plan, long):
        out = posenc.attend(q, k, v, one, causal=causal)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_two_tokens_a_million_apart_are_cheap():
    encoding = posenc.XLNet(d_model=8, heads=2)
    plan = encoding.plan(Positions(torch.tensor([0, 10**6])))
    assert plan.lookups[0].dot_query.shape == (2, 3, 4)
    plan = encoding.plan(Positions(torch.tensor([[0, 1, 2], [10**9, 10**9 + 1, 10**9 + 2]])))
    assert plan.lookups[0].dot_query.shape == (2, 5, 4)


def test_xlnet_options_from_a_configuration():
    from transformers import XLNetConfig

    encoding = posenc.XLNet.from_hf(XLNetConfig(d_model=16, n_head=2, attn_type="uni", clamp_len=5))
    assert (encoding.causal, encoding.clamp_length, encoding.head_dim) == (True, 5, 8)
    names = {"content_bias", "position_bias", "position_proj.weight", "segment_bias", "segment_table"}
    assert set(encoding.state_dict()) == names
