"""Cells of whole models: transformers' own, as they are and with `hf.accelerate`.

Weights are random, widths as published; steps have the dropout of the published configurations, 0.1 of the probabilities of T5
and DeBERTa. On a CPU the models have two layers; on a GPU twelve, and two where they are compiled, so
that the compiler takes seconds. Accelerated outputs are compared first: in float32 with the original's, in bfloat16 by
their distance to float32, which may be at most twice the original's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .uses import OURS, PASSES, Cell, Contest, Measured
from .uses_layers import DECODED, PAST, SIZES, difference, token_masks

FLOAT32 = 1e-4
GPU_SIZES = ((64, 128), (16, 512), (8, 1024))
THEIRS = "transformers"
WORDS = 1000
"""Of the vocabulary: that of bench.models."""


def cells(device: str, sizes=SIZES) -> Iterator[Cell]:
    if device == "cpu":
        for name, (batch, length), (what, training) in product(("t5", "deberta", "bloom"), sizes, PASSES.items()):
            make = partial(one_pass, name, 2, batch, length, training, device, False)
            yield Cell(f"model/{name}/{batch}x{length}/{what}", make)
        for name in ("bloom", "llama"):
            yield Cell(f"model/{name}/1 after {PAST}/token", partial(one_token, name, PAST, device))
        for name in ("t5", "deberta", "bloom", "llama"):
            texts = ((1, 16), (8, 64)) if name == "llama" else ((8, 64), (1, 512))
            for (batch, length), (what, training) in product(texts, PASSES.items()):
                make = partial(one_pass, name, 2, batch, length, training, device, False, True)
                yield Cell(f"model/{name}, padded/{batch}x{length}/{what}", make)
        for what, training in PASSES.items():
            make = partial(one_pass, "t5-generate", 2, 8, 64, training, device, False)
            yield Cell(f"model/t5 with decoder/8x64/{what}", make)
        yield Cell("generate/t5, 2 layers/1x64/16 tokens", partial(generate, 1, 64, device, 16, 2))
        for what, training in PASSES.items():
            make = partial(one_pass, "t5", 2, 8, 64, training, device, True)
            yield Cell(f"compiled/t5, 2 layers/8x64/{what}", make)
        return
    for name in ("t5", "deberta"):
        for (batch, length), (what, training) in product(GPU_SIZES, reversed(PASSES.items())):
            make = partial(one_pass, name, 12, batch, length, training, device, False)
            yield Cell(f"model/{name}-base/{batch}x{length}/{what}", make)
        for what, training in reversed(PASSES.items()):
            make = partial(one_pass, name, 12, 64, 128, training, device, False, True)
            yield Cell(f"model/{name}-base, padded/64x128/{what}", make)
    for batch, length in ((8, 512), (1, 128)):
        yield Cell(f"generate/t5-base/{batch}x{length}/32 tokens", partial(generate, batch, length, device))
    yield Cell("lengths/deberta-base/25 batches/longest step", partial(changing_lengths, device))


def compiled_cells(device: str) -> Iterator[Cell]:
    for (batch, length), name, (what, training) in product(GPU_SIZES, ("t5", "deberta"), PASSES.items()):
        make = partial(one_pass, name, 2, batch, length, training, device, True)
        yield Cell(f"compiled/{name}, 2 layers/{batch}x{length}/{what}", make)


# ---- models --------------------------------------------------------------------------------------------------------
class Models(NamedTuple):
    theirs: Any
    ours: Any
    error: float
    allowed: float


def make_model(name: str, layers: int, device: str) -> Any:
    from . import models

    torch.manual_seed(0)
    with torch.device(device):
        if name == "llama":
            return models.llama(1, 16)[0]
        if name != "t5-generate":
            return getattr(models, name)(1, 16, layers)[0]
        return models.make(
            "T5ForConditionalGeneration", "T5Config", {}, vocab_size=WORDS, d_model=768, d_ff=3072, num_layers=layers, num_heads=12,
            d_kv=64, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
        )[0]  # fmt: skip


def tokens(batch: int, length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, WORDS, (batch, length), generator=generator).to(device)


@lru_cache(maxsize=2)
def both(name: str, layers: int, device: str) -> Models:
    """A model and its accelerated copy, compared."""
    from .. import hf

    theirs = make_model(name, layers, device).eval()
    few = {"input_ids": tokens(2, 160, device)}
    if name == "t5-generate":
        few["decoder_input_ids"] = tokens(2, 16, device)
    with torch.no_grad():
        truth = _hidden(theirs(**few))
        if device != "cpu":
            theirs.to(torch.bfloat16)
        ours = hf.accelerate(copy.deepcopy(theirs))
        own, their = _hidden(ours(**few)), _hidden(theirs(**few))
    allowed = FLOAT32 if device == "cpu" else 2.0 * difference(their, truth)
    return Models(theirs, ours, difference(own, truth), allowed)


def _hidden(output: Any) -> Tensor:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits


def one_pass(
    name: str, layers: int, batch: int, length: int, training: bool, device: str, compiled: bool, padded: bool = False
) -> Contest:
    models = both(name, layers, device)
    given = {"input_ids": tokens(batch, length, device)}
    if name == "t5-generate":
        given["decoder_input_ids"] = given["input_ids"]
    if padded:
        given["attention_mask"] = token_masks("padded", batch, length, device)["key_mask"].long()

    def forward(run) -> Tensor:
        with torch.no_grad():
            return _hidden(run(**given))

    def step(run, model) -> None:
        _hidden(run(**given)).float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    def call(run, model):
        return partial(step, run, model) if training else partial(forward, run)

    calls = {}
    torch._dynamo.reset()
    for who, model in ((OURS, models.ours), (THEIRS, models.theirs)):
        model.train(training)
        calls[who] = call(torch.compile(model, dynamic=False) if compiled else model, model)
    if compiled:  # which of the original's two ways is faster depends on the model
        calls[f"{THEIRS}, eager"] = call(models.theirs, models.theirs)

    def check() -> tuple[float, float]:
        """The models are compared already; of compiled ones and of padded texts these results too."""
        if not (padded or compiled):
            return models.error, models.allowed
        for model in (models.ours, models.theirs):
            model.eval()
        real = given["attention_mask"].bool() if padded else ...
        theirs = forward(models.theirs)[real]
        torch._dynamo.utils.counters.clear()
        run = torch.compile(models.ours, dynamic=False) if compiled else models.ours
        error = difference(forward(run)[real], theirs)
        for model in (models.ours, models.theirs):
            model.train(training)
        return max(models.error, error if device == "cpu" else error / 2), models.allowed

    def graphs() -> str:
        """Of our model, compiled by `check`; breaks would make it slow."""
        counters = torch._dynamo.utils.counters
        return f"{counters['stats']['unique_graphs']} graphs, breaks: {dict(counters['graph_break']) or 'none'}"

    return Contest(calls.pop(OURS), calls, check, engine=graphs if compiled else None)


def one_token(name: str, past: int, device: str) -> Contest:
    """One token after `past`, `DECODED` times in a round."""
    models = both(name, 2, device)
    ids = tokens(1, past + 2 * DECODED, device)
    state: dict[str, list[Any]] = {}
    by_name = {OURS: models.ours.eval(), THEIRS: models.theirs.eval()}

    def start(who: str) -> None:
        with torch.no_grad():
            state[who] = [by_name[who](input_ids=ids[:, :past], use_cache=True).past_key_values, past]
        token(who)

    def token(who: str) -> Tensor:
        cache, at = state[who]
        state[who][1] = at + 1
        with torch.no_grad():
            return by_name[who](input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).last_hidden_state

    def check() -> tuple[float, float]:
        for who in by_name:
            start(who)
        return difference(token(OURS), token(THEIRS)), models.allowed

    return Contest(
        partial(token, OURS), {THEIRS: partial(token, THEIRS)}, check,
        prepare={who: partial(start, who) for who in by_name}, inner=DECODED,
    )  # fmt: skip


def generate(batch: int, length: int, device: str, new: int = 32, layers: int = 12) -> Contest:
    models = both("t5-generate", layers, device)
    ids = tokens(batch, length, device)

    def call(model) -> Tensor:
        with torch.no_grad():
            return model.generate(input_ids=ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    return Contest(
        partial(call, models.ours.eval()), {THEIRS: partial(call, models.theirs.eval())},
        lambda: (models.error, models.allowed), inner=1,
    )  # fmt: skip


# ---- lengths that change ----------------------------------------------------------------------------------------------
LENGTHS = tuple(64 + (number * 397) % 637 for number in range(25))
"""64 to 700, as they come."""


def changing_lengths(device: str) -> Measured:
    """DeBERTa's training steps as lengths change, in a fresh process with an empty cache of kernels: the longest step after the
    first. The first one, which may compile, is a remark."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "posenc.bench.uses_models", "--device", device],
            capture_output=True, text=True, env={**os.environ, "TRITON_CACHE_DIR": folder}, timeout=200,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the process failed")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    remarks = {"first step": found["first"], "median step": found["median"]}
    return Measured(found["longest"], found["error"], remarks)


