"""Every family at published widths, as it is and accelerated: forward pass and training step, time and memory.

    python -m posenc.bench.accelerated --out bench/results/hf-families.json -j 8            eight models at once, a core for each
    python -m posenc.bench.accelerated --out bench/results/hf-families.json --missing       after an interruption: the rest
    python -m posenc.bench.accelerated --device cuda --warm -j 12                           compile the kernels, in 12 processes
    python -m posenc.bench.accelerated --device cuda --out bench/results/hf-families-h200.json
    python -m posenc.bench.accelerated --table bench/results/hf-families.json               as the documentation has it
    posenc bench --suite hf [--device cuda]                                                   three whole encoders

Few layers unless whole, random weights. On a CPU: float32, one thread unless --threads is given; times are processor time of this process, minima
of calls that alternate between the two models; memory is the peak above the loaded model, in a process of its own. How
busy the machine was (its load, and how long the model took) stands beside the figures. On a GPU: bfloat16, eight times as many rows;
times are medians of alternating calls, the host's work included, and memory is the allocator's peak above the loaded model.
Outputs are compared before anything is reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import posenc

from ..core import files
from ..hf.family import first
from ..lab.peak_memory import process_bytes
from .measure import machine, peak_bytes, seconds
from .models import MODELS, WHOLE, Made

WAYS = ("original", "accelerated")
ROWS = 8
"""How many times as many rows a GPU gets, of the models with few layers."""
LEAST = 4.0
"""Seconds for which short calls are repeated on a CPU."""
AUTOCAST = ("Wav2Vec2-Conformer, rotary, 10 s",)
"""Models that compute in bfloat16 on a GPU by autocast alone: they rotate in float32."""
TABLES = re.compile("bias_table|rel_pos|pos_bias|sinks$")
"""Names of learned tables, which some models start at zero."""
ALLOWED = 1e-4
"""The largest difference in float32, of the output's spread."""


def library(model: Any) -> Any:
    """The drop-in for this model."""
    from .. import hf, timm

    return timm if type(model).__module__.startswith("timm.") else hf


def load(name: str, way: str) -> Made:
    torch.manual_seed(0)
    model, inputs = {**WHOLE, **MODELS}[name]()
    for key, parameter in model.named_parameters():
        if TABLES.search(key):
            torch.nn.init.normal_(parameter, std=0.02)
    return (library(model).accelerate(model) if way == "accelerated" else model).eval(), inputs


def forward(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return first(model(**inputs))


def step(model: Any, inputs: dict[str, Any]) -> None:
    model.zero_grad()
    first(model(**inputs)).square().mean().backward()


CALLS = {"forward": forward, "step": step}


def real(output: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """The output at real tokens."""
    mask = inputs.get("attention_mask")
    return output[mask.bool()] if mask is not None and mask.shape == output.shape[:2] else output


def on_card(name: str, times: int) -> dict[str, Any]:
    """`measure` on a GPU; times=0: a call of each, so that kernels are compiled."""
    model, inputs = load(name, "original")
    rows = 1 if name in WHOLE else ROWS
    tensors = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor)}
    inputs |= {key: x.cuda().repeat(rows, *(1,) * (x.dim() - 1)) for key, x in tensors.items()}
    model = model.cuda()
    truth = real(forward(model, inputs), inputs) if times else None
    if name in AUTOCAST:
        with torch.autocast("cuda", torch.bfloat16):
            return _in_low_precision(name, model, inputs, truth, times)
    low = {key: inputs[key].bfloat16() for key, x in tensors.items() if x.is_floating_point()}
    return _in_low_precision(name, model.bfloat16(), {**inputs, **low}, truth, times)


