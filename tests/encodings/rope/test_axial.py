"""Many axes against the models that named the conventions."""

import math

import pytest
import torch
from transformers import DINOv3ViTConfig, PixtralVisionConfig
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.vit_mae import modeling_vit_mae as mae

import posenc
from posenc.encodings.rope.convert import clip_positions, grid_positions, mixed_positions
from tests import seeds
from tests.oracle import assert_rotated

ROWS, COLUMNS = 3, 5


def qk(length, size, heads=2):
    torch.manual_seed(seeds.seed(0))
    return torch.randn(1, heads, length, size), torch.randn(1, heads, length, size)


def equal(encoding, positions, q, k, theirs, furthest=None):
    """`furthest` is the largest angle: a position, where the first frequency is 1."""
    furthest = positions.abs().max().item() if furthest is None else furthest
    for x, ours, other in zip(
        (q, k), encoding.rotation(posenc.Positions(positions)).rotate_qk(q, k), theirs, strict=True
    ):
        assert_rotated(ours, other, x, furthest)


def test_equals_pixtral():
    config = PixtralVisionConfig(hidden_size=32, num_attention_heads=2, head_dim=16, rope_theta=1000.0)
    q, k = qk(ROWS * COLUMNS, 16)
    at = grid_positions(ROWS, COLUMNS)
    cos, sin = pixtral.PixtralVisionRotaryEmbedding(config)(q, at[0])
    theirs = pixtral.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)
    equal(posenc.AxialRoPE(head_dim=16, convention="pixtral", base=1000.0), at, q, k, theirs)


@pytest.mark.parametrize("merge", [1, 2])
def test_equals_qwen2_vl_vision(merge):
    config = Qwen2VLVisionConfig(embed_dim=32, num_heads=2)
    q, k = qk(4 * 6, 16)
    at = grid_positions(4, 6, merge=merge)
    theirs_at = qwen2.get_vision_position_ids(torch.tensor([[1, 4, 6]]), merge)
    assert torch.equal(at[0], theirs_at)
    cos, sin = qwen2.Qwen2VLVisionRotaryEmbedding(config)(q, theirs_at)
    rows = qwen2.apply_rotary_pos_emb_vision(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
    equal(posenc.AxialRoPE(head_dim=16), at, q, k, [x.transpose(0, 1)[None] for x in rows])


def test_equals_dinov3_with_prefix():
    config = DINOv3ViTConfig(hidden_size=32, num_attention_heads=2, patch_size=4, image_size=20)
    cos, sin = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 4 * ROWS, 4 * COLUMNS))
    q, k = qk(5 + ROWS * COLUMNS, 16)
    theirs = dinov3.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = posenc.AxialRoPE(head_dim=16, convention="dinov3", grid=(ROWS, COLUMNS))
    equal(encoding, grid_positions(ROWS, COLUMNS, centred=True, prefix=5), q, k, theirs, furthest=2 * math.pi)


@pytest.mark.parametrize("drawn", [
    {"rescale": 2.0}, {"jitter": 1.5}, {"shift": 0.3}, {"shift": 0.2, "jitter": 1.3, "rescale": 2.0},
])  # fmt: skip
def test_equals_dinov3_in_training(drawn):
    """The same numbers from the same seed: coordinates are drawn in its order."""
    config = DINOv3ViTConfig(
        hidden_size=32, num_attention_heads=2, patch_size=4, image_size=20,
        **{f"pos_embed_{name}": drawn.get(name) for name in ("shift", "jitter", "rescale")},
    )  # fmt: skip
    theirs = dinov3.DINOv3ViTRopePositionEmbedding(config).train()
    q, k = qk(5 + ROWS * COLUMNS, 16)
    at = grid_positions(ROWS, COLUMNS, centred=True, prefix=5)
    encoding = posenc.AxialRoPE(head_dim=16, convention="dinov3", grid=(ROWS, COLUMNS), prefix=5, **drawn)
    torch.manual_seed(seeds.seed(3))
    rotated = dinov3.apply_rotary_pos_emb(q, k, *theirs(torch.zeros(1, 3, 4 * ROWS, 4 * COLUMNS)))
    torch.manual_seed(seeds.seed(3))
    rotation = encoding.rotation(posenc.Positions(at))
    furthest = 2 * math.pi * (1 + drawn.get("shift", 0)) * drawn.get("jitter", 1) * drawn.get("rescale", 1)
    assert_rotated(rotation.rotate_q(q), rotated[0], q, furthest)
    assert_rotated(rotation.rotate_k(k), rotated[1], k, furthest)
    assert not torch.allclose(encoding.rotation(posenc.Positions(at)).rotate_q(q), rotation.rotate_q(q))
    encoding.eval()  # nothing is drawn
    fixed = posenc.AxialRoPE(head_dim=16, convention="dinov3", grid=(ROWS, COLUMNS))
    assert torch.equal(encoding.rotation(posenc.Positions(at)).q[0], fixed.rotation(posenc.Positions(at)).q[0])


