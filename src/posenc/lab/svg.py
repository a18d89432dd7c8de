"""Figures as SVG: curves over a logarithmic or linear axis, each labelled at its end.

Written here and not drawn by matplotlib, because the report is one HTML file whose figures have selectable text, tooltips, labels
for screen readers and lines that the keyboard can focus, and because the lab does not depend on matplotlib. A panel is drawn 440
units wide, so that its text is legible at a phone's width; wide pages set two side by side. Labels are moved apart vertically
and joined to their lines, so that they never overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..core.html_tags import Markup, tag
from .lines import Style

WIDTH, LEFT, TOP, BOTTOM = 440, 42, 46, 52
LINE = 15.0  # height of a label
SMALL = 12  # font size of labels and ticks
CHARACTER = 6.7  # widest mean width of a character at that size
LONGEST = 26  # characters of a label


@dataclass(frozen=True)
class Line:
    """One curve; `halves` are the half widths of confidence intervals."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    halves: Sequence[float | None] = ()
    label: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    ticks: Sequence[float] = ()  # of the x axis; none: round numbers
    log: bool = True
    trained: float | None = None  # the training length; what is past it has a tinted background
    trained_label: str = ""
    y_range: tuple[float, float] | None = None
    thin: bool = False  # many points: no markers
    notes: dict[str, str] = field(default_factory=dict)  # instead of a value in a label


def draw(panel: Panel) -> Markup:
    """The panel as an <svg> element."""
    curves = [(line, points) for line in panel.lines if (points := _points(line))]
    if not curves:
        return tag("svg", _text(WIDTH / 2, 20, "–"), viewBox=f"0 0 {WIDTH} 40", role="img", aria_label=panel.title)
    texts = {line.name: _label(panel, line, points) for line, points in curves}
    gutter = 20 + CHARACTER * max(len(text) for text in texts.values())
    right = WIDTH - min(gutter, 0.5 * WIDTH)
    bottom = TOP + max(250.0, LINE * len(curves))
    xs = [x for _, points in curves for x, _ in points] + list(panel.ticks)
    across = _scale(min(xs), max(xs), LEFT + 8, right - 8, panel.log)
    low, high = panel.y_range or _with_margin([y for _, points in curves for _, y in points])
    up = _scale(low, high, bottom, TOP, False)
    parts = _axes(panel, across, up, (min(xs), max(xs)), (low, high), right, bottom)
    heights = _spread([up(points[-1][1]) for _, points in curves], TOP + LINE / 2, bottom - LINE / 2)
    for (line, points), height in zip(curves, heights):
        parts.append(_curve(panel, line, points, across, up, (low, high), right, height, texts[line.name]))
    box = f"0 0 {WIDTH} {bottom + BOTTOM:.0f}"
    return tag("svg", tag("title", panel.title), *parts, viewBox=box, role="img", class_="panel")


def _points(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(line.x, line.y) if y is not None and math.isfinite(y)]


def _label(panel: Panel, line: Line, points: list[tuple[float, float]]) -> str:
    name = line.label or line.name
    name = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    return name if panel.thin else f"{name} {panel.notes.get(line.name) or f'{points[-1][1]:.3f}'}"


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    if log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0
    return lambda value: start + ((math.log(value) if log else value) - low) / span * (end - start)


def _with_margin(values: list[float]) -> tuple[float, float]:
    margin = 0.05 * (max(values) - min(values)) or 0.5
    return min(values) - margin, max(values) + margin


def _spread(wanted: list[float], top: float, bottom: float) -> list[float]:
    """Heights as near as possible to the wanted ones, in the same order, LINE apart and inside [top, bottom]."""
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    gap = min(LINE, (bottom - top) / max(1, len(wanted) - 1))
    groups: list[tuple[float, list[int]]] = []  # (height of the first, members): a group is packed
    for number in order:
        groups.append((min(max(wanted[number], top), bottom), [number]))
        while len(groups) > 1 and groups[-2][0] + gap * len(groups[-2][1]) > groups[-1][0]:
            members = groups[-2][1] + groups[-1][1]
            del groups[-2:]
            first = sum(wanted[m] - gap * at for at, m in enumerate(members)) / len(members)
            groups.append((min(max(first, top), bottom - gap * (len(members) - 1)), members))
    heights = [0.0] * len(wanted)
    for first, members in groups:
        for at, number in enumerate(members):
            heights[number] = first + gap * at
    return heights


