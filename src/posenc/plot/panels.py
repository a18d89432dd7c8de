"""Panels: figures as data, independent of any drawing library.

Titles, axes and values are set here once; `canvas` draws them with matplotlib, the explorer with Plotly, and `csv`
writes them as text.
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
from ..core.translation import Translation
from . import analysis
from .analysis import Subject
from .translations import ENGLISH

if TYPE_CHECKING:
    from ..core.plan import Plan
    from ..encodings.rope.scaling import Scaling
    from ..nn.attention import Attention

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Lines:
    """Curves over a shared x axis."""

    title: str
    x: Array
    series: Mapping[str, Array]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    steps: bool = False
    horizontal_marks: Mapping[str, float] = field(default_factory=dict)  # label -> y
    vertical_marks: Mapping[str, float] = field(default_factory=dict)  # label -> x
    y_min: float | None = None  # lower end of the y axis; values below it are cut off
    styles: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name -> (colour, dash), if not the usual ones
    signed_log_y: bool = False  # sign(y) log(1 + |y|): large and small values of either sign on one axis


@dataclass(frozen=True)
class Heat:
    """A heat map; row 0 is at the top. `labels` name the rows and columns (the tokens of a sentence)."""

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
    colour_bar: bool = True


Panel = Lines | Heat


def array(values: Tensor) -> Array:
    return values.detach().cpu().numpy()


def csv(panel: Panel) -> str:
    """A panel's values as CSV, one table with one header row: x and a column for each curve, or a row and a column for
    each cell's names.
    """
    out = io.StringIO()
    writer = csv_writer.writer(out, lineterminator="\n")
    if isinstance(panel, Lines):
        writer.writerow([panel.x_label, *panel.series])
        writer.writerows(zip(panel.x.tolist(), *(y.tolist() for y in panel.series.values())))
        return out.getvalue()
    rows, columns = panel.y.tolist(), panel.x.tolist()
    if panel.labels is not None:  # tokens may repeat, and the names of columns must not
        rows, columns = ([f"{n} {name}" for n, name in enumerate(names)] for names in panel.labels)
    writer.writerow([f"{panel.y_label} \\ {panel.x_label}", *columns])
    writer.writerows([name, *row] for name, row in zip(rows, panel.z.tolist()))
    return out.getvalue()


def _around_zero(z: Array) -> tuple[float, float]:
    most = float(np.nanmax(np.abs(z))) if z.size else 0.0
    return (-most, most) if most > 0 else (-1.0, 1.0)


def _stripes(z: Array) -> bool:
    """Whether every diagonal is constant (evenly sampled positions keep diagonals)."""
    near = 1e-5 * max(1e-12, float(np.nanmax(np.abs(z))))
    return bool(np.allclose(z[1:, 1:], z[:-1, :-1], rtol=0, atol=near, equal_nan=True))


def label(subject: Subject, words: Translation = ENGLISH) -> str:
    """The encoding's name, with the origin of its tables: random ones show the mechanism, not what a model learns."""
    if subject.tables in ("trained", "untrained"):
        return words(f"{subject.tables} table", name=subject.name)
    return subject.name


def encoding(subject: Subject, length: int = 128, head: int = 0, *, words: Translation = ENGLISH) -> list[Panel]:
    """Position (or distance) × dimension."""
    vectors = analysis.encoding(subject, length, head)
    if vectors is None:
        raise ValueError(f"{subject.name} has no vectors per position, so there is no encoding to draw")
    z, axis = array(vectors.rows), "distance" if vectors.relative else "position"
    at = "centred" if analysis.is_centred(subject) and not vectors.relative else axis
    title, axes = words(f"encoding {at}", name=label(subject, words)), (words(vectors.channel), words(axis))
    return [Heat(title, np.arange(z.shape[1]), array(vectors.at), z, *axes, words("value"), _around_zero(z))]


def dimensions(
    subject: Subject, length: int = 128, head: int = 0, *, selected: Sequence[int] | None = None,
    words: Translation = ENGLISH,
) -> list[Panel]:  # fmt: skip
    """Curves of single dimensions; by default five, evenly spaced."""
    vectors = analysis.encoding(subject, length, head)
    if vectors is None:
        raise ValueError(f"{subject.name} has no vectors per position, so there are no dimensions to draw")
    width = vectors.rows.shape[1]
    selected = sorted({round(c * (width - 1) / 4) for c in range(5)}) if selected is None else selected
    if not all(0 <= c < width for c in selected):
        raise ValueError(f"dimensions {list(selected)} must lie between 0 and {width - 1}")
    series = {f"{words(vectors.channel)} {c}": array(vectors.rows[:, c]) for c in selected}
    title, axis = words("dimensions", name=label(subject, words)), words("distance" if vectors.relative else "position")
    return [Lines(title, array(vectors.at), series, axis, words("value"))]


def similarity(subject: Subject, length: int = 128, head: int = 0, *, words: Translation = ENGLISH) -> list[Panel]:
    """Cosine of the vectors of every two positions (or distances)."""
    values, at, relative = analysis.similarity(subject, length, head)
    axis, z = words("distance" if relative else "position"), array(values)
    if np.isnan(z).any():  # later keys are masked
        title, axes, unit = "product of query and key", (words("key j"), words("query i")), words("product")
    else:
        title, axes, unit = f"similarity {'distance' if relative else 'position'}", (axis, axis), words("cosine")
    return [Heat(words(title, name=label(subject, words)), array(at), array(at), z, *axes, unit, (-1.0, 1.0))]