def _in_low_precision(
    name: str, model: Any, low: dict[str, Any], truth: torch.Tensor | None, times: int
) -> dict[str, Any]:
    models = {"original": model, "accelerated": library(model).accelerate(copy.deepcopy(model))}
    outputs = {way: real(forward(models[way], low), low) for way in WAYS}
    for way in WAYS:
        step(models[way], low)
    if truth is None:
        return {}
    error, allowed = _rms(outputs["accelerated"], truth), 2.0 * _rms(outputs["original"], truth)
    if not error <= allowed:
        raise RuntimeError(f"{name}: bfloat16 outputs are off by {error:.1e}, twice the original's is {allowed:.1e}")
    result: dict[str, Any] = {"error": error, "original_error": allowed / 2.0}
    for what, call in CALLS.items():
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        peaks = {}
        for way in WAYS:
            models[way].zero_grad()
            peaks[way] = peak_bytes(partial(call, models[way], low), "cuda")
        for _ in range(times):
            for way in WAYS:
                taken[way].append(seconds(partial(call, models[way], low), "cuda"))
        for way in WAYS:
            cell = {"seconds": statistics.median(taken[way]), "extra_bytes": peaks[way]}
            result.setdefault(way, {})[what] = cell
    return result


def warm(name: str) -> str:
    _, found = attempt(name, device="cuda", times=0, threads=1)
    return f"{name}: {found if isinstance(found, str) else 'compiled'}"


def memory(name: str) -> dict[str, dict[str, int]]:
    """Way -> call -> bytes above the loaded model, at the peak of the call; in this process. The original first, after a call
    that loads libraries; what an accelerated model keeps between calls is counted."""
    model, inputs = load(name, "accelerated")  # the check of its family loads libraries too
    step(library(model).restore(model), inputs)
    found: dict[str, dict[str, int]] = {}
    for way in WAYS:
        model.zero_grad()
        if way == "accelerated":
            library(model).accelerate(model)
        before, found[way] = process_bytes("VmRSS"), {}
        for what, call in CALLS.items():
            Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from here
            call(model, inputs)
            found[way][what] = process_bytes("VmHWM") - before
    return found


def in_child(name: str, threads: int) -> dict[str, dict[str, int]]:
    """`memory` in a process that gives freed memory back."""
    command = [sys.executable, "-m", "posenc.bench.accelerated", "--memory", name, "--threads", str(threads)]
    done = subprocess.run(
        command, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    worst = ((ours - theirs).abs().max() / theirs.std()).item()
    if not worst <= ALLOWED:
        raise RuntimeError(f"{name}: accelerated outputs are off by {worst:.1e} of their spread; nothing is reported")
    return worst


def _rms(low: torch.Tensor, truth: torch.Tensor) -> float:
    """Error of a low-precision output against float32's, of its spread."""
    return ((low.float() - truth).square().mean().sqrt() / truth.std()).item()


def measure(name: str, times: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    started, busy = time.perf_counter(), os.getloadavg()[0]
    models = {way: load(name, way) for way in WAYS}
    inputs = models["original"][1]
    result: dict[str, Any] = {
        "error": _compare(name, *(real(forward(models[way][0], inputs), inputs) for way in ("accelerated", "original")))
    }
    peaks = in_child(name, threads)
    for what, call in CALLS.items():
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            call(models[way][0], inputs)
        while len(taken["original"]) < times or sum(taken["original"]) < LEAST:
            for way in WAYS:
                start = time.process_time()
                call(models[way][0], inputs)
                taken[way].append(time.process_time() - start)
        for way in WAYS:
            result.setdefault(way, {})[what] = {"seconds": min(taken[way]), "extra_bytes": peaks[way][what]}
    result["load"] = round(max(busy, os.getloadavg()[0]), 1)
    result["seconds"] = round(time.perf_counter() - started)
    return result


def cells(one: dict[str, Any]) -> list[str]:
    """Of the forward pass and of the step: before → after, time and memory, and the ratios."""
    found = []
    for what in one["original"]:
        old, new = one["original"][what], one["accelerated"][what]
        pair = [
            f"{1000 * cell['seconds']:.{0 if cell['seconds'] > 0.02 else 1}f} ms, {cell['extra_bytes'] / 2**20:.0f} MiB"
            for cell in (old, new)
        ]
        ratio = f"{old['seconds'] / new['seconds']:.2f} ×, {old['extra_bytes'] / max(new['extra_bytes'], 1):.1f} ×"
        found.append(f"{pair[0]} → {pair[1]} ({ratio})")
    return found


def table(result: dict[str, Any]) -> str:
    """Rows of Markdown."""
    lines = ["| model | forward | training step |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells(one))} |" for name, one in result["models"].items())])