def _axes(panel: Panel, across, up, xs, ys, right: float, bottom: float) -> list[Markup]:
    made = [_text(0, 16, panel.title, class_="heading"), _text(0, 34, panel.y_label, class_="quiet")]
    if panel.trained is not None and xs[0] <= panel.trained < xs[1]:
        start = across(panel.trained)
        made.append(tag("rect", x=_n(start), y=TOP, width=_n(right - start), height=_n(bottom - TOP), fill="#f1f5f9"))
    for value in _ticks(*ys):
        y = up(value)
        made.append(tag("path", d=f"M{LEFT} {_n(y)}H{_n(right)}", stroke="#dfe4ea"))
        made.append(_text(LEFT - 6, y + 4, f"{value:g}", "end", class_="quiet"))
    free = -math.inf
    ticks = list(panel.ticks) or _ticks(*xs)
    for value in ticks:
        text = f"{value:g}"
        x = across(value)
        half = CHARACTER * len(text) / 2
        if x - half < free:
            continue
        free = x + half + 4
        made.append(_text(x, bottom + 16, text, "middle", class_="mark" if value == panel.trained else "quiet"))
    if panel.trained is not None and panel.trained in ticks:
        x = across(panel.trained)
        made.append(tag("path", d=f"M{_n(x)} {TOP}V{_n(bottom)}", stroke="#64748b", stroke_dasharray="2 3"))
        half = _wide(panel.trained_label) / 2
        made.append(_text(max(x, half), bottom + 31, panel.trained_label, "middle", class_="mark"))
    made.append(tag("path", d=f"M{LEFT} {_n(bottom)}H{_n(right)}", stroke="#64748b"))
    made.append(_text(right, bottom + 47, panel.x_label, "end", class_="quiet"))
    return made


def _wide(text: str) -> float:
    return sum(SMALL + 1 if ord(c) > 0x2E80 else CHARACTER for c in text)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10, 20) if power * times >= rough * 0.999)
    return [float(f"{step * n:.12g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _curve(panel: Panel, line: Line, points, across, up, ys, right: float, height: float, text: str) -> Markup:
    style = line.style
    at = [(across(x), up(y)) for x, y in points]
    parts: list[Markup] = []
    halves = [h or 0.0 for h, y in zip(line.halves, line.y) if y is not None and math.isfinite(y)]
    if any(halves):
        upper = [(across(x), up(min(y + h, ys[1]))) for (x, y), h in zip(points, halves)]
        lower = [(across(x), up(max(y - h, ys[0]))) for (x, y), h in zip(points, halves)]
        parts.append(tag("path", d=_through(upper + lower[::-1]) + "Z", fill=style.colour, class_="interval"))
    width = 1.4 if panel.thin else 2
    parts.append(tag("path", d=_through(at), class_="reach"))
    parts.append(tag("path", d=_through(at), stroke=style.colour, stroke_width=width, stroke_dasharray=style.dash))
    marker = MARKERS[style.marker](style.colour)
    if not panel.thin:
        for (x, y), (size, value) in zip(at, points):
            tooltip = tag("title", f"{line.name}, {size:g}: {value:.3f}")
            parts.append(tag("g", tooltip, marker, transform=f"translate({_n(x)} {_n(y)})"))
    end = at[-1]
    if end[0] > right - 20:
        leader = f"M{_n(end[0] + 5)} {_n(end[1])}L{_n(right + 2)} {_n(height)}H{_n(right + 10)}"
        parts.append(tag("path", d=leader, stroke=style.colour, stroke_width=1, opacity=0.7))
    else:  # the line ends inside the figure: its label has the marker instead of a leader across the other lines
        parts.append(tag("g", marker, transform=f"translate({_n(right + 6)} {_n(height)})"))
    parts.append(_text(right + 13, height + 4, text, fill=style.ink, class_="end"))
    return tag("g", *parts, class_="line", tabindex=0, role="img", aria_label=text)


def _filled(d: str) -> Callable[[str], Markup]:
    return lambda colour: tag("path", d=d, fill=colour)


def _stroked(d: str) -> Callable[[str], Markup]:
    return lambda colour: tag("path", d=d, stroke=colour, stroke_width=2, fill="#fff")


MARKERS: dict[str, Callable[[str], Markup]] = {
    "circle": _filled("M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0Z"),
    "square": _filled("M-3.2 -3.2H3.2V3.2H-3.2Z"),
    "up": _filled("M-4 3.2L0 -4.2L4 3.2Z"),
    "down": _filled("M-4 -3.2L0 4.2L4 -3.2Z"),
    "left": _filled("M3.2 -4L-4.2 0L3.2 4Z"),
    "right": _filled("M-3.2 -4L4.2 0L-3.2 4Z"),
    "diamond": _filled("M0 -4.6L4.6 0L0 4.6L-4.6 0Z"),
    "cross": _stroked("M-3.2 -3.2L3.2 3.2M-3.2 3.2L3.2 -3.2"),
    "plus": _stroked("M-4 0H4M0 -4V4"),
    "dash": _filled("M-4.4 -1.6H4.4V1.6H-4.4Z"),
    "star": _stroked("M-4 0H4M-2 -3.4L2 3.4M-2 3.4L2 -3.4"),
    "ring": _stroked("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z"),
    "frame": _stroked("M-2.8 -2.8H2.8V2.8H-2.8Z"),
    "hollow": _stroked("M0 -4L4 0L0 4L-4 0Z"),
    "bar": _filled("M-1.6 -4.4H1.6V4.4H-1.6Z"),
    "dot": _filled("M-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0Z"),
}


def _through(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, anchor: Literal["start", "middle", "end"] = "start", **more: object) -> Markup:
    align = {} if anchor == "start" else {"text_anchor": anchor}
    return tag("text", text, x=_n(x), y=_n(y), **align, **more)
