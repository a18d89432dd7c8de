"""LongT5 against transformers: local and transient-global encoders, the decoder."""

from importlib.util import find_spec

import pytest
import torch
from transformers import LongT5Config, LongT5EncoderModel, LongT5ForConditionalGeneration

from posenc import hf
from posenc.engines import blocked, reference
from posenc.hf import longt5
from tests.hf.compare import batch, gradients_agree, interpreted, outputs_agree, run, same
from tests.seeds import seed

KINDS = ("local", "transient-global")

SIZES = dict(
    vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, local_radius=6, global_block_size=5, decoder_start_token_id=0, pad_token_id=0,
    eos_token_id=1,
)  # fmt: skip


def make(kind, model=LongT5ForConditionalGeneration, **options):
    torch.manual_seed(seed(1))
    made = model(LongT5Config(**{**SIZES, **options}, encoder_attention_type=kind)).eval()
    for name, parameter in made.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return made


@pytest.fixture
def few_rows(monkeypatch):
    """So few queries at a time that a short text has several blocks."""
    for name, value in (("FEWEST", 8), ("SCORES", 1), ("LEAST", 1)):
        monkeypatch.setattr(blocked, name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_restore(kind, few_rows):
    ids, mask = batch()
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :11])
    same(make(kind), inputs, None, layers=6)


@pytest.mark.parametrize(
    "kind, length", [("local", 1), ("transient-global", 5), *((k, n) for k in KINDS for n in (7, 64))]
)
def test_encoder_of_awkward_lengths(kind, length, few_rows):
    ids = torch.randint(2, 99, (2, length))
    same(make(kind, LongT5EncoderModel), dict(input_ids=ids), None, layers=2)


@pytest.mark.parametrize("length", [1, 4])
def test_a_text_shorter_than_a_summary(length):
    model, inputs = make("transient-global", LongT5EncoderModel), dict(input_ids=torch.randint(2, 99, (2, length)))
    theirs, their_gradients = run(model, inputs, None)
    ours, gradients = run(hf.accelerate(model), inputs, None)
    outputs_agree(ours, theirs)
    (unused,) = gradients.keys() - their_gradients.keys()  # the original's is None, ours zero
    assert unused.endswith("global_relative_attention_bias.weight") and not gradients.pop(unused).any()
    gradients_agree(gradients, their_gradients)


@pytest.mark.parametrize("sizes", [dict(global_block_size=16), dict(local_radius=127), dict(global_block_size=1)])
def test_other_windows_and_summaries(sizes):
    torch.manual_seed(seed(4))
    ids, mask = torch.randint(2, 99, (2, 300)), torch.ones(2, 300, dtype=torch.long)
    mask[0, 211:] = 0
    same(
        make("transient-global", LongT5EncoderModel, **sizes), dict(input_ids=ids, attention_mask=mask), mask, layers=2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_every_sort(kind, few_rows):
    """Left, right, on both sides, within the text, less than a summary's block of text, nothing but padding."""
    ids, mask = torch.randint(2, 99, (6, 37)), torch.zeros(6, 37, dtype=torch.long)
    for row, (first, last) in enumerate([(9, 37), (0, 20), (3, 30), (0, 37), (11, 14)]):
        mask[row, first:last] = 1
    mask[3, 8:21] = 0
    model = make(kind, LongT5EncoderModel)
    inputs = dict(input_ids=ids, attention_mask=mask)
    theirs, their_gradients = run(model, inputs, mask)
    ours, gradients = run(hf.accelerate(model), inputs, mask)
    outputs_agree(ours, theirs)
    gradients_agree(gradients, their_gradients)
    assert model(**inputs).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("options", [{}, dict(num_beams=3)])
@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind, options):
    ids, mask = batch()
    model = make(kind)
    options = dict(max_new_tokens=8, do_sample=False, **options)
    theirs = model.generate(input_ids=ids, attention_mask=mask, **options)
    hf.accelerate(model)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **options), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_output_attentions_falls_back(kind):
    ids, mask = batch()
    model = make(kind)
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5], output_attentions=True)
    theirs = model(**inputs)
    ours = hf.accelerate(model)(**inputs)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dropped", ["window", "summaries"])
