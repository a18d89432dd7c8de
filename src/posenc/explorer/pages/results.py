"""Results: the figures and the report of a run of the lab."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ...core.translation import Translation
from ...plot.panels import Lines, Panel
from ..url_state import InputError, State, to_text
from .base import Controls, Figure, Page, View

FOLDERS = ("out", "runs", ".")


class Results(Page):
    key = "results"
    figures = 1
    html_first = True
    defaults = {"run": ""}

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        text = state["run"].strip() or next(iter(runs()), "")
        if not text:
            raise InputError(words("no run"), clear=True)
        folder = run_folder(text)
        if folder is None:
            raise InputError(words("not a run", run=text[:200]), clear=True)
        drawn: list[Panel] = []
        notes: list[str] = []
        code = answer = ""
        if (folder / "results.json").is_file():
            code = f"from posenc.lab import results\nrun = results.read({str(folder)!r})\nrows = run.rows"
            try:
                answer, drawn = _summary(folder, words)
            except Exception as error:  # a file of another version or origin: its report may still open
                notes.append(words("unreadable", error=f"{type(error).__name__}: {error}"))
        if (folder / "report.html").is_file():
            answer += _report(folder, is_open=not answer, words=words)
        else:
            notes.append(words("no report", run=str(folder)))
        title = f'<h2 class="run-name">{escape(words("run of", run=folder.name))}</h2>'
        return View(
            [Figure(drawn, columns=1, height=400)] if drawn else [], code=code, html=title + answer, notes=notes
        )

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        found = runs()
        first = found[0] if found else None
        run = self.component(
            gr.Dropdown, "run", words, found, value=first, info=words("run why"), allow_custom_value=True
        )

        def write(state: State) -> list[Any]:
            """The list is read again: runs may have come since the server started."""
            now = runs()
            return [gr.update(choices=now, value=state["run"] or next(iter(now), None))]

        return Controls([run], lambda text: {"run": to_text(text)}, write)


def _report(folder: Path, *, is_open: bool, words: Translation) -> str:
    """The run's report in a frame, folded away below the answer."""
    address = escape(f"/report?run={quote(str(folder))}")
    title = escape(words("report of", run=folder.name))
    return (
        f'<details class="whole-report"{" open" * is_open}><summary>{title}</summary>'
        f'<p><a href="{address}" target="_blank" rel="noopener">{escape(words("open report"))}</a></p>'
        f'<iframe src="{address}" title="{title}" loading="lazy" sandbox="allow-scripts allow-downloads" class="report"></iframe>'
        "</details>"
    )


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


def _summary(folder: Path, words: Translation) -> tuple[str, list[Panel]]:
    """(the answer as HTML, one panel per task: its metric over the tested size, one curve per encoding)."""
    from ...lab import summary
    from ...lab.lines import labels, styles
    from ...lab.results import metric_of, read
    from ...lab.texts import Words

    run = read(folder)
    drawn: list[Panel] = []
    for task in run.tasks():
        metric = metric_of(task)
        sizes = sorted({row["size"] for row in run.rows if row["task"] == task["task"]})
        names = labels(run.encodings(task))
        series: dict[str, Any] = {}
        drawn_as: dict[str, tuple[str, str]] = {}
        for encoding, style in styles(list(names)).items():
            points = [run.point(task, encoding, size, metric) for size in sizes]
            series[names[encoding]] = np.array([getattr(point, "value", np.nan) for point in points], dtype=float)
            dash = ",".join(f"{part}px" for part in style.dash.split()) or "solid"
            drawn_as[names[encoding]] = style.colour, dash
        if series and sizes:
            title = words("run task", task=task["task"], metric=words(metric))
            marks = {words("trained", length=task["train"]): float(task["train"])}
            axes = words("tested size"), words(metric)
            x = np.array(sizes, dtype=float)
            drawn.append(Lines(title, x, series, *axes, log_x=True, styles=drawn_as, vertical_marks=marks))
    answer = str(summary.as_html(run, Words(words("language")))) if run.rows else ""
    # the page around it has styles of its own, which a class that is named three times outweighs
    scoped = summary.STYLE.replace(".lab", ".lab.lab.lab")
    return f"<style>{scoped}</style>{answer}" if answer else "", drawn
