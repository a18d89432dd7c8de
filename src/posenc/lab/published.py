"""Published results compared with measured ones: perplexity at a length over perplexity at the training length."""

from __future__ import annotations

import math
from typing import Any

from ..core.html_tags import Markup, join, table, tag
from .results import Mean, Results
from .texts import Words

ENGLISH = Words("en")

# perplexities as printed in the papers; sizes in tokens, the first is the training length: others are compared by their multiple of it
TABLES: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[float | None, ...]]]] = {
    "alibi": (
        "ALiBi (Press et al. 2021, Table 2): WikiText-103, 247 M parameters, trained at 512",
        (512, 1012, 2512, 8512, 15512),
        {
            "sinusoidal": (20.05, 43.54, 132.4, 305.7, 406.0),
            "rope": (20.07, 21.37, 31.58, 54.98, 79.25),
            "t5": (19.65, 18.79, 20.41, 43.08, None),
            "alibi": (19.73, 18.73, 18.41, 18.34, 18.31),
        },
    ),
    "kerple": (
        "KERPLE (Chi et al. 2022): OpenWebText2, 162 M parameters, trained at 512, 5 seeds",
        (512, 1024, 2048, 4096, 8192, 16384),
        {
            "sinusoidal": (33.0, 750.0, 5507.0, 14039.0, 22621.0, 30046.0),
            "rope": (24.2, 32.8, 62.4, 111.0, 185.0, 269.0),
            "t5": (23.7, 21.9, 21.7, 22.5, 25.5, 31.4),
            "alibi": (23.9, 22.4, 22.5, 22.2, 22.3, 22.5),
            "kerple": (23.9, 22.0, 21.6, 21.2, 21.3, 21.4),
            "kerple:form=power": (23.9, 22.1, 21.9, 21.5, 21.6, 21.6),
        },
    ),
    # from one public transcription of the paper's HTML page (v3), not checked against the paper itself
    "cable": (
        "CABLE (Veisi et al. 2025, Table 1): WikiText-103, 44 M parameters, trained at 1024",
        (1024, 2048, 4096, 8192, 15360),
        {
            "rope": (22.26, 41.40, 114.77, 220.56, 375.62),
            "t5": (23.60, 27.64, 73.99, 198.64, 411.09),
            "alibi": (22.74, 22.05, 21.73, 21.58, 21.30),
            "kerple": (22.56, 21.72, 21.32, 21.33, 21.58),
            "fire": (22.90, 22.68, 29.57, 54.89, 104.79),
        },
    ),
}
HOLDS = 0.05  # nats: the same threshold for published and measured changes


def rows(name: str, results: Results) -> list[tuple[str, int, float, float | None]]:
    """(encoding, length, published change, measured change): nats between the training length and the length."""
    _, sizes, encodings = TABLES[name]
    task = next((t for t in results.tasks() if t["task"] == "text"), None)
    found = []
    for encoding, perplexities in encodings.items():
        for size, perplexity in zip(sizes[1:], perplexities[1:]):
            if perplexity is None:
                continue
            published = math.log(perplexity / perplexities[0])  # type: ignore[operator]
            measured = None
            if task is not None:
                nearest = _nearest(task, size * task["train"] / sizes[0])
                here = results.point(task, encoding, task["train"], "loss")
                far = None if nearest is None else results.point(task, encoding, nearest, "loss")
                if isinstance(here, Mean) and isinstance(far, Mean):
                    measured = far.value - here.value
            found.append((encoding, size, published, measured))
    return found


def orders(name: str, results: Results) -> list[tuple[int, list[str], list[str]]]:
    """(length, published order, measured order), best first, of the encodings that have both results."""
    _, sizes, encodings = TABLES[name]
    task = next((t for t in results.tasks() if t["task"] == "text"), None)
    found = []
    for column, size in enumerate(sizes if task is not None else ()):
        nearest = None if task is None else _nearest(task, size * task["train"] / sizes[0])
        theirs: dict[str, float] = {}
        ours: dict[str, float] = {}
        for encoding, perplexities in encodings.items():
            point = None if nearest is None else results.point(task, encoding, nearest, "loss")  # type: ignore[arg-type]
            perplexity = perplexities[column]
            if perplexity is not None and isinstance(point, Mean):
                theirs[encoding], ours[encoding] = perplexity, point.value
        if len(ours) > 1:
            found.append((size, sorted(theirs, key=theirs.__getitem__), sorted(ours, key=ours.__getitem__)))
    return found


def _nearest(task: dict[str, Any], size: float) -> int | None:
    """The tested size nearest to a published one; None if there is none within a quarter on a log scale."""
    nearest = min(task["test"], key=lambda s: abs(math.log(s / size)))
    return nearest if abs(math.log(nearest / size)) < 0.25 else None


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
    ranked = orders(name, results)
    comma = words("comma")
    orderings = [
        words("published order", size=size, ours=comma.join(ours), theirs=comma.join(theirs))
        for size, theirs, ours in ranked
        if theirs != ours
    ]
    if not orderings:
        return words.join(count, words("published same order"))
    return words.join(
        count, words("published other order", count=len(orderings), lengths=len(ranked), orders="; ".join(orderings))
    )


def as_html(name: str, results: Results, words: Words = ENGLISH) -> Markup:
    lines = [
        (
            encoding,
            size,
            f"{published:+.2f}",
            "–" if measured is None else f"{measured:+.2f}",
            agreement(published, measured, words),
        )
        for encoding, size, published, measured in rows(name, results)
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
