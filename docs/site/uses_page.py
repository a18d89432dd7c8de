"""docs/uses.md from the published runs of the suite of uses.

python -m docs.site.uses_page [bench/results/uses-cpu.json bench/results/uses-cuda.json] > docs/uses.md
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from posenc.bench import uses

from .speed_tables import RESULTS

TITLES = {
    "layer": "`posenc.Attention(512, 8)` beside the layer written by hand",
    "masked": "The same layer with padding, packed documents, a window of 64 or 2 key heads for 8",
    "model": "Models of transformers: `hf.accelerate` beside the original",
    "compiled": "The same under `torch.compile`, two layers",
    "generate": "`generate`",
    "lengths": "Lengths that change: the longest training step after the first",
    "decode": "One query over a cache, 32 heads over 8, D128",
    "windows": "Windows of pictures, a table over the grid",
    "call": "One attention call, replayed as a CUDA graph",
    "host": "Host time of one attention call",
}


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
    ratios = sorted(record["ratio"] for record in cells.values() if "ratio" in record)
    machine = result["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "triton") if name in machine)
    busy = statistics.median(record.get("busy", 0.0) for record in cells.values())
    parts = [f"## {where}"]
    if ratios:
        over = sum(ratio > uses.GOAL for ratio in ratios)
        parts.append(
            f"{versions}; {result.get('date', '')} UTC. {len(ratios)} cells: best {ratios[0]:.2f}, median "
            f"{statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}; {over} above {uses.GOAL}. Other processes used "
            f"{busy:.0%} of the cores meanwhile."
        )
    if "note" in result:
        parts.append(f"Note: {result['note']}")
    for group in dict.fromkeys(record["group"] for record in cells.values()):
        chosen = {name: record for name, record in cells.items() if record["group"] == group}
        parts += [f"### {TITLES.get(group, group)}", table(chosen)]
    failed = [f"- {name}: {record['failed']}" for name, record in cells.items() if "failed" in record]
    if failed:
        parts += ["### Failed", "\n".join(failed)]
    if result.get("not run"):
        parts.append(f"Not run, for lack of time: {', '.join(result['not run'])}.")
    return parts


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Rows: what is used; columns: sizes and passes; entries: the ratio, and posenc's time."""
    rows: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for name, record in cells.items():
        _, what, *sizes = name.split("/")
        column = " ".join(sizes)
        columns[column] = None
        rows.setdefault(what, {})[column] = entry(record)
    head = ["", *columns]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += [
        "| " + " | ".join([what, *(row.get(column, "–") for column in columns)]) + " |" for what, row in rows.items()
    ]
    return "\n".join(lines)


def entry(record: dict[str, Any]) -> str:
    if "failed" in record:
        return "failed"
    if "above_us" in record:
        bold = "**" if record["above_us"] > record["goal_us"] else ""
        return f"{bold}{record['above_us']:.0f} µs above plain attention{bold}"
    bold = "**" if record["ratio"] > uses.GOAL else ""
    return f"{bold}{record['ratio']:.2f}{bold} ({uses.duration(record['ours'])})"


def main(arguments: list[str]) -> None:
    paths = [Path(name) for name in arguments] or sorted(RESULTS.glob("uses-*.json"))
    print(page([uses.load(path) for path in paths]), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
