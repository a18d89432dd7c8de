"""T5, mT5, UMT5 against transformers."""

import pytest
import torch
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from tests.hf.harness import Case, pairs, run_check, scatter

SIZES = dict(
    vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, decoder_start_token_id=0,
    attn_implementation="eager",  # with "sdpa" UMT5's decoder sees later tokens in transformers 5.16
)  # fmt: skip


def batch():
    ids = torch.randint(2, 99, (3, 37))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :11]}


def whole(model, config):
    return Case(
        lambda: scatter(model(config(**SIZES))), batch, layers=6, way="interface, compute_bias replaced",
        generates={"greedy": {}, "beams": dict(num_beams=3), "static": dict(cache_implementation="static")},
    )  # fmt: skip


CASES = {
    "t5": whole(T5ForConditionalGeneration, T5Config),
    "mt5": whole(MT5ForConditionalGeneration, MT5Config),
    "umt5": whole(UMT5ForConditionalGeneration, UMT5Config),
    "t5 encoder": Case(
        lambda: scatter(T5EncoderModel(T5Config(**SIZES))), lambda: {"input_ids": torch.randint(2, 99, (3, 37))},
        layers=2, way="interface, compute_bias replaced", compiles="quick",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
