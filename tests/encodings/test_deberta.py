"""Disentangled attention against transformers, and against a triple loop where transformers cannot go (Lq != Lk)."""

import pytest
import torch

import posenc
from posenc import Positions
from posenc.core.errors import OptionError
from tests import oracle
from tests.oracle import copy

TERMS = [("c2p",), ("p2c",), ("c2p", "p2c")]


def padded(batch, length):
    real = torch.ones(batch, length, dtype=torch.bool)
    real[1, length - length // 3 :] = False
    return real, real[:, None, None].expand(batch, 1, length, length)


def scaled_size_sqrt(query, factor):
    """transformers' own, without float32: it is compiled, so oracle.wide cannot reach it."""
    return torch.tensor(query.shape[-1] * factor, dtype=torch.float64).sqrt()


@pytest.mark.parametrize("length", [5, 21])
@pytest.mark.parametrize("terms", TERMS, ids="+".join)
def test_v1_is_transformers(terms, length, monkeypatch):
    from transformers import DebertaConfig
    from transformers.models.deberta import modeling_deberta as m

    config = DebertaConfig(
        hidden_size=16, num_attention_heads=2, relative_attention=True, max_relative_positions=8,
        pos_att_type=list(terms), attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    monkeypatch.setattr(m, "scaled_size_sqrt", scaled_size_sqrt)
    original = m.DisentangledSelfAttention(config).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    table = torch.randn(16, 16, dtype=torch.float64)
    encoding = posenc.DeBERTa(d_model=16, heads=2, max_distance=8, terms=terms).double()
    copy(encoding.table, table)
    if "c2p" in terms:
        encoding.pos_key.load_state_dict(original.pos_proj.state_dict())
    if "p2c" in terms:
        encoding.pos_query.load_state_dict(original.pos_q_proj.state_dict())
    layer = posenc.Attention(16, 2, encoding=encoding, bias=True).double()
    packed = original.in_proj.weight.view(2, 3, 8, 16)  # [head, q k v, size, in]
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        copy(getattr(layer, name).weight, packed[:, number].reshape(16, 16))
    copy(layer.q_proj.bias, original.q_bias)
    copy(layer.k_proj.bias, torch.zeros(16))
    copy(layer.v_proj.bias, original.v_bias)
    copy(layer.o_proj.weight, torch.eye(16))
    copy(layer.o_proj.bias, torch.zeros(16))
    x = torch.randn(2, length, 16, dtype=torch.float64)
    real, mask = padded(2, length)
    relative = m.build_relative_position(x, x)
    expected = original(x, mask, relative_pos=relative, rel_embeddings=table)[0]
    oracle.check_layer(layer, lambda layer, x: layer(x, key_mask=real), x, expected, terms=length)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("buckets, reach, length", [(8, 32, 50), (-1, 12, 20)])
@pytest.mark.parametrize("terms", TERMS, ids="+".join)
def test_v2_and_v3_are_transformers(terms, buckets, reach, length, shared, monkeypatch):
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2 import modeling_deberta_v2 as m

    config = DebertaV2Config(
        hidden_size=16, num_attention_heads=2, relative_attention=True, max_relative_positions=reach,
        position_buckets=buckets, share_att_key=shared, norm_rel_ebd="layer_norm", pos_att_type=list(terms),
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, num_hidden_layers=1,
    )  # fmt: skip
    monkeypatch.setattr(m, "scaled_size_sqrt", scaled_size_sqrt)
    encoder = m.DebertaV2Encoder(config).double().eval()
    original = encoder.layer[0].attention.self
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    encoding = posenc.DeBERTa(
        d_model=16, heads=2, max_distance=reach, buckets=buckets if buckets > 0 else None, terms=terms,
        projections="shared" if shared else "own", own_key_bias=not shared, normalise=True,
    ).double()  # fmt: skip
    copy(encoding.table, encoder.rel_embeddings.weight)
    encoding.norm.load_state_dict(encoder.LayerNorm.state_dict())
    layer = posenc.Attention(16, 2, encoding=encoding, bias=True).double()
    for ours, theirs in {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}.items():
        getattr(layer, ours).load_state_dict(getattr(original, theirs).state_dict())
    if not shared:
        if "c2p" in terms:
            encoding.pos_key.load_state_dict(original.pos_key_proj.state_dict())
        if "p2c" in terms:
            encoding.pos_query.load_state_dict(original.pos_query_proj.state_dict())
    copy(layer.o_proj.weight, torch.eye(16))
    copy(layer.o_proj.bias, torch.zeros(16))
    x = torch.randn(2, length, 16, dtype=torch.float64)
    real, mask = padded(2, length)
    relative = encoder.get_rel_pos(x)
    expected = original(x, mask, relative_pos=relative, rel_embeddings=encoder.get_rel_embedding())[0]
    oracle.check_layer(layer, lambda layer, x: layer(x, key_mask=real), x, expected, terms=length)


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 9, 15, 16, 17, 32, 33, 64, 101, 255, 256])
def test_buckets_are_transformers(size):
    """Odd numbers of buckets too, whose last bucket starts past max_distance, and max_distance = buckets."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distance = torch.arange(-2000, 2001)
    for reach in sorted({size, size + 1, size + 2, *(n for n in (12, 50, 61, 128, 512, 1000) if n > size)}):
        theirs = (make_log_bucket_position(distance, size, reach) + size).clamp(0, 2 * size - 1).long()
        assert torch.equal(posenc.index.deberta_buckets(size, reach).lookup(-distance), theirs), reach


@pytest.mark.parametrize("size, reach", [(5, 12), (9, 50), (8, 8)])
def test_the_encoding_reads_transformers_rows(size, reach):
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    encoding = posenc.DeBERTa(d_model=8, heads=2, buckets=size, max_distance=reach)
    distance = torch.arange(-200, 201)
    theirs = (make_log_bucket_position(distance, size, reach) + size).clamp(0, 2 * size - 1).long()
    assert torch.equal(encoding.index.lookup(-distance), theirs)
    assert torch.equal(encoding.back_index.lookup(distance), theirs)


def test_buckets_without_end_are_refused():
    with pytest.raises(OptionError, match="even number of buckets"):
        posenc.index.deberta_buckets(5, 2**20)


@pytest.mark.parametrize("sign", ["checkpoint", "paper"])
@pytest.mark.parametrize("start, lq, lk", [(0, 4, 9), (5, 4, 9), (0, 7, 3)])
def test_lengths_that_differ_by_triple_loop(sign, start, lq, lk):
    encoding = posenc.DeBERTa(d_model=6, heads=2, max_distance=3, sign=sign, std=0.8).double()
    q, k = torch.randn(1, 2, lq, 3, dtype=torch.float64), torch.randn(1, 2, lk, 3, dtype=torch.float64)
    s = posenc.scores(q, k, encoding.plan(Positions((start, lq), lk)))
    k_r = encoding.pos_key(encoding.table).view(6, 2, 3)
    q_r = encoding.pos_query(encoding.table).view(6, 2, 3)
    delta = lambda d: min(max(d + 3, 0), 5)  # noqa: E731
    for h in range(2):
        for i in range(lq):
            for j in range(lk):
                d = start + i - j
                back = delta(d) if sign == "checkpoint" else delta(-d)
                value = q[0, h, i] @ k[0, h, j] + q[0, h, i] @ k_r[delta(d), h] + k[0, h, j] @ q_r[back, h]
                torch.testing.assert_close(s[0, h, i, j], value / 9**0.5)


def test_the_table_and_its_norm_can_be_shared():
    first = posenc.DeBERTa(d_model=8, heads=2, max_distance=4, normalise=True)
    second = posenc.DeBERTa(d_model=8, heads=2, max_distance=4, normalise=True, table=first.table, norm=first.norm)
    assert second.table is first.table
    assert second.norm is first.norm
    before = first.table.clone()
    second.reset_parameters()
    assert torch.equal(before, first.table)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(terms=("c2c",)), "'c2p', 'p2c' or both"),
        (dict(terms=()), "'c2p', 'p2c' or both"),
        (dict(projections="none"), "'own' or 'shared'"),
        (dict(sign="other"), "'checkpoint' or 'paper'"),
        (dict(projections="shared", own_key_bias=True), "needs projections='own'"),
        (dict(norm=torch.nn.LayerNorm(8)), "normalise=True"),
        (dict(buckets=8, max_distance=4), "at least the number of buckets"),
        (dict(table=torch.nn.Parameter(torch.zeros(3, 8))), r"table must be"),
        (dict(heads=3), "multiple of heads"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        posenc.DeBERTa(**{"d_model": 8, "heads": 2, **options})


def test_shared_projections_need_a_host():
    with pytest.raises(ValueError, match="host=attention"):
        posenc.DeBERTa(d_model=8, heads=2, projections="shared").plan(Positions(3))
    encoding = posenc.DeBERTa(d_model=8, heads=2, projections="shared")
    with pytest.raises(ValueError, match="as many key heads"):
        posenc.Attention(8, 2, kv_heads=1, encoding=encoding)(torch.zeros(1, 3, 8))


@pytest.mark.parametrize("second", [False, True])
def test_options_from_a_configuration(second):
    from transformers import DebertaConfig, DebertaV2Config

    sizes = dict(hidden_size=16, num_attention_heads=2, relative_attention=True, pos_att_type=["c2p", "p2c"])
    if not second:
        encoding = posenc.DeBERTa.from_hf(DebertaConfig(**sizes, max_position_embeddings=20))
        assert tuple(encoding.table.shape) == (40, 16) and encoding.norm is None
        assert encoding.pos_key.bias is None and encoding.pos_query.bias is not None
        return
    config = DebertaV2Config(**sizes, position_buckets=8, max_relative_positions=16, norm_rel_ebd="x | Layer_Norm")
    encoding = posenc.DeBERTa.from_hf(config)
    assert tuple(encoding.table.shape) == (16, 16) and encoding.norm is not None and encoding.pos_key.bias is not None
    assert encoding.index == posenc.index.deberta_buckets(8, 16)
    config.share_att_key = True
    assert posenc.DeBERTa.from_hf(config, table=encoding.table).pos_key is None
