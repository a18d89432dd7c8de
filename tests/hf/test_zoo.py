"""A few draws of the exam over all model types (`python -m tests.fuzz.zoo`)."""

import pytest

from tests.fuzz import zoo

DRAWS = (
    ("llama", "LlamaForCausalLM", 3), ("gpt_oss", "GptOssForCausalLM", 1), ("t5", "T5Model", 5), ("bert", "BertModel", 2),
    ("mistral", "MistralForCausalLM", 4), ("bart", "BartModel", 6), ("gptj", "GPTJForCausalLM", 7), ("vit", "ViTModel", 8),
)  # fmt: skip


@pytest.mark.parametrize(("model_type", "name", "first"), DRAWS)
def test_a_draw(model_type, name, first):
    """The first of some draws that the original runs."""
    assert (model_type, name) in zoo.kinds([model_type])
    for seed in range(first, first + 20):
        try:
            assert not zoo.examine(model_type, name, seed).startswith("FAULT")
            return
        except zoo.Refused:
            continue
    raise AssertionError("no draw of twenty ran")
