"""Figures of every encoding, computed from its own plan (needs matplotlib: the extra `plot`).

    posenc.plot.overview("t5").savefig("t5.png")
    posenc.plot.distance("alibi", reach=256, heads=16)
    posenc.plot.kernel(my_encoding, length=64, head=3)

Each function takes an encoding, or a name with options and sizes (d_model, heads, head_dim), and returns a matplotlib
figure. An encoding made from a name has the tables of a small trained model where there is one (`trained`), else
untrained ones, initialised with seed 0; titles state which. Distances are r = j - i, key minus
query, so the past is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import analysis, panels
from .analysis import subject
from .canvas import figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from ..core.encoding import Encoding
    from ..encodings.rope.scaling import Scaling
    from ..nn.attention import Attention

__all__ = [
    "VIEWS", "buckets", "decomposition", "dimensions", "distance", "encoding", "kernel", "overview", "save",
    "similarity", "wavelengths",
]  # fmt: skip


def overview(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """Up to four panels: scores over distance and over (i, j), the encoding, and its buckets or similarity.

    Raises ValueError for a head that does not exist and OptionError for unknown options, as every figure does.

        >>> len(posenc.plot.overview("t5").axes) >= 4
        True
    """
    return figure(panels.overview(subject(encoding, **options), length, head))


def encoding(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """Heat map of position × dimension; distance × dimension (or × head) for relative encodings.

    Raises ValueError for an encoding without vectors.

        >>> posenc.plot.encoding("sinusoidal", d_model=32).axes[0].get_ylabel()
        'position (tokens)'
    """
    return figure(panels.encoding(subject(encoding, **options), length, head))


def dimensions(
    encoding: Encoding | str, *, length: int = 128, head: int = 0, selected: Sequence[int] | None = None, **options: Any
) -> Figure:
    """Curves of single dimensions of the encoding, by default five.

    Raises ValueError for dimensions that do not exist.

        >>> len(posenc.plot.dimensions("sinusoidal", selected=[0, 10]).axes[0].lines)
        2
    """
    return figure(panels.dimensions(subject(encoding, **options), length, head, selected=selected))


def similarity(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """Cosine similarity of the vectors of every two positions, or distances.

    Raises ValueError for an encoding without vectors.

        >>> posenc.plot.similarity("rope", length=16).axes[0].get_xlabel()
        'position (tokens)'
    """
    return figure(panels.similarity(subject(encoding, **options), length, head))


def kernel(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """The contribution of position to the score of query i and key j, with equal content at every position.

    Raises ValueError for a head that does not exist.

        >>> posenc.plot.kernel("alibi", heads=4, head=3).axes[0].get_ylabel()
        'query position i (tokens)'
    """
    return figure(panels.kernel(subject(encoding, **options), length, head))


def distance(
    encoding: Encoding | str, *, reach: int = 128, selected_heads: Sequence[int] | None = None, **options: Any
) -> Figure:
    """The contribution of position over distance, one curve per selected head.

    Raises ValueError for a head that does not exist.

        >>> len(posenc.plot.distance("alibi", heads=4, selected_heads=[0, 3]).axes[0].lines)
        2
    """
    return figure(panels.distance(subject(encoding, **options), reach, selected_heads))


def buckets(encoding: Encoding | str, *, reach: int | None = None, **options: Any) -> Figure:
    """The table row of each distance.

    Raises ValueError for an encoding without a table by distance.

        >>> posenc.plot.buckets("t5").axes[0].get_ylabel()
        'table row'
    """
    return figure(panels.buckets(subject(encoding, **options), reach))


def wavelengths(
    *, head_dim: int = 128, base: float = 10000.0, scalings: Mapping[str, Scaling | None] | None = None,
    original: int = 4096, target: int | None = None,
) -> Figure:  # fmt: skip
    """Rotary wavelengths for each scaling, against the trained (`original`) and the target length.

    Raises ValueError for sizes that do not fit.

        >>> len(posenc.plot.wavelengths(head_dim=64, target=16384).axes[0].lines) >= 5
        True
    """
    return figure(panels.wavelengths(head_dim, base, scalings, original=original, target=target))


def decomposition(
    layer: Attention | Encoding | str, x: Tensor | None = None, *, length: int = 24, head: int = 0,
    labels: Sequence[str] | None = None, **options: Any,
) -> Figure:  # fmt: skip
    """A layer's scores for x [1, L, d_model], and the content and position terms that sum to them.

    An encoding is put into an untrained layer; x defaults to `length` random vectors.

    Raises ValueError for a head that does not exist.

        >>> len(posenc.plot.decomposition("deberta", length=8).axes) >= 5
        True
    """
    from ..nn.attention import Attention

    if not isinstance(layer, Attention):
        layer = analysis.layer(subject(layer, **options))
    elif options:
        raise TypeError(f"options {', '.join(options)} need an encoding's name; this layer exists already")
    x = analysis.content(layer, length) if x is None else x
    return figure(panels.decomposition(layer, x, head=head, labels=labels), columns=3)


VIEWS: dict[str, Callable[..., Figure]] = {
    "overview": overview,
    "encoding": encoding,
    "dimensions": dimensions,
    "similarity": similarity,
    "kernel": kernel,
    "distance": distance,
    "buckets": buckets,
    "decomposition": decomposition,
}
