"""Shaw's tables against the models that use them, and against the [L, L, d] form of the paper."""

import pytest
import torch

import posenc
from posenc import Positions
from tests.oracle import cases, copy, tensor


@pytest.mark.parametrize("case", cases("opennmt"), ids=lambda c: "causal" if c["causal"] else "both")
def test_keys_and_values_are_opennmts(case):
    """One shared table for keys and values, distance j - i, True = masked there."""
    weights = case["weights"]
    table = tensor(weights["relative_positions_embeddings.weight"])[None]
    encoding = posenc.Shaw(head_dim=4, max_distance=case["k"], values=True).double()
    copy(encoding.keys, table)
    copy(encoding.values, table)
    layer = posenc.Attention(8, case["heads"], encoding=encoding, bias=True).double()
    names = {"q_proj": "linear_query", "k_proj": "linear_keys", "v_proj": "linear_values", "o_proj": "final_linear"}
    for ours, theirs in names.items():
        copy(getattr(layer, ours).weight, weights[f"{theirs}.weight"])
        copy(getattr(layer, ours).bias, weights.get(f"{theirs}.bias", [0.0] * 8))
    mask = ~torch.tensor(case["mask"])
    # its scores, here up to 10, are rounded to float32 before the softmax
    torch.testing.assert_close(layer(tensor(case["x"]), mask=mask), tensor(case["out"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", cases("bert"), ids=lambda c: c["kind"])
def test_bert_relative_key(case):
    """i - j there, so the table is reversed; relative_key_query adds the keys' dot with the same table."""
    weights = case["weights"]
    reach = case["max"] - 1
    table = tensor(weights["distance_embedding.weight"]).flip(0)[None]
    q, k, v = (
        torch.nn.functional.linear(tensor(case["x"]), tensor(weights[f"{n}.weight"]), tensor(weights[f"{n}.bias"]))
        .unflatten(-1, (2, 4))
        .transpose(1, 2)
        for n in ("query", "key", "value")
    )
    real = torch.arange(6)[None] < torch.tensor(case["real"])[:, None]
    lookup = posenc.Lookup(
        posenc.index.clip(reach, reach), dot_query=table, dot_key=table if case["kind"].endswith("query") else None
    )
    if case["kind"] == "relative_key":
        encoding = posenc.Shaw(head_dim=4, max_distance=reach).double()
        copy(encoding.keys, table)
        lookup = encoding.plan(Positions(6)).lookups[0]
    out = posenc.attend(q, k, v, posenc.Plan(Positions(6), lookups=(lookup,)), key_mask=real)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), tensor(case["out"]), rtol=0, atol=1e-10)


def test_asymmetric_keys_are_wav2vec2_berts():
    from transformers import Wav2Vec2BertConfig
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    config = Wav2Vec2BertConfig(
        hidden_size=16, num_attention_heads=2, position_embeddings_type="relative_key",
        left_max_position_embeddings=5, right_max_position_embeddings=2, attention_dropout=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    oracle = Wav2Vec2BertSelfAttention(config).double().eval()
    encoding = posenc.Shaw(head_dim=8, left=5, right=2).double()
    copy(encoding.keys, oracle.distance_embedding.weight[None])
    layer = posenc.Attention(16, 2, encoding=encoding, bias=True).double()
    names = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "o_proj": "linear_out"}
    for ours, theirs in names.items():
        getattr(layer, ours).load_state_dict(getattr(oracle, theirs).state_dict())
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 9:] = False
    mask = torch.zeros(2, 1, 13, 13, dtype=torch.float64).masked_fill(
        ~real[:, None, None], torch.finfo(torch.float64).min
    )
    expected = oracle(x, attention_mask=mask)[0]
    torch.testing.assert_close(layer(x, key_mask=real), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("outside", ["clip", "zero"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("keys, values", [(True, False), (False, True), (True, True)])
def test_the_papers_form(outside, per_head, keys, values):
    """s = q (k + a)ᵀ / sqrt(d), o = Σ w (v + a), with a[i, j] written out."""
    encoding = posenc.Shaw(
        head_dim=4, heads=3, left=2, right=1, keys=keys, values=values, per_head=per_head, outside=outside, std=1.0
    ).double()
    q, k, v = (torch.randn(2, 3, 6, 4, dtype=torch.float64) for _ in range(3))
    distance = torch.arange(6)[None, :] - torch.arange(6)[:, None]
    inside = ((distance >= -2) & (distance <= 1))[..., None]

    def written_out(table):
        if table is None:
            return torch.zeros(1, 6, 6, 4, dtype=torch.float64)
        vectors = table[:, distance.clamp(-2, 1) + 2]
        return vectors if outside == "clip" else vectors * inside

    a_k, a_v = written_out(encoding.keys), written_out(encoding.values)
    s = ((q[:, :, :, None] * (k[:, :, None] + a_k)).sum(-1) / 2.0).softmax(-1)
    expected = (s[..., None] * (v[:, :, None] + a_v)).sum(-2)
    torch.testing.assert_close(posenc.attend(q, k, v, encoding.plan(Positions(6))), expected)


def test_a_plan_holds_nothing_of_size_length_squared():
    plan = posenc.Shaw(head_dim=64, max_distance=16, values=True).plan(Positions(100_000))
    assert sum(t.numel() for _, t in plan.tensors()) == 2 * 33 * 64


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(keys=False), "keys=True, values=True"),
        (dict(max_distance=-1), "at least 0"),
        (dict(per_head=True), "needs heads"),
        (dict(outside="wrap"), "'clip' or 'zero'"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(posenc.OptionError, match=words):
        posenc.Shaw(head_dim=4, **options)