def test_dropout_falls_on_the_weights(dropped, monkeypatch, few_rows):
    """With all weights of the window, or of the summaries, dropped, ours equals theirs: the others are not normalised again."""
    ids, mask = batch()
    inputs = dict(input_ids=ids, attention_mask=mask)
    summaries = ids.shape[1] // SIZES["global_block_size"]

    def drop(x, p=0.5, *_, **__):
        if x.dim() <= 3:
            return x
        is_summary = torch.arange(x.shape[-1]) >= x.shape[-1] - summaries  # theirs are behind the window's
        if accelerated:
            is_summary = torch.full_like(is_summary, x.shape[-1] == summaries)
        return x * (is_summary if dropped == "window" else ~is_summary)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    monkeypatch.setattr(reference, "drop", lambda x, rate, rows, columns: drop(x))
    model = make("transient-global", LongT5EncoderModel).train()
    accelerated = False
    theirs, their_gradients = run(model, inputs, mask)
    hf.accelerate(model)
    accelerated = True
    ours, gradients = run(model, inputs, mask)
    outputs_agree(ours, theirs)
    gradients_agree(gradients, their_gradients)
    model.eval()
    assert not torch.allclose(run(model, inputs, mask, backward=False)[0], ours)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing(kind, reentrant, few_rows):
    ids, mask = batch()
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, use_cache=False)
    model = make(kind, dropout_rate=0.0).train()
    _, wanted = run(model, inputs, None)
    hf.accelerate(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    _, gradients = run(model, inputs, None)
    gradients_agree(gradients, wanted)


def test_dropout_is_the_same_when_a_block_is_computed_again(few_rows):
    """The output is linear in the values: its slope is right only if the backward pass drops what the forward dropped."""
    encoder = hf.accelerate(make("transient-global", LongT5EncoderModel, dropout_rate=0.3)).double().train().encoder
    attention = encoder.block[0].layer[0].TransientGlobalSelfAttention
    states, weight = torch.randn(2, 37, 32, dtype=torch.float64), attention.v.weight

    def total():
        torch.manual_seed(seed(7))
        return attention(states, mask=batch()[1][:2])[0].sum()

    first = total()
    (slope,) = torch.autograd.grad(first, weight)
    step = torch.randn_like(weight)
    weight.data.add_(step)
    assert (slope * step).sum().item() == pytest.approx((total() - first).item(), rel=1e-9)


def test_bfloat16():
    ids, mask = batch()
    model = make("transient-global", LongT5EncoderModel)
    inputs = dict(input_ids=ids, attention_mask=mask)
    truth, _ = run(model, inputs, mask, backward=False)
    theirs, _ = run(model.to(torch.bfloat16), inputs, mask, backward=False)
    ours, _ = run(hf.accelerate(model), inputs, mask, backward=False)
    error, allowed = ((x.float() - truth).square().mean().sqrt().item() for x in (ours, theirs))
    assert error <= 2.0 * allowed


def test_a_layer_without_a_mask_sees_everything():
    attention = make("transient-global", LongT5EncoderModel).encoder.block[0].layer[0].TransientGlobalSelfAttention
    states = torch.randn(2, 23, 32)
    theirs = attention(states, mask=torch.ones(2, 23))[0]
    outputs_agree(hf.accelerate(attention)(states)[0], theirs)


def test_blocks_are_made_once_for_a_call(monkeypatch):
    calls = []
    make_ids = longt5.modeling_longt5._make_global_fixed_block_ids
    monkeypatch.setattr(
        longt5.modeling_longt5, "_make_global_fixed_block_ids", lambda *args: calls.append(1) or make_ids(*args)
    )
    ids, mask = batch()
    original, model = (make("transient-global", LongT5EncoderModel) for _ in range(2))
    hf.accelerate(model)
    for change in (None, 5, 3):
        if change is not None:
            mask[0, change:] = 0
        calls.clear()
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask)
        assert len(calls) == 1
        ours = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert len(calls) == 2
        assert not hasattr(mask, "posenc_blocks")
        ours.sum().backward()
        theirs = original(input_ids=ids, attention_mask=mask).last_hidden_state
        outputs_agree(ours[mask != 0], theirs[mask != 0])


def test_report():
    model = hf.accelerate(make("transient-global"))
    assert "2 × LongT5TransientGlobalAttention (t5) on cpu" in str(hf.report(model))
    hf.accelerate(model, engine="reference")
    assert "2 × LongT5TransientGlobalAttention (t5) on reference" in str(hf.report(model))
    ids, mask = batch()
    theirs = hf.accelerate(model)(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)[0]
    ours = hf.accelerate(model, engine="reference")(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)[0]
    outputs_agree(ours, theirs)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_window_and_summaries_merge(engine):
    ids, mask = batch()
    inputs = dict(input_ids=ids, attention_mask=mask)
    model = make("transient-global", LongT5EncoderModel)
    theirs, their_gradients = run(model, inputs, mask)
    ours, gradients = run(hf.accelerate(model, engine=engine), inputs, mask)
    outputs_agree(ours, theirs)
    gradients_agree(gradients, their_gradients)


MERGED = """
from posenc import hf
from tests.hf import test_longt5
from tests.hf.compare import same

ids, mask = test_longt5.batch()
model = test_longt5.make("transient-global", test_longt5.LongT5EncoderModel, num_layers=1, num_heads=2)
assert "LongT5TransientGlobalAttention (t5) on triton" in str(hf.report(hf.accelerate(model)))
hf.restore(model)
same(model, dict(input_ids=ids[1:], attention_mask=mask[1:]), mask[1:], layers=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_window_and_summaries_merge_in_the_triton_engine():
    interpreted(MERGED)
