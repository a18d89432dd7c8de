"""The `hf` suite: a transformers model as it is against the same model accelerated, in one run.

    python -m posenc.hf.measure --device cpu         L 2048, float32, forward; each cell in a process of its own
    python -m posenc.hf.measure --device cuda        4 × 4096 tokens, bfloat16, forward and training step
    python -m posenc.hf.measure --device cpu --models longt5-base-encoder --length 4096

Random weights at the published sizes, dropout as published. The outputs are compared before any time is reported.
Memory on a CPU is the peak of the resident set above the loaded model, with a malloc that gives freed memory back (the
total, and what malloc holds as it is, are given too); on a GPU torch's peak allocation, all in.

    cd bench/results && python -m posenc.hf.measure --table hf-cpu.json hf-cpu-longt5.json hf-cuda.json    as the documentation has it
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import posenc

from ..core import files

MODELS = ("t5-base-encoder", "deberta-v3-base")
KNOWN = (*MODELS, "longt5-base-encoder")  # its transient-global layers; on a CPU by --models only, for longer texts
ALLOWED = 1e-4  # float32, of the output's spread, through twelve layers


def make(name: str) -> Any:
    """A model at its published size, random weights."""
    from transformers import DebertaV2Config, DebertaV2Model, T5Config, T5EncoderModel

    torch.manual_seed(0)
    if name == "longt5-base-encoder":
        from transformers import LongT5Config, LongT5EncoderModel

        return LongT5EncoderModel(
            LongT5Config(
                d_model=768, d_ff=2048, num_layers=12, num_heads=12, d_kv=64, feed_forward_proj="gated-gelu",
                encoder_attention_type="transient-global", attn_implementation="eager",
            )
        )  # fmt: skip
    if name == "t5-base-encoder":
        return T5EncoderModel(T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64))
    config = DebertaV2Config(
        vocab_size=128100, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        max_position_embeddings=512, relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip
    return DebertaV2Model(config)


def tokens(model: Any, rows: int, length: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, model.config.vocab_size, (rows, length), generator=generator).to(device)


def timed(run, times: int, device: str) -> float:
    """Median seconds of a call, after one that is not counted."""
    taken = []
    for number in range(times + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if number:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


# ---- CPU -----------------------------------------------------------------------------------------------------------
def cell(name: str, label: str, length: int, threads: int, out: str) -> None:
    """One model, one way ("original", "eager", "accelerated"), in this process: a forward for every line of stdin.

    Answers each with its seconds, and the end of stdin with the measurements.
    """
    from .. import hf

    torch.set_num_threads(threads)
    model = make(name).eval()
    ids = tokens(model, 1, length, "cpu")
    if label == "eager":
        model.set_attn_implementation("eager")
    if label == "accelerated":
        hf.accelerate(model)
    with torch.no_grad():
        model(ids[:, :16])  # what is made once belongs to the loaded model
        before = _resident()
        _reset_peak()
        kept = None
        for _ in sys.stdin:
            start = time.perf_counter()
            kept = model(ids).last_hidden_state
            print(time.perf_counter() - start, flush=True)
        peak = _peak()
        torch.save(kept, out)
    measured = {
        "extra_bytes": peak - before,
        "total_bytes": peak,
        "attention": "posenc" if label == "accelerated" else str(model.config._attn_implementation),
        "engines": sorted({one.engine for one in hf.report(model, length=length).layers}),
    }
    print(json.dumps(measured), flush=True)


class Child:
    """`cell` in a process of its own."""

    def __init__(self, name: str, label: str, length: int, threads: int, out: str, **environment: str):
        command = [sys.executable, "-m", "posenc.hf.measure", "--cell", name, label, out,
                   "--length", str(length), "--threads", str(threads)]  # fmt: skip
        self.what = f"{name} {label}"
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  read where the child fails
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def forward(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._answer())

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        measured = json.loads(self._answer())
        self.process.wait()
        return measured

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.what} failed:\n{self.errors.read()[-2000:]}")
        return line


def on_cpu(name: str, length: int, times: int, threads: int) -> dict[str, Any]:
    """Memory first, each way alone; then time, alternating, so that a busy minute falls on all of them."""
    results: dict[str, Any] = {}
    outputs: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for label in ("original", "eager", "accelerated"):
            if label == "eager" and results["original"]["attention"] == "eager":
                continue
            out = str(Path(folder) / label)
            # malloc's own threshold grows, and then freed memory stays in the resident set; a fixed one gives it back
            child = Child(name, label, length, threads, out, MALLOC_MMAP_THRESHOLD_="65536")
            child.forward()
            results[label] = child.end()
            outputs[label] = torch.load(out, weights_only=True)
        children = {label: Child(name, label, length, threads, str(Path(folder) / label)) for label in results}
        taken = [{label: child.forward() for label, child in children.items()} for _ in range(times + 1)][1:]
        for label, child in children.items():
            results[label]["seconds"] = statistics.median(one[label] for one in taken)
            results[label]["extra_bytes_with_malloc_as_it_is"] = child.end()["extra_bytes"]
    results["error"] = _compare(name, outputs["accelerated"], outputs["original"])
    new, ratios = results["accelerated"], {}
    for label in ("original", "eager"):
        if label in results:
            old, of = results[label], "" if label == "original" else ", eager"
            ratios["time" + of] = statistics.median(one[label] / one["accelerated"] for one in taken)
            ratios["extra memory" + of] = old["extra_bytes"] / max(new["extra_bytes"], 1)
            ratios["total memory" + of] = old["total_bytes"] / new["total_bytes"]
    results["ratios"] = ratios
    return results


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from here


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


# ---- GPU -----------------------------------------------------------------------------------------------------------
def on_cuda(name: str, rows: int, length: int, times: int, device: str = "cuda") -> dict[str, Any]:
    from .. import hf

    model = make(name).to(device).eval()
    ids = tokens(model, rows, length, device)
    few = ids[:1, : min(length, 1024)]
    results: dict[str, Any] = {}
    with torch.no_grad():
        truth = model(few).last_hidden_state
        model.to(torch.bfloat16)
        theirs = _rms(model(few).last_hidden_state, truth)
        hf.accelerate(model)
        ours = _rms(model(few).last_hidden_state, truth)
        hf.restore(model)
    if not ours <= 2.0 * theirs:
        raise RuntimeError(f"{name}: bfloat16 error {ours:.1e}, the original's {theirs:.1e}; nothing is reported")
    results["error"], results["error of the original"] = ours, theirs

    def forward():
        with torch.no_grad():
            model(ids)

    def step():
        model(ids).last_hidden_state.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    for label in ("original", "accelerated"):
        if label == "accelerated":
            hf.accelerate(model)
        results[label] = {
            "forward": _gpu_cell(model.eval(), forward, times),
            "step": _gpu_cell(model.train(), step, times),
            "engines": sorted({one.engine for one in hf.report(model, length=length).layers}),
            "attention": "posenc" if label == "accelerated" else str(model.config._attn_implementation),
        }
    results["ratios"] = {}
    for what in ("forward", "step"):
        old, new = results["original"][what], results["accelerated"][what]
        if "seconds" in old and "seconds" in new:
            results["ratios"][f"{what} time"] = old["seconds"] / new["seconds"]
            results["ratios"][f"{what} memory"] = old["peak_bytes"] / new["peak_bytes"]
    return results


def _gpu_cell(model: Any, run, times: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        seconds = timed(run, times, "cuda")
    except torch.cuda.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        return {"failed": "out of memory"}
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated()}


# ---- both ----------------------------------------------------------------------------------------------------------
def _compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    worst = ((ours - theirs).abs().max() / theirs.std()).item()
    if not worst <= ALLOWED:
        raise RuntimeError(f"{name}: accelerated outputs are off by {worst:.1e} of their spread; nothing is reported")
    return worst


def _rms(low: torch.Tensor, truth: torch.Tensor) -> float:
    """Error of a low-precision output against float32's, of its spread."""
    return ((low.float() - truth).square().mean().sqrt() / truth.std()).item()