def test_equals_llama4_vision_with_its_class_token():
    config = Llama4VisionConfig(hidden_size=32, num_attention_heads=2, image_size=16, patch_size=4)
    freqs = llama4.Llama4VisionRotaryEmbedding(config)(torch.zeros(1))
    q, k = qk(17, 16)
    theirs = llama4.vision_apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), freqs)
    at = grid_positions(4, 4, prefix=1, prefix_at=-1).roll(-1, dims=1)  # its class token comes last
    encoding = posenc.AxialRoPE(head_dim=16, convention="llama4", base=config.rope_parameters["rope_theta"])
    equal(encoding, at, q, k, [x.transpose(1, 2) for x in theirs])


@pytest.mark.parametrize(("config", "rotary", "module", "interleaved", "sections"), [
    (Qwen2VLTextConfig, "Qwen2VLRotaryEmbedding", qwen2, False, [2, 3, 3]),
    (Qwen3VLTextConfig, "Qwen3VLTextRotaryEmbedding", qwen3, True, [4, 2, 2]),
    (Qwen3VLTextConfig, "Qwen3VLTextRotaryEmbedding", qwen3, True, [3, 3, 2]),
])  # fmt: skip
def test_equals_qwen_text(config, rotary, module, interleaved, sections):
    config = config(
        hidden_size=32, num_attention_heads=2, head_dim=16, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "mrope_section": sections},
    )  # fmt: skip
    at = mixed_positions([4, (2, 3), 3, (2, 2, 2), 2])
    q, k = qk(at.shape[1], 16)
    cos, sin = getattr(module, rotary)(config)(q, at.permute(2, 0, 1))
    theirs = module.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = posenc.MRoPE.from_config(config, interleaved=interleaved)
    equal(encoding, at, q, k, theirs)
    text = posenc.RoPE(head_dim=16, base=5000.0)
    for positions in (posenc.Positions(7), posenc.Positions(mixed_positions([7]))):
        assert torch.equal(encoding.rotation(positions).rotate_q(q[:, :, :7]), text.rotate(q[:, :, :7], 7))


def test_mrope_takes_yarn():
    yarn = posenc.scaling.YaRN(factor=4.0, original=64)
    x = torch.randn(1, 1, 9, 32)
    ours = posenc.MRoPE(head_dim=32, scaling=yarn).rotation(posenc.Positions(9)).rotate_q(x)
    assert torch.equal(ours, posenc.RoPE(head_dim=32, scaling=yarn).rotate(x, 9))


@pytest.mark.parametrize("length", [5, 40])
def test_mrope_follows_the_length_as_transformers_does(length):
    """The largest position of any axis counts: here an image's columns."""
    m = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    at = posenc.rope.mixed_positions([2, (2, length)])
    config = m.Qwen2VLTextConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    )  # fmt: skip
    x = torch.randn(1, 2, at.shape[1], 32)
    cos, sin = m.Qwen2VLRotaryEmbedding(config)(x, at.movedim(-1, 0))
    theirs = m.apply_rotary_pos_emb(x, x, cos, sin)[0]
    rope = posenc.MRoPE.from_config(config)
    assert rope.length_dependent
    ours = rope.rotation(posenc.Positions(at)).rotate_q(x)
    assert_rotated(ours, theirs, x, at.max().item())
    words = posenc.Positions(length)  # text alone is RoPE's
    plain = posenc.RoPE(head_dim=32, scaling=rope.scaling)
    assert torch.equal(rope.rotation(words).q[0], plain.rotation(words).q[0])


