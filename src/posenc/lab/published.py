"""Published results compared with measured ones: perplexity at a length over perplexity at the training length."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

from ..core.html_tags import Markup, join, table, tag
from .evidence import text_task
from .results import Mean, Results
from .texts import Words

ENGLISH = Words("en")

TABLES: dict[str, tuple[str, list[int], dict[str, list[float]]]] = {
    name: (table["title"], table["sizes"], table["perplexities"])
    for name, table in tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8")).items()
}
"""Title, lengths and perplexities of each encoding."""
HOLDS = 0.05  # nats: the same threshold for published and measured changes


def rows(name: str, results: Results) -> list[tuple[str, int, float, float | None]]:
    """(encoding, length, published change, measured change): nats between the training length and the length."""
    _, sizes, encodings = TABLES[name]
    found = []
    for encoding, perplexities in encodings.items():
        here, *losses = _losses(results, encoding, sizes)
        for size, perplexity, loss in zip(sizes[1:], perplexities[1:], losses):
            if not math.isnan(perplexity):
                measured = None if here is None or loss is None else loss - here
                found.append((encoding, size, math.log(perplexity / perplexities[0]), measured))
    return found


def orders(name: str, results: Results) -> list[tuple[int, list[str], list[str]]]:
    """(length, published order, measured order), best first, of the encodings that have both results."""
    _, sizes, encodings = TABLES[name]
    losses = {encoding: _losses(results, encoding, sizes) for encoding in encodings}
    found = []
    for column, size in enumerate(sizes):
        ours = {encoding: loss for encoding in encodings if (loss := losses[encoding][column]) is not None}
        theirs = {encoding: encodings[encoding][column] for encoding in ours}
        known = [encoding for encoding in ours if not math.isnan(theirs[encoding])]
        if len(known) > 1:
            found.append((size, sorted(known, key=theirs.__getitem__), sorted(known, key=ours.__getitem__)))
    return found


def _losses(results: Results, encoding: str, sizes: list[int]) -> list[float | None]:
    """The loss at the tested length nearest to each published one, in multiples of the training length, which is the first; None
    where there is none within a quarter on a log scale."""
    task = text_task(results)
    if task is None:
        return [None] * len(sizes)
    found: list[float | None] = []
    for size in sizes:
        away = {tested: abs(math.log(tested * sizes[0] / (size * task["train"]))) for tested in task["test"]}
        nearest = min(away, key=away.__getitem__)
        point = results.point(task, encoding, nearest, "loss") if away[nearest] < 0.25 else None
        found.append(point.value if isinstance(point, Mean) else None)
    return found


def outcomes_agree(published: float, measured: float) -> bool:
    """Whether published and measured change agree: the quality holds, or it drops."""
    return (published <= HOLDS) == (measured <= HOLDS)


def agreement(published: float, measured: float | None, words: Words) -> str:
    if measured is None:
        return words("not measured")
    if outcomes_agree(published, measured):
        return words("agrees")
    theirs, ours = (words("holds" if value <= HOLDS else "loses") for value in (published, measured))
    return words("disagrees", theirs=theirs, ours=ours)


def sentence(name: str, results: Results, words: Words = ENGLISH) -> str:
    """A sentence on agreement and disagreement with a published table."""
    found = [row for row in rows(name, results) if row[3] is not None]
    title = TABLES[name][0].split(":")[0]
    if not found:
        return words("published nothing", title=title)
    other = [
        words("published entry", encoding=row[0], size=row[1], outcome=agreement(row[2], row[3], words))
        for row in found
        if not outcomes_agree(row[2], row[3])  # type: ignore[arg-type]
    ]
    others = words("published others", names=words("comma").join(other)) if other else ""
    count = words("published count", title=title, agree=len(found) - len(other), found=len(found), others=others)
    ranked, comma = orders(name, results), words("comma")
    orderings = [
        words("published order", size=size, ours=comma.join(ours), theirs=comma.join(theirs))
        for size, theirs, ours in ranked
        if theirs != ours
    ]
    key = "published other order" if orderings else "published same order"
    return words.join(count, words(key, count=len(orderings), lengths=len(ranked), orders="; ".join(orderings)))


def as_html(name: str, results: Results, words: Words = ENGLISH) -> Markup:
    lines = [
        (encoding, size, f"{theirs:+.2f}", "–" if ours is None else f"{ours:+.2f}", agreement(theirs, ours, words))
        for encoding, size, theirs, ours in rows(name, results)
    ]
    head = [words(key) for key in ("encoding", "length", "published value", "measured value")]
    about = words.join(words("published about"), sentence(name, results, words))
    return join([tag("p", about), table((*head, words("verdict")), lines)])


def as_text(name: str, results: Results, words: Words = ENGLISH) -> str:
    """The table for a terminal: a line for each encoding, published and measured change at each length."""
    lines = [words("published line", title=TABLES[name][0])]
    found = rows(name, results)
    for encoding in dict.fromkeys(row[0] for row in found):
        changes = (
            f"{size}: {published:+.2f} / {'–' if measured is None else f'{measured:+.2f}'}"
            for other, size, published, measured in found
            if other == encoding
        )
        lines.append(f"  {encoding:<12}{'   '.join(changes)}")
    return "\n".join(lines)
