"""The figures of the site: those of the course (posenc.plot.course), an overview of each encoding, and what only a page needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from posenc.encodings.registry import ENCODINGS
from posenc.plot import analysis, canvas, course, panels
from posenc.plot.panels import Heat, Panel


def attention_order() -> list[Panel]:
    """A map of which of the four doors each encoding takes."""
    doors = ["input", "queries, keys", "scores", "values"]
    rows = list(ENCODINGS)
    z = np.zeros((len(rows), 4))
    for row, name in enumerate(rows):
        enters = ENCODINGS[name].enters
        z[row] = [door in enters for door in ("input", "queries", "scores", "values")]
    return [
        Heat("Where each encoding enters", np.arange(4), np.arange(len(rows)), z, "", "", "enters", (0.0, 1.0),
             diverging=False, labels=(rows, doors))
    ]  # fmt: skip


COURSE = (
    course.order_lost, attention_order, course.sinusoid_table, course.sinusoid_similarity, course.learned_resize, course.shaw_clip,
    course.shaw_memory, course.four_terms, course.t5_buckets, course.t5_mistake, course.deberta_buckets, course.rope_decay,
    course.rope_rotation, course.scaling_wavelengths, course.dynamic_base, course.scaling_divisors, course.yarn_ramp,
    course.alibi_slopes, course.lab_quick,
)  # fmt: skip
FIGURES: dict[str, Callable[..., list[Panel]]] = {make.__name__.replace("_", "-"): make for make in COURSE}
"""The function `rope_decay` draws the figure `rope-decay`."""


def draw(name: str, path: Path) -> None:
    if name.startswith("overview-"):
        drawn = panels.overview(analysis.subject(name.removeprefix("overview-")), 96)
    elif name in FIGURES:
        drawn = FIGURES[name]()
    else:
        raise ValueError(f"unknown figure {name!r}; there are {', '.join(FIGURES)} and overview-ENCODING")
    canvas.save(canvas.figure(drawn), path)


def names() -> list[str]:
    return [*FIGURES, *(f"overview-{name}" for name in ENCODINGS if name != "none")]
