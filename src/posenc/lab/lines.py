"""How each encoding is drawn: the same hue, dash and marker in every figure of the lab.

An encoding has a hue. Its variants (t5 and t5:max_distance=32, rope and rope+yarn:8) share the hue and differ in lightness
and dashes; encodings differ in their markers too, so that no line is recognised by its colour alone. Every colour has a contrast of
at least 3 : 1 with white. tests/lab/test_lines.py simulates the common kinds of colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Style(NamedTuple):
    colour: str  # of the line
    ink: str  # of its label: at least 4.5 : 1 with white
    dash: str  # SVG's stroke-dasharray; empty is a solid line
    marker: str  # a key of svg.MARKERS


# The first shade is the encoding's own and that of its labels; a variant takes the next one.
SHADES: dict[str, tuple[str, ...]] = {
    "alibi": ("#127f4a", "#3d9a6c", "#0a5230"),
    "rope": ("#0547d0", "#4b86e8", "#0a2a78", "#6b80b5", "#02597d"),
    "t5": ("#a35d05", "#b9770e", "#6e3f03"),
    "shaw": ("#7a259f", "#a45fc2", "#4f1569"),
    "clipped": ("#464501", "#7d7b23", "#2b2a00"),
    "sinusoidal": ("#bf2637", "#dc5a68", "#84111f"),
    "learned": ("#4b0521", "#8c4a63", "#2c0213"),
    "none": ("#6d6d6d", "#858585", "#3a3a3a"),
    "transformer_xl": ("#01444f", "#3f808a", "#012a31"),
    "deberta": ("#bc1f92", "#d55fb4", "#801263"),
}
MARKERS = {
    "alibi": "circle", "rope": "square", "t5": "up", "shaw": "diamond", "clipped": "down", "sinusoidal": "cross",
    "learned": "plus", "none": "dash", "transformer_xl": "right", "deberta": "left",
}  # fmt: skip
DASHES = ("", "8 4", "2 3", "9 3 2 3", "14 4", "5 2 1 2 1 2", "1 2")
SPARE = ("#4d4d9e", "#7a5c3e", "#3f7a1f", "#9a3b1f", "#2f5d73", "#6b4a86")  # encodings without a hue of their own
SPARE_MARKERS = ("star", "ring", "frame", "hollow", "bar", "dot")


def family(encoding: str) -> str:
    """The encoding without options and extension: t5:max_distance=32 and t5 are one, so are rope+yarn:8 and rope."""
    return encoding.split("+")[0].split(":")[0]


def styles(encodings: Sequence[str]) -> dict[str, Style]:
    """A style for every line of a figure."""
    used: dict[str, int] = {}
    spare = [name for name in dict.fromkeys(map(family, encodings)) if name not in SHADES]
    found = {}
    for encoding in encodings:
        name = family(encoding)
        number = used[name] = used.get(name, -1) + 1
        if name in SHADES:
            shades, marker = SHADES[name], MARKERS[name]
        else:
            at = spare.index(name) % len(SPARE)
            shades, marker = (SPARE[at],), SPARE_MARKERS[at]
        found[encoding] = Style(shades[number % len(shades)], shades[0], DASHES[number % len(DASHES)], marker)
    return found


def labels(encodings: Sequence[str]) -> dict[str, str]:
    """Short names for figures: further options are left out where the name stays unique (rope+yarn:4,beta_fast=4)."""
    short = {encoding: encoding.split(",")[0] for encoding in encodings}
    return {encoding: name if list(short.values()).count(name) == 1 else encoding for encoding, name in short.items()}
