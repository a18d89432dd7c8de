"""T5, clipped and ALiBi against the models that use them, and against each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import posenc
from posenc import Positions
from tests.oracle import copy


def dense(encoding, positions, heads, dtype=torch.float64):
    """The bias alone: scores of zero queries."""
    zero = lambda n: torch.zeros(1, heads, n, 4, dtype=dtype)  # noqa: E731
    return posenc.scores(zero(positions.q_length), zero(positions.k_length), encoding.plan(positions))[0]


def t5_layer(kind, decoder, dtype):
    if kind == "umt5":
        from transformers import UMT5Config as Config
        from transformers.models.umt5.modeling_umt5 import UMT5Attention as Layer
    elif kind == "mt5":
        from transformers import MT5Config as Config
        from transformers.models.mt5.modeling_mt5 import MT5Attention as Layer
    else:
        from transformers import T5Config as Config
        from transformers.models.t5.modeling_t5 import T5Attention as Layer
    config = Config(d_model=16, num_heads=2, d_kv=8, dropout_rate=0.0, is_decoder=decoder)
    config._attn_implementation = "eager"
    oracle = Layer(config, has_relative_attention_bias=True, layer_idx=0).to(dtype).eval()
    torch.nn.init.normal_(oracle.relative_attention_bias.weight)
    return oracle


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_t5_is_the_models_own(kind, decoder, dtype, tolerance):
    oracle = t5_layer(kind, decoder, dtype)
    encoding = posenc.T5(heads=2, causal=decoder).to(dtype)
    copy(encoding.table, oracle.relative_attention_bias.weight)
    layer = posenc.Attention(16, 2, encoding=encoding, causal=decoder).to(dtype)
    for ours, theirs in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}.items():
        getattr(layer, ours).load_state_dict(getattr(oracle, theirs).state_dict())
    x = torch.randn(2, 200, 16, dtype=dtype)
    real = torch.ones(2, 200, dtype=torch.bool)
    real[1, 150:] = False
    mask = real[:, None, None].expand(2, 1, 200, 200)
    if decoder:
        mask = mask & torch.ones(200, 200, dtype=torch.bool).tril()
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    name = "attention_mask" if kind == "umt5" else "mask"
    expected = oracle(x, **{name: added})[0]
    torch.testing.assert_close(layer(x, key_mask=real), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("buckets, reach", [(32, 128), (64, 200), (8, 16), (32, 127)])
def test_t5_buckets_are_transformers(buckets, reach, decoder):
    from transformers.models.t5.modeling_t5 import T5Attention

    r = torch.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(r, not decoder, buckets, reach)
    ours = posenc.index.log_buckets(buckets, reach, causal=decoder).lookup(r)
    assert torch.equal(ours, theirs)


def test_t5_scaled_is_mpnets():
    from transformers import MPNetConfig
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    config = MPNetConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, relative_attention_num_buckets=32,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    encoder = MPNetEncoder(config).double().eval()
    oracle = encoder.layer[0].attention.attn
    torch.nn.init.normal_(encoder.relative_attention_bias.weight)
    encoding = posenc.T5(heads=2, scale=None).double()
    copy(encoding.table, encoder.relative_attention_bias.weight)
    layer = posenc.Attention(16, 2, encoding=encoding, bias=True).double()
    for ours, theirs in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}.items():
        getattr(layer, ours).load_state_dict(getattr(oracle, theirs).state_dict())
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    bias = encoder.compute_position_bias(x)
    expected = oracle(x, position_bias=bias)[0]
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


def test_t5_with_every_distance_exact_is_clipped():
    t5 = posenc.T5(heads=2, buckets=64, max_distance=17, scale=None).double()
    clipped = posenc.Clipped(heads=2, max_distance=15).double()
    with torch.no_grad():
        for r in range(-15, 16):
            clipped.table[:, r + 15] = t5.table[posenc.formulas.t5_bucket(r, buckets=64, max_distance=17, causal=False)]
    positions = Positions(15)
    assert torch.equal(dense(t5, positions, 2), dense(clipped, positions, 2))


def test_clipped_is_one_number_per_head_and_distance():
    encoding = posenc.Clipped(heads=3, max_distance=2, std=1.0).double()
    bias = dense(encoding, Positions(6), 3)
    for i in range(6):
        for j in range(6):
            assert torch.equal(bias[:, i, j], encoding.table[:, min(max(j - i, -2), 2) + 2])
    assert posenc.Clipped(heads=3, max_distance=2).table.abs().max() == 0


def test_clipped_tables_can_hold_alibi():
    alibi = posenc.ALiBi(heads=4)
    clipped = posenc.Clipped(heads=4, max_distance=8)
    with torch.no_grad():
        clipped.table.copy_(-torch.tensor(posenc.formulas.alibi_slopes(4))[:, None] * torch.arange(-8, 9).abs())
    positions = Positions(9)
    torch.testing.assert_close(dense(alibi, positions, 4), dense(clipped, positions, 4))


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 12, 16])
@pytest.mark.parametrize("model", ["bloom", "mpt"])
def test_alibi_is_blooms_and_mpts(model, heads):
    """Theirs adds slope times key position: equal after the softmax, causally."""
    length = 20
    if model == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        theirs = build_alibi_tensor(torch.ones(1, length), heads, torch.float32).view(heads, 1, length)
    else:
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        theirs = build_mpt_alibi_tensor(heads, length).view(heads, 1, length)
    past = torch.ones(length, length, dtype=torch.bool).tril()
    ours = dense(posenc.ALiBi(heads=heads), Positions(length), heads, torch.float32)
    for s in (ours, theirs):
        assert torch.isfinite(s).all()
    softmax = lambda s: s.expand(heads, length, length).masked_fill(~past, float("-inf")).softmax(-1)  # noqa: E731
    torch.testing.assert_close(softmax(ours), softmax(theirs), rtol=0, atol=1e-6)


def test_alibi_is_symmetric_and_exact_in_bfloat16():
    encoding = posenc.ALiBi(heads=12).to(torch.bfloat16)
    slopes = encoding.plan(Positions(3)).slopes
    assert slopes.tolist() == pytest.approx(posenc.formulas.alibi_slopes(12), rel=1e-7)
    bias = dense(encoding, Positions(7), 12)
    assert torch.equal(bias, bias.transpose(1, 2))


def test_alibi_slopes_can_be_learned():
    encoding = posenc.ALiBi(heads=6, learnable=True)
    assert encoding.slopes.tolist() == pytest.approx(posenc.formulas.alibi_slopes(6))
    q = torch.randn(1, 6, 5, 4)
    posenc.attend(q, q, q, encoding.plan(Positions(5)), causal=True).square().sum().backward()
    assert encoding.slopes.grad.abs().min() > 0
    assert not list(posenc.ALiBi(heads=6).parameters())


def test_alibi_far_away_keeps_its_digits():
    far = dense(posenc.ALiBi(heads=2), Positions((10_000_000, 1), (9_999_990, 11)), 2)
    near = dense(posenc.ALiBi(heads=2), Positions((10, 1), 11), 2)
    assert torch.equal(far, near)


@given(st.integers(0, 10**7), st.integers(1, 9), st.integers(1, 9))
def test_bias_encodings_know_distance_only(start, lq, lk):
    for encoding in (posenc.T5(heads=2), posenc.Clipped(heads=2, std=1.0), posenc.ALiBi(heads=2)):
        here, there = Positions((3, lq), lk), Positions((start + 3, lq), (start, lk))
        assert torch.equal(dense(encoding, here, 2), dense(encoding, there, 2))


def test_t5_starts_as_t5_does():
    layer = posenc.Attention(256, 4, encoding="t5")
    assert layer.q_proj.weight.std().item() == pytest.approx((256 * 64) ** -0.5, rel=0.05)
    assert layer.k_proj.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert layer.encoding.table.std().item() == pytest.approx(256**-0.5, rel=0.3)


@pytest.mark.parametrize("options, words", [(dict(buckets=31), "even"), (dict(max_distance=8), "max_distance=8")])
def test_t5_says_what_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        posenc.T5(heads=2, **options)


def test_t5_options_from_a_configuration():
    from transformers import T5Config

    config = T5Config(d_model=16, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=20)
    encoding = posenc.T5.from_hf(config)
    assert encoding.index == posenc.index.log_buckets(8, 20, causal=False)
    assert tuple(encoding.table.shape) == (8, 4) and encoding.std == 16**-0.5
    assert posenc.T5.from_hf(config, causal=True).index == posenc.index.log_buckets(8, 20, causal=True)
