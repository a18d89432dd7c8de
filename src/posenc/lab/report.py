"""The report: results.json, results.csv, and one HTML file that opens anywhere, offline."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import published, svg, verdict
from .html_tags import Markup, data, escaped, join, table, tag
from .results import Mean, Results, metric_of
from .store import write

# Okabe and Ito's colours, distinguishable for every common kind of colour vision, then three more
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F00", "#000000", "#882255", "#44AA99")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
TITLES = {"loss": "loss, nats per byte (lower is better)", "accuracy": "right answers (higher is better)"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td:not(.why) { white-space: nowrap; }
.holds { color: #00694d; } .breaks, .cannot { color: #b03000; } .why { color: #777; font-size: 13px; text-align: left; }
.verdict { background: #f2f6fa; border-left: 4px solid #0072B2; padding: .5em 1em; }
.wide { overflow-x: auto; } pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 13px; }
"""


def save(results: Results, folder: Path, *, still: bool = False) -> list[Path]:
    """Write every form of the results."""
    page = as_html(results, still=still).encode()
    files = {"results.json": results.as_json(), "results.csv": results.as_csv(), "report.html": page}
    for name, content in files.items():
        write(folder / name, content)
    return [folder / name for name in files]


def as_html(results: Results, *, still: bool = False) -> Markup:
    """The page. Its figures are static pictures with `still` or without Plotly."""
    title = results.experiment["title"]
    sentences = [tag("p", sentence) for sentence in verdict.sentences(results)]
    parts: list[Markup | dict[str, Any]] = [tag("h1", title), tag("div", *sentences, class_="verdict")]
    for task in results.tasks():
        metric = metric_of(task)
        parts += [
            tag("h2", task["task"]),
            _curves(results, task, metric, TITLES[metric]),
            _table(results, task, metric),
        ]
        if task.get("sliding") and metric == "loss":
            stride = task["sliding"]
            about = (
                f"Sliding windows: only the last {stride} bytes of a window count, the same bytes at every length. "
                "A gain above that is missing here comes from the first bytes of a window, which have "
                "little context."
            )
            figure = _curves(results, task, "sliding", f"loss of the last {stride} bytes, nats per byte")
            parts += [tag("p", about), figure]
        parts += [tag("h3", "Training"), _training(results, task), _costs(results, task), _rates(results, task)]
    parts += [published.as_html(name, results) for name in results.experiment.get("published", ())]
    settings = {"experiment": results.experiment, "machine": results.machine}
    parts += [tag("h2", "Settings"), tag("pre", json.dumps(settings, indent=1))]
    return page(title, parts, None if still else plotly_script())


def page(title: str, parts: Iterable[Markup | dict[str, Any]], script: str | None) -> Markup:
    """A whole page. A part is Markup or a figure in Plotly's form; `script` is Plotly, None draws static pictures."""
    figures: list[dict[str, Any]] = []
    body: list[Markup] = []
    for part in parts:
        if isinstance(part, Markup):
            body.append(part)
        elif script is None:
            body.append(svg.draw(part))
        else:
            body.append(tag("div", id=f"figure{len(figures)}"))
            figures.append(escaped(part))
    head = [
        tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width"), tag("title", title),
        tag("style", Markup(STYLE)),
    ]  # fmt: skip
    if script is not None:
        draw = "figures.forEach((f, i) => Plotly.newPlot('figure' + i, f.data, f.layout, {responsive: true, displaylogo: false}));"
        head.append(tag("script", Markup(script)))
        body.append(tag("script", Markup(f"const figures = {data(figures)};\n{draw}")))
    whole = tag("html", tag("head", *head), tag("body", join(body, "\n")), lang="en")
    return Markup(f"<!doctype html>{whole}\n")


