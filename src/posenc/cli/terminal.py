"""Terminal output: colours, wrapped text, tables that fit the width, line charts in braille dots."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

_ESCAPE = re.compile(r"\033\[[0-9;]*m")
# Wong's palette, distinguishable with every common kind of colour vision, as the nearest of the 256 colours
PALETTE = (32, 214, 36, 166, 175, 81, 228)


def prepare() -> None:
    """Replace characters that the output encoding lacks by question marks instead of failing; a closed stream discards."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it stays open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def announce(text: str) -> None:
    """Report at once, on stderr, what a command is about to do; stdout is for its result."""
    print(text, file=sys.stderr, flush=True)


def coloured() -> bool:
    """Whether to use colours: only on a terminal, and not if NO_COLOR is set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if coloured() and text else text


def bold(text: str) -> str:
    return _paint(text, "1")


def dim(text: str) -> str:
    return _paint(text, "2")


def colour(text: str, number: int) -> str:
    return _paint(text, f"38;5;{PALETTE[number % len(PALETTE)]}")


def width() -> int:
    """The number of columns: the terminal's, $COLUMNS, or 100 for a file or a pipe."""
    return max(30, shutil.get_terminal_size((100, 24)).columns)


def length(text: str) -> int:
    """The number of columns of a text, without its colour codes."""
    return len(_ESCAPE.sub("", text))


def wrap(text: str, columns: int) -> list[str]:
    return textwrap.wrap(text, max(8, columns), break_long_words=True, break_on_hyphens=False) or [""]


def hanging(label: str, text: str, *, after: str = "") -> list[str]:
    """The label and the text, wrapped to the terminal with a hanging indent."""
    indent = length(label)
    lines = wrap(text, width() - indent - length(after))
    return [(label if i == 0 else " " * indent) + line + (after if i == 0 else "") for i, line in enumerate(lines)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, narrowest: int = 9) -> list[str]:
    """A table whose cells wrap to fit the terminal; one block per row if it is too narrow for columns."""
    gaps = 2 * (len(header) - 1)
    longest = [max(len(row[c]) for row in [header, *rows]) for c in range(len(header))]
    words = [max(len(word) for row in [header, *rows] for word in row[c].split()) for c in range(len(header))]
    least = [longest[0], *(max(min(narrowest, longest[c]), words[c]) for c in range(1, len(header)))]
    room = width() - gaps
    if sum(least) > room:
        return _blocks(header, rows)
    columns = list(least)
    # widen the column that needs the most room, one character at a time
    while sum(columns) < room and columns != longest:
        columns[max(range(len(columns)), key=lambda c: longest[c] / columns[c] if columns[c] < longest[c] else 0)] += 1
    lines = ["  ".join(bold(name.ljust(columns[c])) for c, name in enumerate(header)).rstrip()]
    lines.append(dim("─" * (sum(columns) + gaps)))
    for row in rows:
        cells = [wrap(cell, columns[c]) for c, cell in enumerate(row)]
        for i in range(max(map(len, cells))):
            texts = [(cell[i] if i < len(cell) else "").ljust(columns[c]) for c, cell in enumerate(cells)]
            texts[0] = bold(texts[0]) if i == 0 else texts[0]
            lines.append("  ".join(texts).rstrip())
    return lines


def _blocks(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    wide = max(map(len, header[1:]))
    lines: list[str] = []
    for row in rows:
        lines.append(bold(row[0]))
        for name, cell in zip(header[1:], row[1:]):
            lines += hanging(f"  {dim(name.ljust(wide))}  ", cell)
    return lines


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def chart(
    curves: Mapping[str, Sequence[float]], axis: tuple[str, str, str], *, low: float | None = None,
    high: float | None = None, rows: int = 9,
) -> list[str]:  # fmt: skip
    """Curves over one axis in braille dots (2 × 4 per character), each labelled at its right end.

    Every curve has one value per step of the axis; `axis` labels its left end, middle and right end.
    Values outside [low, high] are not drawn.
    """
    values = [v for curve in curves.values() for v in curve]
    bottom, top = min(values) if low is None else low, max(values) if high is None else high
    if top == bottom:
        bottom, top = bottom - 1, top + 1
    marks = {0: _number(top), rows // 2: _number((top + bottom) / 2), rows - 1: _number(bottom)}
    margin = max(map(len, marks.values()))
    columns = max(8, min(72, width() - margin - max(map(len, curves)) - 4))
    cells = [[0] * columns for _ in range(rows)]
    owner = [[0] * columns for _ in range(rows)]
    ends: list[tuple[int, float, int]] = []
    for number, curve in enumerate(curves.values()):
        heights = [_at(curve, x / (2 * columns - 1)) for x in range(2 * columns)]
        dots = [round((top - v) / (top - bottom) * (4 * rows - 1)) if bottom <= v <= top else None for v in heights]
        previous = None
        for x, dot in enumerate(dots):
            if dot is not None:
                start = dot if previous is None else min(dot, previous + 1)
                stop = dot if previous is None else max(dot, previous - 1)
                for y in range(start, stop + 1):
                    cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
                    owner[y // 4][x // 2] = number
            previous = dot
        visible = [dot for dot in dots if dot is not None]
        if visible:
            ends.append((visible[-1] // 4, -heights[-1], number))
    tags: list[list[int]] = [[] for _ in range(rows)]
    for row, _, number in sorted(ends):
        free = next((y for y in range(row, rows) if not tags[y]), row)
        tags[free].append(number)
    names = list(curves)
    lines = []
    for y in range(rows):
        drawn = "".join(colour(chr(0x2800 + c), o) if c else " " for c, o in zip(cells[y], owner[y]))
        tag = "  ".join(colour(names[n], n) for n in tags[y])
        lines.append(f"{marks.get(y, ''):>{margin}} {dim('│')}{drawn} {tag}".rstrip())
    return [*lines, " " * (margin + 1) + dim("└" + "─" * columns), " " * (margin + 2) + _axis(*axis, columns)]


def _at(curve: Sequence[float], fraction: float) -> float:
    """A curve's value at a fraction of its length, interpolated for floats; integers (rows, buckets) stay steps."""
    at = fraction * (len(curve) - 1)
    lower = min(int(at), len(curve) - 1)
    upper = min(lower + 1, len(curve) - 1)
    if isinstance(curve[lower], int):
        return curve[lower if at - lower < 0.5 else upper]
    return curve[lower] + (curve[upper] - curve[lower]) * (at - lower)


def _axis(left: str, middle: str, right: str, columns: int) -> str:
    if len(left) + len(middle) + len(right) + 2 > columns:
        left, right = left.split(" (")[0], right.split(" (")[0]
    before = max(1, columns // 2 - len(left) - len(middle) // 2)
    return left + " " * before + middle + " " * max(1, columns - len(left) - before - len(middle) - len(right)) + right


def heat_map(grid: Sequence[Sequence[float]], *, low: float, high: float) -> list[str]:
    """Shades from low (blank) to high (full), one character per value."""
    shades = " ░▒▓█"
    top = len(shades) - 1
    return ["".join(shades[round(min(1.0, max(0.0, (v - low) / (high - low))) * top)] for v in row) for row in grid]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2f}"
