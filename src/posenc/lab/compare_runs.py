"""Compare two runs: the results that both have, and their differences."""

from __future__ import annotations

from typing import NamedTuple

from ..core.html_tags import Markup, table, tag
from . import lines, svg
from .report import columns, fold, pad, page, printable
from .results import Mean, Results, metric_of
from .texts import Words

ENGLISH = Words("en")


class Row(NamedTuple):
    task: str
    encoding: str
    size: int
    a: Mean
    b: Mean

    @property
    def change(self) -> str:
        return f"{self.b.value - self.a.value:+.3f}"

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


def settings_that_differ(a: Results, b: Results, words: Words = ENGLISH) -> list[str]:
    pairs: dict[str, tuple[object, object]] = {}
    others = {task["task"]: task for task in b.tasks()}
    for task in a.tasks():
        other = others.get(task["task"], {})
        shared = [name for name in task if name in other and name not in ("encodings", "test")]
        pairs |= {f"{task['task']} {name}": (task[name], other[name]) for name in shared}
    for name in ("device", "precision", "engine"):
        pairs[name] = a.experiment.get(name), b.experiment.get(name)
    pairs["text"] = a.experiment.get("text", {}).get("source"), b.experiment.get("text", {}).get("source")
    return [words("two values", name=name, a=one, b=two) for name, (one, two) in pairs.items() if one != two]


def answers(found: list[Row], words: Words = ENGLISH) -> tuple[str, str]:
    """(the largest difference, how many differ by more than chance)."""
    if not found:
        return words("nothing common"), ""
    largest = max(found, key=lambda row: abs(row.b.value - row.a.value))
    first = words("largest change", **largest._asdict())
    known = [row.differs for row in found if row.differs is not None]
    return first, words("beyond", count=sum(known), total=len(known)) if known else words("beyond unknown")


def as_text(a: Results, b: Results, names: list[str], words: Words = ENGLISH) -> str:
    listed = [f"A {names[0]}   B {names[1]}"]
    listed += [f"  {words('differs setting', line=line)}" for line in settings_that_differ(a, b, words)]
    found = rows(a, b)
    wide = max((columns(row.encoding) for row in found), default=0)
    for row in found:
        mark = f"  {words('differs')}" if row.differs else ""
        name = pad(row.encoding, wide)
        listed.append(f"  {row.task:<10} {name} {row.size:>6}  {row.a!s:>16} {row.b!s:>16}  {row.change}{mark}")
    return printable("\n".join([*listed, *filter(None, answers(found, words))]))


def as_html(a: Results, b: Results, names: list[str], *, still: bool = False, language: str | None = None) -> Markup:
    return page(f"{names[0]} · {names[1]}", lambda words: _body(a, b, names, words), still=still, language=language)


def _body(a: Results, b: Results, names: list[str], words: Words) -> list[Markup]:
    found = rows(a, b)
    bold, more = answers(found, words)
    parts = [
        tag("h1", words("two runs", a=f"A {names[0]}", b=f"B {names[1]}")),
        tag("ul", tag("li", tag("strong", bold), " ", tag("span", more)), class_="answers"),
    ]
    different = settings_that_differ(a, b, words)
    if different:
        parts.append(tag("p", words("differs setting", line="; ".join(different)), class_="note"))
    panels, tables = [], []
    for task in dict.fromkeys(row.task for row in found):
        own = [row for row in found if row.task == task]
        encodings = list(dict.fromkeys(row.encoding for row in own))
        styles, labels = lines.styles(encodings), lines.labels(encodings)
        drawn = []
        for encoding in encodings:
            points = sorted((row for row in own if row.encoding == encoding), key=lambda row: row.size)
            for run, dash in (("A", ""), ("B", "6 4")):
                values = [getattr(row, run.lower()).value for row in points]
                style, label = styles[encoding]._replace(dash=dash), f"{labels[encoding]} {run}"
                drawn.append(svg.Line(f"{encoding} {run}", [row.size for row in points], values, style, label=label))
        settings = next(t for t in a.tasks() if t["task"] == task)
        metric = metric_of(settings)
        x_axis, sizes = words("bytes axis" if metric == "loss" else "size axis"), sorted({row.size for row in own})
        panels.append(svg.draw(svg.Panel(task, x_axis, words(f"{metric} axis"), drawn, ticks=sizes)))
        listed = [
            (row.encoding, row.size, row.a, row.b, f"{row.change} {words('differs')}" if row.differs else row.change)
            for row in own
        ]
        tables += [tag("h2", task), table((words("encoding"), words("length"), "A", "B", "B − A"), listed)]
    return [*parts, tag("div", *panels, class_="panels"), fold(words("every result"), *tables)]