def attempt(name: str, *, device: str, times: int, threads: int) -> tuple[str, dict[str, Any] | str]:
    """The name, and its result or what went wrong: one model does not end the run of the others."""
    try:
        return name, on_card(name, times) if device == "cuda" else measure(name, times, threads)
    except Exception as error:
        return name, f"{type(error).__name__}: {str(error)[:300]}"


def pin(cores: Any) -> None:
    """Keep this process on the next core."""
    os.sched_setaffinity(0, {cores.get()})


def attempt_all(names: list[str], jobs: int, **options: Any) -> Iterator[tuple[str, dict[str, Any] | str]]:
    if jobs == 1:
        yield from (attempt(name, **options) for name in names)
        return
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[-jobs:]:
        cores.put(core)
    with context.Pool(jobs, pin, (cores,)) as pool:
        yield from pool.imap_unordered(partial(attempt, **options), names)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posenc.bench.accelerated", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=(*WHOLE, *MODELS), default=list(MODELS))
    parser.add_argument("--times", type=int, help="calls of each; 5, on a GPU 25")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--warm", action="store_true", help="on a GPU: one call of each, so that kernels are compiled")
    parser.add_argument("-j", type=int, default=1, help="processes of --warm, or of a CPU, each on a core of its own")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON; models that it has are kept")
    parser.add_argument("--missing", action="store_true", help="leave out the models that --out has")
    parser.add_argument("--table", type=Path, help="print the table of this result instead")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if given.memory:
        print(json.dumps(memory(given.memory)))
        return
    if given.table:
        print(table(json.loads(given.table.read_text(encoding="utf-8"))))
        return
    if given.warm:
        with multiprocessing.get_context("spawn").Pool(given.j) as pool:
            for line in pool.imap_unordered(warm, given.models):
                print(line, flush=True)
        return
    on_gpu = given.device == "cuda"
    if given.j > 1 and (on_gpu or given.j * given.threads > len(os.sched_getaffinity(0))):
        parser.error("-j is for --warm, and for a CPU with a core for each process and thread")
    import transformers

    about = machine(given.device)
    result: dict[str, Any] = {
        "machine": about["gpu"] if on_gpu else f"{about['cpu']}, {given.threads} of its cores for each model, {given.j} at once",
        "models": {},
        "versions": {"posenc": posenc.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    if given.out and given.out.is_file():
        before = json.loads(given.out.read_text(encoding="utf-8"))
        differs = [name for name in ("machine", "versions") if before[name] != result[name]]
        if differs:
            parser.error(
                f"{given.out} was measured with another {' and '.join(differs)}; give another --out, or delete it"
            )
        result["models"] = before["models"]
    names = [one for one in given.models if not given.missing or one not in result["models"]]
    times = given.times or (25 if on_gpu else 5)
    failed = 0
    for name, found in attempt_all(names, given.j, device=given.device, times=times, threads=given.threads):
        if isinstance(found, str):
            failed += 1
            print(f"{name}: {found}", flush=True)
            continue
        result["models"][name] = found
        print(table({"models": {name: found}}).splitlines()[-1], flush=True)
        if given.out:
            files.write_json(given.out, result)
    if failed:
        sys.exit(f"{failed} of {len(names)} models failed")


if __name__ == "__main__":
    main()
