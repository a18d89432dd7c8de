"""The Attention module: what must hold for every encoding, and the arguments of forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import posenc
from posenc import KVCache
from posenc.encodings.registry import causal_options
from tests.encodings.every import BOTH_SIDES, NAMES, furthest, layer, make

RELATIVE = [n for n in NAMES if not make(n).absolute]


def inputs(length=9, batch=2, d_model=16):
    return torch.randn(batch, length, d_model, dtype=torch.float64)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_token_by_token_is_prefill(name, cuts):
    attn = layer(name).double()
    x = inputs(sum(cuts))
    whole = attn(x)
    for grad in (False, True):
        cache, parts, start = KVCache(), [], 0
        with torch.set_grad_enabled(grad):
            for cut in cuts:
                parts.append(attn(x[:, start : start + cut], cache=cache))
                start += cut
        close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_is_no_padding(name):
    attn = layer(name).double()
    x = inputs(7)
    lengths = (7, 4)
    real = torch.stack([torch.arange(7) >= 7 - n for n in lengths])
    padded = attn(x, key_mask=real)
    for row, n in enumerate(lengths):
        close(padded[row : row + 1, 7 - n :], attn(x[row : row + 1, 7 - n :]))
    # and go on decoding from there, padded rows included
    cache, more = KVCache(), inputs(2)
    attn(x, key_mask=real, cache=cache)
    steps = [attn(more[:, i : i + 1], cache=cache) for i in range(2)]
    for row, n in enumerate(lengths):
        whole = attn(torch.cat((x[row, 7 - n :], more[row]))[None])
        close(torch.cat(steps, 1)[row], whole[0, -2:])


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_right_padding_is_no_padding(name):
    attn = layer(name, causal=False).double()
    x = inputs(7)
    real = torch.arange(7)[None] < torch.tensor([[7], [4]])
    close(attn(x, key_mask=real)[1:, :4], attn(x[1:, :4]))


@pytest.mark.parametrize("name", NAMES)
def test_packed_is_separate(name):
    attn = layer(name).double()
    first, second = inputs(5, 1), inputs(3, 1)
    documents = torch.tensor([[0] * 5 + [1] * 3])
    positions = torch.cat((torch.arange(5), torch.arange(3)))[None]
    packed = attn(torch.cat((first, second), 1), positions=positions, documents=documents)
    close(packed, torch.cat((attn(first), attn(second)), 1))


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_explicit_positions_are_the_default_ones(name):
    attn = layer(name, causal=False).double()
    x = inputs()
    close(attn(x, positions=torch.arange(9)), attn(x))


@pytest.mark.parametrize("name", RELATIVE)
@settings(max_examples=8)
@given(shift=st.integers(0, 10**6))
def test_relative_encodings_do_not_depend_on_a_shift(name, shift):
    attn = layer(name).double()
    x = inputs()
    close(attn(x, positions=torch.arange(9) + shift % (furthest(name) - 9)), attn(x), 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_a_longer_past(name):
    attn = layer(name).double()
    x = inputs()
    close(attn(x[:, 4:], memory=x[:, :4]), attn(x)[:, 4:])


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_order_is_seen_but_for_none(name):
    """Without positions a bidirectional layer is equivariant to any permutation; with them it is not."""
    attn = layer(name, causal=False).double()
    x = inputs(6, 1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    same = torch.allclose(attn(x[:, order]), attn(x)[:, order], atol=1e-9)
    # alibi, like every symmetric bias, still distinguishes near from far
    assert same == (name in ("none", "sinks"))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_every_parameter(name):
    attn = layer(name, d_model=8, heads=2).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    names = [n for n, _ in attn.named_parameters() if n.startswith("encoding.")]
    parameters = dict(attn.named_parameters())

    def run(*values):
        return torch.func.functional_call(attn, dict(zip(names, values, strict=True)), (x,)).square()

    values = [parameters[n].detach().clone().requires_grad_() for n in names]
    if not values:
        assert name in (
            "none",
            "sinusoidal",
            "sinusoidal_2d",
            "rope",
            "mrope",
            "axial",
            "xpos",
            "alibi",
            "tempered",
            "many_axes",
            "sandwich",
            "cape",
        )
        return
    assert torch.autograd.gradcheck(run, values, fast_mode=True)


def test_cross_attention():
    attn = posenc.Attention(16, 4).double()
    x, context = inputs(3), inputs(8)
    real = torch.arange(8)[None] < torch.tensor([[8], [5]])
    out = attn(x, context, key_mask=real)
    close(out[1:], attn(x[1:], context[1:, :5]))
    cache = KVCache()
    close(attn(x, context, key_mask=real, cache=cache), out)
    close(attn(x, torch.zeros_like(context), key_mask=real, cache=cache), out)  # the projected context is kept
    with pytest.raises(ValueError, match="8 context keys, the context has 3"):
        attn(x, context[:, :3], cache=cache)


def test_cross_attention_on_a_common_axis():
    encoding = make("t5")
    attn = posenc.Attention(16, 4, encoding=encoding).double()
    x = inputs(8)
    out = attn(x[:, 5:], x, positions=torch.arange(5, 8), context_positions=torch.arange(8))
    close(out, attn(x)[:, 5:])


def test_a_shared_encoding_is_one_table():
    encoding = make("t5")
    stack = torch.nn.ModuleList(posenc.Attention(16, 4, encoding=encoding) for _ in range(3))
    assert len(list(stack.parameters())) == 3 * 4 + 1
    x = torch.randn(1, 5, 16)
    for attn in stack:
        x = attn(x)
    x.sum().backward()
    assert encoding.table.grad is not None


def test_window_and_masks():
    attn = posenc.Attention(16, 4, encoding=make("clipped"), causal=True, window=(2, None)).double()
    x = inputs(6)
    out = attn(x)
    assert torch.equal(attn(torch.cat((torch.zeros_like(x[:, :2]), x[:, 2:]), 1))[:, 4:], out[:, 4:])
    blocked = torch.ones(6, 6, dtype=torch.bool)
    blocked[:, 0] = False
    close(attn(x, mask=blocked)[:, 1:], attn(x, mask=torch.zeros(6, 6).double().masked_fill(~blocked, -1e9))[:, 1:])
    assert attn(x, mask=blocked)[:, 0].abs().max() == 0  # the first token may see nothing


def test_dropout_in_training_only():
    attn = posenc.Attention(16, 4, encoding=make("shaw"), dropout=0.5)
    x = torch.randn(1, 5, 16)
    assert not torch.equal(attn(x), attn(x))
    attn.eval()
    assert torch.equal(attn(x), attn(x))


def test_positions_go_on_from_the_last_known():
    attn = layer("sinusoidal").double()
    x = inputs(5)
    cache = KVCache()
    first = attn(x[:, :3], positions=torch.tensor([10, 11, 12]), cache=cache)
    second = attn(x[:, 3:], cache=cache)
    close(torch.cat((first, second), 1), attn(x, positions=torch.arange(10, 15)))


def test_a_mask_over_all_keys_may_be_given_while_decoding():
    attn = layer("t5").double()
    x = inputs(4)
    real = torch.tensor([[True] * 4, [False, True, True, True]])
    cache = KVCache()
    attn(x[:, :3], key_mask=real[:, :3], cache=cache)
    close(attn(x[:, 3:], key_mask=real, cache=cache), attn(x, key_mask=real)[:, 3:])


def test_documents_with_a_cache():
    attn = layer("alibi").double()
    x, documents = inputs(6), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    whole = attn(x, documents=documents)
    cache = KVCache()
    parts = [attn(x[:, i : i + 2], documents=documents[:, i : i + 2], cache=cache) for i in (0, 2, 4)]
    close(torch.cat(parts, 1), whole)
    with pytest.raises(ValueError, match="documents were given for some tokens"):
        attn(x[:, :1], cache=cache)


def test_grouped_queries_repeat_keys():
    attn = posenc.Attention(16, 4, kv_heads=2, encoding=make("t5")).double()
    full = posenc.Attention(16, 4, encoding=attn.encoding).double()
    state = attn.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].view(2, 4, 16).repeat_interleave(2, 0).reshape(16, 16)
    full.load_state_dict(state)
    x = inputs()
    close(attn(x), full(x))


@pytest.mark.parametrize(
    "make_layer, words",
    [
        (lambda: posenc.Attention(16, 3), "not a multiple of heads=3"),
        (lambda: posenc.Attention(16, 4, kv_heads=3), "multiple of kv_heads=3"),
        (lambda: posenc.Attention(16, 4, dropout=1.5), "less than 1"),
        (lambda: posenc.Attention(16, 4, encoding="aliby"), "did you mean 'alibi'"),
    ],
)
def test_bad_layers(make_layer, words):
    with pytest.raises(ValueError, match=words):
        make_layer()


# ---- causal layers and their encodings --------------------------------------------------------------------------
def test_a_causal_layer_makes_causal_encodings_by_name():
    def position(name, causal):
        return posenc.Attention(16, 4, encoding=name, causal=causal).encoding

    assert position("t5", True).causal
    assert position("transformer_xl", True).causal
    assert position("xlnet", True).attn_type == "uni"
    assert position("shaw", True).keys.shape == (1, 17, 4)
    assert position("clipped", True).table.shape == (4, 17)
    assert not position("t5", False).causal
    assert position("shaw", False).keys.shape == (1, 33, 4)
    assert position("clipped", False).table.shape == (4, 33)


@pytest.mark.parametrize("name", ["shaw", "clipped", "transformer_xl", "xlnet"])
def test_the_causal_form_is_the_past_of_both_sides(name):
    """What describes later keys is never read by a causal layer: without it, the numbers are the same."""
    both = posenc.Attention(16, 4, encoding=make(name, std=1.0), causal=True).double()
    past = posenc.Attention(16, 4, encoding=make(name, std=1.0, **causal_options(name)), causal=True).double()
    weights = both.state_dict()
    for parameter, value in past.state_dict().items():
        rows = [slice(None)] * value.dim()
        if value.shape != weights[parameter].shape:
            rows[1] = slice(0, value.shape[1])
        weights[parameter] = weights[parameter][tuple(rows)]
    past.load_state_dict(weights)
    x = inputs(30)
    close(past(x), both(x))


@pytest.mark.parametrize("name", ["xpos", "relative_logits"])
def test_encodings_of_the_past_are_refused_by_a_layer_that_is_not_causal(name):
    for position in (name, make(name)):
        with pytest.raises(posenc.OptionError, match="is defined for past keys only.*give causal=True"):
            posenc.Attention(16, 4, encoding=position)
    with pytest.raises(posenc.OptionError, match="is defined for past keys only"):
        posenc.Attention(16, 4, encoding=posenc.Randomized(encoding=make(name), max_length=50))
    posenc.Attention(16, 4, encoding=name, causal=True)


def test_a_form_that_does_not_fit_gets_a_warning():
    with pytest.warns(UserWarning, match=r"half of this T5 table is for later keys.*T5\(causal=True"):
        posenc.Attention(16, 4, encoding=posenc.T5(heads=4), causal=True)
    with pytest.warns(UserWarning, match="causal T5 puts every later key into bucket 0"):
        posenc.Attention(16, 4, encoding=posenc.T5(heads=4, causal=True))
    with pytest.warns(UserWarning, match="causal XLNet gives every later key the row of distance 0"):
        posenc.Attention(16, 4, encoding=make("xlnet", attn_type="uni"))


# ---- axes ---------------------------------------------------------------------------------------------------------
ONE_AXIS = [name for name in NAMES if make(name).axes == 1]


@pytest.mark.parametrize("name", ONE_AXIS)
def test_an_axis_that_nobody_reads_is_an_error(name):
    attn, x, cache = layer(name).double(), inputs(5), KVCache()
    two = torch.arange(10).view(1, 5, 2)
    for arguments in ({"positions": two}, {"segments": torch.zeros(2, 5, dtype=torch.int64)}):
        with pytest.raises(ValueError, match="positions have 2 axes, and .* reads 1 axis; give one axis"):
            attn(x, cache=cache, **arguments)
    with pytest.raises(ValueError, match="positions have 2 axes|use another encoding for cross-attention"):
        attn(x, x, positions=two, context_positions=two)
    with pytest.raises(ValueError, match="positions have 2 axes"):
        attn.encoding.plan(posenc.Positions(two), x=x, host=attn)
    assert cache.layers == ()
    close(attn(x, positions=two[..., 0] // 2), attn(x))


def test_which_axes_are_read():
    assert set(NAMES) - set(ONE_AXIS) == {
        "sinusoidal_2d", "axial", "mrope", "xlnet", "grid_bias", "continuous_bias", "decomposed", "mixed_rope", "many_axes",
    }  # fmt: skip
    attn = layer("mrope").double()
    with pytest.raises(ValueError, match="positions have 4 axes, and MRoPE reads 3 axes"):
        attn(inputs(5), positions=torch.zeros(2, 5, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", ["sinusoidal_2d", "axial"])
def test_rows_and_columns_may_be_given_to_a_layer(name):
    numbered = layer(name).double()  # a grid with 4 columns
    attn = posenc.Attention(16, 4, kv_heads=2, encoding=make(name, columns=None), causal=True).double()
    attn.load_state_dict(numbered.state_dict())
    x, patches = inputs(8), posenc.rope.grid_positions(2, 4)
    close(attn(x, positions=patches), numbered(x))
    cache = KVCache()
    parts = [attn(x[:, i : i + 2], positions=patches[:, i : i + 2], cache=cache) for i in (0, 2, 4, 6)]
    close(torch.cat(parts, 1), numbered(x))
    close(attn(x, x, positions=patches, context_positions=patches), numbered(x, x))
    with pytest.raises(ValueError, match="give all tokens of a sequence the same axes"):
        attn(x[:, :1], positions=torch.zeros(2, 1, dtype=torch.int64), cache=cache)


def test_position_must_be_an_encoding():
    with pytest.raises(TypeError, match="an Encoding, an encoding's name or None, got Linear"):
        posenc.Attention(16, 4, encoding=torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(x=torch.zeros(2, 5, 8)), r"x must be \[B, L, 16\]"),
        (dict(context=torch.zeros(1, 5, 16)), r"context must be \[2, M, 16\]"),
        (dict(context_positions=torch.arange(5)), "needs context"),
        (
            dict(context=torch.zeros(2, 5, 16), documents=torch.zeros(2, 5).long()),
            "documents cannot be combined with context",
        ),
        (dict(context=torch.zeros(2, 5, 16), memory=torch.zeros(2, 5, 16)), "memory cannot be combined with context"),
        (dict(memory=torch.zeros(2, 5, 8)), r"memory must be \[2, M, 16\]"),
        (dict(memory=torch.zeros(2, 5, 16), cache=KVCache()), "not both"),
        (dict(positions=torch.arange(4)), r"positions must be \[2, 5\]"),
        (dict(positions=torch.arange(5.0)), "must be integers"),
        (dict(key_mask=torch.ones(2, 5)), "key_mask must be bool"),
        (dict(key_mask=torch.ones(2, 4, dtype=torch.bool)), r"key_mask must be \[B, L\] = \[2, 5\]"),
        (dict(documents=torch.ones(2, 4, dtype=torch.int64)), "documents must be int ids"),
        (dict(documents=torch.ones(2, 5)), "documents must be int ids .* got torch.float32"),
        (dict(documents=[0, 0, 0, 1, 1]), "documents must be int ids .* got list"),
        (dict(segments=torch.ones(5, dtype=torch.int64)), "segments must be int ids"),
        (dict(segments=(torch.ones(2, 5, dtype=torch.int64),)), r"\(ids, \(lowest, highest\)\)"),
        (dict(segments=(torch.ones(2, 5, dtype=torch.int64), 3)), r"\(lowest, highest\), got 3"),
    ],
)
def test_bad_arguments(arguments, words):
    attn = posenc.Attention(16, 4, encoding="t5")
    with pytest.raises(ValueError, match=words):
        attn(**{"x": torch.zeros(2, 5, 16), **arguments})


@pytest.mark.parametrize("name", ["documents", "segments"])
def test_ids_for_another_batch_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must be int ids \[2, 5\]"):
        posenc.Attention(16, 4)(inputs()[:, :5], **{name: torch.zeros(3, 5, dtype=torch.long)})


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_projections_may_have_hooks_and_be_replaced(name):
    """Plain ones are called as functions; whoever changes one gets it called as a module."""
    torch.manual_seed(0)
    attn, x = posenc.Attention(16, 2, encoding="rope"), torch.randn(1, 5, 16, requires_grad=True)
    plain, projection = attn(x), getattr(attn, name)
    calls = []
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(projection, register)(lambda *_, register=register: calls.append(register))
        attn(x).sum().backward()
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: calls.append(module))
    attn(x)
    handle.remove()
    assert calls[:3] == ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
    assert projection in calls[3:]
    projection.forward = lambda y: torch.nn.Linear.forward(projection, y) + 1.0
    assert not torch.equal(attn(x), plain)
    del projection.forward
    assert torch.equal(attn(x), plain)
    torch.nn.utils.parametrize.register_parametrization(projection, "weight", torch.nn.Tanh())
    assert not torch.equal(attn(x), plain)
    setattr(attn, name, torch.nn.Sequential(projection, torch.nn.ReLU()))
    assert not torch.equal(attn(x), plain)
    weights = {f"{name}.0.{key}": 0 * value for key, value in projection.state_dict().items()}
    assert not torch.func.functional_call(attn, weights, (x,)).equal(plain)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["pope", "tupe"])
def test_grouped_queries_of_encodings_with_terms_for_each_head_of_keys(name, masked):
    """As a layer whose keys and values are repeated by hand."""
    layer = posenc.Attention(32, 4, kv_heads=2, encoding=name, causal=True)
    whole = posenc.Attention(32, 4, encoding=name, causal=True)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.3)
    found = {key: value.clone() for key, value in layer.state_dict().items()}
    for key in ("k_proj.weight", "v_proj.weight"):
        found[key] = found[key].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    if name == "pope":
        found["encoding.bias"] = found["encoding.bias"].repeat_interleave(2, 0)
    whole.load_state_dict(found)
    x, more = torch.randn(2, 9, 32), {"key_mask": torch.arange(9).expand(2, 9) < 8} if masked else {}
    torch.testing.assert_close(layer(x, **more), whole(x, **more))
    cache = posenc.KVCache()
    parts = [layer(part, cache=cache, **({"key_mask": more["key_mask"][:, at]} if masked else {}))
             for part, at in ((x[:, :5], slice(0, 5)), (x[:, 5:], slice(5, 9)))]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, 1), whole(x, **more))
