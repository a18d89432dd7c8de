"""Positions over a grid against Swin, Swin v2, BEiT, SAM and RoPE-ViT, and the ways to give them."""

import pytest
import torch

import posenc
from posenc import KVCache, Positions
from tests import oracle
from tests.oracle import copy


def bias_of(encoding, positions, heads, dtype=torch.float64):
    zero = lambda n: torch.zeros(1, heads, n, 4, dtype=dtype)  # noqa: E731
    return posenc.scores(zero(positions.q_length), zero(positions.k_length), encoding.plan(positions))[0]


@pytest.mark.parametrize("window", [(1, 1), (3, 5), (4, 4)])
@pytest.mark.parametrize("class_token", [False, True])
def test_grid_bias_is_timms(window, class_token):
    """Swin and MaxViT without a class token, BEiT with one."""
    original = oracle.timm_layer("pos_embed_rel").RelPosBias(window, 2, prefix_tokens=int(class_token)).double()
    torch.nn.init.normal_(original.relative_position_bias_table)
    encoding = posenc.GridBias(heads=2, window=window, class_token=class_token).double()
    copy(encoding.table, original.relative_position_bias_table)
    length = window[0] * window[1] + int(class_token)
    expected = original.get_bias()[0]
    torch.testing.assert_close(bias_of(encoding, Positions(length), 2), expected, rtol=0, atol=1e-10)
    patches = posenc.rope.grid_positions(*window)
    if class_token:
        patches = torch.cat((torch.full((1, 1, 2), -1), patches), 1)
    torch.testing.assert_close(bias_of(encoding, Positions(patches), 2), expected, rtol=0, atol=1e-10)
    q, k, v = torch.randn(3, 2, 2, length, 4, dtype=torch.float64).unbind()
    out, lse = posenc.attend(q, k, v, encoding.plan(Positions(length)), return_lse=True)
    scores = q @ k.mT / 2 + expected
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=0, atol=1e-10)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-10)


def test_the_layer_is_swins():
    from transformers import SwinConfig
    from transformers.models.swin import modeling_swin as m

    config = SwinConfig(qkv_bias=True, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "eager"
    original = m.SwinAttention(config, 16, 4, 3).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layer = posenc.Attention(16, 4, encoding=posenc.GridBias(heads=4, window=(3, 3)), bias=True).double()
    ours = {"encoding.table": original.relative_position_bias.relative_position_bias_table}
    ours |= {name: x for name, x in original.state_dict().items() if "proj" in name}
    layer.load_state_dict(ours)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    with oracle.wide(m), torch.no_grad():
        expected = original(x)[0]
    oracle.check_layer(layer, lambda layer, x: layer(x), x, expected, terms=24)


def test_a_class_token_has_gradients_for_its_three_rows():
    encoding = posenc.GridBias(heads=2, window=(2, 3), class_token=True, std=1.0).double()
    q, k, v = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64).unbind()
    table = encoding.table.detach().clone().requires_grad_()

    def run(table):
        encoding.table = torch.nn.Parameter(table) if not isinstance(table, torch.nn.Parameter) else table
        plan = torch.func.functional_call(_Planned(encoding), {"encoding.table": table}, (Positions(7),))
        return posenc.attend(q, k, v, plan).square()

    assert torch.autograd.gradcheck(run, table, fast_mode=True)
    grad = torch.autograd.grad(run(table).sum(), table)[0]
    assert (grad[-3:].abs().sum(1) > 0).all()


class _Planned(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, positions):
        return self.encoding.plan(positions)


def test_a_resized_table_is_timms():
    resize = oracle.timm_layer("pos_embed_rel").resize_rel_pos_bias_table_simple
    encoding = posenc.GridBias(heads=3, window=(4, 4), class_token=True, std=1.0)
    table = encoding.table.detach().clone()
    encoding.resize((6, 6))
    torch.testing.assert_close(encoding.table, resize(table, (6, 6), (11 * 11 + 3, 3)), rtol=0, atol=1e-5)
    assert bias_of(encoding, Positions(37), 3).isfinite().all()


@pytest.mark.parametrize("window, pretrained", [((4, 4), None), ((3, 5), None), ((6, 6), (3, 3))])
def test_the_layer_is_swin_v2s(window, pretrained):
    from transformers import Swinv2Config
    from transformers.models.swinv2 import modeling_swinv2 as m

    config = Swinv2Config(qkv_bias=False, attention_probs_dropout_prob=0.0)
    with oracle.wide(m):
        original = m.Swinv2SelfAttention(config, 16, 4, window, list(pretrained or (0, 0))).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        original.logit_scale[0] = 9.0  # above its bound, ln 100
    encoding = posenc.ContinuousBias(heads=4, window=window, pretrained=pretrained).double()
    encoding.mlp.load_state_dict(original.continuous_position_bias_mlp.state_dict())
    copy(encoding.logit_scale, original.logit_scale)
    layer = posenc.Attention(16, 4, encoding=encoding).double()
    for ours, theirs in {"q_proj": "query", "k_proj": "key", "v_proj": "value"}.items():
        getattr(layer, ours).load_state_dict(getattr(original, theirs).state_dict())
    copy(layer.o_proj.weight, torch.eye(16, dtype=torch.float64))
    x = torch.randn(2, window[0] * window[1], 16, dtype=torch.float64)
    expected = original(x)[0].detach()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.float()(x.float()).double(), expected, rtol=0, atol=1e-4)  # scores are up to 100
    for mine, theirs in zip(encoding.mlp, original.continuous_position_bias_mlp):
        assert type(mine) is type(theirs)


