"""XLNet against transformers: padding, segments, memories, two streams, generation."""

from importlib.util import find_spec

import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel

from posenc import hf
from posenc.engines import further_axes as axes
from posenc.hf import xlnet
from tests.hf.compare import gradients_agree, interpreted, outputs_agree, run, same
from tests.seeds import seed

SIZES = dict(vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=37, dropout=0.1)


def make(model=XLNetModel, **options):
    torch.manual_seed(seed(1))
    made = model(XLNetConfig(**{**SIZES, **options})).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def batch(length=21):
    torch.manual_seed(seed(2))
    ids = torch.randint(2, 99, (3, length))
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, 15:] = 0
    mask[2, :6] = 0
    segments = (torch.arange(length)[None, :] > torch.tensor([[5], [9], [12]])).long()
    return ids, mask, segments


@pytest.mark.parametrize("options", [{}, dict(clamp_len=7)])
def test_outputs_gradients_and_restore(options):
    ids, mask, segments = batch()
    inputs = dict(input_ids=ids, attention_mask=mask, token_type_ids=segments)
    same(make(**options), inputs, None, layers=2)


def test_one_direction():
    ids, _, segments = batch()
    same(make(attn_type="uni"), dict(input_ids=ids, token_type_ids=segments), None, layers=2)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("mem_len", [None, 30])
def test_memories(mem_len, dense, monkeypatch):
    """Padded tokens are memories that every later token sees."""
    monkeypatch.setattr(xlnet, "prefers_dense", lambda *a: dense)
    ids, mask, segments = batch()
    model = make(mem_len=mem_len)
    first = dict(input_ids=ids, attention_mask=mask.roll(1, 0), use_mems=True)
    second = dict(input_ids=ids.flip(1), attention_mask=mask, token_type_ids=segments, use_mems=True)
    with torch.no_grad():
        theirs = model(**second, mems=model(**first).mems)
        hf.accelerate(model)
        ours = model(**second, mems=model(**first).mems)
    outputs_agree(ours.last_hidden_state, theirs.last_hidden_state)
    for a, b in zip(ours.mems, theirs.mems, strict=True):
        outputs_agree(a, b)


def test_an_empty_batch():
    ids, mask, segments = batch()
    model = hf.accelerate(make())
    for more in ({}, dict(attention_mask=mask[:0], token_type_ids=segments[:0])):
        assert model(input_ids=ids[:0], **more).last_hidden_state.shape == (0, 21, 32)


def test_one_padded_text_in_one_direction_and_an_empty_one():
    ids, mask, segments = batch()
    inputs = dict(input_ids=ids[1:2], attention_mask=mask[1:2], token_type_ids=segments[1:2])
    same(make(attn_type="uni"), inputs, None, layers=2)
    mask[0] = 0
    same(make(), dict(input_ids=ids, attention_mask=mask, token_type_ids=segments), None, layers=2)


def test_two_streams():
    ids, mask, segments = batch()
    order = torch.rand(3, 21).argsort(1)
    perm_mask = (order[:, :, None] <= order[:, None, :]).float()
    target = torch.zeros(3, 4, 21)
    target[:, torch.arange(4), torch.tensor([2, 7, 8, 13])] = 1.0
    inputs = dict(
        input_ids=ids, attention_mask=mask, token_type_ids=segments, perm_mask=perm_mask, target_mapping=target
    )
    model = make(XLNetLMHeadModel)
    theirs, _ = run(model, inputs, None, backward=False)  # the first of the order sees nothing
    outputs_agree(run(hf.accelerate(model), inputs, None, backward=False)[0], theirs)
    perm_mask[:, :, 0], mask[2] = 0.0, 1
    same(hf.restore(model), inputs, None, layers=2)


@pytest.mark.parametrize("options", [{}, dict(clamp_len=7), dict(attn_type="uni"), dict(bi_data=True)])
@pytest.mark.parametrize("given", ["padding", "segments", "both", "streams"])
def test_a_dense_bias_as_on_a_gpu(options, given, monkeypatch):
    rows = (
        [1] if "attn_type" in options else [0, 1, 2, 0]
    )  # the original masks one text in one direction, and halves of two
    ids, mask, segments = (x[rows] for x in batch())
    inputs = dict(input_ids=ids)
    if given in ("padding", "both"):
        inputs["attention_mask"] = mask
    if given in ("segments", "both"):
        inputs["token_type_ids"] = segments
    if given == "streams":
        order = torch.rand(len(rows), 21).argsort(1)
        inputs["perm_mask"] = (order[:, :, None] <= order[:, None, :]).float()
        inputs["perm_mask"][:, :, 0] = 0.0
        inputs["target_mapping"] = torch.eye(21)[None, [2, 7, 8, 13]].repeat(len(rows), 1, 1)
    model = make(XLNetLMHeadModel, **options)
    theirs, their_gradients = run(model, inputs, None)
    hf.accelerate(model)
    monkeypatch.setattr(xlnet, "prefers_dense", lambda *a: True)
    monkeypatch.setattr(xlnet, "attend", lambda *a, **k: pytest.fail("an engine runs"))
    ours, our_gradients = run(model, inputs, None)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)