def kernel(
    subject: Subject, length: int = 128, head: int = 0, *, most: int | None = None, tables: Plan | None = None,
    words: Translation = ENGLISH,
) -> list[Panel]:  # fmt: skip
    """The contribution of position to the score of (i, j), for about `most` positions of a long sequence. `tables`: see
    `analysis.kernel`.
    """
    _check_head(subject, head)
    positions = analysis.sample_positions(length, most)
    z = array(analysis.kernel(subject, positions, positions, head, tables)[0])
    pattern = words("flat" if not np.nansum(np.abs(z)) else "stripes" if _stripes(z) else "no stripes")
    title, at = words("kernel", name=label(subject, words), head=head, pattern=pattern), array(positions)
    return [Heat(title, at, at, z, words("key j"), words("query i"), words("score"), _around_zero(z))]


def distance(
    subject: Subject, reach: int = 128, heads: Sequence[int] | None = None, *, words: Translation = ENGLISH
) -> list[Panel]:
    """The contribution of position over distance, one curve per head; by default four heads, evenly spaced."""
    heads = sorted({round(h * (subject.heads - 1) / 3) for h in range(4)}) if heads is None else heads
    for head in heads:
        _check_head(subject, head)
    r = torch.arange(-reach, 1 if subject.encoding.causal_only else reach + 1)
    z = array(analysis.over_distance(subject, r))
    same = len({z[h].tobytes() for h in heads}) == 1
    series = {words("all heads"): z[heads[0]]} if same else {f"{words('head')} {h}": z[h] for h in heads}
    title = words("over distance", name=label(subject, words), pattern=words("heads agree" if same else "heads differ"))
    return [Lines(title, array(r), series, words("distance"), words("score"))]


def buckets(subject: Subject, reach: int | None = None, *, words: Translation = ENGLISH) -> list[Panel]:
    """The table row of each distance; by default to a little beyond the span."""
    if reach is None:
        span = analysis.span_of(subject.plan(Positions(128)))
        reach = 128 if span is None else max(2, -span[0], span[1]) * 5 // 4
    r, rows = analysis.buckets(subject, reach)
    changes = torch.nonzero(rows[1:] != rows[:-1]).flatten()
    low, high = (int(r[changes[0]]), int(r[changes[-1] + 1])) if len(changes) else (0, 0)
    title = words("buckets", name=subject.name, low=low, high=high)
    return [Lines(title, array(r), {words("row"): array(rows)}, words("distance"), words("row"), steps=True)]


def wavelengths(
    head_dim: int = 128, base: float = 10000.0, scalings: Mapping[str, Scaling | None] | None = None, *,
    original: int = 4096, target: int | None = None, words: Translation = ENGLISH,
) -> list[Panel]:  # fmt: skip
    """Tokens per rotation of each rotary pair, against the trained and the target context length."""
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
    series = {name: array(analysis.wavelengths(head_dim, base, scaling, target)) for name, scaling in scalings.items()}
    slow = int(sum(w > original for w in next(iter(series.values()))))
    title = words("wavelengths", slow=slow, pairs=head_dim // 2, original=original)
    marks = {words("trained", length=original): original, words("target length", length=target): target}
    x, axes = np.arange(head_dim // 2), (words("pair"), words("wavelength"))
    return [Lines(title, x, series, *axes, log_y=True, horizontal_marks=marks)]


def decomposition(
    attention: Attention, x: Tensor, *, head: int = 0, labels: Sequence[str] | None = None,
    words: Translation = ENGLISH,
) -> list[Panel]:  # fmt: skip
    """A layer's scores for x [1, L, d_model] and the terms that sum to them, on one colour scale."""
    _check_head(attention, head)
    terms = {name: array(z[head]) for name, z in analysis.decomposition(attention, x, Positions(x.shape[1])).items()}
    total = np.sum(list(terms.values()), axis=0)
    limits = _around_zero(np.stack([total, *terms.values()]))
    positions = np.arange(x.shape[1])
    names = None if labels is None else (labels, labels)
    titles = [words(name) if np.abs(z).max() > 0 else words("absent", term=words(name)) for name, z in terms.items()]
    axes = words("key j"), words("query i"), words("score")
    return [
        Heat(title, positions, positions, z, *axes, limits, labels=names)
        for title, z in zip([words("total"), *titles], [total, *terms.values()])
    ]


def overview(subject: Subject, length: int = 128, head: int = 0, *, words: Translation = ENGLISH) -> list[Panel]:
    """Up to four panels that summarise an encoding."""
    drawn = [*distance(subject, length, words=words), *kernel(subject, length, head, words=words)]
    vectors = analysis.encoding(subject, length, head)
    if vectors is not None:
        drawn += encoding(subject, length, head, words=words)
        bucketed = not subject.absolute and _reads_buckets(subject)
        drawn += buckets(subject, words=words) if bucketed else similarity(subject, length, head, words=words)
    return drawn


def _reads_buckets(subject: Subject) -> bool:
    """Whether the plan consists of tables by distance: a grid's plan changes the positions, FIRE's far one is a function."""
    runs, tokens = (subject.plan(positions) for positions in (Positions(2), Positions(torch.arange(2))))
    return bool(runs.lookups and tokens.lookups) and runs.positions.runs is not None


def _check_head(layer: Subject | Attention, head: int) -> None:
    if not 0 <= head < layer.heads:
        raise ValueError(f"head {head} does not exist; the heads are 0 to {layer.heads - 1}")
