"""CoPE, stick-breaking and PaTH against x-transformers and flash-linear-attention; decoding, padding, gradients."""

import pytest
import torch

import posenc
from posenc.contextual import cope, path, path_keys, path_step, stick_breaking


def tensors(length=13, heads=4, kv_heads=2, size=6):
    make = lambda h: torch.randn(2, h, length, size, dtype=torch.float64)  # noqa: E731
    return make(heads), make(kv_heads), make(kv_heads)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def whole(x):
    return x.repeat_interleave(2, 1)


@pytest.mark.parametrize("most", [3, 40])
def test_cope_is_x_transformers(most):
    from x_transformers.x_transformers import CoPE

    q, k, v = tensors()
    original = CoPE(6, 4, most).double()
    torch.nn.init.normal_(original.pos_emb)
    future = torch.ones(13, 13, dtype=torch.bool).triu(1)
    logits = (q @ whole(k).mT * 6**-0.5).masked_fill(future, -torch.finfo(torch.float64).max)
    scores = (logits + original(q, logits)).masked_fill(future, float("-inf"))
    expected = scores.softmax(-1) @ whole(v)
    for block in (5, 128):
        close(cope(q, k, v, original.pos_emb, block=block), expected)
    scaled = cope(q, k, v, original.pos_emb, scale_positions=True)
    close(scaled, cope(q, k, v, original.pos_emb * 6**-0.5))


def test_cope_with_open_gates_counts_tokens():
    """Gates that are all open make a key's position its distance + 1: a clipped relative position."""
    q, k, v = tensors(kv_heads=4)
    table = torch.randn(5, 6, dtype=torch.float64)
    big = torch.cat((q, torch.full_like(q[..., :1], 1e3)), -1), torch.cat((k, torch.ones_like(k[..., :1])), -1)
    table = torch.cat((table, torch.zeros(5, 1, dtype=torch.float64)), -1)
    ours = cope(*big, v, table, scale=1.0)
    r = torch.arange(13) - torch.arange(13)[:, None]
    rows = table[(1 - r).clamp(0, 4), :6]
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rows)
    close(ours, scores.masked_fill(r > 0, float("-inf")).softmax(-1) @ v, 1e-8)


@pytest.mark.parametrize("current", [False, True])
def test_stick_breaking_is_flas(current):
    naive = pytest.importorskip("fla.ops.stickbreaking_attn.naive", reason="needs fla-core").naive_stickbreaking_attn
    q, k, v = tensors()
    swap = lambda x: x.transpose(1, 2)  # noqa: E731
    out, rest = naive(swap(q), swap(k), swap(v), attend_current=current)
    for block in (4, 128):
        ours, left = stick_breaking(q, k, v, include_current=current, block=block)
        close(ours, swap(out))
        close(left, swap(rest))


