"""`generate` of an accelerated model writes the original's tokens, however it searches and whatever it caches."""

import threading

import pytest
import torch
from transformers import GenerationConfig, cache_utils

from posenc import hf
from tests.hf.uses.tiny import DECODERS, batch, make, pair
from tests.seeds import seed

GENERATORS = ("t5", *DECODERS)
WAYS = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True, top_p=0.95, temperature=1.3),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "repetition": dict(do_sample=False, repetition_penalty=1.5, no_repeat_ngram_size=2),
    "no cache": dict(do_sample=False, use_cache=False),
}


def prompt(family, length=11):
    """Padded on the left, as decoders are."""
    given = batch(family, length=length, padding=False)
    given.pop("labels")
    given["attention_mask"][1, :4] = 0
    given["input_ids"] = given["input_ids"] * given["attention_mask"]
    return given


def generate(model, given, **options):
    torch.manual_seed(seed(7))
    with torch.no_grad():
        return model.generate(**given, max_new_tokens=9, min_new_tokens=9, pad_token_id=0, **options)


@pytest.mark.parametrize("family", GENERATORS)
def test_every_way_of_searching(family):
    original, model = pair(family)
    given = prompt(family)
    for way, options in WAYS.items():
        assert torch.equal(generate(model, given, **options), generate(original, given, **options)), way


@pytest.mark.parametrize("family", GENERATORS)
def test_assisted(family):
    original, model = pair(family)
    one = {name: tensor[:1] for name, tensor in prompt(family).items()}
    wanted = generate(original, one, do_sample=False)
    small = hf.accelerate(make(family, base=3))
    for assistant in (small, model):  # one that is often wrong, one that is always right
        found = generate(model, one, do_sample=False, assistant_model=assistant, use_cache=True)  # MPT's default: none
        assert torch.equal(found, wanted)
    if family != "t5":
        assert torch.equal(generate(model, one, do_sample=False, prompt_lookup_num_tokens=3, use_cache=True), wanted)


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_static_cache(family):
    """The caches of one size that transformers has for compiled decoding; BLOOM and MPT have none."""
    original, model = pair(family)
    given = prompt(family)
    wanted = generate(original, given, do_sample=False)
    found = generate(model, given, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, wanted)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no such cache")
@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_quantised_cache(family):
    original, model = pair(family)
    given = prompt(family)
    options = dict(do_sample=False, cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert torch.equal(generate(model, given, **options), generate(original, given, **options))


@pytest.mark.slow
def test_continuous_batching_is_refused_and_sdpa_serves_it():
    original, model = pair("llama")
    if not hasattr(model, "generate_batch"):
        pytest.skip("this transformers has no continuous batching")
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=1, pad_token_id=0)
    blocks = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
    with pytest.raises(ValueError, match="posenc is not supported for continuous batching.*'sdpa'"):
        model.generate_batch(inputs=prompts, generation_config=config)
    model.set_attn_implementation("sdpa")
    outputs = [
        one.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=blocks, warmup=False)
        for one in (original, model)
    ]
    wanted, found = ({name: one.generated_tokens for name, one in output.items()} for output in outputs)
    assert found == wanted
    assert all(len(tokens) == 5 for tokens in found.values())


def test_two_requests_at_once():
    original, model = pair("llama")
    requests = [prompt("llama", length) for length in (9, 14)]
    wanted = [generate(original, given, do_sample=False) for given in requests]
    found = [None, None]

    def answer(number):
        torch.set_num_threads(1)
        with torch.no_grad():
            found[number] = model.generate(
                **requests[number], max_new_tokens=9, min_new_tokens=9, pad_token_id=0, do_sample=False
            )

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
