"""docs/uses.md from the published runs of the suite of uses.

python -m docs.site.uses_page [bench/results/uses-cpu.json bench/results/uses-cuda.json] > docs/uses.md
"""

from __future__ import annotations

import statistics
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from posenc.bench import uses

from . import markdown
from .speed_tables import RESULTS

TITLES = {
    "layer": "`posenc.Attention(512, 8)` beside the layer written by hand",
    "masked": "The same layer with padding, packed documents, a window of 64, 2 key heads for 8 or a boolean mask of all pairs; on a CPU also cross-attention (context), dropout and autocast",
    "model": "Models of transformers: `hf.accelerate` beside the original",
    "compiled": "The same under `torch.compile`, two layers",
    "generate": "`generate`",
    "lengths": "Lengths that change: the longest training step after the first",
    "decode": "One query over a cache, 32 heads over 8, D128",
    "windows": "Windows of pictures, a table over the grid",
    "call": "One attention call, replayed as a CUDA graph",
    "host": "Host time of one attention call",
}


ON_CPU = {
    "masked/*, dropout/1x16/*": "host time: the hash of a call's rows and keys takes some 60 small operations, whatever the sizes; at 8x128 PyTorch's own "
    "draws take longer",
    "compiled/*/step": "torch.compile itself: the compiled original takes as long as ours, and longer than the eager original, which is the best other",
    "layer/clipped/1x512/*": "tiles in O(L) memory, beside a dense bias that is read whole; which takes longer depends on how memory was used before "
    "(0.93 to 1.19 in different runs)",
    "layer/transformer_xl/*": "host time: its table is projected in each call, and the difference of its two biases made",
    "layer/relative_logits/*": "host time: its table is flipped and padded and its states are scaled in each call, by operations of PyTorch",
    "*/shaw*/step": "host time of autograd functions in Python, where dense code has PyTorch's; at 8 x 128 and more the same products, timed "
    "0.99 to 1.15 in different runs",
    "*token": "host time, some 20 µs: the cache and the layer check what code written by hand does not; the rest is noise",
    "masked/learned, padded/1x16/*": "positions count the real tokens of each text; the layer written by hand adds the first rows of its table",
    "*1x16*": "host time: up to 30 µs of Python for checks (tests/nn/test_work.py counts them), in a call of half a millisecond",
    "*": "noise of this run: the same products and PyTorch's attention on both sides",
}
"""The same on a CPU."""
REASONS = {
    "decode/none/*/python": "PyTorch's own call, with a plan's making and checks before it: some 10 µs of Python, whatever the sizes",
    "call/t5/*/forward": "the other code makes the dense bias once and never again; a table that may be learned is read in each call, which takes "
    "two small launches before the kernel",
    "call/clipped/*/forward": "as t5",
    "windows/*/forward": "the other code makes the bias once and never again; here a launch makes it in each call",
    "compiled/deberta*": "host time: the kernels take 0.97 ms forward and 4.19 in a step, the original's 1.10 and 4.36; the compiler checks the functions of posenc that it "
    "went through before each call, 0.2 to 0.3 ms, and an operator of its own takes 0.15",
    "compiled/*": "the dense code, fused by Inductor, takes no more time on the device than the fused kernels at this length",
    "layer/relative_logits/*": "host time: its table is flipped and padded and its states are scaled in each call, by operations of PyTorch",
    "layer/transformer_xl/*": "host time: its table is projected in each call, and the difference of its two biases made",
    "masked/*, packed/*": "host time: the bounds of the documents are found in each call, two launches before the kernel; code written by hand makes its "
    "dense mask in one operation",
    "masked/t5, mask/4x2048/forward": "each pair looks up the bias of its distance beside the mask; a mask that holds the bias already has one number to load",
    "masked/*, 4 tokens/*": "host time: a recorded step of the kernel that serves several queries, beside PyTorch's attention with a mask that was made before",
    "masked/*": "host time: a layer with masks on a GPU makes its plan and checks its masks in each call",
    "host/deberta/*": "its table is projected in each call, and content terms of queries and keys are 6 launches forward and 18 in a step, in two functions of autograd",
    "host/transformer_xl/*": "its table is projected in each call and the difference of its two biases made, by operations of PyTorch with gradients of their own",
    "host/*": "a function of autograd in Python and its launches, on a host whose speed varies by a factor of two from run to run",
    "layer/none/*token": "host time: the cache and the layer check what code written by hand does not, some 10 µs of Python",
    "layer/sinusoidal/*token": "as none",
    "layer/learned/*token": "as none",
    "layer/*/step": "host time of autograd functions in Python, where dense code has PyTorch's",
    "layer/*": "host time: the kernels take less than their launches",
}
"""Why a cell may be above the goal, by its name; the first pattern that fits."""


