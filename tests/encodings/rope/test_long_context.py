"""Self-Extend, ReRoPE and dual chunks against their definitions, dense and in float64."""

import math

import pytest
import torch

import posenc
from posenc.encodings.rope.convert import dual_chunk, rerope, self_extend
from tests import seeds


def distances(length, rule):
    return torch.tensor([[rule(i, j) if j <= i else 0.0 for j in range(length)] for i in range(length)]).double()


def self_extended(group, window):
    return lambda i, j: i - j if i - j < window else i // group + window - window // group - j // group


def rerotated(window, leak=math.inf):
    return lambda i, j: min(i - j, window + max(i - j - window, 0) / leak)


def chunked(size, local):
    n = size - local

    def rule(i, j):
        if i // n == j // n:
            at = i % n
        elif i // n == j // n + 1:
            at = min(i % n + n, size)
        else:
            at = min(2 * n - 1, size)
        return at - j % n

    return rule


CASES = {
    "self_extend": (self_extend, dict(group=2, window=4), self_extended(2, 4)),
    "self_extend_wide": (self_extend, dict(group=4, window=16), self_extended(4, 16)),
    "rerope": (rerope, dict(window=4), rerotated(4)),
    "leaky": (rerope, dict(window=6, leak=8.0), rerotated(6, 8.0)),
    "dual_chunk": (dual_chunk, dict(chunk_size=6, local=2), chunked(6, 2)),
    "dual_chunk_wide": (dual_chunk, dict(chunk_size=24, local=5), chunked(24, 5)),
}


def dense(q, k, v, distance, rope, log_scale=None):
    """Turn q_i by the mapped distance to each key; the definition, at O(L² D)."""
    length = k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    angle = distance[..., None] * torch.tensor(rope.frequencies(), dtype=torch.float64)
    a, b = q[..., 0::2], q[..., 1::2]
    x, y = k[..., 0::2], k[..., 1::2]
    real = torch.einsum("bhic,bhjc,ijc->bhij", a, x, angle.cos()) + torch.einsum(
        "bhic,bhjc,ijc->bhij", b, y, angle.cos()
    )
    cross = torch.einsum("bhic,bhjc,ijc->bhij", a, y, angle.sin()) - torch.einsum(
        "bhic,bhjc,ijc->bhij", b, x, angle.sin()
    )
    s = (real + cross) * rope.attention_factor**2 / q.shape[-1] ** 0.5
    if log_scale:
        s = s * ((torch.arange(length) + 1).double().log() / math.log(log_scale)).clamp(min=1.0)[:, None]
    s = s.masked_fill(~torch.ones(length, length).tril().bool(), -math.inf)
    return torch.softmax(s, dim=-1) @ v


def data(length=41, heads=4, kv_heads=2, size=8):
    torch.manual_seed(seeds.seed(0))
    q = torch.randn(2, heads, length, size, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, length, size, dtype=torch.float64)
    return q, k, v