def suite(device: str, *, models=None, rows: int = 4, length: int | None = None, times: int = 3, threads: int = 0):
    """Every model on a device: a dict ready for JSON."""
    import transformers

    threads = threads or torch.get_num_threads()
    length = length or (4096 if device == "cuda" else 2048)
    result: dict[str, Any] = {
        "suite": "hf", "device": device, "rows": rows if device == "cuda" else 1, "length": length,
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {threads} threads",
        "versions": {"posenc": posenc.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "models": {},
    }  # fmt: skip
    for name in models or (KNOWN if device == "cuda" else MODELS):
        if device == "cuda":
            result["models"][name] = on_cuda(name, rows, length, times)
            torch.cuda.empty_cache()
        else:
            result["models"][name] = on_cpu(name, length, times, threads)
        print(describe(name, result["models"][name]), flush=True)
    return result


def describe(name: str, one: dict[str, Any]) -> str:
    head = f"outputs agree to {one['error']:.1e} of their spread"
    if "error of the original" in one:
        head = f"bfloat16 error {one['error']:.1e} of the outputs' spread, the original's {one['error of the original']:.1e}"
    lines = [f"{name}  ({head})"]
    for label in ("original", "eager", "accelerated"):
        if label not in one:
            continue
        cells = one[label]
        for what in ("forward", "step") if "forward" in cells else ("",):
            cell = cells[what] if what else cells
            if "failed" in cell:
                text = cell["failed"]
            else:
                text = f"{1000 * cell['seconds']:9.1f} ms"
                if "extra_bytes" in cell:
                    text += f"  {cell['extra_bytes'] / 2**20:8.0f} MiB extra, {cell['total_bytes'] / 2**20:.0f} total"
                else:
                    text += f"  {cell['peak_bytes'] / 1e9:8.2f} GB"
            lines.append(f"  {label:<12} {cells['attention']:<7} {what:<8} {text}  {' '.join(cells['engines'])}")
    lines.append("  original / accelerated: " + ", ".join(f"{k} {v:.2f}" for k, v in one["ratios"].items()))
    return "\n".join(lines)


NAMES = {
    "t5-base-encoder": "T5-base",
    "deberta-v3-base": "DeBERTa-v3-base",
    "longt5-base-encoder": "LongT5-base, 4096 tokens",
}


def table(results: list[dict[str, Any]], train: str = "training step", forward: str = "forward") -> str:
    """Rows of Markdown: model, what, before, after, ratios."""
    rows = []
    for result in results:
        for name, one in result["models"].items():
            new = one["accelerated"]
            if result["device"] == "cuda":
                for what, label in (("forward", forward), ("step", train)):
                    cells = [
                        f"{1000 * cell['seconds']:.0f} ms, {cell['peak_bytes'] / 1e9:.1f} GB"
                        for cell in (one["original"][what], new[what])
                    ]
                    ratios = [f"{one['ratios'][f'{what} {of}']:.1f} ×" for of in ("time", "memory")]
                    rows.append([f"{NAMES[name]}, H200", label, *cells, *ratios])
                continue
            for label in ("original", "eager"):
                if label in one:
                    old, of = one[label], "" if label == "original" else ", eager"
                    cells = [f"{cell['seconds']:.1f} s, {cell['extra_bytes'] / 2**20:.0f} MiB" for cell in (old, new)]
                    ratios = [f"{one['ratios'][key + of]:.1f} ×" for key in ("time", "extra memory")]
                    rows.append([f"{NAMES[name]}, CPU", f"{forward} ({old['attention']})", *cells, *ratios])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m posenc.hf.measure", description="original against accelerated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=KNOWN)
    parser.add_argument("--rows", type=int, default=4, help="batch rows on a GPU")
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write the result here, as JSON")
    parser.add_argument("--table", nargs="+", type=Path, help="print the rows of these results instead, in Markdown")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cell:
        name, label, out = given.cell
        cell(name, label, given.length, given.threads, out)
        return
    if given.table:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in given.table]))
        return
    result = suite(
        given.device, models=given.models, rows=given.rows, length=given.length, times=given.times,
        threads=given.threads,
    )  # fmt: skip
    if given.out is not None:
        files.write_json(given.out, result)
        print(f"written to {given.out}")


if __name__ == "__main__":
    main()