def printable(text: str) -> str:
    """Text that is safe to print: names from a file may hold a terminal's control characters."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)


def plotly_script() -> str | None:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return get_plotlyjs()


def line_styles(encodings: list[str]) -> dict[str, tuple[str, str]]:
    """A colour for every trained encoding; its extensions share it and differ in their dashes."""
    trained = list(dict.fromkeys(s.split("+")[0] for s in encodings))
    used: dict[str, int] = {}
    styles = {}
    for encoding in encodings:
        base = encoding.split("+")[0]
        used[base] = used.get(base, -1) + 1
        styles[encoding] = (COLOURS[trained.index(base) % len(COLOURS)], DASHES[used[base] % len(DASHES)])
    return styles


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, **more.pop("xaxis", {})}, "yaxis": {"title": {"text": y}, **more.pop("yaxis", {})},
        "height": 460, "margin": {"t": 20, "l": 60, "r": 20, "b": 50}, "template": "none", "hovermode": "closest", **more,
    }  # fmt: skip


def _curves(results: Results, task: dict[str, Any], metric: str, title: str) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    styles = line_styles(results.encodings(task))
    for encoding, (colour, dash) in styles.items():
        points = [(size, results.point(task, encoding, size, metric)) for size in sorted(task["test"])]
        known = [(size, p) for size, p in points if isinstance(p, Mean)]
        if not known:
            continue
        x = [size for size, _ in known]
        if any(p.half is not None for _, p in known):
            upper = [p.value + (p.half or 0) for _, p in known]
            lower = [p.value - (p.half or 0) for _, p in known]
            traces.append({
                "x": x + x[::-1], "y": upper + lower[::-1], "fill": "toself", "fillcolor": colour, "opacity": 0.12,
                "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "legendgroup": encoding, "mode": "lines",
            })  # fmt: skip
        traces.append({
            "x": x, "y": [p.value for _, p in known], "name": encoding, "mode": "lines+markers", "legendgroup": encoding,
            "line": {"color": colour, "dash": dash},
        })  # fmt: skip
    sizes = sorted(task["test"])
    train = {
        "type": "line", "x0": task["train"], "x1": task["train"], "y0": 0, "y1": 1, "yref": "paper",
        "line": {"color": "#999", "dash": "dot", "width": 1},
    }  # fmt: skip
    axis = {"type": "log", "tickvals": sizes, "ticktext": [str(s) for s in sizes]}
    more: dict[str, Any] = {"yaxis": {"range": [0, 1.03]}} if metric == "accuracy" else {}
    return {"data": traces, "layout": _layout("size (training up to the dotted line)", title, xaxis=axis, shapes=[train], **more)}  # fmt: skip


def _table(results: Results, task: dict[str, Any], metric: str) -> Markup:
    sizes = sorted(task["test"])
    head = [f"{size}{' (trained)' if size == task['train'] else ''}" for size in sizes]
    rows = []
    for s in verdict.standings(results, task):
        points = [results.point(task, s.encoding, size, metric) for size in sizes]
        scores = [point if isinstance(point, Mean) else "cannot" if point else "–" for point in points]
        rows.append([s.encoding, *scores, tag("td", s.outcome, class_=s.outcome), tag("td", s.reason, class_="why")])
    return table(["encoding", *head, f"at {max(sizes)}", ""], rows)


def _training(results: Results, task: dict[str, Any]) -> dict[str, Any]:
    trained = list(dict.fromkeys(s.split("+")[0] for s in results.encodings(task)))
    styles = line_styles(trained)
    traces = []
    for encoding in trained:
        for number, record in enumerate(results.training(task, encoding)):
            steps = [step for step, _ in record["curve"]]
            losses = [loss for _, loss in record["curve"]]
            traces.append({
                "x": steps, "y": losses, "name": encoding, "mode": "lines", "legendgroup": encoding,
                "showlegend": number == 0, "line": {"color": styles[encoding][0], "width": 1.2},
            })  # fmt: skip
    return {"data": traces, "layout": _layout("step", "training loss, nats")}


def _costs(results: Results, task: dict[str, Any]) -> Markup:
    """Speed and memory in this run, whose trials may have shared the machine."""
    rows = []
    for encoding in dict.fromkeys(s.split("+")[0] for s in results.encodings(task)):
        records = results.training(task, encoding)
        if not records:
            continue
        first = records[0]
        speeds = [r["tokens_per_second"] for r in records if r["tokens_per_second"]]
        memories = [r["memory"] for r in records if r["memory"] is not None]
        rows.append([
            encoding, f"{first['parameters']:,}", f"{first['position_parameters']:,}", mean_of(speeds, "{:,.0f}"),
            mean_of(memories, "{:,.0f}", 1e-6), mean_of([r["seconds"] for r in records], "{:.1f}"),
            ", ".join(sorted({r["status"] for r in records})),
        ])  # fmt: skip
    head = ("encoding", "parameters", "of the encoding", "tokens/s", "peak memory, MB", "seconds", "training")
    return table(head, rows)


def _rates(results: Results, task: dict[str, Any]) -> Markup:
    """The learning-rate check, if there is one."""
    if not task.get("rates"):
        return Markup("")
    metric = metric_of(task)
    rates = sorted({task["lr"], *(task["lr"] * times for times in task["rates"])})
    rows = []
    for encoding in dict.fromkeys(s.split("+")[0] for s in results.encodings(task)):
        found = results.rates(task, encoding)
        known = {rate: point.value for rate, point in found.items() if isinstance(point, Mean)}
        if not known:
            continue
        pick = min if metric == "loss" else max
        best = pick(known, key=lambda rate: known[rate])
        rows.append([encoding, *(f"{known[r]:.3f}{' *' if r == best else ''}" if r in known else "–" for r in rates)])
    about = f"Score at the training size, first seed; * is the best, {task['lr']:g} was used."
    head = ["encoding", *(f"{rate:g}" for rate in rates)]
    return join([tag("h3", "Learning-rate check"), tag("p", about), table(head, rows)])


def mean_of(values: list[float], form: str, times: float = 1.0) -> str:
    return form.format(times * sum(values) / len(values)) if values else "–"


def as_text(results: Results) -> str:
    """The tables and the verdict for a terminal."""
    lines: list[str] = []
    for task in results.tasks():
        metric = metric_of(task)
        sizes = sorted(task["test"])
        lines += ["", f"{task['task']}: {TITLES[metric]}; trained to size {task['train']}, seeds: {task['seeds']}"]
        wide = max([len(s) for s in results.encodings(task)] + [6])
        lines.append("  " + "encoding".ljust(wide) + "".join(f"{size:>16}" for size in sizes))
        for s in verdict.standings(results, task):
            row = "  " + s.encoding.ljust(wide)
            for size in sizes:
                point = results.point(task, s.encoding, size, metric)
                row += f"{point!s:>16}" if isinstance(point, Mean) else f"{'cannot' if point else '–':>16}"
            lines.append(f"{row}  {s.outcome}")
    for name in results.experiment.get("published", ()):
        lines += ["", published.as_text(name, results)]
    lines += ["", "Verdict", *(f"  {sentence}" for sentence in verdict.sentences(results))]
    return printable("\n".join(lines))
