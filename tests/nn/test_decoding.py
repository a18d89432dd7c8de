"""One KVCache for a model: what it gives in steps is what the whole sequence gives, whatever happens in between."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import posenc
from posenc import KVCache
from tests.encodings.every import BOTH_SIDES, NAMES, layer


def inputs(length=9, batch=2, d_model=16):
    return torch.randn(batch, length, d_model, dtype=torch.float64)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


class Stack(torch.nn.Module):
    """Self-attention, and cross-attention where there is a context, in each layer."""

    def __init__(self, name, layers=2, cross=False, numbered=False):
        super().__init__()
        self.own = torch.nn.ModuleList(layer(name, layer_idx=n if numbered else None) for n in range(layers))
        self.cross = torch.nn.ModuleList(layer(name, causal=False) for _ in range(layers if cross else 0))

    def forward(self, x, context=None, **more):
        cache = more.get("cache")
        for n, attn in enumerate(self.own):
            x = x + attn(x, **more)
            if context is not None:
                x = x + self.cross[n](x, context, cache=cache)
        return x


# ---- the whole and its steps ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(data=st.data())
def test_steps_are_the_whole_whatever_happens_in_between(name, data):
    """Random chunks, failed calls, crops and copies, of a stack of two layers."""
    stack = Stack(name, numbered=data.draw(st.booleans())).double()
    x = inputs(12)
    whole = stack(x)
    out = torch.full_like(whole, float("nan"))
    cache, done = KVCache(), 0
    with torch.set_grad_enabled(data.draw(st.booleans())):
        while done < 12:
            event = data.draw(st.sampled_from(["step", "step", "step", "fail", "crop", "copy", "mode"]))
            end = min(12, done + data.draw(st.integers(1, 5)))
            if event == "step":
                out[:, done:end] = stack(x[:, done:end], cache=cache).detach()
                done = end
            elif event == "fail":
                wrong = torch.ones(3, 3, 3, dtype=torch.bool)
                with pytest.raises(ValueError, match="mask must broadcast"):
                    stack(x[:, done:end], cache=cache, mask=wrong)
            elif event == "crop":
                done = data.draw(st.integers(0, done))
                cache.crop(done)
            elif event == "copy":  # a branch that takes other tokens and is thrown away
                branch = copy.copy(cache) if data.draw(st.booleans()) else copy.deepcopy(cache)
                stack(inputs(3), cache=branch)
                assert len(branch) == done + 3
            else:
                with torch.inference_mode():
                    out[:, done:end] = stack(x[:, done:end], cache=cache)
                done = end
            assert len(cache) == done
    close(out, whole.detach())


@pytest.mark.parametrize("name", BOTH_SIDES)
@settings(max_examples=4)
@given(cuts=st.lists(st.integers(1, 4), min_size=2, max_size=4), fails=st.booleans())
def test_a_decoder_with_a_context_continues(name, cuts, fails):
    stack = Stack(name, cross=True).double()
    x, context = inputs(sum(cuts)), inputs(7)
    whole = stack(x, context)
    cache, parts, start = KVCache(), [], 0
    for cut in cuts:
        if fails and start:
            with pytest.raises(ValueError):
                stack(x[:, start : start + cut], context[:, :3], cache=cache)  # in the first layer's cross-attention
            cache.crop(start)
        parts.append(stack(x[:, start : start + cut], context, cache=cache))
        start += cut
    close(torch.cat(parts, 1), whole)
    cache.crop(cuts[0])
    close(stack(x[:, cuts[0] :], context, cache=cache), whole[:, cuts[0] :])
    cache.crop(0)
    cache.reorder(torch.tensor([1, 0]))
    close(stack(x.flip(0), context.flip(0), cache=cache), whole.flip(0))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fox"])
def test_one_module_has_a_slot_for_itself_and_one_for_its_context(name):
    attn = layer(name).double()
    x, context = inputs(6), inputs(4)
    own, cross, cache = attn(x), attn(x, context), KVCache()
    for i in (0, 3):
        close(attn(x[:, i : i + 3], cache=cache), own[:, i : i + 3])
        close(attn(x[:, i : i + 3], context, cache=cache), cross[:, i : i + 3])
    assert [slot.k.shape[2] for slot in cache.layers] == [6, 4]
    assert cache.layer(attn).context is None
    assert cache.layer(attn, cross=True).length == 6


def test_cross_attention_remembers_what_it_was_given():
    attn = posenc.Attention(16, 4, encoding="t5").double()
    x, context = inputs(6), inputs(5)
    at, positions = torch.tensor([3, 4, 7, 8, 9, 10]), torch.tensor([9, 2, 4, 5, 0])
    real = torch.tensor([[True] * 5, [True, True, True, False, False]])
    whole = attn(x, context, positions=at, context_positions=positions, key_mask=real)
    cache = KVCache()
    first = attn(x[:, :3], context, positions=at[:3], context_positions=positions, key_mask=real, cache=cache)
    parts = [first, attn(x[:, 3:5], context, cache=cache)]  # 8, 9: behind the last
    parts.append(attn(x[:, 5:], context, context_positions=positions, cache=cache))
    close(torch.cat(parts, 1), whole)
    with pytest.raises(ValueError, match="at other context_positions"):
        attn(x, context, context_positions=positions + 1, cache=cache)
    with pytest.raises(ValueError, match=r"context_positions must be \[2, 5\]"):
        attn(x, context, context_positions=positions[:3])
    with pytest.raises(ValueError, match=r"key_mask must be \[B, Lk\] = \[2, 5\]"):
        attn(x, context, key_mask=real[:, :3], cache=cache)
    assert len(cache) == 6


@pytest.mark.parametrize("scaling", [posenc.scaling.DynamicNTK(factor=2.0, original=4), None])
def test_rotary_cross_attention_continues(scaling):
    attn = posenc.Attention(16, 4, encoding=posenc.RoPE(head_dim=4, scaling=scaling, values=True)).double()
    x, context, cache = inputs(6), inputs(8), KVCache()
    whole = attn(x, context)
    close(torch.cat([attn(x[:, i : i + 2], context, cache=cache) for i in (0, 2, 4)], 1), whole)


# ---- failures -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [{}, {"positions": torch.arange(6, 9)}, {"key_mask": torch.ones(2, 3).bool()}])
def test_learned_past_its_end_leaves_the_cache(arguments):
    attn = posenc.Attention(16, 4, encoding=posenc.Learned(max_length=8, d_model=16), causal=True).double()
    x, cache = inputs(8), KVCache()
    first = attn(x[:, :6], cache=cache, positions=torch.arange(6) if "positions" in arguments else None)
    with pytest.raises(ValueError, match="end at max_length=8"):
        attn(inputs(3), cache=cache, **arguments)
    assert len(cache) == 6
    close(torch.cat((first, attn(x[:, 6:], cache=cache)), 1), attn(x))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": torch.ones(5, 5, dtype=torch.bool)},
        {"key_mask": torch.ones(2, 5)},
        {"positions": torch.arange(5)},
        {"documents": torch.zeros(2, 2, dtype=torch.int64)},
        {"segments": torch.zeros(2, 2, dtype=torch.int64)},
    ],
)
def test_a_refused_argument_leaves_the_cache(wrong):
    attn, x, cache = layer("sinusoidal").double(), inputs(6), KVCache()
    attn(x[:, :4], cache=cache, key_mask=torch.ones(2, 4, dtype=torch.bool))
    slot = cache.layer(attn)
    before = {**slot.__dict__, "marks": dict(slot.marks)}
    with pytest.raises(ValueError):
        attn(x[:, 4:], cache=cache, **wrong)
    assert slot.__dict__ == before
    close(attn(x[:, 4:], cache=cache), attn(x)[:, 4:])


def test_a_failed_first_call_leaves_an_empty_cache():
    attn, x, cache = layer("t5").double(), inputs(4), KVCache()
    with pytest.raises(ValueError):
        attn(x, cache=cache, mask=torch.ones(3, 3, dtype=torch.bool))
    assert cache.layers == ()
    close(attn(x, cache=cache), attn(x))


# ---- modes of autograd ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["learned", "rope", "t5", "shaw"])
def test_modes_may_change_between_steps(name):
    stack = Stack(name, cross=True).double()
    x, context = inputs(8), inputs(5)
    whole, cache, parts = stack(x, context), KVCache(), []
    for i, mode in enumerate([torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad] * 2):
        with mode():
            parts.append(stack(x[:, i : i + 1], context, cache=cache))
    close(torch.cat([part.detach().clone() for part in parts], 1), whole.detach())
    parts[-1].sum().backward()  # nothing of inference mode is saved for it
    assert all(p.grad is not None for p in stack.cross[0].q_proj.parameters())


def test_gradients_through_a_cache_are_those_of_the_whole():
    attn, x = layer("t5").double(), inputs(6)
    for frozen in (False, True):  # with frozen keys, storage must still not be written to
        attn.zero_grad()
        for projection in (attn.k_proj, attn.v_proj):
            projection.requires_grad_(not frozen)
        attn(x).square().sum().backward()
        whole = {name: p.grad.clone() for name, p in attn.named_parameters() if p.grad is not None}
        attn.zero_grad()
        cache = KVCache()
        torch.cat([attn(x[:, i : i + 1], cache=cache) for i in range(6)], 1).square().sum().backward()
        for name, p in attn.named_parameters():
            if name in whole:
                close(p.grad, whole[name])


# ---- misuse -------------------------------------------------------------------------------------------------------
def test_a_layer_that_is_used_twice_raises_where_others_lag():
    stack, cache = Stack("rope", 3).double(), KVCache()
    stack(inputs(4), cache=cache)
    stack.own[0](inputs(1), cache=cache)
    with pytest.raises(ValueError, match=r"from 5 to 6 tokens, and the other layers of the cache hold 4.*crop\(4\)"):
        stack.own[0](inputs(1), cache=cache)
    cache.crop(4)
    stack(inputs(1), cache=cache)
    assert [slot.length for slot in cache.layers] == [5, 5, 5]
    with pytest.raises(ValueError, match="from 0 to 2 tokens, and the other layers of the cache hold 5"):
        layer("rope").double()(inputs(2), cache=cache)  # not there from the start


def test_a_step_that_failed_between_layers_is_noticed():
    stack, cache, x = Stack("t5").double(), KVCache(), inputs(5)
    whole = stack(x)
    stack(x[:, :4], cache=cache)
    stack.own[0](x[:, 4:], cache=cache)  # and what follows raises
    with pytest.raises(ValueError, match=r"After a step that failed: cache.crop\(4\)"):
        stack(x[:, 4:], cache=cache)
    cache.crop(4)
    close(stack(x[:, 4:], cache=cache), whole[:, 4:])


def test_shared_weights_have_explicit_slots():
    attn, x, cache = layer("t5").double(), inputs(7), KVCache()
    whole = x
    for _ in range(3):
        whole = attn(whole)
    parts = []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        y = x[:, start:end]
        for n in range(3):
            y = attn(y, cache=cache.layer(n))
        parts.append(y)
    close(torch.cat(parts, 1), whole)
    assert len(cache) == 7
    assert len(cache.layers) == 3


@pytest.mark.parametrize(
    "position",
    [
        lambda: posenc.Sinusoidal2D(d_model=16, columns=4, prefix=1),
        lambda: posenc.Randomized(encoding=posenc.Sinusoidal(d_model=16), max_length=50),
    ],
)
def test_what_is_added_to_a_whole_input_has_no_second_step(position):
    attn, cache = posenc.Attention(16, 4, encoding=position(), causal=True).double(), KVCache()
    attn(inputs(5), cache=cache)
    with pytest.raises(ValueError, match="added to a whole input at once, and the cache holds 5 tokens"):
        attn(inputs(1), cache=cache)
    assert len(cache) == 5


def test_explicit_slots_of_another_kind_raise():
    attn, x, cache = layer("t5").double(), inputs(4), KVCache()
    attn(x, cache=cache.layer("own"))
    attn(x, inputs(3), cache=cache.layer("context"))
    with pytest.raises(ValueError, match="holds its own keys and was given to attention that needs a context's"):
        attn(x, inputs(3), cache=cache.layer("own"))
    with pytest.raises(ValueError, match="holds a context's keys and was given to attention that needs its own"):
        attn(x, cache=cache.layer("context"))
    with pytest.raises(TypeError, match=r"must be a KVCache, or a slot of one.*got dict"):
        attn(x, cache={})


def test_two_layers_with_one_number_raise():
    first, second = (layer("rope", layer_idx=0).double() for _ in range(2))
    cache = KVCache()
    first(inputs(4), cache=cache)
    with pytest.raises(ValueError, match="two layers have layer_idx=0; give each its own"):
        second(inputs(4), cache=cache)
    del first
    second(inputs(1), cache=cache)  # the other is gone: a model that was made again


def test_another_batch_and_another_dtype_raise():
    attn, cache = layer("rope").double(), KVCache()
    attn(inputs(4), cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows and the input has 3"):
        attn(inputs(1, batch=3), cache=cache)
    attn.float()
    with pytest.raises(ValueError, match="holds torch.float64 on cpu, got torch.float32"):
        attn(inputs(1).float(), cache=cache)


@pytest.mark.parametrize("numbered", [False, True])
def test_copies_of_a_model(numbered):
    stack, x = Stack("t5", numbered=numbered).double(), inputs(6)
    whole, cache = stack(x), KVCache()
    stack(x[:, :4], cache=cache)
    both = pickle.loads(pickle.dumps((stack, cache)))
    close(both[0](x[:, 4:], cache=both[1]), whole[:, 4:])
    both = copy.deepcopy((stack, cache))
    close(both[0](x[:, 4:], cache=both[1]), whole[:, 4:])
    other = copy.deepcopy(stack)
    if numbered:
        close(other(x[:, 4:], cache=copy.deepcopy(cache)), whole[:, 4:])
    with pytest.raises(ValueError, match="two layers have layer_idx=0" if numbered else "from 0 to 2 tokens"):
        other(x[:, 4:], cache=cache)
    close(stack(x[:, 4:], cache=copy.deepcopy(cache)), whole[:, 4:])
    close(stack(x[:, 4:], cache=cache), whole[:, 4:])


def test_beam_search_by_rows_and_by_copies():
    stack, x = Stack("alibi").double(), inputs(5)
    cache = KVCache()
    stack(x[:, :3], cache=cache)
    beams = cache.copy()
    beams.reorder(torch.tensor([1, 1, 0]))
    rows = torch.cat((x[[1, 1, 0], :3], inputs(1, batch=3)), 1)
    close(stack(rows[:, 3:], cache=beams), stack(rows)[:, 3:])
    close(stack(x[:, 3:], cache=cache), stack(x)[:, 3:])


# ---- a step's price -------------------------------------------------------------------------------------------------
def test_a_step_appends_in_place():
    stack, cache = Stack("rope").eval(), KVCache()
    with torch.no_grad():
        stack(torch.randn(1, 32, 16), cache=cache)
        stack(torch.randn(1, 1, 16), cache=cache)
        held = [slot._k.data_ptr() for slot in cache.layers]
        for _ in range(31):
            stack(torch.randn(1, 1, 16), cache=cache)
    assert [slot._k.data_ptr() for slot in cache.layers] == held


def test_a_compiled_layer_decodes():
    torch._dynamo.reset()
    attn, x = layer("rope"), torch.randn(2, 7, 16)
    compiled = torch.compile(attn, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = KVCache()
        parts = [compiled(x[:, :5], cache=cache), *(compiled(x[:, i : i + 1], cache=cache) for i in (5, 6))]
        torch.testing.assert_close(torch.cat(parts, 1), attn(x), rtol=0, atol=1e-5)


# ---- documents ----------------------------------------------------------------------------------------------------
LENGTH_DEPENDENT = {
    "dynamic": lambda: posenc.RoPE(head_dim=4, scaling=posenc.scaling.DynamicNTK(factor=2.0, original=3)),
    "dynamic mrope": lambda: posenc.MRoPE(head_dim=4, scaling=posenc.scaling.DynamicNTK(factor=2.0, original=3)),
    "dynamic yarn": lambda: posenc.RoPE(head_dim=4, scaling=posenc.scaling.DynamicYaRN(original=3)),
}


def packed_layer(name):
    if name in LENGTH_DEPENDENT:
        return posenc.Attention(16, 4, encoding=LENGTH_DEPENDENT[name](), causal=True).double()
    return layer(name).double()


@pytest.mark.parametrize("name", [*NAMES, *LENGTH_DEPENDENT])
@pytest.mark.parametrize("cuts", [(8,), (5, 1, 2), (1,) * 8])
def test_packed_is_separate_without_positions(name, cuts):
    attn = packed_layer(name)
    texts = [inputs(5, 1), inputs(3, 1)]
    x, documents = torch.cat(texts, 1), torch.tensor([[7] * 5 + [2] * 3])
    cache = KVCache() if len(cuts) > 1 else None
    parts, start = [], 0
    for cut in cuts:
        now = slice(start, start + cut)
        parts.append(attn(x[:, now], documents=documents[:, now], cache=cache))
        start += cut
    got, expected = torch.cat(parts, 1), torch.cat([attn(text) for text in texts], 1)
    if attn.encoding.length_dependent and cache is not None:
        got, expected = got[:, -1:], expected[:, -1:]  # earlier steps had a shorter text
    close(got, expected)


@pytest.mark.parametrize("name", ["learned", "sinusoidal", *LENGTH_DEPENDENT])
def test_documents_that_do_not_lie_together_and_padding(name):
    attn = packed_layer(name)
    x, documents = inputs(9, 1), torch.tensor([[0, 1, 1, 0, 0, 2, 1, 0, 2]])
    real = torch.tensor([[True, True, False, True, True, True, True, True, False]])
    packed = attn(x, documents=documents, key_mask=real)
    for number in range(3):
        chosen = (documents[0] == number) & real[0]
        close(packed[:, chosen], attn(x[:, chosen]))


@pytest.mark.parametrize("name", ["learned", *LENGTH_DEPENDENT])
def test_documents_with_given_positions(name):
    attn = packed_layer(name)
    x, documents = inputs(6, 1), torch.tensor([[0, 0, 0, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    close(attn(x, documents=documents, positions=positions), attn(x, documents=documents))
    cache = KVCache()
    attn(x[:, :4], documents=documents[:, :4], positions=positions[:, :4], cache=cache)
    with pytest.raises(ValueError, match="give them with every call"):
        attn(x[:, 4:], documents=documents[:, 4:], cache=cache)


def test_positions_that_were_given_go_on_with_padding_too():
    attn, x = layer("sinusoidal").double(), inputs(5)
    real = torch.ones(2, 5, dtype=torch.bool)
    whole, cache = attn(x, positions=torch.arange(10, 15), key_mask=real), KVCache()
    first = attn(x[:, :3], positions=torch.arange(10, 13), key_mask=real[:, :3], cache=cache)
    close(torch.cat((first, attn(x[:, 3:], cache=cache)), 1), whole)
