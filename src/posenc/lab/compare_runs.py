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
    found = []
    others = {task["task"]: task for task in b.tasks()}
    for task in a.tasks():
        other = others.get(task["task"], {})
        found += [
            words("two values", name=f"{task['task']} {name}", a=task[name], b=other[name])
            for name in task
            if name not in ("encodings", "test") and name in other and other[name] != task[name]
        ]
    for name in ("device", "precision", "engine"):
        if a.experiment.get(name) != b.experiment.get(name):
            found.append(words("two values", name=name, a=a.experiment.get(name), b=b.experiment.get(name)))
    texts = [run.experiment.get("text", {}).get("source") for run in (a, b)]
    if texts[0] != texts[1]:
        found.append(words("two values", name="text", a=texts[0], b=texts[1]))
    return found


def answers(found: list[Row], words: Words = ENGLISH) -> tuple[str, str]:
    """(the largest difference, how many differ by more than chance)."""
    if not found:
        return words("nothing common"), ""
    largest = max(found, key=lambda row: abs(row.b.value - row.a.value))
    first = words(
        "largest change", encoding=largest.encoding, task=largest.task, size=largest.size, a=largest.a, b=largest.b
    )
    known = [row.differs for row in found if row.differs is not None]
    return first, words("beyond", count=sum(known), total=len(known)) if known else words("beyond unknown")


def as_text(a: Results, b: Results, names: list[str], words: Words = ENGLISH) -> str:
    listed = [f"A {names[0]}   B {names[1]}"]
    listed += [f"  {words('differs setting', line=line)}" for line in settings_that_differ(a, b, words)]
    found = rows(a, b)
    wide = max((columns(row.encoding) for row in found), default=0)
    for row in found:
        mark = f"  {words('differs')}" if row.differs else ""
        listed.append(
            f"  {row.task:<10} {pad(row.encoding, wide)} {row.size:>6}  {row.a!s:>16} {row.b!s:>16}  "
            f"{row.b.value - row.a.value:+.3f}{mark}"
        )
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
            for label, dash, values in (
                ("A", "", [r.a.value for r in points]),
                ("B", "6 4", [r.b.value for r in points]),
            ):
                style = styles[encoding]._replace(dash=dash)
                name = f"{labels[encoding]} {label}"
                drawn.append(svg.Line(f"{encoding} {label}", [r.size for r in points], values, style, label=name))
        settings = next(t for t in a.tasks() if t["task"] == task)
        metric = metric_of(settings)
        panels.append(
            svg.draw(
                svg.Panel(
                    task, words("bytes axis" if metric == "loss" else "size axis"), words(f"{metric} axis"), drawn,
                    ticks=sorted({r.size for r in own}),
                )
            )
        )  # fmt: skip
        listed = [
            (
                row.encoding, row.size, row.a, row.b,
                f"{row.b.value - row.a.value:+.3f}{' ' + words('differs') if row.differs else ''}",
            )
            for row in own
        ]  # fmt: skip
        tables += [tag("h2", task), table((words("encoding"), words("length"), "A", "B", "B − A"), listed)]
    return [*parts, tag("div", *panels, class_="panels"), fold(words("every result"), *tables)]
