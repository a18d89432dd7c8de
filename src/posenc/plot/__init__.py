"""Pictures of every encoding, from its own numbers (matplotlib; the extra `plot`).

    posenc.plot.overview("t5").savefig("t5.png")
    posenc.plot.distance("alibi", reach=256, heads=16)
    posenc.plot.kernel(my_scheme, length=64, head=3)

Each function takes an encoding, or an encoding's name with its options and sizes (d_model, heads, head_dim), and returns a
matplotlib figure. Learned tables of an encoding made by name are as they start, with seed 0. Signs: r = j - i, key minus
query, so the past is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import numbers, panels
from .canvas import figure, save
from .numbers import subject

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
    """Up to four panels: over distance, over (i, j), the encoding, and its buckets or similarity."""
    return figure(panels.overview(subject(encoding, **options), length, head))


def encoding(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """Heat map of position × dimension; distance × dimension (or × head) for relative encodings."""
    return figure(panels.encoding(subject(encoding, **options), length, head))


def dimensions(
    encoding: Encoding | str, *, length: int = 128, head: int = 0, chosen: Sequence[int] | None = None, **options: Any
) -> Figure:
    """Curves of single dimensions of the encoding; `chosen` names them."""
    return figure(panels.dimensions(subject(encoding, **options), length, head, chosen=chosen))


def similarity(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """Cosine similarity of the vectors of every two positions, or distances."""
    return figure(panels.similarity(subject(encoding, **options), length, head))


def kernel(encoding: Encoding | str, *, length: int = 128, head: int = 0, **options: Any) -> Figure:
    """What position adds to the score of query i and key j, with the same content everywhere."""
    return figure(panels.kernel(subject(encoding, **options), length, head))


def distance(
    encoding: Encoding | str, *, reach: int = 128, shown: Sequence[int] | None = None, **options: Any
) -> Figure:
    """The same over distance, one curve for each head in `shown`."""
    return figure(panels.distance(subject(encoding, **options), reach, shown))


def buckets(encoding: Encoding | str, *, reach: int | None = None, **options: Any) -> Figure:
    """The table row that each distance reads."""
    return figure(panels.buckets(subject(encoding, **options), reach))


def wavelengths(
    *, head_dim: int = 128, base: float = 10000.0, scalings: Mapping[str, Scaling | None] | None = None,
    original: int = 4096, target: int | None = None,
) -> Figure:  # fmt: skip
    """Rotary wavelengths against the trained (`original`) and the wanted (`target`) length, for each scaling."""
    return figure(panels.wavelengths(head_dim, base, scalings, original=original, target=target))


def decomposition(
    layer: Attention | Encoding | str, x: Tensor | None = None, *, length: int = 24, head: int = 0,
    labels: Sequence[str] | None = None, **options: Any,
) -> Figure:  # fmt: skip
    """A layer's scores over x [1, L, d_model], and the content and position terms that sum to them. Of an encoding: an
    untrained layer with it, over `length` random vectors where x is not given.
    """
    from ..nn.attention import Attention

    if not isinstance(layer, Attention):
        layer = numbers.layer(subject(layer, **options))
    elif options:
        raise TypeError(f"{', '.join(options)}: options go with an encoding's name; this layer is made already")
    x = numbers.content(layer, length) if x is None else x
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