@pytest.mark.parametrize("length", [1, 13, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_path_is_flas(length, gated):
    naive = pytest.importorskip("fla.ops.path_attn.naive", reason="needs fla-core").naive_path_attn
    q, k, v = tensors(length)
    w = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    beta = 2 * torch.rand(2, 2, length, dtype=torch.float64)
    gates = -torch.rand(2, 4, length, dtype=torch.float64) if gated else torch.zeros(2, 4, length, dtype=torch.float64)
    swap = lambda x: x.transpose(1, 2)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:  # it computes in float32
        patch.setattr(torch, "float", torch.float64)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        expected = swap(naive(*map(swap, (q, k, v, w, beta, gates)), scale=0.3, chunk_size=16))
        torch.set_default_dtype(before)
    for block in (5, 64):
        close(path(q, k, v, w, beta, gates=gates if gated else None, scale=0.3, block=block), expected)


def test_path_is_the_product_of_its_matrices_and_none_without_beta():
    q, k, v = tensors(9, heads=2)
    w = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    beta = 2 * torch.rand(2, 2, 9, dtype=torch.float64)
    each = torch.eye(6, dtype=torch.float64) - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    scores = torch.full((2, 2, 9, 9), float("-inf"), dtype=torch.float64)
    for i in range(9):
        product = torch.eye(6, dtype=torch.float64).expand(2, 2, 6, 6)
        for j in range(i, -1, -1):
            scores[:, :, i, j] = torch.einsum("bhd,bhde,bhe->bh", q[:, :, i], product, k[:, :, j]) * 6**-0.5
            product = product @ each[:, :, j]
    close(path(q, k, v, w, beta, block=4), scores.softmax(-1) @ v)
    close(path(q, k, v, w, 0 * beta), posenc.attend(q, k, v, causal=True))


def test_token_by_token_is_prefill():
    q, k, v = tensors(9)
    table = torch.randn(4, 6, dtype=torch.float64)
    w = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    beta = 2 * torch.rand(2, 2, 9, dtype=torch.float64)
    counted, broken, along = cope(q, k, v, table), stick_breaking(q, k, v), path(q, k, v, w, beta)
    keys, values = k[:, :, :0], v[:, :, :0]
    for i in range(9):
        now, past = slice(i, i + 1), slice(0, i + 1)
        close(cope(q[:, :, now], k[:, :, past], v[:, :, past], table), counted[:, :, now])
        for ours, all_rows in zip(stick_breaking(q[:, :, now], k[:, :, past], v[:, :, past]), broken):
            close(ours, all_rows[:, :, now])
        token = (x[:, :, now] for x in (q, k, v, w, beta))
        out, keys, values = path_step(*token, keys=keys, values=values)
        close(out, along[:, :, now])


def steps(q, k, v, w, beta, keys, values, first, **of_all):
    """path_step from token `first` on; of_all: what has an entry for each token, on its last axis."""
    outs = []
    for i in range(first, q.shape[2]):
        token = (x[:, :, i : i + 1] for x in (q, k, v, w, beta))
        more = {name: x[..., : i + 1] for name, x in of_all.items()}
        out, keys, values = path_step(*token, keys=keys, values=values, **more)
        outs.append(out)
    return torch.cat(outs, 2), keys


@pytest.mark.parametrize("of_all", [(), ("gates",), ("key_mask",), ("documents",), ("gates", "key_mask", "documents")])
def test_steps_of_path_after_a_prompt_are_prefill(of_all):
    q, k, v = tensors(75)
    w = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    beta = 2 * torch.rand(2, 2, 75, dtype=torch.float64)
    given = {
        "gates": torch.randn(2, 4, 75, dtype=torch.float64).sigmoid().log(),
        "key_mask": torch.arange(75)[None] >= torch.tensor([[0], [3]]),
        "documents": torch.arange(75).expand(2, -1) // 30,
    }
    given = {name: given[name] for name in of_all}
    expected = path(q, k, v, w, beta, **given)
    out, last = steps(q, k, v, w, beta, k[:, :, :0], v[:, :, :0], 0, **given)
    close(out, expected)
    masks = {"key_mask": given["key_mask"]} if "key_mask" in given else {}
    close(path_keys(k, w, beta, **masks), last)
    for prompt in (5, 66):
        start = {name: x[..., :prompt] for name, x in masks.items()}
        keys = path_keys(*(x[:, :, :prompt] for x in (k, w, beta)), **start)
        close(steps(q, k, v, w, beta, keys, v[:, :, :prompt], prompt, **given)[0], expected[:, :, prompt:])


def test_keys_of_path_in_float32_keep_their_digits_in_half_precision():
    q, k, v = (x.bfloat16() for x in tensors(300, size=16))
    w = torch.nn.functional.normalize(torch.randn(2, 2, 300, 16), dim=-1).bfloat16()
    beta = (2 * torch.rand(2, 2, 300)).bfloat16()
    expected = path(*(x.double() for x in (q, k, v, w, beta)))
    out, keys = steps(q, k, v, w, beta, path_keys(*(x[:, :, :3] for x in (k, w, beta))), v[:, :, :3], 3)
    assert (out.dtype, keys.dtype) == (torch.bfloat16, torch.float32)
    close(out.double(), expected[:, :, 3:], 2e-2)


def test_left_padding_is_no_padding():
    q, k, v = tensors(7)
    table = torch.randn(4, 6, dtype=torch.float64)
    real = torch.arange(7)[None] >= torch.tensor([[0], [3]])
    alone = [x[1:, :, 3:] for x in (q, k, v)]
    close(cope(q, k, v, table, key_mask=real)[1:, :, 3:], cope(*alone, table))
    for ours, theirs in zip(stick_breaking(q, k, v, key_mask=real), stick_breaking(*alone)):
        close(ours[1:, :, 3:], theirs)
    assert torch.equal(cope(q, k, v, table, key_mask=real)[1, :, :3], torch.zeros(4, 3, 6, dtype=torch.float64))
    w = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    beta, gates = 2 * torch.rand(2, 2, 7, dtype=torch.float64), -torch.rand(2, 4, 7, dtype=torch.float64)
    for block in (2, 64):
        ours = path(q, k, v, w, beta, gates=gates, key_mask=real, block=block)[1:, :, 3:]
        close(ours, path(*alone, w[1:, :, 3:], beta[1:, :, 3:], gates=gates[1:, :, 3:]))


def test_packed_is_separate():
    q, k, v = tensors(11)
    table = torch.randn(4, 6, dtype=torch.float64)
    w = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    beta = 2 * torch.rand(2, 2, 11, dtype=torch.float64)
    documents = torch.tensor([[0] * 4 + [1] * 7, [5] * 9 + [3] * 2])
    packed = (
        cope(q, k, v, table, documents=documents, block=3), stick_breaking(q, k, v, documents=documents, block=3)[0],
        path(q, k, v, w, beta, documents=documents, block=3),
    )  # fmt: skip
    for row, cut in ((0, 4), (1, 9)):
        for part in (slice(0, cut), slice(cut, 11)):
            one = [x[row : row + 1, :, part] for x in (q, k, v)]
            more = [x[row : row + 1, :, part] for x in (w, beta)]
            alone = cope(*one, table), stick_breaking(*one)[0], path(*one, *more)
            for ours, wanted in zip(packed, alone, strict=True):
                close(ours[row : row + 1, :, part], wanted)


@pytest.mark.parametrize("function", ["cope", "stick_breaking", "path"])
def test_gradients(function):
    q, k, v = (x.requires_grad_() for x in tensors(5, 2, 1, 4))
    if function == "cope":
        table = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        run, more = (lambda *x: cope(*x, block=2)), [table]
    elif function == "stick_breaking":
        run, more = (lambda *x: torch.cat([y.flatten() for y in stick_breaking(*x, block=2)])), []
    else:
        w = torch.randn(2, 1, 5, 4, dtype=torch.float64, requires_grad=True)
        beta = torch.rand(2, 1, 5, dtype=torch.float64, requires_grad=True)
        gates = -torch.rand(2, 2, 5, dtype=torch.float64)
        more = [w, beta, gates.requires_grad_()]
        run = lambda q, k, v, w, beta, gates: path(q, k, v, w, beta, gates=gates, block=2)  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v, *more), fast_mode=True)


