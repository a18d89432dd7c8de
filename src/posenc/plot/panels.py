"""Panels: a picture as data, before any drawing library. Titles, axes and numbers are decided here once;
`canvas` draws them with matplotlib, the explorer with Plotly, and `csv` writes them down.
"""

from __future__ import annotations

import csv as csv_writer
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.positions import Positions
from . import numbers
from .numbers import Subject
from .words import ENGLISH, Words

if TYPE_CHECKING:
    from ..core.plan import Plan
    from ..encodings.rope.scaling import Scaling
    from ..nn.attention import Attention

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Lines:
    """Curves over one axis."""

    title: str
    x: Array
    series: Mapping[str, Array]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    steps: bool = False
    across: Mapping[str, float] = field(default_factory=dict)  # horizontal lines
    upright: Mapping[str, float] = field(default_factory=dict)  # vertical lines
    floor: float | None = None  # where the axis ends below; what is less is cut off


@dataclass(frozen=True)
class Heat:
    """Numbers over two axes; row 0 is at the top. `labels` name the rows and columns (words of a sentence)."""

    title: str
    x: Array
    y: Array
    z: Array
    x_label: str
    y_label: str
    unit: str
    limits: tuple[float, float] | None = None
    diverging: bool = True
    labels: tuple[Sequence[str], Sequence[str]] | None = None
    bar: bool = True  # whether the colours are explained beside it


Panel = Lines | Heat


def array(values: Tensor) -> Array:
    return values.detach().cpu().numpy()


def csv(panels: Sequence[Panel]) -> str:
    """The panels' numbers as text: one block a panel, its title first."""
    out = io.StringIO()
    writer = csv_writer.writer(out, lineterminator="\n")
    for number, panel in enumerate(panels):
        if number:
            writer.writerow([])
        writer.writerow([panel.title])
        if isinstance(panel, Lines):
            writer.writerow([panel.x_label, *panel.series])
            writer.writerows(zip(panel.x.tolist(), *(y.tolist() for y in panel.series.values())))
        else:
            rows, columns = panel.labels or (panel.y.tolist(), panel.x.tolist())
            writer.writerow([f"{panel.y_label} \\ {panel.x_label}", *columns])
            writer.writerows([name, *row] for name, row in zip(rows, panel.z.tolist()))
    return out.getvalue()


def _around_zero(z: Array) -> tuple[float, float]:
    most = float(np.nanmax(np.abs(z))) if z.size else 0.0
    return (-most, most) if most > 0 else (-1.0, 1.0)


def _stripes(z: Array) -> bool:
    """Whether every diagonal holds one value (checked on sampled positions, which keep diagonals)."""
    return bool(np.allclose(z[1:, 1:], z[:-1, :-1], rtol=0, atol=1e-5 * max(1e-12, float(np.abs(z).max()))))


def encoding(subject: Subject, length: int = 128, head: int = 0, *, words: Words = ENGLISH) -> list[Panel]:
    """Position (or distance) × dimension."""
    vectors = numbers.encoding(subject, length, head)
    if vectors is None:
        raise ValueError(f"{subject.name} gives positions no vectors, so there is no encoding to draw")
    z = array(vectors.rows)
    return [
        Heat(
            words(f"encoding {'distance' if vectors.relative else 'position'}", name=subject.name),
            np.arange(z.shape[1]), array(vectors.places), z, words(vectors.channel),
            words("distance" if vectors.relative else "position"), words("value"), _around_zero(z),
        )
    ]  # fmt: skip


def dimensions(
    subject: Subject, length: int = 128, head: int = 0, *, chosen: Sequence[int] | None = None, words: Words = ENGLISH
) -> list[Panel]:
    """Curves of single dimensions; by default five, from the first to the last."""
    vectors = numbers.encoding(subject, length, head)
    if vectors is None:
        raise ValueError(f"{subject.name} gives positions no vectors, so there are no dimensions to draw")
    width = vectors.rows.shape[1]
    chosen = sorted({round(c * (width - 1) / 4) for c in range(5)}) if chosen is None else chosen
    if not all(0 <= c < width for c in chosen):
        raise ValueError(f"dimensions {list(chosen)} must lie between 0 and {width - 1}")
    series = {f"{words(vectors.channel)} {c}": array(vectors.rows[:, c]) for c in chosen}
    return [
        Lines(
            words("dimensions", name=subject.name), array(vectors.places), series,
            words("distance" if vectors.relative else "position"), words("value"),
        )
    ]  # fmt: skip


def similarity(subject: Subject, length: int = 128, head: int = 0, *, words: Words = ENGLISH) -> list[Panel]:
    """Cosine of the vectors of every two positions (or distances)."""
    z, places, relative = numbers.similarity(subject, length, head)
    axis = words("distance" if relative else "position")
    return [
        Heat(
            words("similarity", name=subject.name), array(places), array(places), array(z), axis, axis,
            words("cosine"), (-1.0, 1.0),
        )
    ]  # fmt: skip