def test_mrope_scales_scores_where_its_scaling_does():
    yarn = posenc.scaling.YaRN(factor=4.0, original=64, mscale=1.0, mscale_all_dim=1.0, scale_scores=True)
    assert posenc.MRoPE(head_dim=32, scaling=yarn).plan(posenc.Positions(3)).scale == pytest.approx(
        yarn.score_factor * 32**-0.5
    )


def test_mixed_positions_equal_qwen():
    model = qwen2.Qwen2VLModel.__new__(qwen2.Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = type("C", (), {"vision_config": type("V", (), {"spatial_merge_size": 2})})()
    kinds = torch.tensor([[0] * 3 + [1] * 6 + [0] * 2 + [2] * 20 + [0] * 4])
    theirs, _ = model.get_rope_index(
        torch.zeros_like(kinds),
        kinds,
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        video_grid_thw=torch.tensor([[5, 4, 4]]),
    )
    ours = mixed_positions([3, (2, 3), 2, (5, 2, 2), 4], after="size")
    assert torch.equal(ours, theirs.permute(1, 2, 0))
    behind = mixed_positions([3, (2, 3), 2, (5, 2, 2), 4])
    assert behind[0, -4, 0] == behind[0, :-4].max() + 1


def rope_index(module, name, kinds, **grids):
    """The positions that a model of transformers gives to these tokens, [B, L, 3]."""
    cls = getattr(module, name)
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    vision = type("V", (), {"spatial_merge_size": 2, "tokens_per_second": 2})
    model.config = type("C", (), {"vision_config": vision})()
    return model.get_rope_index(torch.zeros_like(kinds), kinds, **grids)[0].permute(1, 2, 0)


def test_mixed_positions_equal_qwen2_5():
    """An image and two clips that were taken at different speeds."""
    kinds = torch.tensor([[0] * 3 + [1] * 6 + [0] * 2 + [2] * 20 + [0] * 4 + [2] * 18 + [0]])
    theirs = rope_index(
        qwen2_5, "Qwen2_5_VLModel", kinds, image_grid_thw=torch.tensor([[1, 4, 6]]),
        video_grid_thw=torch.tensor([[5, 4, 4], [3, 4, 6]]), second_per_grid_ts=torch.tensor([0.25, 1.5]),
    )  # fmt: skip
    parts = [3, (2, 3), 2, (5, 2, 2), 4, (3, 2, 3), 1]
    assert torch.equal(mixed_positions(parts, after="size", step=(0.5, 3.0)), theirs)
    with pytest.raises(ValueError, match="2 clips"):
        mixed_positions(parts, step=(1.0,))


def test_mixed_positions_equal_qwen3():
    """A clip is written as times and frames, one image each."""
    kinds = torch.tensor([[0] * 3 + [1] * 6 + [0] * 2 + ([2] * 4 + [0] * 3) * 3])
    theirs = rope_index(
        qwen3, "Qwen3VLModel", kinds, image_grid_thw=torch.tensor([[1, 4, 6]]),
        video_grid_thw=torch.tensor([[3, 4, 4]]),
    )  # fmt: skip
    assert torch.equal(mixed_positions([3, (2, 3), 2, (2, 2), 3, (2, 2), 3, (2, 2), 3], after="size"), theirs)


def test_equals_vit_mae():
    table = mae.build_2d_sinusoidal_position_embedding(ROWS, COLUMNS, 32, cls_token=True)
    x = torch.zeros(1, 1 + ROWS * COLUMNS, 32)
    positions = posenc.Positions(grid_positions(ROWS, COLUMNS, prefix=1))
    for first, theirs in (("rows", table), ("columns", table.roll(16, dims=-1))):
        encoding = posenc.Sinusoidal2D(d_model=32, first=first, prefix=1)
        torch.testing.assert_close(encoding.embed(x, positions)[0], theirs, atol=1e-6, rtol=1e-6)


def test_three_axes_see_differences_only():
    encoding = posenc.AxialRoPE(head_dim=24, convention="blocks", sections=(4, 4, 4)).double()
    q, k = (x.double() for x in qk(2 * 3 * 4, 24))
    at = clip_positions(2, 3, 4)
    here = posenc.scores(q, k, encoding.plan(posenc.Positions(at)))
    for shift in ([7, 0, 0], [0, 2**20, -3], [5, 5, 2**20]):
        there = posenc.scores(q, k, encoding.plan(posenc.Positions(at + torch.tensor(shift))))
        torch.testing.assert_close(there, here, atol=1e-11, rtol=1e-11)
    assert not torch.allclose(here, posenc.scores(q, k, encoding.plan(posenc.Positions(at * 2))))


def test_attention_with_images_among_text():
    attention = posenc.Attention(32, 2, encoding=posenc.MRoPE(head_dim=16), causal=True)
    at = mixed_positions([3, (2, 3), 4])
    x = torch.randn(1, at.shape[1], 32)
    whole = attention(x, positions=at)
    cache = posenc.KVCache()
    steps = [attention(x[:, i : i + 1], positions=at[:, i : i + 1], cache=cache) for i in range(at.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_clip_positions_step():
    assert clip_positions(3, 1, 2, start=4, step=2.5)[0, :, 0].tolist() == [4, 4, 6, 6, 9, 9]


@pytest.mark.parametrize(("make", "words"), [
    (lambda: posenc.AxialRoPE(head_dim=18), "multiple of 4"),
    (lambda: posenc.AxialRoPE(head_dim=16, convention="vit"), "'pixtral'"),
    (lambda: posenc.AxialRoPE(head_dim=16, convention="dinov3"), "grid"),
    (lambda: posenc.AxialRoPE(head_dim=16, convention="blocks", sections=(9, 9)), "pairs"),
    (lambda: posenc.AxialRoPE(head_dim=16).rotation(posenc.Positions(4)), "2 axes"),
    (lambda: posenc.MRoPE(head_dim=16, sections=(1, 1, 1)), "add up"),
    (lambda: posenc.MRoPE(head_dim=16, sections=(0, 4, 4), interleaved=True), "share"),
    (lambda: posenc.Sinusoidal2D(d_model=30), "multiple of 4"),
    (lambda: grid_positions(3, 4, merge=2), "blocks"),
    (lambda: posenc.AxialRoPE(head_dim=16, shift=0.1), "dinov3"),
    (lambda: posenc.AxialRoPE(head_dim=16, convention="dinov3", grid=(2, 2), rescale=0.5), "at least 1"),
    (lambda: posenc.AxialRoPE(head_dim=16, columns=0), "columns=0 must be at least 1"),
    (lambda: posenc.AxialRoPE(head_dim=16, convention="dinov3", grid=(2, 2), columns=2), "positions instead"),
    (lambda: posenc.AxialRoPE(head_dim=16).plan(posenc.Positions(4)), "columns="),
    (lambda: posenc.Sinusoidal2D(d_model=16).embed(torch.zeros(1, 4, 16), posenc.Positions(4)), "columns="),
    (lambda: mixed_positions([(1, 2, 3, 4)]), "words"),
])  # fmt: skip
def test_says_what_is_wrong(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_patches_may_be_numbered_row_by_row():
    q, _ = qk(ROWS * COLUMNS, 16)
    at = posenc.Positions(grid_positions(ROWS, COLUMNS))
    for convention in ("pixtral", "qwen2_vl", "llama4"):
        numbered = posenc.AxialRoPE(head_dim=16, convention=convention, columns=COLUMNS)
        assert torch.equal(
            numbered.rotation(posenc.Positions(ROWS * COLUMNS)).rotate_q(q),
            posenc.AxialRoPE(head_dim=16, convention=convention).rotation(at).rotate_q(q),
        )
    x = torch.zeros(1, ROWS * COLUMNS, 16)
    numbered = posenc.Sinusoidal2D(d_model=16, columns=COLUMNS).embed(x, posenc.Positions(ROWS * COLUMNS))
    assert torch.equal(numbered, posenc.Sinusoidal2D(d_model=16).embed(x, at))
