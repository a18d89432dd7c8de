"""Falcon with ALiBi against transformers: plain heads, one key head, and grouped heads."""

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM, FalconModel

from posenc import hf
from posenc.hf import rules
from tests.hf.compare import outputs_agree
from tests.hf.harness import Case, inputs_of, pairs, run_check, scatter
from tests.seeds import seed

KINDS = {
    "falcon": dict(multi_query=False, parallel_attn=False),
    "falcon multi-query": dict(multi_query=True, parallel_attn=True),
    "falcon grouped": dict(new_decoder_architecture=True, num_kv_heads=2),
}


def make(kind, head=False, **options):
    torch.manual_seed(seed(1))
    options = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True,
               "bias": True, "pad_token_id": 0, "eos_token_id": 1, **KINDS[kind], **options}  # fmt: skip
    return scatter((FalconForCausalLM if head else FalconModel)(FalconConfig(**options)), std=0.1)


def batch():
    return {"input_ids": torch.randint(2, 32, (3, 29))}


CASES = {
    name: Case(
        lambda name=name: make(name), batch, layers=2, way="override", with_head=lambda name=name: make(name, head=True),
        generates={"greedy": {}, "beams": dict(num_beams=3)} if name == "falcon" else None,
    )
    for name in KINDS
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


def test_output_attentions_are_the_originals():
    model, inputs = make("falcon"), inputs_of(CASES["falcon"], "left")
    with torch.no_grad():
        theirs = model(**inputs, output_attentions=True).attentions
        ours = hf.accelerate(model)(**inputs, output_attentions=True).attentions
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_short_texts_are_the_originals(monkeypatch):
    monkeypatch.setattr(rules, "BIASED", 160 * 160)
    model, inputs = make("falcon"), inputs_of(CASES["falcon"], "left")
    with torch.no_grad():
        theirs = model(**inputs)[0]
        assert torch.equal(hf.accelerate(model)(**inputs)[0], theirs)


def test_what_is_refused():
    with pytest.raises(hf.UnsupportedModel, match="has no attention layer"):
        hf.accelerate(make("falcon", alibi=False))
    model = make("falcon")
    model.config._attn_implementation = "eager"
    with pytest.raises(hf.UnsupportedModel, match="adds ALiBi twice with attn_implementation='eager'"):
        hf.accelerate(model)


def test_a_mask_of_another_shape_is_refused():
    model = hf.accelerate(make("falcon"))
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, 5\] with ALiBi, got \[1, 1, 5, 5\]"):
        model(torch.ones(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 1, 5, 5))


def test_positions_beyond_those_that_bfloat16_counts():
    torch.manual_seed(seed(2))
    model, ids = make("falcon"), torch.randint(2, 32, (1, 700))
    with torch.no_grad():
        theirs = model(ids)[0]
        outputs_agree(hf.accelerate(model)(ids)[0], theirs)