def step_through_lengths(device: str, layers: int = 12, lengths=LENGTHS, batch: int = 4) -> dict[str, Any]:
    models = both("deberta", layers, device)
    result: dict[str, Any] = {"longest": {}, "first": {}, "median": {}, "error": models.error}
    for who, model in ((THEIRS, models.theirs), (OURS, models.ours)):
        model.train()
        taken = [time_step(model, tokens(batch, length, device)) for length in lengths]
        result["first"][who], result["longest"][who] = taken[0], max(taken[1:])
        result["median"][who] = sorted(taken)[len(taken) // 2]
    return result


def time_step(model: Any, ids: Tensor) -> float:
    """Seconds of one training step."""
    began = time.perf_counter()
    model(input_ids=ids).last_hidden_state.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---- cold start ---------------------------------------------------------------------------------------------------------
def cold_start(name: str, warm: bool, device: str) -> dict[str, Any]:
    """Seconds of the first training step of an accelerated model in this process, and of the second; `warm`: after warm_up."""
    from .. import hf, warm_up

    model, ids = hf.accelerate(make_model(name, 12, device).to(torch.bfloat16)).train(), tokens(16, 128, device)
    found: dict[str, Any] = {"model": name, "warm_up": None}
    if warm:
        began = time.perf_counter()
        kernels = warm_up(model, input_ids=ids, progress=False)
        found |= {"warm_up": time.perf_counter() - began, "kernels": dict(kernels)}
    return found | {step: time_step(model, ids) for step in ("first", "second")}


def cold_starts(device: str) -> None:
    """Each in a fresh process with an empty cache of kernels, a line of JSON each."""
    for name, warm in product(("t5", "deberta"), ((), ("--warm-up",))):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "posenc.bench.uses_models", "--device", device, "--cold", name, *warm]
            subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": folder}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="DeBERTa's steps as lengths change, or cold starts; prints JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--cold", choices=("t5", "deberta", "all"), help="the first step of a model; all: four processes"
    )
    parser.add_argument("--warm-up", action="store_true", help="posenc.warm_up before it")
    given = parser.parse_args()
    if given.cold == "all":
        cold_starts(given.device)
    elif given.cold is not None:
        print(json.dumps(cold_start(given.cold, given.warm_up, given.device)), flush=True)
    else:
        print(json.dumps(step_through_lengths(given.device)))


if __name__ == "__main__":
    main()