def test_float32_is_close_and_half_precision_comes_back_as_it_went():
    q, k, v = tensors(20)
    table = torch.randn(6, 6, dtype=torch.float64)
    exact = cope(q, k, v, table)
    torch.testing.assert_close(cope(*(x.float() for x in (q, k, v, table))).double(), exact, rtol=0, atol=1e-5)
    assert stick_breaking(*(x.bfloat16() for x in (q, k, v)))[0].dtype == torch.bfloat16


def test_bad_input():
    q, k, v = tensors(4)
    with pytest.raises(ValueError, match="the table must be"):
        cope(q, k, v, torch.zeros(3, 5))
    with pytest.raises(ValueError, match="block=0"):
        stick_breaking(q, k, v, block=0)
    with pytest.raises(ValueError, match="decode with path_step"):
        path(q[:, :, :1], k, v, k, k[..., 0])
    with pytest.raises(ValueError, match="takes one token, got 4 queries"):
        path_step(q, k, v, k, k[..., 0], keys=k, values=v)
    token = [x[:, :, :1] for x in (q, k, v, k, k[..., 0])]
    with pytest.raises(ValueError, match="values must be"):
        path_step(*token, keys=k, values=v[..., :3])
    with pytest.raises(ValueError, match="gates must be"):
        path_step(*token, keys=k, values=v, gates=torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match="beta"):
        path_keys(k, k, k)
    with pytest.raises(ValueError, match="do not fit together"):
        stick_breaking(q, k[..., :3], v)
