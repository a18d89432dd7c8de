"""The summary of a run as HTML: the answer, one figure, a small table, the meaning of its words, how the models were made.

    as_html(results, Words("zh"))     an element; STYLE is the style sheet it needs

The report opens with it, and the explorer's page of results shows it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ..core.html_tags import Markup, join, tag
from . import answer, evidence, lines, svg, verdict
from .results import Mean, Results, metric_of
from .texts import TAGS, Words
from .verdict import Standing

SYMBOLS = {"holds": "✓", "loses": "↘", "breaks": "✕", "cannot": "∅", "not learnt": "?", "missing": "–"}
OTHER_TASKS = 3  # columns of other tasks in the small table

STYLE = Path(__file__).with_name("summary.css").read_text(encoding="utf-8")


def as_html(results: Results, words: Words) -> Markup:
    """The whole summary."""
    items = [tag("li", tag("strong", a.bold), " ", tag("span", a.more)) for a in answer.answers(results, words)]
    panels, note = figure(results, words)
    rows = small_table(results, words)
    if len(panels) == 1:  # the table stands beside it
        parts = [tag("div", *panels, rows, class_="panels"), note]
    else:
        parts = [tag("div", *panels, class_="panels"), note, rows]
    parts = [tag("ul", *items, class_="answers"), *parts, definitions(results, words), setup(results, words)]
    return tag("div", *parts, class_="lab", lang=TAGS[words.language])


# ---- the figure ---------------------------------------------------------------------------------------------------
def figure(results: Results, words: Words) -> tuple[list[Markup], Markup]:
    """(panels, how to read them): the main task's scores over the length, after the stronger run's, if there is one."""
    task = answer.main_task(results)
    stronger = evidence.stronger_than(results)
    far = answer.length(task, max(task["test"]), words)
    if stronger is None:
        title = words("figure of", task=task["task"], train=answer.length(task, task["train"], words), far=far)
        panels = [svg.draw(scores(results, task, words, title=title))]
    else:
        here = scores(results, task, words, title=words("figure here", far=far))
        panels = [_stronger(words.language), svg.draw(here)]
    note = words("read figure" if metric_of(task) == "loss" else "read figure accuracy")
    if task["seeds"] > 1 or stronger is not None:
        note = words.join(note, words("interval"))
    return panels, tag("p", note, class_="note")


@cache
def _stronger(language: str) -> Markup:
    """The strongest run's panel, the same in every report."""
    words, (run, task) = Words(language), evidence.strongest_text()
    reach = answer.length(task, max(task["test"]), words)
    return svg.draw(scores(run, task, words, title=words("figure stronger", gpu=answer.gpu(run), far=reach)))


def scores(
    results: Results, task: dict[str, Any], words: Words, *, title: str = "", metric: str | None = None
) -> svg.Panel:
    """A task's scores over the tested sizes, one line for each encoding."""
    metric = metric or metric_of(task)
    encodings = results.encodings(task)
    styles, labels = lines.styles(encodings), lines.labels(encodings)
    sizes = sorted(task["test"])
    drawn, notes = [], {}
    for encoding in encodings:
        points = {size: results.point(task, encoding, size, metric) for size in sizes}
        known = {size: point for size, point in points.items() if isinstance(point, Mean)}
        if not known:
            continue
        if isinstance(points[sizes[-1]], str):
            notes[encoding] = words("cannot run")
        drawn.append(
            svg.Line(
                encoding, list(known), [p.value for p in known.values()], styles[encoding],
                [p.half for p in known.values()], labels[encoding],
            )
        )  # fmt: skip
    is_text = metric_of(task) == "loss"
    axis = words("sliding axis", stride=task["sliding"]) if metric == "sliding" else words(f"{metric} axis")
    return svg.Panel(
        title or task["task"], words("bytes axis" if is_text else "size axis"), axis, drawn, ticks=sizes, notes=notes,
        trained=task["train"], trained_label=words("trained" if is_text else "trained size"),
        y_range=(0.0, 1.03) if metric == "accuracy" else None,
    )  # fmt: skip


