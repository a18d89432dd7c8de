"""Results: the figures and the report of a run of the lab."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ...plot.panels import Lines, Panel
from ...plot.translations import Translation
from ..url_state import InputError, State, to_text
from .base import Controls, Figure, Page, View

FOLDERS = ("out", "runs", ".")


class Results(Page):
    key = "results"
    figures = 1
    defaults = {"run": ""}

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        text = state["run"].strip()
        if not text:
            found = runs()
            raise InputError(words("no run") if not found else words("choose run", runs=", ".join(found)))
        folder = run_folder(text)
        if folder is None:
            raise InputError(words("not a run", run=text[:200]))
        drawn: list[Panel] = []
        notes: list[str] = []
        code = ""
        if (folder / "results.json").is_file():
            code = f"from posenc.lab import results\nrun = results.read({str(folder)!r})\nrows = run.rows"
            try:
                drawn = _figures(folder, words)
            except Exception as error:  # a file of another version or origin: its report may still open
                notes.append(words("unreadable", error=f"{type(error).__name__}: {error}"))
        if not (folder / "report.html").is_file():
            notes.append(words("no report", run=str(folder)))
            return View([Figure(drawn, columns=2, height=400)] if drawn else [], code=code, notes=notes)
        address = f"/report?run={quote(str(folder))}"
        frame = (
            f'<p><a href="{escape(address)}" target="_blank" rel="noopener">{escape(words("open report"))}</a></p>'
            f'<iframe src="{escape(address)}" title="{escape(words("report of", run=folder.name))}" '
            'sandbox="allow-scripts allow-downloads" class="report"></iframe>'
        )
        return View([Figure(drawn, columns=2, height=400)] if drawn else [], code=code, html=frame, notes=notes)

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        run = gr.Dropdown(
            runs(), value=None, label=words("run"), info=words("run why"), allow_custom_value=True,
            elem_id="results-run",
        )  # fmt: skip
        return Controls([run], lambda text: {"run": to_text(text)}, lambda state: [state["run"] or None])


def runs() -> list[str]:
    """Run folders near the working directory, newest first."""
    found: dict[Path, float] = {}
    for parent in FOLDERS:
        for pattern in ("*/results.json", "*/report.html"):
            for file in Path(parent).glob(pattern):
                found[file.parent] = max(found.get(file.parent, 0.0), file.stat().st_mtime)
    return [str(folder) for folder in sorted(found, key=lambda folder: -found[folder])][:50]


def run_folder(text: str) -> Path | None:
    """The folder of a run; None for any folder without a report or results."""
    try:
        folder = Path(text).expanduser().resolve()
        known = any((folder / name).is_file() for name in ("report.html", "results.json"))
    except (OSError, ValueError, RuntimeError):
        return None
    return folder if known else None


def _figures(folder: Path, words: Translation) -> list[Panel]:
    """One panel per task: its metric over the tested size, one curve per encoding."""
    from ...lab.results import metric_of, read

    run = read(folder)
    drawn: list[Panel] = []
    for task in run.tasks():
        metric = metric_of(task)
        rows = [row for row in run.rows if row["task"] == task["task"]]
        sizes = sorted({row["size"] for row in rows})
        series: dict[str, Any] = {}
        for encoding in run.encodings(task):
            points = [run.point(task, encoding, size, metric) for size in sizes]
            series[encoding] = np.array([getattr(point, "value", np.nan) for point in points], dtype=float)
        if series and sizes:
            drawn.append(
                Lines(
                    words("run task", task=task["task"], metric=words(metric)), np.array(sizes, dtype=float), series,
                    words("tested size"), words(metric),
                    vertical_marks={words("trained", length=task["train"]): float(task["train"])},
                )
            )  # fmt: skip
    return drawn
