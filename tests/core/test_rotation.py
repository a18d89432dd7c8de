"""rotate: the same numbers block by block as by the formula, its gradients, and what it refuses."""

import math

import pytest
import torch

import posenc
from posenc.core import rotation
from posenc.core.rotation import Rotation, apply_rotary
from tests import budget, seeds

LAYOUTS = ("half", "interleaved")


@pytest.fixture(params=[64, 2**10])
def blocks(request, monkeypatch):
    """Blocks so small that every case has several, and a remainder."""
    monkeypatch.setattr(rotation, "SMALL", 0)
    monkeypatch.setattr(rotation, "BLOCK", request.param)


def phases(length=13, pairs=4, rows=1, dtype=torch.float64):
    angle = torch.rand(rows, length, pairs, dtype=torch.float64, generator=seeds.generator(0)) * math.tau
    return (1.5 * angle.cos()).to(dtype), (1.5 * angle.sin()).to(dtype)


def by_hand(x, cos, sin, layout):
    """Pair by pair, as drawn in the module's head."""
    out, pairs = x.clone(), cos.shape[-1]
    for c in range(pairs):
        i, j = (c, c + pairs) if layout == "half" else (2 * c, 2 * c + 1)
        u, w = cos[:, None, :, c], sin[:, None, :, c]
        out[..., i], out[..., j] = x[..., i] * u - x[..., j] * w, x[..., i] * w + x[..., j] * u
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [8, 11])
def test_pairs_are_rotated_as_drawn(layout, size, blocks):
    for x in (torch.randn(2, 3, 13, size).double(), torch.randn(2, 13, 3, size).double().transpose(1, 2)):
        for rows in (1, 2):
            cos, sin = phases(rows=rows)
            torch.testing.assert_close(
                apply_rotary(x, cos, sin, layout), by_hand(x, cos, sin, layout), atol=1e-14, rtol=1e-14
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_rounded_once(layout, dtype, blocks):
    x = torch.randn(2, 3, 13, 8).to(dtype)
    cos, sin = phases(dtype=torch.float32)
    out = apply_rotary(x, cos, sin, layout)
    assert out.dtype == dtype
    exact = by_hand(x.double(), cos.double(), sin.double(), layout)
    smallest = 2.0**-25 if dtype == torch.float16 else 0.0
    once = 1.01 * budget.unit(dtype)
    torch.testing.assert_close(out.double(), exact, rtol=once, atol=in_float32(x) + smallest)


def in_float32(x):
    """Roundings of two products and their sum, by phases of magnitude 1.5."""
    return 3 * budget.unit(torch.float32) * 2 * 1.5 * x.abs().max().item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout, monkeypatch):
    monkeypatch.setattr(rotation, "SMALL", 0)
    monkeypatch.setattr(rotation, "BLOCK", 64)  # eight rows and two
    x = torch.randn(1, 1, 10, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = phases(10, 2)
    assert torch.autograd.gradcheck(
        lambda x: apply_rotary(x, cos, sin, layout), x, check_forward_ad=True, check_batched_grad=False
    )
    assert torch.autograd.gradgradcheck(lambda x: apply_rotary(x, cos, sin, layout), x)
    cos, sin = (p.requires_grad_() for p in phases(10, 2))  # phases that are learned
    assert torch.autograd.gradcheck(lambda x, c, s: apply_rotary(x, c, s, layout), (x, cos, sin))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_queries_and_keys_at_once(layout):
    """As CUDA runs it; either gradient may be missing."""
    q = torch.randn(1, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 5, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = phases(5, 2)

    def both(q, k):
        return rotation._OnePass.apply(cos, sin, layout, False, q, k)

    assert torch.autograd.gradcheck(both, (q, k), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(both, (q, k))
    for number in (0, 1):
        assert torch.autograd.gradcheck(lambda q, k, n=number: both(q, k)[n], (q, k))
    whole = Rotation((cos, sin), (cos, sin), layout)
    for ours, one in zip(whole.rotate_qk(q, k), (q, k), strict=True):
        assert torch.equal(ours, apply_rotary(one, cos, sin, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_and_formula_agree_under_transforms_and_compile(layout, blocks):
    x = torch.randn(3, 1, 2, 13, 8)
    cos, sin = phases(dtype=torch.float32)
    eager = torch.stack([apply_rotary(part, cos, sin, layout) for part in x])
    torch.testing.assert_close(
        torch.vmap(lambda part: apply_rotary(part, cos, sin, layout))(x), eager, rtol=0, atol=in_float32(x)
    )
    compiled = torch.compile(lambda part: apply_rotary(part, cos, sin, layout), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x[0]), eager[0], rtol=0, atol=in_float32(x))
    assert apply_rotary(x[0].to("meta"), cos.to("meta"), sin.to("meta"), layout).is_meta


def test_nothing_to_rotate(blocks):
    x = torch.randn(2, 3, 0, 8)
    cos, sin = phases(length=0, dtype=torch.float32)
    assert apply_rotary(x, cos, sin, "half").shape == x.shape
    x = torch.randn(2, 3, 13, 8)
    assert torch.equal(apply_rotary(x, *phases(pairs=0, dtype=torch.float32), "half"), x)


def test_wrong_phases_raise():
    q = torch.randn(2, 3, 13, 8)
    for cos, sin, words in (
        (*phases(length=12), "do not fit q"),
        (*phases(pairs=5), "at most 4"),
        (*phases(rows=3), "do not fit q"),
        (phases()[0], phases(pairs=3)[1], "both be"),
    ):
        with pytest.raises(ValueError, match=words):
            Rotation((cos, sin), None).check(q, q, None)
    with pytest.raises(ValueError, match="'interleaved'"):
        Rotation(phases(), None, "halves").check(q, q, None)


def test_queries_alone():
    rope = posenc.RoPE(head_dim=8)
    q = torch.randn(1, 2, 13, 8)
    alone = Rotation(rope.rotation(posenc.Positions(13)).q, None)
    assert alone.rotate_k(q) is q
    assert torch.equal(alone.rotate_q(q), rope.rotate(q, 13))


def test_neighbouring_channels_that_begin_at_an_odd_element():
    """A slice of a wider tensor: a complex number begins at an even one."""
    x, phases = torch.randn(1, 1, 5, 34)[..., 1:], torch.randn(1, 5, 1)
    rotation = Rotation((phases.cos(), phases.sin()), None, layout="interleaved")
    assert torch.equal(rotation.rotate_qkv(x, x, x)[0], rotation.rotate_qkv(x.contiguous(), x, x)[0])


def test_phases_of_the_caller_carry_no_state_and_may_change():
    """Channels are kept between calls, but not on the caller's tensors, and not past a change of them."""
    x = torch.randn(1, 2, 3, 8)
    cos, sin = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    first = apply_rotary(x, cos, sin)
    assert cos.__dict__ == {}
    assert sin.__dict__ == {}
    assert torch.equal(apply_rotary(x, cos, sin), first)
    cos.mul_(2.0)
    torch.testing.assert_close(apply_rotary(x, cos, sin), rotation.rotate_by_formula(x, cos, sin, "half"))
    for _ in range(20):  # a new tensor may get the identity of a dead one
        cos, sin = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
        torch.testing.assert_close(apply_rotary(x, cos, sin), rotation.rotate_by_formula(x, cos, sin, "half"))
