"""RoPE against transformers, its invariances, and where it must keep its numbers."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import posenc
from posenc import scaling
from tests import seeds
from tests.oracle import assert_rotated


def test_equals_llama():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_theta=5000.0)
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(9)[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    rotation = posenc.RoPE(head_dim=16, base=5000.0).rotation(posenc.Positions(9))
    assert_rotated(rotation.rotate_q(q), theirs[0], q, 9)
    assert_rotated(rotation.rotate_k(k), theirs[1], k, 9)


@settings(max_examples=30, deadline=None)
@given(st.integers(-(2**20), 2**20), st.integers(1, 40), st.sampled_from(["half", "interleaved"]))
def test_shift_changes_nothing(shift, length, layout):
    rope = posenc.RoPE(head_dim=16, layout=layout).double()
    generator = seeds.generator(length)
    q, k = torch.randn(2, 1, 2, length, 16, generator=generator, dtype=torch.float64)
    here = posenc.scores(q, k, rope.plan(posenc.Positions(length)))
    there = posenc.scores(q, k, rope.plan(posenc.Positions((shift, length))))
    torch.testing.assert_close(here, there, atol=1e-12, rtol=1e-12)


def test_survives_casts_copies_and_devices():
    rope = posenc.RoPE(head_dim=16, scaling=scaling.DynamicNTK(original=8))
    positions = posenc.Positions((1_000_000, 5))
    cos = rope.rotation(positions).q[0]
    assert cos.dtype == torch.float32
    for other in (copy.deepcopy(rope).to(torch.bfloat16), pickle.loads(pickle.dumps(rope))):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(other.rotation(positions).q[0], cos)
    assert copy.deepcopy(rope).to("meta").rotation(positions).q[0].is_meta
    assert copy.deepcopy(rope).double().rotation(positions).q[0].dtype == torch.float64
    assert rope.state_dict() == {}


def test_dynamic_takes_each_rows_own_length():
    rope = posenc.RoPE(head_dim=16, scaling=scaling.DynamicNTK(factor=2.0, original=8))
    assert rope.length_dependent
    x = torch.randn(2, 2, 16, 16)
    positions = torch.stack([torch.arange(16) - 10, torch.arange(16)])
    both = rope.rotate(x, positions)
    for row, total in ((0, 6), (1, 16)):
        plain = posenc.RoPE(head_dim=16, scaling=None if total < 8 else scaling.NTK(factor=2 * 16 / 8 - 1))
        assert_rotated(both[row], plain.rotate(x, positions)[row], x[row], 16)


def test_compiles_whole():
    for extension in (None, scaling.DynamicNTK(original=4), scaling.DynamicYaRN(original=4, beta_slow=0.1)):
        rope = posenc.RoPE(head_dim=8, scaling=extension)
        x = torch.randn(1, 2, 6, 8)

        def rotate_x(x, rope=rope):
            return rope.rotation(posenc.Positions(6)).rotate_q(x)

        compiled = torch.compile(rotate_x, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), rotate_x(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_dim": 15}, "even"),
        ({"head_dim": 16, "rotary_dim": 18}, "exceeds"),
        ({"head_dim": 16, "layout": "halves"}, "'half' or 'interleaved'"),
        ({"head_dim": 16, "scaling": {"factor": 2}}, "from_config"),
    ],
)
def test_says_what_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        posenc.RoPE(**options)


def test_compiled_positions_out_of_range_raise_too():
    """By an assertion inside the graph, which waits for nothing."""
    rope = posenc.RoPE(head_dim=8)
    x = torch.randn(1, 1, 3, 8)
    rotate_x = torch.compile(lambda p: rope.rotate(x, p), fullgraph=True, backend="aot_eager")
    good = torch.tensor([0, 5, 2**31 - 1])
    torch.testing.assert_close(rotate_x(good), rope.rotate(x, good))
    with pytest.raises(RuntimeError, match="range of rotary phases"):
        rotate_x(torch.tensor([0, 5, 2**31]))
    xpos = posenc.XPos(head_dim=8, max_length=64)
    q = torch.compile(lambda p: xpos.rotation(posenc.Positions(p)).rotate_q(x), fullgraph=True, backend="aot_eager")
    q(torch.tensor([0, 5, 63]))
    with pytest.raises(RuntimeError, match="xPos"):
        q(torch.tensor([0, 5, 64]))


def test_positions_out_of_range_raise():
    rope = posenc.RoPE(head_dim=16)
    for positions in ((2**31 - 3, 4), torch.tensor([2**31]), torch.tensor([-(2**31)])):
        with pytest.raises(ValueError, match="range"):
            rope.rotation(posenc.Positions(positions))
    rope.rotation(posenc.Positions((2**31 - 4, 4)))
