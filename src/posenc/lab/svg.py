"""Draw a figure in Plotly's form (traces and a layout) as static SVG, for report pages without scripts.

Hand-written, because Plotly exports images only through a browser and matplotlib, which the lab does not otherwise need,
writes three to four times as many bytes. It supports lines, markers, bands and vertical lines.
"""

from __future__ import annotations

import math
from typing import Any

from .html_tags import Markup, tag

WIDTH, HEIGHT = 1000, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 210, 15, 45  # margins; the legend is at the right
DASHES = {"solid": "", "dash": "8 5", "dot": "2 4", "dashdot": "8 4 2 4", "longdash": "14 6"}


def draw(figure: dict[str, Any]) -> Markup:
    """The figure as an <svg> element."""
    data, layout = figure["data"], figure["layout"]
    values = [(x, y) for trace in data for x, y in zip(trace["x"], trace["y"]) if y is not None]
    if not values:
        return tag("p", "nothing to draw")
    log = layout.get("xaxis", {}).get("type") == "log"
    across = _scale([x for x, _ in values], LEFT, WIDTH - RIGHT, log)
    up = _scale(
        layout.get("yaxis", {}).get("range") or _with_margin([y for _, y in values]), HEIGHT - BOTTOM, TOP, False
    )
    parts = [*_axes(layout, across, up)]
    for trace in data:
        points = [(across(x), up(y)) for x, y in zip(trace["x"], trace["y"]) if y is not None]
        parts += _band(trace, points) if trace.get("fill") else _line(trace, points)
    for shape in layout.get("shapes", ()):
        parts.append(
            _path(f"M{across(shape['x0']):.1f} {TOP}V{HEIGHT - BOTTOM}", stroke="#999", stroke_dasharray="2 4")
        )
    parts += _legend(data)
    style = "width:100%;font:13px system-ui,sans-serif"
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", style=style, fill="none")


def _scale(values, start: float, end: float, log: bool):
    low, high = min(values), max(values)
    if log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0

    def scale(value: float) -> float:
        return start + ((math.log(value) if log else value) - low) / span * (end - start)

    scale.range = (min(values), max(values))  # type: ignore[attr-defined]
    return scale


def _with_margin(values: list[float]) -> tuple[float, float]:
    margin = 0.04 * (max(values) - min(values)) or 0.5
    return min(values) - margin, max(values) + margin


def _axes(layout: dict[str, Any], across, up) -> list[Markup]:
    made = []
    for value in _ticks(*up.range):
        y = up(value)
        made.append(_path(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", stroke="#e4e4e4"))
        made.append(_text(LEFT - 8, y + 4, f"{value:g}", "end"))
    x_axis = layout.get("xaxis", {})
    values = x_axis.get("tickvals") or _ticks(*across.range)
    for value, label in zip(values, x_axis.get("ticktext") or [f"{v:g}" for v in values]):
        made.append(_text(across(value), HEIGHT - BOTTOM + 18, label, "middle"))
    made.append(_path(f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}", stroke="#555"))
    title = x_axis.get("title", {}).get("text", "")
    made.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, title, "middle"))
    title = layout.get("yaxis", {}).get("title", {}).get("text", "")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    made.append(tag("g", _text(0, 0, title, "middle"), transform=f"translate(14 {middle:.0f}) rotate(-90)"))
    return made


def _ticks(low: float, high: float) -> list[float]:
    """About six round values."""
    rough = (high - low) / 6
    if not rough > 1e-12 * max(abs(low), abs(high), 1e-200):  # one value within float precision
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10, 20) if power * times >= rough)
    first = math.ceil(low / step)
    return [float(f"{step * n:.12g}") for n in range(first, math.floor(high / step) + 1)]


def _line(trace: dict[str, Any], points: list[tuple[float, float]]) -> list[Markup]:
    line = trace.get("line", {})
    colour, dash = line.get("color", "#000"), DASHES[line.get("dash", "solid")]
    made = [_path(_through(points), stroke=colour, stroke_width=line.get("width", 2), stroke_dasharray=dash)]
    if "markers" in trace.get("mode", ""):
        made += [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill=colour) for x, y in points]
    return made


def _band(trace: dict[str, Any], points: list[tuple[float, float]]) -> list[Markup]:
    return [_path(_through(points) + "Z", fill=trace["fillcolor"], opacity=trace.get("opacity", 0.12))]


def _legend(data: list[dict[str, Any]]) -> list[Markup]:
    made, y = [], TOP + 10
    for trace in data:
        if trace.get("showlegend", True) and trace.get("name"):
            x = WIDTH - RIGHT + 15
            made += _line({"line": trace.get("line", {})}, [(x, y), (x + 28, y)])
            made.append(_text(x + 36, y + 4, trace["name"], "start"))
            y += 19
    return made


def _through(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _path(d: str, **attributes: object) -> Markup:
    return tag("path", d=d, **attributes)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, fill="#333")
