"""Compare two runs: the results that both have, and their differences."""

from __future__ import annotations

from typing import Any, NamedTuple

from .html_tags import Markup, table, tag
from .report import line_styles, page, plotly_script, printable
from .results import Mean, Results, metric_of


class Row(NamedTuple):
    task: str
    encoding: str
    size: int
    a: Mean
    b: Mean

    @property
    def differs(self) -> bool | None:
        """Whether the difference exceeds both confidence intervals; None if a run has one seed."""
        if self.a.half is None or self.b.half is None:
            return None
        return abs(self.a.value - self.b.value) > self.a.half + self.b.half


def rows(a: Results, b: Results) -> list[Row]:
    """Every (task, encoding, size) that both runs have."""
    found = []
    others = {task["task"]: task for task in b.tasks()}
    for task in a.tasks():
        other = others.get(task["task"])
        if other is None:
            continue
        metric = metric_of(task)
        for encoding in a.encodings(task):
            for size in task["test"]:
                here, there = a.point(task, encoding, size, metric), b.point(other, encoding, size, metric)
                if isinstance(here, Mean) and isinstance(there, Mean):
                    found.append(Row(task["task"], encoding, size, here, there))
    return found


def settings_that_differ(a: Results, b: Results) -> list[str]:
    found = []
    others = {task["task"]: task for task in b.tasks()}
    for task in a.tasks():
        other = others.get(task["task"], {})
        found += [
            f"{task['task']}: {name} {task[name]} and {other[name]}"
            for name in task
            if name not in ("encodings", "test") and name in other and other[name] != task[name]
        ]
    for name in ("device", "precision", "engine"):
        if a.experiment.get(name) != b.experiment.get(name):
            found.append(f"{name}: {a.experiment.get(name)} and {b.experiment.get(name)}")
    return found


def as_text(a: Results, b: Results, names: list[str]) -> str:
    lines = [f"A {names[0]}   B {names[1]}", *(f"  differs: {line}" for line in settings_that_differ(a, b))]
    found = rows(a, b)
    if not found:
        return printable("\n".join([*lines, "the runs have no (task, encoding, size) in common"]))
    wide = max(len(row.encoding) for row in found)
    for row in found:
        mark = "  differs" if row.differs else ""
        lines.append(
            f"  {row.task:<10} {row.encoding:<{wide}} {row.size:>6}  {row.a!s:>16} {row.b!s:>16}  "
            f"{row.b.value - row.a.value:+.3f}{mark}"
        )
    return printable("\n".join(lines))


def as_html(a: Results, b: Results, names: list[str], *, still: bool = False) -> Markup:
    found = rows(a, b)
    title = f"{names[0]} and {names[1]}"
    parts: list[Markup | dict[str, Any]] = [tag("h1", title)]
    parts += [tag("p", f"Differs: {line}") for line in settings_that_differ(a, b)]
    for task in dict.fromkeys(row.task for row in found):
        own = [row for row in found if row.task == task]
        data = []
        for encoding, (colour, _) in line_styles(list(dict.fromkeys(row.encoding for row in own))).items():
            points = sorted((row for row in own if row.encoding == encoding), key=lambda row: row.size)
            for label, dash, values in (
                ("A", "solid", [row.a.value for row in points]),
                ("B", "dash", [row.b.value for row in points]),
            ):
                data.append({
                    "x": [row.size for row in points], "y": values, "name": f"{encoding} {label}",
                    "mode": "lines+markers", "line": {"color": colour, "dash": dash},
                })  # fmt: skip
        figure = {"data": data, "layout": {"xaxis": {"type": "log", "title": {"text": "size"}}, "height": 460}}
        lines = [
            (
                row.encoding,
                row.size,
                row.a,
                row.b,
                f"{row.b.value - row.a.value:+.3f}{' differs' if row.differs else ''}",
            )
            for row in own
        ]
        parts += [tag("h2", task), figure, table(("encoding", "size", "A", "B", "B − A"), lines)]
    return page(title, parts, None if still else plotly_script())
