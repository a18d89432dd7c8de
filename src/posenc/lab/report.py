"""The report: results.json, results.csv, and one HTML file that opens anywhere, offline, in two languages.

The page opens with the answer (summary.py); every table and curve is folded away below it. Both languages are in the
page, and a switch that needs no script shows one of them.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ..core.html_tags import Markup, join, table, tag
from . import answer, evidence, lines, published, summary, svg, verdict
from .results import Mean, Results, metric_of
from .store import write
from .texts import LANGUAGES, TAGS, Words

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
LANGUAGE_STYLE = """
body:not(:has(#lang-{key}:checked)) main.{key} {{ display: none; }}
"""
# the browser's language on the first visit, unless the page was made for one; #zh and #en in the address choose too
CHOOSE = """
const wanted = location.hash.slice(1) || (document.body.dataset.given ? '' : navigator.language.slice(0, 2));
const input = document.getElementById('lang-' + wanted);
if (input) input.checked = true;
const name = () => { document.documentElement.lang = document.querySelector('input[name=lang]:checked').value; };
document.querySelectorAll('input[name=lang]').forEach(one => one.addEventListener('change', name));
name();
"""


def save(results: Results, folder: Path, *, still: bool = False, language: str | None = None) -> list[Path]:
    """Write every form of the results."""
    html = as_html(results, still=still, language=language).encode()
    files = {"results.json": results.as_json(), "results.csv": results.as_csv(), "report.html": html}
    for name, content in files.items():
        write(folder / name, content)
    return [folder / name for name in files]


def as_html(results: Results, *, still: bool = False, language: str | None = None) -> Markup:
    """The page. `still`: without scripts, so it opens in the first language; `language`: the one it opens in."""
    return page(results.experiment["title"], lambda words: _body(results, words), still=still, language=language)


def page(
    title: str, body: Callable[[Words], Iterable[Markup]], *, still: bool = False, language: str | None = None
) -> Markup:
    """A whole page in every language; `body` makes its parts in one."""
    first = language or next(iter(LANGUAGES))
    style = summary.STYLE + STYLE + "".join(LANGUAGE_STYLE.format(key=key) for key in LANGUAGES)
    head = [
        tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title), tag("style", Markup(style)),
    ]  # fmt: skip
    labels = []
    for key, name in LANGUAGES.items():
        chosen = {"checked": "checked"} if key == first else {}
        switch = tag("input", type="radio", name="lang", id=f"lang-{key}", value=TAGS[key], **chosen)
        labels.append(tag("label", switch, name, lang=TAGS[key]))
    mains = [tag("main", *body(Words(key)), class_=f"lab {key}", lang=TAGS[key]) for key in LANGUAGES]
    script = [] if still else [tag("script", Markup(CHOOSE))]
    given = {"data_given": language} if language else {}
    whole = tag("html", tag("head", *head), tag("body", join([tag("nav", *labels, aria_label="Language · 语言"), *mains, *script], "\n"), **given), lang=TAGS[first])  # fmt: skip
    return Markup(f"<!doctype html>{whole}\n")


def _body(results: Results, words: Words) -> list[Markup]:
    parts = [tag("h1", words.title(results.experiment["title"])), summary.as_html(results, words)]
    for task in results.tasks():
        parts.append(fold(words("details task", task=task["task"]), *_every_length(results, task, words)))
        if results.steps(task):
            parts.append(fold(words("details steps", task=task["task"]), *_every_step(results, task, words)))
    parts += _published(results, words)
    if evidence.stronger_than(results) is not None:
        parts += _stronger(words.language)
    parts.append(fold(words("details training"), *(_training(results, words))))
    if rates := _rates(results, words):
        parts.append(fold(words("details rates"), *rates))
    settings = {"experiment": results.experiment, "machine": results.machine}
    parts.append(fold(words("details settings"), tag("pre", json.dumps(settings, indent=1), tabindex=0)))
    return parts


def fold(title: str, *content: Markup) -> Markup:
    """A part of the page that opens on a click."""
    return tag("details", tag("summary", title), *content)


def _published(results: Results, words: Words) -> list[Markup]:
    return [
        fold(words("published", title=published.TABLES[name][0]), published.as_html(name, results, words))
        for name in results.experiment.get("published", ())
    ]


@cache
def _stronger(language: str) -> list[Markup]:
    """The strongest run: every length, and the published tables. The same in every report."""
    words, (run, task) = Words(language), evidence.strongest_text()
    about = words(
        "stronger about", gpu=answer.gpu(run), parameters=answer.parameters(run, task, words),
        train=answer.length(task, task["train"], words), steps=task["steps"], seeds=answer.seeds(run, task, words),
    )  # fmt: skip
    whole = fold(words("details stronger"), tag("p", about), *_every_length(run, task, words))
    return [whole, *_published(run, words)]


def _every_length(results: Results, task: dict[str, Any], words: Words) -> list[Markup]:
    """A task's scores at every length, as curves and as a table, and those in sliding windows."""
    panels = [svg.draw(summary.scores(results, task, words))]
    parts = [tag("p", answer.what(task, words))]
    sliding = _sliding(results, task, words) if task.get("sliding") and metric_of(task) == "loss" else ""
    if sliding:
        title = words("sliding title", task=task["task"])
        panels.append(svg.draw(summary.scores(results, task, words, title=title, metric="sliding")))
    parts += [tag("div", *panels, class_="panels"), _table(results, task, words)]
    return [*parts, tag("p", sliding)] if sliding else parts


def _table(results: Results, task: dict[str, Any], words: Words) -> Markup:
    """The verdict is next to the name, so that it is visible on narrow screens."""
    sizes, metric = sorted(task["test"]), metric_of(task)
    head = [words("trained tick", size=size) if size == task["train"] else size for size in sizes]
    rows, standings = [], verdict.standings(results, task)
    for s in standings:
        points = [results.point(task, s.encoding, size, metric) for size in sizes]
        scores = (_score(point, words) for point in points)
        rows.append([tag("td", summary.breakable(s.encoding)), summary.badge(s, words), *scores])
    verdict_head = tag("th", words("verdict"), class_="verdict")
    reasons = [
        tag("p", words("cannot why", encoding=s.encoding, size=s.size, reason=s.reason), class_="note")
        for s in standings
        if s.reason
    ]
    return join([table([words("encoding"), verdict_head, *head], rows), *reasons])


def _score(point: Mean | str | None, words: Words) -> str:
    return str(point) if isinstance(point, Mean) else words("cannot run") if point else "–"


def _every_step(results: Results, task: dict[str, Any], words: Words) -> list[Markup]:
    """The verdicts after parts of the training, and which of them still move at its end."""
    steps = results.steps(task)
    rows, moved, known = [], [], 0
    for encoding, found in verdict.by_steps(results, task):
        cells = [cell for one in found for cell in (summary.badge(one, words), tag("td", one.change))]
        rows.append([tag("td", summary.breakable(encoding)), *cells])
        outcomes = [one.outcome for one in found[-2:]]
        known += "missing" not in outcomes
        moved += [encoding] if "missing" not in outcomes and len(set(outcomes)) > 1 else []
    head = [cell for step in steps for cell in (tag("th", words("after steps", steps=step), class_="verdict"), "")]
    about = words("steps about", train=task["train"], far=max(task["test"]), last=steps[-1])
    settled = words(
        "steps moved" if moved else "steps settled", names=words.names(moved), before=steps[-2], last=steps[-1]
    )
    return [tag("p", words.join(about, settled if known else "")), table([words("encoding"), *head], rows)]


def _sliding(results: Results, task: dict[str, Any], words: Words) -> str:
    """The change in sliding windows, where the first bytes of a window do not count."""
    far = max(task["test"])
    changes = {}
    for encoding in results.encodings(task):
        ends = [results.point(task, encoding, size, "sliding") for size in (task["train"], far)]
        if isinstance(ends[0], Mean) and isinstance(ends[1], Mean):
            changes[encoding] = ends[1].value - ends[0].value
    if not changes:
        return ""
    most = verdict.HOLDS["loss"]
    hold = [f"{encoding} ({change:+.3f})" for encoding, change in changes.items() if change <= most]
    lose = [f"{encoding} {changes[encoding]:+.2f}" for encoding in sorted(changes, key=changes.__getitem__)][
        len(hold) :
    ]
    span = {"train": task["train"], "far": far}
    return words.join(
        words("sliding about", stride=task["sliding"]),
        words.number_of("sliding hold", hold, **span) if hold else words("sliding none", **span),
        words("sliding lose", names=words("comma").join(lose)) if lose else "",
    )


def _training(results: Results, words: Words) -> list[Markup]:
    parts = []
    for task in results.tasks():
        trained = results.trained(task)
        styles, labels = lines.styles(trained), lines.labels(trained)
        drawn = []
        for encoding in trained:
            for record in results.training(task, encoding)[:1]:  # one seed: more would hide one another
                steps, losses = [step for step, _ in record["curve"]], [loss for _, loss in record["curve"]]
                drawn.append(svg.Line(encoding, steps, losses, styles[encoding], label=labels[encoding]))
        if any(line.x for line in drawn):
            title = words("curves of", task=task["task"])
            panel = svg.Panel(title, words("step axis"), words("training axis"), drawn, log=False, thin=True)
            parts.append(svg.draw(panel))
    costs = [join([tag("h3", task["task"]), _costs(results, task, words)]) for task in results.tasks()]
    return [tag("div", *parts, class_="panels"), *costs, tag("p", words("shared machine"), class_="note")]


def _costs(results: Results, task: dict[str, Any], words: Words) -> Markup:
    """Speed and memory in this run."""
    rows = []
    for encoding in results.trained(task):
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
    keys = ("encoding", "parameters", "of the encoding", "tokens/s", "memory", "seconds", "training")
    return table([words(key) for key in keys], rows)


def _rates(results: Results, words: Words) -> list[Markup]:
    """The learning-rate check, if there is one."""
    parts = []
    for task in results.tasks():
        if not task.get("rates"):
            continue
        rates = sorted({task["lr"], *(task["lr"] * times for times in task["rates"])})
        rows = []
        for encoding in results.trained(task):
            found = results.rates(task, encoding)
            known = {rate: point.value for rate, point in found.items() if isinstance(point, Mean)}
            if not known:
                continue
            pick = min if metric_of(task) == "loss" else max
            best = pick(known, key=lambda rate: known[rate])
            scores = (f"{known[r]:.3f}{' *' if r == best else ''}" if r in known else "–" for r in rates)
            rows.append([encoding, *scores])
        parts += [tag("h3", task["task"]), tag("p", words("rates about", lr=task["lr"]))]
        parts.append(table([words("encoding"), *(f"{rate:g}" for rate in rates)], rows))
    return parts


def mean_of(values: list[float], form: str, times: float = 1.0) -> str:
    return form.format(times * sum(values) / len(values)) if values else "–"


# ---- the terminal -------------------------------------------------------------------------------------------------
def as_text(
    results: Results, words: Words | None = None, *, bold: Callable[[str], str] = str, width: int | None = None
) -> str:
    """The tables for a terminal and, at the end, the answer, wrapped to `width` columns."""
    words = words or Words("en")
    tables = ["\n".join(_text_table(results, task, words)) for task in results.tasks()]
    tables += [published.as_text(name, results, words) for name in results.experiment.get("published", ())]
    rows = [printable("\n\n".join(["", *tables, words("answer")])[1:])]
    for one in answer.answers(results, words):
        rows += [bold(line) for line in wrap(printable(one.bold), width, "  ")]
        rows += wrap(printable(one.more), width, "    ")
    return "\n".join(rows)


def wrap(text: str, width: int | None, indent: str) -> list[str]:
    """Lines of at most `width` columns; Chinese breaks between any two characters, but not before a closing mark."""
    rows, row = [], indent
    for part in re.findall(r"[\u2e80-\uffef“”][，。；：、）”]*|[^\s\u2e80-\uffef“”]+[，。；：、）”]*|\s+", text):
        if width is not None and columns(row) + columns(part) > width and row.strip():
            rows.append(row.rstrip())
            row = indent
        row += "" if row == indent and part.isspace() else part
    return [*rows, row.rstrip()] if row.strip() else rows


def _text_table(results: Results, task: dict[str, Any], words: Words) -> list[str]:
    metric, sizes = metric_of(task), sorted(task["test"])
    size = answer.length(task, task["train"], words)
    rows = [
        words("trained to", task=f"{task['task']}, {answer.what(task, words)}", axis=words(f"{metric} axis"), size=size,
              seeds=answer.seeds(results, task, words))
    ]  # fmt: skip
    standings = verdict.standings(results, task)
    wide = max(map(columns, [words("encoding"), *(s.encoding for s in standings)]))
    tags = max(map(columns, [words("verdict"), *(words(s.outcome) for s in standings)]))
    rows.append(f"  {pad(words('encoding'), wide)}  {pad(words('verdict'), tags)}" + "".join(f"{n:>16}" for n in sizes))
    for s in standings:
        row = f"  {pad(s.encoding, wide)}  {pad(words(s.outcome), tags)}"
        for n in sizes:
            point = results.point(task, s.encoding, n, metric)
            text = _score(point, words)
            row += " " * max(1, 16 - columns(text)) + text
        rows.append(row)
    return rows


def columns(text: str) -> int:
    """The columns of a text on a terminal: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, wide: int) -> str:
    return text + " " * (wide - columns(text))


def printable(text: str) -> str:
    """Text that is safe to print: names from a file may hold a terminal's control characters."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)