def test_generate_and_output_attentions():
    ids, mask, _ = batch()
    model = make(XLNetLMHeadModel)
    options = dict(max_new_tokens=4, do_sample=False)
    theirs = model.generate(input_ids=ids, **options)
    weights = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    hf.accelerate(model)
    assert torch.equal(model.generate(input_ids=ids, **options), theirs)
    for a, b in zip(model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions, weights, strict=True):
        assert torch.equal(a, b)


def test_nothing_of_a_call_stays_behind():
    ids, mask, _ = batch()
    model = hf.accelerate(make())
    alone, _ = run(model, dict(input_ids=ids), None, backward=False)
    run(model, dict(input_ids=ids, attention_mask=mask), None, backward=False)
    assert torch.equal(run(model, dict(input_ids=ids), None, backward=False)[0], alone)


PADDED = """
from posenc import hf
from tests.hf import test_xlnet
from tests.hf.compare import same

ids, mask, segments = test_xlnet.batch()
mask[0] = 0
model = test_xlnet.make(n_layer=1)
assert "XLNetRelativeAttention (xlnet) on triton" in str(hf.report(hf.accelerate(model)))
hf.restore(model)
same(model, dict(input_ids=ids, attention_mask=mask, token_type_ids=segments), None, layers=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_padded_tokens_see_themselves_in_the_triton_engine():
    interpreted(PADDED)


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
def test_half_of_the_batch_backwards(attn_type):
    torch.manual_seed(seed(2))
    ids = torch.randint(2, 99, (4, 21))
    segments = (torch.arange(21)[None, :] > torch.tensor([[5], [9], [12], [3]])).long()
    mask = torch.ones(4, 21, dtype=torch.long)
    mask[1, 15:] = 0
    mask[3, :4] = 0
    inputs = dict(input_ids=ids, token_type_ids=segments)
    if attn_type == "bi":  # the original cannot join padding and causality
        inputs["attention_mask"] = mask
    same(make(bi_data=True, attn_type=attn_type), inputs, None, layers=2)


@pytest.mark.parametrize("highest", [1, 3, 4])
def test_segments_of_any_number(highest):
    ids, mask, _ = batch()
    segments = torch.randint(0, highest + 1, ids.shape)
    segments[0, 0] = highest
    inputs = dict(input_ids=ids, attention_mask=mask, token_type_ids=segments)
    same(make(), inputs, mask, layers=2)


def test_segments_are_channels(monkeypatch):
    """Few of them take the way of attention without segments, with wider heads."""
    ids = torch.randint(2, 99, (2, 80))
    segments = torch.randint(0, 3, ids.shape)
    model, calls, widen = hf.accelerate(make()), [], axes.widen
    monkeypatch.setattr(axes, "widen", lambda *arguments: calls.append(1) or widen(*arguments))
    same(make(), dict(input_ids=ids, token_type_ids=segments), torch.ones_like(ids), layers=2)
    assert calls
    calls.clear()
    model(input_ids=ids, token_type_ids=segments)
    assert len(calls) == 2


@pytest.mark.slow
def test_gradients_of_a_compiled_model_with_padding():
    ids, mask, _ = batch()
    model = make(XLNetLMHeadModel)
    inputs = dict(input_ids=ids[:2], attention_mask=mask[:2])
    theirs, their_gradients = run(model, inputs, None)
    ours, our_gradients = run(torch.compile(hf.accelerate(model), backend="aot_eager"), inputs, None)
    outputs_agree(ours, theirs)
    gradients_agree({name.removeprefix("_orig_mod."): g for name, g in our_gradients.items()}, their_gradients)


def test_a_compiled_model_looks_at_its_segments():
    model = hf.accelerate(make()).eval()
    ids = torch.randint(2, 99, (2, 80))
    segments = torch.randint(0, 3, ids.shape)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        expected = model(input_ids=ids, token_type_ids=segments).last_hidden_state
        outputs_agree(compiled(input_ids=ids, token_type_ids=segments).last_hidden_state, expected)
        with pytest.raises(ValueError, match="token_type_ids from 0 to 15, got 0 to 99; renumber"):
            compiled(input_ids=ids, token_type_ids=segments.index_fill(1, torch.tensor([0]), 99))
