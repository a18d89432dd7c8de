"""Interactive plots of the committed benchmarks and lab runs: Plotly's own file beside the pages, one script of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posenc.lab.results import Mean

from . import speed_tables, tables


def write(folder: Path) -> None:
    from plotly.offline import get_plotlyjs

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plotly.js").write_text(get_plotlyjs(), encoding="utf-8")
    (folder / "plot-data.js").write_text(f"window.posencPlots = {json.dumps(all_plots())};\n", encoding="utf-8")


def all_plots() -> dict[str, dict[str, Any]]:
    """id -> {data, layout}; a page shows one with <div class="posenc-plot" data-plot="id"></div>."""
    found = {}
    for which, title in (
        ("quick", "Loss on text, trained at 64 bytes"),
        ("paper", "Loss on text, trained at 512 bytes, H200"),
    ):
        found[f"lab-{which}"] = _lab(which, title)
    for name, title in (("results.json", "CPU, float32"), ("h200.json", "H200, bfloat16")):
        for kind in ("forward", "training"):
            found[f"speed-{name.split('.')[0]}-{kind}"] = _speed(name, kind, f"{kind} on {title}")
    for device, title in (("cpu", "CPU"), ("cuda", "H200")):
        found[f"uses-{device}"] = _uses(device, f"Uses on {title}: time / best other code")
    return found


def _uses(device: str, title: str) -> dict[str, Any]:
    """A point for each cell of the suite of uses, coloured by group."""
    cells = {name: cell for name, cell in tables.uses(device)["cells"].items() if "ratio" in cell}
    data: list[dict[str, Any]] = []
    for group in dict.fromkeys(cell["group"] for cell in cells.values()):
        some = [name for name, cell in cells.items() if cell["group"] == group]
        ratios = [cells[name]["ratio"] for name in some]
        data.append({"x": list(range(len(some))), "y": ratios, "text": some, "name": group, "mode": "markers",
                     "hovertemplate": "%{text}: %{y:.2f} ×<extra></extra>"})  # fmt: skip
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"dash": "dot"}}
    axes = {"xaxis": {"title": {"text": "cell"}}, "yaxis": {"type": "log", "title": {"text": "ratio"}}}
    return {"data": data, "layout": {"title": {"text": title}, **axes, "shapes": [line]}}


def _lab(which: str, title: str) -> dict[str, Any]:
    found, task = tables.run(which), tables.run(which).tasks()[0]
    data = []
    for encoding in found.encodings(task):
        points = [(size, found.point(task, encoding, size, "loss")) for size in task["test"]]
        known = [(size, point.value) for size, point in points if isinstance(point, Mean)]
        data.append({"x": [x for x, _ in known], "y": [y for _, y in known], "name": encoding, "mode": "lines+markers"})
    axes = {
        "xaxis": {"type": "log", "title": {"text": "length (bytes)"}},
        "yaxis": {"title": {"text": "nats per byte"}},
    }
    return {"data": data, "layout": {"title": {"text": title}, **axes}}


def _speed(name: str, kind: str, title: str) -> dict[str, Any]:
    records = [
        r for r in speed_tables.load(name)["records"] if r["pass"] == kind and r["peer"] == "posenc" and "ratio" in r
    ]
    data = []
    for workload in dict.fromkeys(r["workload"] for r in records):
        points = sorted((r["length"], r["ratio"]) for r in records if r["workload"] == workload)
        data.append(
            {"x": [x for x, _ in points], "y": [y for _, y in points], "name": workload, "mode": "lines+markers"}
        )
    axes = {
        "xaxis": {"type": "log", "title": {"text": "tokens"}},
        "yaxis": {"title": {"text": "time / attention without positions"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": {"title": {"text": title}, **axes}}
