"""RoPE in the layouts of real models, and weights carried from one layout to the other."""

import pytest
import torch
from transformers import CohereConfig, GlmConfig, GPTJConfig, GPTNeoXConfig, Llama4TextConfig, LlamaConfig, PhiConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.glm import modeling_glm as glm
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.phi import modeling_phi as phi
from transformers.models.roformer import modeling_roformer as roformer

import posenc
from posenc.encodings.rope.convert import convert
from tests import budget
from tests.oracle import assert_rotated

L, SIZES = 11, dict(hidden_size=64, num_attention_heads=2)


@pytest.fixture
def qk():
    return torch.randn(2, 2, L, 32), torch.randn(2, 2, L, 32)


@pytest.mark.parametrize(("module", "config", "rotary", "layout", "width"), [
    (llama, LlamaConfig(**SIZES), "LlamaRotaryEmbedding", "half", 32),
    (cohere, CohereConfig(**SIZES), "CohereRotaryEmbedding", "interleaved", 32),
    (neox, GPTNeoXConfig(**SIZES, rotary_pct=0.25), "GPTNeoXRotaryEmbedding", "half", 8),
    (phi, PhiConfig(**SIZES, partial_rotary_factor=0.5), "PhiRotaryEmbedding", "half", 16),
    (glm, GlmConfig(**SIZES, head_dim=32, partial_rotary_factor=0.5), "GlmRotaryEmbedding", "interleaved", 16),
])  # fmt: skip
def test_equals_the_model(module, config, rotary, layout, width, qk):
    q, k = qk
    cos, sin = getattr(module, rotary)(config)(q, torch.arange(L)[None])
    if module is phi:
        parts = [(x[..., :width], x[..., width:]) for x in qk]
        rotated = module.apply_rotary_pos_emb(parts[0][0], parts[1][0], cos, sin)
        theirs = [torch.cat((new, rest), dim=-1) for new, (_, rest) in zip(rotated, parts, strict=True)]
    else:
        theirs = module.apply_rotary_pos_emb(q, k, cos, sin)
    rope = posenc.rope.from_config(config)
    assert (rope.layout, rope.rotary_dim) == (layout, width)
    rotation = rope.rotation(posenc.Positions(L))
    assert_rotated(rotation.rotate_q(q), theirs[0], q, L)
    assert_rotated(rotation.rotate_k(k), theirs[1], k, L)
    assert torch.equal(rope.rotate(q, L), rotation.rotate_q(q))


def test_equals_gptj(qk):
    rope = posenc.rope.from_config(GPTJConfig(n_embd=64, n_head=2, rotary_dim=16))
    assert (rope.layout, rope.rotary_dim) == ("interleaved", 16)
    sin, cos = gptj.create_sinusoidal_positions(L, 16)[None].chunk(2, dim=-1)
    for x in qk:
        rows = x.transpose(1, 2)
        rotated = gptj.apply_rotary_pos_emb(rows[..., :16], sin, cos)
        assert_rotated(rope.rotate(x, L), torch.cat((rotated, rows[..., 16:]), dim=-1).transpose(1, 2), x, L)


def test_equals_llama4(qk):
    q, k = qk
    config = Llama4TextConfig(**SIZES, head_dim=32, rope_theta=500000.0)
    freqs = llama4.Llama4TextRotaryEmbedding(config)(q, torch.arange(L)[None])
    theirs = llama4.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), freqs)
    rope = posenc.rope.from_config(config)
    assert rope.layout == "interleaved"
    for x, other in zip(qk, theirs, strict=True):
        assert_rotated(rope.rotate(x, L), other.transpose(1, 2), x, L)


def test_equals_roformer_with_values(qk):
    table = roformer.RoFormerSinusoidalPositionalEmbedding(L, 32)
    table.weight.data = table.create_weight()
    theirs = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(table.weight[None, None], *qk, qk[1])
    rope = posenc.RoPE(head_dim=32, layout="interleaved", values=True)
    rotation = rope.rotation(posenc.Positions(L))
    for x, ours, other in zip(qk, rotation.rotate_qk(*qk), theirs, strict=False):
        assert_rotated(ours, other, x, L)
    q, k, v = (x.double() for x in theirs)
    weights = torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, dim=-1)
    ours = posenc.attend(*(x.double() for x in qk), qk[1].double(), rope.double().plan(posenc.Positions(L)))
    # what the original's float32 rotation leaves of 32 products a score, and of the values
    allowed = budget.unit(torch.float32) * (3 * L + 8) * 2 * budget.c(32) * v.abs().max().item()
    torch.testing.assert_close(ours, weights @ v, rtol=0, atol=allowed)


@pytest.mark.parametrize("rotary_dim", [None, 16])
def test_converted_weights_give_the_same_scores(rotary_dim):
    x = torch.randn(1, L, 48)
    q_weight, k_weight, bias, norm = torch.randn(64, 48), torch.randn(64, 48), torch.randn(64), torch.rand(32)

    def scores(layout, q_weight, k_weight, bias, norm):
        q, k = (
            torch.nn.functional.linear(x, weight, bias).unflatten(-1, (2, 32)).transpose(1, 2) * norm
            for weight in (q_weight, k_weight)
        )
        rope = posenc.RoPE(head_dim=32, rotary_dim=rotary_dim, layout=layout)
        return posenc.scores(q, k, rope.plan(posenc.Positions(L)))

    before = scores("interleaved", q_weight, k_weight, bias, norm)
    moved = [convert(w, heads, to="half", rotary_dim=rotary_dim) for w, heads in
             ((q_weight, 2), (k_weight, 2), (bias, 2), (norm, 1))]  # fmt: skip
    torch.testing.assert_close(scores("half", *moved), before, atol=1e-4, rtol=1e-5)
    for new, old, heads in zip(moved, (q_weight, k_weight, bias, norm), (2, 2, 2, 1), strict=True):
        assert torch.equal(convert(new, heads, to="interleaved", rotary_dim=rotary_dim), old)
    assert not torch.equal(moved[0], q_weight)


def test_convert_equals_the_checkpoint_script():
    weight = torch.randn(64, 48)
    theirs = weight.view(2, 16, 2, 48).transpose(1, 2).reshape(64, 48)  # what the Llama conversion does
    assert torch.equal(convert(weight, 2, to="half"), theirs)


@pytest.mark.parametrize(("arguments", "words"), [
    (dict(heads=3, to="half"), "multiple of heads"),
    (dict(heads=2, to="halves"), "'interleaved'"),
    (dict(heads=2, to="half", rotary_dim=7), "even"),
])  # fmt: skip
def test_convert_says_what_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=words):
        convert(torch.zeros(64, 4), **arguments)