def page(results: list[dict[str, Any]]) -> str:
    parts = [
        "# Uses: posenc beside the code that it replaces",
        "`posenc bench --suite uses [--device cuda]` runs each cell beside the best other code that computes the same, verified "
        "first, in turns within one run. A ratio is posenc's time over the best other's: below 1 is a gain, and up to "
        f"{uses.GOAL} is noise. This page is made by `python -m docs.site.uses_page`.",
    ]
    for result in results:
        parts += device_section(result)
    return "\n\n".join(parts) + "\n"


def device_section(result: dict[str, Any]) -> list[str]:
    cells = result["cells"]
    ranked = uses.ranked_ratios(cells)
    ratios = [ratio for ratio, _ in ranked]
    machine = result["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "triton") if name in machine)
    busy = statistics.median(record.get("busy", 0.0) for record in cells.values())
    parts = [f"## {where}"]
    over = [(ratio, name) for ratio, name in ranked if ratio > uses.GOAL]
    if ratios:
        parts.append(
            f"{versions}; {result.get('date', '')} UTC. {len(ratios)} cells: best {ratios[0]:.2f}, median "
            f"{statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}; {len(over)} above {uses.GOAL}. Other processes used "
            f"{busy:.0%} of the cores meanwhile."
        )
    alone = [record["floor"] / record["ours"] for name, record in cells.items() if is_layer_with_floor(name, record)]
    if alone:
        parts.append(
            f"A layer's four linear maps alone take {statistics.median(alone):.2f} of the layer without positions (the median of its "
            f"{len(alone)} cells). Attention that took no time at all would leave that ratio beside PyTorch's; none, sinusoidal and learned, "
            "whose attention is PyTorch's own, have nothing to gain."
        )
    if "note" in result:
        parts.append(f"Note: {result['note']}")
    for group in dict.fromkeys(record["group"] for record in cells.values()):
        chosen = {name: record for name, record in cells.items() if record["group"] == group}
        parts += [f"### {TITLES.get(group, group)}", table(chosen)]
    if over:
        parts += [
            f"### Above {uses.GOAL}",
            "\n".join(f"- {name}, {ratio:.2f}: {reason(name, result['device'])}" for ratio, name in over),
        ]
    missed = [(name, one) for name, one in cells.items() if "goal_us" in one and uses.misses_goal(one)]
    if missed:
        lines = [
            f"- {name}, {one['above_us']:.0f} µs above plain attention (goal {one['goal_us']:.0f}): {reason(name, result['device'])}"
            for name, one in missed
        ]
        parts += ["### Above the host's goals", "\n".join(lines)]
    failed = [f"- {name}: {record['failed']}" for name, record in cells.items() if "failed" in record]
    if failed:
        parts += ["### Failed", "\n".join(failed)]
    if result.get("not run"):
        parts.append(f"Not run, for lack of time: {', '.join(result['not run'])}.")
    return parts


def is_layer_with_floor(name: str, record: dict[str, Any]) -> bool:
    return name.startswith("layer/none/") and "floor" in record


def reason(name: str, device: str) -> str:
    reasons = ON_CPU if device == "cpu" else REASONS
    return next((text for pattern, text in reasons.items() if fnmatch(name, pattern)), "no reason is known")


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Rows: what is used; columns: sizes and passes; entries: the ratio, and posenc's time."""
    rows: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for name, record in cells.items():
        _, what, *sizes = name.split("/")
        column = " ".join(sizes)
        columns[column] = None
        rows.setdefault(what, {})[column] = entry(record)
    filled = ([what, *(row.get(column, "–") for column in columns)] for what, row in rows.items())
    return markdown.table(["", *columns], filled)


def entry(record: dict[str, Any]) -> str:
    if "failed" in record:
        return "failed"
    bold = "**" if uses.misses_goal(record) else ""
    if "above_us" in record:
        return f"{bold}{record['above_us']:.0f} µs above plain attention{bold}"
    return f"{bold}{record['ratio']:.2f}{bold} ({uses.duration(record['ours'])})"


def main(arguments: list[str]) -> None:
    paths = [Path(name) for name in arguments] or sorted(RESULTS.glob("uses-*.json"), key=lambda path: path.stem)
    print(page([uses.load(path) for path in paths]), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