def kernel(
    subject: Subject, length: int = 128, head: int = 0, *, most: int | None = None, tables: Plan | None = None,
    words: Words = ENGLISH,
) -> list[Panel]:  # fmt: skip
    """The score that position adds, over (i, j); about `most` positions of a long sequence are drawn. `tables`: see
    `numbers.kernel`.
    """
    _check_head(subject, head)
    place = numbers.positions(length, most)
    z = array(numbers.kernel(subject, place, place, head, tables)[0])
    look = words("flat") if not z.any() else words("stripes") if _stripes(z) else words("no stripes")
    return [
        Heat(
            words("kernel", name=subject.name, head=head, look=look), array(place), array(place), z,
            words("key j"), words("query i"), words("score"), _around_zero(z),
        )
    ]  # fmt: skip


def distance(
    subject: Subject, reach: int = 128, heads: Sequence[int] | None = None, *, words: Words = ENGLISH
) -> list[Panel]:
    """The score that position adds over distance, one curve a head; by default four heads, from first to last."""
    heads = sorted({round(h * (subject.heads - 1) / 3) for h in range(4)}) if heads is None else heads
    for head in heads:
        _check_head(subject, head)
    r = torch.arange(-reach, reach + 1)
    z = array(numbers.over_distance(subject, r))
    same = len({z[h].tobytes() for h in heads}) == 1
    series = {words("all heads"): z[heads[0]]} if same else {f"{words('head')} {h}": z[h] for h in heads}
    title = words("over distance", name=subject.name, look=words("heads agree" if same else "heads differ"))
    return [Lines(title, array(r), series, words("distance"), words("score"))]


def buckets(subject: Subject, reach: int | None = None, *, words: Words = ENGLISH) -> list[Panel]:
    """The table row of each distance; by default a little past the span."""
    if reach is None:
        span = numbers.span(subject, 128)
        reach = 128 if span is None else max(2, -span[0], span[1]) * 5 // 4
    r, rows = numbers.buckets(subject, reach)
    changes = torch.nonzero(rows[1:] != rows[:-1]).flatten()
    low, high = (int(r[changes[0]]), int(r[changes[-1] + 1])) if len(changes) else (0, 0)
    title = words("buckets", name=subject.name, low=low, high=high)
    return [Lines(title, array(r), {words("row"): array(rows)}, words("distance"), words("row"), steps=True)]


def wavelengths(
    head_dim: int = 128,
    base: float = 10000.0,
    scalings: Mapping[str, Scaling | None] | None = None,
    *,
    original: int = 4096,
    target: int | None = None,
    words: Words = ENGLISH,
) -> list[Panel]:
    """Tokens for one turn of each rotary pair, against the trained and the wanted context length."""
    from ..encodings.rope import scaling as kinds

    target = 4 * original if target is None else target
    factor = target / original
    if scalings is None:
        scalings = {
            "RoPE": None,
            "linear": kinds.Linear(factor=factor),
            "NTK": kinds.NTK(factor=factor),
            "YaRN": kinds.YaRN(factor=factor, original=original),
            "Llama 3": kinds.Llama3(factor=factor, original=original),
        }
    series = {name: array(numbers.wavelengths(head_dim, base, scaling, target)) for name, scaling in scalings.items()}
    slow = int(sum(w > original for w in next(iter(series.values()))))
    return [
        Lines(
            words("wavelengths", slow=slow, pairs=head_dim // 2, original=original), np.arange(head_dim // 2), series,
            words("pair"), words("wavelength"), log_y=True,
            across={words("trained", length=original): original, words("wanted", length=target): target},
        )
    ]  # fmt: skip


def decomposition(
    attention: Attention, x: Tensor, *, head: int = 0, labels: Sequence[str] | None = None, start: int = 0,
    words: Words = ENGLISH,
) -> list[Panel]:  # fmt: skip
    """A layer's scores over x [1, L, d_model] and the terms that sum to them, on one colour scale."""
    if not 0 <= head < attention.heads:
        raise ValueError(f"head {head} does not exist; the heads are 0 to {attention.heads - 1}")
    terms = {
        name: array(z[head]) for name, z in numbers.decomposition(attention, x, Positions((start, x.shape[1]))).items()
    }
    total = np.sum(list(terms.values()), axis=0)
    limits = _around_zero(np.stack([total, *terms.values()]))
    place = np.arange(start, start + x.shape[1])
    names = None if labels is None else (labels, labels)
    shown = {words("total"): total} | {
        words("absent", term=words(name)) if not np.abs(z).max() > 0 else words(name): z for name, z in terms.items()
    }
    return [
        Heat(title, place, place, z, words("key j"), words("query i"), words("score"), limits, labels=names)
        for title, z in shown.items()
    ]


def overview(subject: Subject, length: int = 128, head: int = 0, *, words: Words = ENGLISH) -> list[Panel]:
    """What is worth seeing of an encoding, in up to four panels."""
    drawn = [*distance(subject, length, words=words), *kernel(subject, length, head, words=words)]
    vectors = numbers.encoding(subject, length, head)
    if vectors is not None:
        drawn += encoding(subject, length, head, words=words)
        bucketed = not subject.absolute and subject.plan(Positions(2)).lookups
        drawn += buckets(subject, words=words) if bucketed else similarity(subject, length, head, words=words)
    return drawn


def _check_head(subject: Subject, head: int) -> None:
    if not 0 <= head < subject.heads:
        raise ValueError(f"head {head} does not exist; the heads are 0 to {subject.heads - 1}")