def test_the_definitions_are_the_worked_ones():
    assert distances(12, self_extended(2, 4))[-1].tolist() == [7, 7, 6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    assert distances(12, rerotated(4))[-1].tolist() == [4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1, 0]
    rows = distances(14, chunked(6, 2)).long().tolist()
    assert rows[7] == [6, 5, 4, 3, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    assert rows[8] == [6, 5, 4, 3, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0]
    assert rows[13] == [6, 5, 4, 3, 6, 5, 4, 3, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name, block):
    function, options, rule = CASES[name]
    rope = posenc.RoPE(head_dim=8, layout="interleaved")
    q, k, v = data()
    ours = function(q, k, v, rope=rope, block=block, **options)
    torch.testing.assert_close(ours, dense(q, k, v, distances(41, rule), rope), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_scaled_queries_and_magnitudes(name):
    function, options, rule = CASES[name]
    rope = posenc.RoPE(head_dim=8, layout="interleaved", scaling=posenc.scaling.YaRN(factor=4.0, original=64))
    q, k, v = data()
    ours = function(q, k, v, rope=rope, log_scale=10, **options)
    torch.testing.assert_close(ours, dense(q, k, v, distances(41, rule), rope, 10), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_cached_keys_give_the_last_rows(name):
    function, options, _ = CASES[name]
    rope = posenc.RoPE(head_dim=8)
    q, k, v = data()
    whole = function(q, k, v, rope=rope, **options)
    for length in (1, 7, 30):
        last = function(q[:, :, -length:], k, v, rope=rope, block=4, **options)
        torch.testing.assert_close(last, whole[:, :, -length:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("function", "options"), [
    (self_extend, dict(group=4, window=48)), (rerope, dict(window=41)), (rerope, dict(window=41, leak=3.0)),
    (dual_chunk, dict(chunk_size=64, local=8)),
])  # fmt: skip
def test_short_texts_are_plain_rope(function, options):
    rope = posenc.RoPE(head_dim=8)
    q, k, v = data()
    plain = posenc.attend(q, k, v, rope.double().plan(posenc.Positions(41)), causal=True, engine="reference")
    torch.testing.assert_close(function(q, k, v, rope=rope, **options), plain, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["self_extend", "leaky", "dual_chunk"])
def test_gradients(name):
    function, options, _ = CASES[name]
    rope = posenc.RoPE(head_dim=4)
    tensors = [x[:1, :, :11, :4].clone().requires_grad_() for x in data(11, 2, 1, 4)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: function(q, k, v, rope=rope, block=5, **options), tensors, fast_mode=True
    )


def test_padding_is_not_seen():
    rope = posenc.RoPE(head_dim=8)
    q, k, v = data()
    mask = torch.ones(2, 41, dtype=torch.bool)
    mask[1, 5:9] = False
    ours = rerope(q, k, v, rope=rope, window=4, key_mask=mask)
    spoiled = v.clone()
    spoiled[1, :, 5:9] = 1e6
    assert torch.equal(ours, rerope(q, k, spoiled, rope=rope, window=4, key_mask=mask))
    mask[0, 0] = False
    assert torch.equal(rerope(q, k, v, rope=rope, window=4, key_mask=mask)[0, :, 0], torch.zeros(4, 8).double())


def test_low_precision_and_far_positions_stay_near_float64():
    rope = posenc.RoPE(head_dim=8)
    q, k, v = data(300)
    exact = self_extend(q, k, v, rope=rope, group=2, window=64)
    low = self_extend(q.bfloat16(), k.bfloat16(), v.bfloat16(), rope=rope, group=2, window=64)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("call", "words"), [
    (lambda q, k, v: self_extend(q, k, v, rope=posenc.RoPE(head_dim=8), group=3, window=4), "multiple of group"),
    (lambda q, k, v: rerope(q, k, v, rope=posenc.RoPE(head_dim=8), window=4, leak=0.5), "at least 1"),
    (lambda q, k, v: dual_chunk(q, k, v, rope=posenc.RoPE(head_dim=8), chunk_size=4, local=4), "less than"),
    (lambda q, k, v: rerope(q, k[:, :, :9], v[:, :, :9], rope=posenc.RoPE(head_dim=8), window=4), "Lq <= Lk"),
    (lambda q, k, v: self_extend(q, k, v[:, :, :9], rope=posenc.RoPE(head_dim=8), group=2, window=4), "same heads and length"),
    (lambda q, k, v: dual_chunk(q, k, v[0, 0], rope=posenc.RoPE(head_dim=8), chunk_size=4, local=2), "v must be a tensor"),
    (lambda q, k, v: rerope(q, k, v, window=4, rope=posenc.RoPE(
        head_dim=8, scaling=posenc.scaling.DynamicNTK(original=8))), "depend on the length"),
    (lambda q, k, v: rerope(q, k, v, window=4, log_scale=1, rope=posenc.RoPE(head_dim=8)), "training length"),
])  # fmt: skip
def test_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call(*data())
