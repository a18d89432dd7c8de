"""Attention sinks against gpt-oss, and joined to the output of every engine against one more column."""

import pytest
import torch

import posenc
from posenc import KVCache, Plan, Positions
from tests import budget, oracle
from tests.encodings.every import layer
from tests.oracle import copy
from tests.plans import plan_of, tensors


def gpt_oss(window):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    config = GptOssConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        sliding_window=window, layer_types=["full_attention" if window is None else "sliding_attention"],
        max_position_embeddings=131072, attention_bias=True,
    )  # fmt: skip
    config._attn_implementation = "eager"
    original = m.GptOssAttention(config, 0).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return m, config, original


@pytest.mark.parametrize("window", [None, 4])
def test_the_layer_is_gpt_oss(window):
    m, config, original = gpt_oss(window)
    x, length = torch.randn(2, 11, 16, dtype=torch.float64), 11
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        visible &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    rope = posenc.RoPE.from_config(config).double()
    phases = rope.rotation(Positions(length)).k
    with torch.no_grad():
        # its own phases have frequencies rounded to float32: with ours the layer is the same to float64's precision
        for ours, theirs in zip(phases, m.GptOssRotaryEmbedding(config)(x, torch.arange(length)[None])):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        mask = torch.zeros(1, 1, length, length).double().masked_fill(~visible, torch.finfo(torch.float64).min)
        expected = original(x, phases, mask)[0]
    encoding = posenc.Sinks(heads=4, encoding=rope).double()
    copy(encoding.sinks, original.sinks)
    attn = posenc.Attention(
        16, 4, kv_heads=2, head_dim=8, encoding=encoding, causal=True, bias=True,
        window=None if window is None else (window - 1, 0),
    ).double()  # fmt: skip
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attn, name).load_state_dict(getattr(original, name).state_dict())
    oracle.check_layer(attn, lambda attn, x: attn(x), x, expected, terms=16)


SLOTS = ["bias", "dot_query", "add_value", "slopes", "decay", "pair", "scale"]


@pytest.mark.parametrize("slot", [None, *SLOTS])
def test_every_engine_joins_them(slot):
    """Output, log-sum-exp and the gradients of every tensor: the column of the reference is a formula of its own."""
    q, k, v = (x.requires_grad_() for x in tensors(lq=9, lk=12))
    plan = plan_of((slot,), q, k, v) if slot else Plan(Positions((3, 9), 12))
    sinks = torch.tensor([-3.0, 0.0, 2.0, 30.0], dtype=torch.float64, requires_grad=True)
    plan = posenc.core.plan.replace(plan, sinks=sinks)
    leaves = [q, k, v, *(x for _, x in plan.tensors())]
    results = {}
    for engine in ("auto", "blocked", "reference"):
        out, lse = posenc.attend(q, k, v, plan, causal=True, engine=engine, return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse.cos().sum(), leaves)
        assert torch.equal(posenc.attend(q, k, v, plan, causal=True, engine=engine), out)
        results[engine] = (out, lse, *grads)
    for engine in ("auto", "blocked"):
        for ours, exact in zip(results[engine], results["reference"], strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)


def test_every_engine_takes_their_gradient_in_float32():
    q, k, v = (x.float().requires_grad_() for x in tensors(lq=40, lk=40))
    plan = plan_of(("bias", "dot_query"), q, k, v)
    plan = posenc.core.plan.replace(plan, sinks=torch.randn(4, requires_grad=True))
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    g = torch.randn(*q.shape[:3], v.shape[3])
    out = posenc.attend(q, k, v, plan, causal=True)
    exact = posenc.attend(*(x.double() for x in (q, k, v)), plan, causal=True, engine="reference")
    theirs = torch.autograd.grad(exact, list(leaves.values()), g.double())
    for ours, wanted in zip(torch.autograd.grad(out, list(leaves.values()), g), theirs):
        size = wanted.double().square().mean().sqrt().item()
        error = (ours.double() - wanted.double()).square().mean().sqrt().item()
        assert error <= budget.c(40 * 9) * budget.unit(torch.float32) * size


def test_a_fully_masked_query_leaves_all_weight_to_the_sink():
    q, k, v = tensors(lq=3, lk=5)
    real = torch.zeros(2, 5, dtype=torch.bool)
    real[0] = True
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for engine in ("auto", "reference"):
        out, lse = posenc.attend(
            q, k, v, Plan(Positions(3, 5), sinks=sinks), key_mask=real, engine=engine, return_lse=True
        )
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        torch.testing.assert_close(lse[1], sinks[:, None].expand(4, 3))
        grad = torch.autograd.grad(out.sum() + lse.sum(), sinks)[0]
        assert grad.isfinite().all()


def test_no_weight_is_lost_to_a_sink_of_minus_infinity():
    q, k, v = tensors()
    plan = Plan(Positions(5, 7), sinks=torch.full((4,), float("-inf"), dtype=torch.float64))
    torch.testing.assert_close(posenc.attend(q, k, v, plan), posenc.attend(q, k, v))


def test_merged_parts_hold_one_sink():
    q, k, v = tensors(lq=5, lk=8)
    sinks = torch.randn(4, dtype=torch.float64)
    whole = posenc.attend(q, k, v, Plan(Positions(5, 8), sinks=sinks), return_lse=True)
    near = posenc.attend(q, k[:, :, 3:], v[:, :, 3:], Plan(Positions(5, 5), sinks=sinks), return_lse=True)
    far = posenc.attend(q, k[:, :, :3], v[:, :, :3], return_lse=True)
    for ours, exact in zip(posenc.merge([near, far]), whole, strict=True):
        torch.testing.assert_close(ours, exact)


def test_they_go_with_any_encoding_and_decode():
    for name in ("rope", "t5", "alibi"):
        inner = layer(name).encoding
        encoding = posenc.Sinks(heads=4, encoding=inner, std=1.0)
        attn = posenc.Attention(16, 4, kv_heads=2, encoding=encoding, causal=True).double()
        x, cache = torch.randn(2, 6, 16, dtype=torch.float64), KVCache()
        steps = [attn(x[:, i : i + 1], cache=cache) for i in range(6)]
        torch.testing.assert_close(torch.cat(steps, 1), attn(x))
        assert encoding.absolute == inner.absolute
    assert posenc.create("sinks", d_model=16, heads=4, encoding="rope").encoding.head_dim == 4
    with pytest.raises(posenc.OptionError, match="Sinusoidal is added to the input"):
        posenc.Sinks(heads=4, d_model=16, encoding="sinusoidal")
    with pytest.raises(posenc.OptionError, match="an encoding's name or an encoding"):
        posenc.Sinks(heads=4, encoding=3)
    q, k, v = tensors()
    with pytest.raises(ValueError, match="for 3 heads"):
        posenc.attend(q, k, v, Plan(Positions(5, 7), sinks=torch.zeros(3)))