def test_the_bias_is_timms_too():
    original = oracle.timm_layer("pos_embed_rel").RelPosMlp((4, 6), 3, hidden_dim=8, mode="swin").double().eval()
    encoding = posenc.ContinuousBias(heads=3, window=(4, 6), hidden=8, cosine=False).double()
    encoding.mlp[0].load_state_dict(original.mlp.fc1.state_dict())
    encoding.mlp[2].load_state_dict(original.mlp.fc2.state_dict())
    # its coordinates are float32 numbers
    torch.testing.assert_close(bias_of(encoding, Positions(24), 3), original.get_bias()[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (6, 2)])
def test_the_layer_is_sams(grid):
    """Tables for 4 × 4 patches; other grids read them interpolated."""
    from transformers.models.sam import modeling_sam as m
    from transformers.models.sam.configuration_sam import SamVisionConfig

    config = SamVisionConfig(hidden_size=16, num_attention_heads=4, image_size=64, patch_size=16, qkv_bias=False)
    original = m.SamVisionAttention(config, window_size=0).double().eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    encoding = posenc.Decomposed(head_dim=4, grid=(4, 4)).double()
    copy(encoding.rel_pos_h, original.rel_pos_h)
    copy(encoding.rel_pos_w, original.rel_pos_w)
    encoding.grid = grid
    layer = posenc.Attention(16, 4, encoding=encoding, out_bias=True).double()
    for part, weight in zip(("q_proj", "k_proj", "v_proj"), original.qkv.weight.chunk(3)):
        copy(getattr(layer, part).weight, weight)
    layer.o_proj.load_state_dict(original.proj.state_dict())
    x = torch.randn(2, *grid, 16, dtype=torch.float64)
    with oracle.wide(m), torch.no_grad():
        expected = original(x)[0].flatten(1, 2)
    oracle.check_layer(layer, lambda layer, x: layer(x), x.flatten(1, 2), expected, terms=24)
    patches = posenc.rope.grid_positions(*grid)
    torch.testing.assert_close(layer.double()(x.flatten(1, 2), positions=patches), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("queries, keys", [((6, 8), (3, 2)), ((2, 3), (4, 9)), ((4, 4), (4, 4))])
def test_pooled_queries_and_keys_are_mvitv2s(queries, keys):
    """Positions of the larger grid; those of pooled keys are the last of the patches that they stand for."""
    add = oracle.timm_function("mvitv2", "cal_rel_pos_type")
    grid = [max(pair) for pair in zip(queries, keys)]
    encoding = posenc.Decomposed(head_dim=4, grid=grid, std=0.5).double()
    q, k = (torch.randn(2, 3, rows * columns, 4, dtype=torch.float64) for rows, columns in (queries, keys))
    expected = add(q @ k.mT / 2, q, False, queries, keys, encoding.rel_pos_h, encoding.rel_pos_w)
    at_q, at_k = (posenc.rope.grid_positions(*size) for size in (queries, keys))
    steps = torch.tensor([[size // own for size, own in zip(grid, side)] for side in (queries, keys)])
    plan = encoding.plan(Positions(at_q * steps[0], at_k * steps[1] + steps[1] - 1))
    torch.testing.assert_close(posenc.scores(q, k, plan), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(posenc.attend(q, k, k, plan), expected.softmax(-1) @ k, rtol=0, atol=1e-10)


def test_mixed_rotations_are_timms():
    m = oracle.timm_layer("pos_embed_sincos")
    original = m.RotaryEmbeddingMixed(32, 1, 4, feat_shape=[3, 5], grid_indexing="xy").double()
    encoding = posenc.MixedRoPE(head_dim=8, heads=4, columns=5).double()
    with torch.no_grad():
        encoding.frequencies.copy_(original.freqs[:, 0].flip(0))  # x first; ours are row, column
    x = torch.randn(2, 4, 15, 8, dtype=torch.float64)
    with oracle.wide(m):
        theirs = m.apply_rot_embed_cat(x, m.get_mixed_freqs(original.freqs[:, 0], original.t_x, original.t_y))
    rotation = encoding.rotation(Positions(15))
    torch.testing.assert_close(rotation.rotate_q(x), theirs, rtol=0, atol=1e-10)
    rows = posenc.rope.grid_positions(3, 5)
    torch.testing.assert_close(encoding.rotation(Positions(rows)).rotate_k(x), theirs, rtol=0, atol=1e-10)
    with torch.no_grad():  # the kernels of evaluation do not know phases of each head
        torch.testing.assert_close(encoding.rotation(Positions(15)).rotate_q(x), theirs, rtol=0, atol=1e-10)


def test_mixed_rotations_start_as_the_authors_do():
    m = oracle.timm_layer("pos_embed_sincos")
    torch.manual_seed(3)
    theirs = m.init_random_2d_freqs(12, 1, 4)[:, 0]
    torch.manual_seed(3)
    torch.testing.assert_close(posenc.MixedRoPE(head_dim=12, heads=4).frequencies, theirs, rtol=0, atol=1e-6)


def test_mixed_rotations_follow_grouped_queries_and_any_axes():
    encoding = posenc.MixedRoPE(head_dim=6, heads=4, kv_heads=2, axes=3).double()
    positions = torch.randint(0, 9, (2, 7, 3))
    layer = posenc.Attention(24, 4, kv_heads=2, encoding=encoding, causal=True).double()
    x, cache = torch.randn(2, 7, 24, dtype=torch.float64), KVCache()
    whole = layer(x, positions=positions)
    torch.testing.assert_close(layer(x, positions=positions + 5), whole)  # relative on every axis
    steps = [layer(x[:, i : i + 1], positions=positions[:, i : i + 1], cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert torch.autograd.grad(whole.square().sum(), encoding.frequencies)[0].abs().min() > 0
    with pytest.raises(ValueError, match="reads 3 axes"):
        encoding.plan(Positions(3))
    with pytest.raises(ValueError, match="phases are for 2 heads"):
        other = posenc.Attention(24, 4, encoding=encoding).double()
        other(x, positions=positions)


@pytest.mark.parametrize("name", ["grid_bias", "continuous_bias", "decomposed"])
def test_tokens_outside_the_grid_are_refused(name):
    encoding = posenc.create(
        name, heads=2, d_model=8, **({"grid": (2, 3)} if name == "decomposed" else {"window": (2, 3)})
    )
    with pytest.raises(ValueError, match="row 2; this grid has rows 0 to 1"):
        encoding.plan(Positions(7))
    with pytest.raises(ValueError, match="column 3; this grid has columns 0 to 2"):
        encoding.plan(Positions(torch.tensor([[[0, 0], [0, 3]]])))
    with pytest.raises(posenc.OptionError, match=r"must be \(rows, columns\)"):
        posenc.GridBias(heads=2, window=7)


def test_patches_of_several_windows_may_be_mixed():
    """A query sees keys of its own window only: documents; and only some of its patches."""
    encoding = posenc.GridBias(heads=2, window=(3, 3), std=1.0).double()
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind()
    at = torch.tensor([[0, 4, 8, 2, 3, 1, 7, 5]])
    windows = torch.tensor([[0, 0, 1, 0, 1, 1, 0, 1]])
    out = posenc.attend(q, k, v, encoding.plan(Positions(at)), documents=windows)
    for number in (0, 1):
        chosen = windows[0] == number
        alone = (x[:, :, chosen] for x in (q, k, v))
        torch.testing.assert_close(out[:, :, chosen], posenc.attend(*alone, encoding.plan(Positions(at[:, chosen]))))


# ---- any axes -------------------------------------------------------------------------------------------------------
def test_many_axes_make_mrope_and_axial():
    mrope = posenc.MRoPE(head_dim=16, sections=(4, 2, 2), interleaved=True)
    axial = posenc.AxialRoPE(head_dim=16, convention="qwen2_vl")
    frequencies = posenc.formulas.inverse_frequencies(16, 10000.0)
    ours = posenc.ManyAxes(axis_of=(0, 1, 2, 0, 1, 2, 0, 0), frequencies=frequencies, head_dim=16)
    ladders = posenc.ManyAxes(axis_of=(0,) * 4 + (1,) * 4)
    for a, b, axes in ((mrope, ours, 3), (axial, ladders, 2)):
        at = Positions(torch.randint(0, 99, (2, 5, axes)))
        for mine, theirs in zip(a.rotation(at).k, b.rotation(at).k):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_many_axes_of_any_order_and_odd_shares(layout):
    axis_of, w = (2, 0, 1, 0, 0), (1.0, 0.5, 0.25, -0.1, 0.0)
    encoding = posenc.ManyAxes(axis_of=axis_of, frequencies=w, layout=layout).double()
    p, x = torch.randint(0, 50, (1, 6, 3)), torch.randn(1, 2, 6, 11, dtype=torch.float64)
    rotated = encoding.rotation(Positions(p)).rotate_k(x)
    first = (lambda c: (c, c + 5)) if layout == "half" else (lambda c: (2 * c, 2 * c + 1))
    expected = x.clone()
    for c, (axis, frequency) in enumerate(zip(axis_of, w)):
        a, b = (x[..., n] for n in first(c))
        angle = p[..., axis].double() * frequency
        for n, value in zip(first(c), (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())):
            expected[..., n] = value
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        dict(axis_of=()),
        dict(axis_of=(0, -1)),
        dict(axis_of=(0, 1), frequencies=(1.0,)),
        dict(axis_of=(0, 1), head_dim=3),
    ],
)
def test_bad_axes(options):
    with pytest.raises(posenc.OptionError):
        posenc.ManyAxes(**options)