# ---- the small table ----------------------------------------------------------------------------------------------
def small_table(results: Results, words: Words) -> Markup:
    """A row for each encoding: its verdicts, and the main task's scores at the training length and at the longest test.
    Ordered by the stronger run where there is one."""
    task = answer.main_task(results)
    ranked = verdict.standings(results, task)
    others = [t for t in results.tasks() if t is not task][:OTHER_TASKS]
    elsewhere = [{s.encoding: s for s in verdict.standings(results, t)} for t in others]
    stronger = evidence.stronger_than(results)
    there: dict[str, Standing] = {}
    key = "from to" if metric_of(task) == "loss" else "right from to"
    head = [tag("th", words("encoding"))]
    if stronger is not None:
        run, theirs = stronger
        there = {s.encoding: s for s in verdict.standings(run, theirs)}
        ranked.sort(key=lambda s: s.encoding not in there or there[s.encoding].outcome != "holds")
        head += [
            tag("th", words("stronger run", gpu=answer.gpu(run)), class_="verdict"),
            tag("th", words(key, from_=theirs["train"], to=max(theirs["test"])), class_="wide"),
        ]
    head += [
        tag("th", words("this run" if stronger is not None else "verdict"), class_="verdict"),
        tag("th", words(key, from_=task["train"], to=max(task["test"]))),
        *(tag("th", t["task"], class_="verdict wide") for t in others),
    ]
    rows = [tag("tr", *head)]
    for s in ranked:
        cells = [tag("td", breakable(s.encoding))]
        if stronger is not None:
            other = there.get(s.encoding)
            cells += [badge(other, words), tag("td", other.change if other else "–", class_="wide")]
        change = s.change if s.far else f"{s.here.value:.3f}" if s.here else "–"
        cells += [badge(s, words), tag("td", change)]
        cells += [badge(found.get(s.encoding), words, "wide") for found in elsewhere]
        rows.append(tag("tr", *cells))
    return tag("div", tag("table", *rows, class_="small"), class_="scroll", tabindex=0)


def breakable(encoding: str) -> Markup:
    """The name, with places where a narrow column may break it."""
    return join(re.split("(?<=[:,+_=])", encoding), "<wbr/>")


def badge(s: Standing | None, words: Words, more: str = "") -> Markup:
    outcome = s.outcome if s is not None else "missing"
    text = tag("span", f"{SYMBOLS[outcome]} {words(outcome)}" if s is not None else SYMBOLS[outcome], class_=outcome)
    return tag("td", text, class_=f"verdict {more}".strip())


# ---- what the words mean, how the models were made ----------------------------------------------------------------
def definitions(results: Results, words: Words) -> Markup:
    metrics = sorted({metric_of(task) for task in results.tasks()}, reverse=True)  # loss first
    parts = [
        words(f"define {metric}", hold=verdict.HOLDS[metric], broken=verdict.BREAKS[metric], learnt=verdict.LEARNT)
        for metric in metrics
    ]
    return tag("p", words.join(*parts), class_="note")


def setup(results: Results, words: Words) -> Markup:
    found = [tag("h2", words("setup"))]
    for task in results.tasks():
        if "layers" not in task:
            continue
        data = words(f"data {metric_of(task)}", batch=task["batch"], train=answer.length(task, task["train"], words))
        layers = words("layers 1") if task["layers"] == 1 else words("layers n", count=task["layers"])
        sentence = words(
            "setup model", task=words("setup task", task=task["task"], what=answer.what(task, words)), layers=layers,
            width=task["width"], heads=task["heads"], parameters=answer.parameters(results, task, words),
            steps=task["steps"], data=data, seeds=answer.seeds(results, task, words), lr=task["lr"],
        )  # fmt: skip
        found.append(tag("p", sentence))
    text = results.experiment.get("text") or {}
    more = []
    if text.get("source"):
        where = answer.source(results, words)
        if str(text.get("bytes", "")).isdigit():
            where = words("source size", source=where, megabytes=f"{int(text['bytes']) / 1e6:.1f}")
        more.append(words("setup text", source=where))
    more += [_rate(results, words), words("setup equal"), answer.limits(results, words)]
    return join([*found, tag("p", words.join(*more))])


def _rate(results: Results, words: Words) -> str:
    """What position_lr is, and which encodings it favours."""
    rates = {task.get("position_lr", 1.0) for task in results.tasks()}
    rate = max(rates)
    if rate == 1.0:
        return words("setup same rate")
    counts: dict[str, int] = {}
    for training in results.trainings:
        name = training["settings"]["encoding"]
        counts[name] = max(counts.get(name, 0), training["position_parameters"])
    tables = [name for name, count in counts.items() if count]
    free = [name for name, count in counts.items() if not count]
    return words("setup rate", rate=rate, tables=words.names(tables) or "–", free=words.names(free) or "–")
