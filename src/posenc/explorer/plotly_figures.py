"""Convert panels to Plotly JSON directly: building Plotly's Python objects takes longer than drawing them.

    +-- a panel of a row --------------------------+
    | title, broken into lines                     |   above: as high as the highest of the row
    | -- alibi  -- rope                  (legend)  |
    |  y  +------------------------------------+ c |
    |     |                                    | o |   left: room for numbers or tokens; right: for a colour bar
    |     +------------------------------------+ l |
    |                  x                           |   below
    +----------------------------------------------+

Nothing is drawn over the plotting area but curves and the labels of marks. Plotly's own toolbar is off: it covers titles.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..plot.canvas import PALETTE
from ..plot.panels import Array, Heat, Lines, Panel
from ..plot.text_layout import columns_of, wrap

DASHES = ("solid", "dash", "dashdot", "dot")
# the colour maps of posenc.plot: ColorBrewer's RdBu and cividis, readable with every common kind of colour vision
_BLUE_TO_RED = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip
DIVERGING = [[n / 10, colour] for n, colour in enumerate(_BLUE_TO_RED)]
SEQUENTIAL = "Cividis"
MAX_TICKS, SPARSE_TICKS = 18, 12
"""Token labels per axis: all of up to 18, else about 12 of them, because every label costs the browser time."""
NARROW = 600
"""Figures below this width are on a phone."""
CONFIG = {"displaylogo": False, "displayModeBar": False}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"


def subplots(panels: Sequence[Panel], *, columns: int = 2, height: int = 380, width: int = 1050) -> dict[str, Any]:
    """One figure with the panels in a grid, `width` pixels wide; each row is `height` pixels high, plus its legend."""
    columns = max(1, min(columns, len(panels)))
    rows = [panels[n : n + columns] for n in range(0, len(panels), columns)]
    frames = [_frame(row, width // columns, height) for row in rows]
    whole = sum(frame.height for frame in frames)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": whole,
        "width": width,
        "autosize": False,
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0, "autoexpand": False},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": FONT, "size": 12, "color": "#1f2933"},
        "annotations": [],
        "shapes": [],
        "hovermode": "closest",
        "showlegend": False,
        "dragmode": False if width < NARROW else "zoom",  # a finger on a figure scrolls the page
    }
    top = number = 0
    for row, frame in zip(rows, frames):
        left = 0
        for column, panel in enumerate(row):
            number += 1
            suffix = "" if number == 1 else str(number)
            left += frame.lefts[column]
            box = Box(
                left / width, (left + frame.across) / width,
                1 - (top + frame.height - frame.below) / whole, 1 - (top + frame.above) / whole,
            )  # fmt: skip
            left += frame.across + frame.rights[column]
            legend = frame.legends[column]
            layout["annotations"].append(
                {
                    "text": frame.titles[column], "x": box.left, "y": box.top + (3 + LEGEND_LINE * len(legend)) / whole, "xref": "paper",
                    "yref": "paper", "xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False,
                    "font": {"size": 13, "color": "#102a43"},
                }
            )  # fmt: skip
            if isinstance(panel, Lines):
                _lines(panel, suffix, box, data, layout, legend=legend)
            else:
                _heat(panel, suffix, box, data, layout, bar=frame.bars[column])
            x_axis, y_axis = layout[f"xaxis{suffix}"], layout[f"yaxis{suffix}"]
            x_axis["title"]["text"] = wrap(panel.x_label, int(frame.across / 6.4))
            y_axis["title"]["text"] = wrap(panel.y_label, int((box.top - box.bottom) * whole / 6.4))
            if column and panel.y_label == row[column - 1].y_label:
                y_axis["title"]["text"] = ""
                y_axis["showticklabels"] = not _shares_tokens(panel, row[column - 1])
        top += frame.height
    return {"data": data, "layout": layout, "config": CONFIG}


def mosaic(given: Sequence[Panel], *, columns: int = 4, height: int = 200, width: int = 1050) -> dict[str, Any]:
    """Many small heat maps with one size and colour scale, as a single heat map: separate ones take the browser several
    times as long.
    """
    panels = [panel for panel in given if isinstance(panel, Heat)]
    columns = max(1, min(columns, len(panels)))
    rows, size, gap = math.ceil(len(panels) / columns), len(panels[0].y), max(1, round(len(panels[0].y) / 6))
    step = size + gap
    z = np.full((rows * step, columns * step - gap), np.nan, dtype=np.float32)
    names = []
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        z[row * step + gap : (row + 1) * step, column * step : column * step + size] = panel.z
        names.append((panel.title, column * step - 0.5, row * step + gap - 0.5))
    whole = Heat("", np.arange(z.shape[1]), np.arange(z.shape[0]), z, panels[0].x_label, panels[0].y_label,
                 panels[0].unit, panels[0].limits, panels[0].diverging)  # fmt: skip
    room = (width - 44 - BAR) / columns
    tile = min(height - 10, room * size / step)  # tiles are not higher than wide
    above = 20
    figure = subplots([whole], columns=1, height=int(tile * rows * step / size) + 36 + above, width=width)
    layout = figure["layout"]
    layout["annotations"] = [
        {
            "text": wrap(title, int(room / 6.6)), "x": x, "y": y, "xref": "x", "yref": "y", "xanchor": "left",
            "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": "#102a43"}, "borderpad": 0,
        }
        for title, x, y in names
    ]  # fmt: skip
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"showticklabels": False, "showline": False, "ticks": ""}
    layout["xaxis"]["domain"][0] = 44 / width
    layout["yaxis"]["domain"] = [36 / layout["height"], 1.0 - (above - tile * gap / size) / layout["height"]
                                 if tile * gap / size < above else 1.0]  # fmt: skip
    figure["data"][0]["hovertemplate"] = "%{z:.4g}<extra></extra>"
    return figure


def as_json(figure: dict[str, Any]) -> str:
    return json.dumps(figure, ensure_ascii=False, allow_nan=False)


LEFT, BELOW, BELOW_TOKENS, BAR = 74, 58, 100, 76
"""Pixels around a panel: labels of the y axis, labels of the x axis (numbers, tokens), colour bar."""
LEGEND_LINE, TITLE_LINE = 22, 17
NEAR = 1.8
"""The ratio of two levels below which their labels would touch on a logarithmic axis."""
FEW = 8
"""Points of a logarithmic axis that are all labelled."""


class Box(NamedTuple):
    """The plotting area of a panel, as fractions of the figure."""

    left: float
    right: float
    bottom: float
    top: float


class Frame(NamedTuple):
    """What surrounds the plotting areas of one row of panels: sizes in pixels, titles, legends, colour bars."""

    height: int
    above: int
    below: int
    across: int  # width of every plotting area: panels in a row are compared
    lefts: list[int]
    rights: list[int]
    titles: list[str]
    legends: list[list[int]]  # entries of each line of each panel's legend; none: it has no legend
    bars: list[bool]


def _frame(row: Sequence[Panel], width: int, height: int) -> Frame:
    """The frame of panels in one row, each about `width` pixels wide."""
    bars, lefts = _bars(row), []
    for number, panel in enumerate(row):
        shares = number > 0 and panel.y_label == row[number - 1].y_label
        tokens = panel.labels[0] if isinstance(panel, Heat) and panel.labels else ()
        if number and _shares_tokens(panel, row[number - 1]):
            lefts.append(14)
        elif tokens:  # as wide as the widest, and the axis' title beside it
            lefts.append(max(LEFT, 34 + 7 * max(columns_of(_shortened(name)) for name in tokens)))
        else:
            lefts.append(LEFT - 16 if shares else LEFT)
    rights = [BAR if bar else _right(panel) for panel, bar in zip(row, bars)]
    across = (width * len(row) - sum(lefts) - sum(rights)) // len(row)
    titles = [wrap(panel.title, int((across + right - 14) / 7.3)) for panel, right in zip(row, rights)]
    legends = []
    for number, panel in enumerate(row):
        shared = any(_same_curves(other, panel) for other in row[:number])
        own = isinstance(panel, Lines) and len(panel.series) > 1 and not shared
        legends.append(_legend_lines(panel.series, across + 14) if own else [])
    above = max(
        10 + TITLE_LINE * (title.count("<br>") + 1) + LEGEND_LINE * len(lines) for title, lines in zip(titles, legends)
    )
    more = LEGEND_LINE * max(map(len, legends))
    below = BELOW_TOKENS if any(map(_has_long_tokens, row)) else BELOW
    return Frame(height + more, above, below, across, lefts, rights, titles, legends, bars)


def _right(panel: Panel) -> int:
    """Pixels right of a panel without a colour bar: half of the last tick's label may stand there."""
    few = isinstance(panel, Lines) and panel.log_x and len(panel.x) <= FEW
    return 6 + 4 * len(f"{panel.x[-1]:g}") if few else 14


def _has_long_tokens(panel: Panel) -> bool:
    """Whether the tokens along the x axis are too wide to stand side by side, so that they are rotated."""
    return isinstance(panel, Heat) and panel.labels is not None and max(map(columns_of, panel.labels[1])) > 2


def _shares_tokens(panel: Panel, before: Panel) -> bool:
    both = isinstance(panel, Heat) and isinstance(before, Heat)
    return both and panel.labels is not None and panel.labels == before.labels and panel.y_label == before.y_label


def _same_curves(panel: Panel, other: Panel) -> bool:
    return isinstance(panel, Lines) and isinstance(other, Lines) and list(panel.series) == list(other.series)


def _legend_lines(names: Iterable[str], across: int) -> list[int]:
    """How many entries each line of a legend has, if it is `across` pixels wide: an entry is a line and a name."""
    lines, room = [0], across
    for name in names:
        width = 52 + 7 * columns_of(name)
        if lines[-1] and width > room:
            lines, room = [*lines, 0], across
        lines[-1] += 1
        room -= width
    return lines


def _bars(row: Sequence[Panel]) -> list[bool]:
    """Whether each panel of a row has a colour bar; a panel shares that of an equal neighbour on its right."""

    scales = [(panel.limits, panel.unit) if isinstance(panel, Heat) else None for panel in row]
    return [
        isinstance(panel, Heat) and panel.colour_bar and scales[number] not in scales[number + 1 : number + 2]
        for number, panel in enumerate(row)
    ]


def _encode(values: Array) -> dict[str, Any]:
    """An array as float32 in base64, which Plotly reads fastest; Plotly leaves values that are not finite blank."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    values = np.where(np.isfinite(values), values, np.float32(np.nan))
    packed = {"dtype": "f4", "bdata": base64.b64encode(values.tobytes()).decode()}
    return packed | {"shape": f"{values.shape[0]}, {values.shape[1]}"} if values.ndim == 2 else packed


def _axes(panel: Panel, suffix: str, box: Box, layout: dict[str, Any]) -> None:
    left, right, bottom, top = box
    # the boxes leave room for labels; automatic margins would draw every figure several times
    common = {
        "gridcolor": "#e4e7eb", "zeroline": False, "linecolor": "#9aa5b1", "showline": True,
        # automatic tick angles and overflow make the browser measure every label: a third of the drawing time
        "tickangle": 0, "ticklabeloverflow": "allow",
    }  # fmt: skip
    across = max(3, min(7, int((right - left) * layout["width"] / 48)))
    layout[f"xaxis{suffix}"] = {
        "domain": [left, right], "anchor": f"y{suffix}", "title": {"text": panel.x_label, "standoff": 6}, "nticks": across,
        **common,
    }  # fmt: skip
    layout[f"yaxis{suffix}"] = {
        "domain": [bottom, top], "anchor": f"x{suffix}", "title": {"text": panel.y_label, "standoff": 6}, "nticks": 6, **common,
    }  # fmt: skip


def _lines(panel: Lines, suffix: str, box: Box, data: list, layout: dict[str, Any], *, legend: list[int]) -> None:
    _axes(panel, suffix, box, layout)
    # Plotly would break a long legend anywhere, also beyond its panel, so each of its lines is a legend of its own
    first = 1 + sum(key.startswith("legend") for key in layout)
    lines = [_legend_name(first + line) for line, entries in enumerate(legend) for _ in range(entries)]
    for number, (name, y) in enumerate(panel.series.items()):
        colour, dash = panel.styles.get(name, (PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)]))
        trace = {
            "type": "scatter", "mode": "lines", "name": name, "x": _encode(panel.x), "y": _encode(y),
            "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "connectgaps": False,
            "legend": lines[number] if legend else "legend", "showlegend": bool(legend), "legendgroup": name,
            "line": {"color": colour, "width": 2, "dash": dash, "shape": "hvh" if panel.steps else "linear"},
        }  # fmt: skip
        if panel.signed_log_y:
            hover = "%{x}: %{customdata:.4g}"
            trace |= {"y": _encode(_signed_log(y)), "customdata": _encode(y), "hovertemplate": hover}
        data.append(trace)
    for axis, log in (("xaxis", panel.log_x), ("yaxis", panel.log_y)):
        if log:
            # Plotly draws powers a quarter larger than the given size
            layout[f"{axis}{suffix}"] |= {
                "type": "log", "exponentformat": "power", "dtick": 1, "tickfont": {"size": 10},
            }  # fmt: skip
    # the labels of marks would widen an automatic range
    ends = [float(np.nanmin(panel.x)), float(np.nanmax(panel.x))]
    if ends[0] < ends[1]:
        layout[f"xaxis{suffix}"]["range"] = [math.log10(max(end, 1e-9)) for end in ends] if panel.log_x else ends
    if panel.log_x and len(panel.x) <= FEW:  # powers of ten would miss them
        layout[f"xaxis{suffix}"] |= {
            "tickmode": "array", "tickvals": panel.x.tolist(), "ticktext": [f"{x:g}" for x in panel.x], "tickfont": {"size": 12},
        }  # fmt: skip
    if panel.signed_log_y:
        most = max(float(np.nanmax(np.abs(y[np.isfinite(y)]), initial=1.0)) for y in panel.series.values())
        powers = [0.0, *(sign * 10.0**n for n in range(math.ceil(math.log10(most)) + 1) for sign in (1, -1))]
        ticks = sorted(t for t in powers if abs(t) <= 2 * most)
        layout[f"yaxis{suffix}"] |= {
            "tickmode": "array", "tickvals": [float(_signed_log(np.array(t))) for t in ticks],
            "ticktext": [f"{t:,.0f}".replace("-", "−") for t in ticks],
        }  # fmt: skip
    if panel.y_min is not None:
        top = max(float(np.nanmax(y, initial=panel.y_min)) for y in panel.series.values())
        edge = panel.y_min, top + 0.05 * (top - panel.y_min)
        layout[f"yaxis{suffix}"]["range"] = (
            [math.log10(v) for v in (panel.y_min, top * 2)] if panel.log_y else list(edge)
        )
    levels: list[float] = []
    for name, level in panel.horizontal_marks.items():
        near = any(max(level, other) < NEAR * min(level, other) for other in levels)
        _mark(layout, name, suffix, y=float(level), log=panel.log_y, leftwards=near)
        levels.append(float(level))
    for name, x in panel.vertical_marks.items():
        low, high, at = (math.log10(max(v, 1e-9)) if panel.log_x else v for v in (*ends, float(x)))
        # the label is on the side that has more room
        _mark(layout, name, suffix, x=float(x), log=panel.log_x, leftwards=at - low > high - at)
    for line in range(len(legend)):
        layout["showlegend"] = True
        above = (len(legend) - 1 - line) * LEGEND_LINE / layout["height"]
        layout[_legend_name(first + line)] = {
            "orientation": "h", "x": box.left, "y": box.top + above, "xanchor": "left", "yanchor": "bottom",
            "font": {"size": 12}, "bgcolor": "rgba(255,255,255,0)",
        }  # fmt: skip


def _legend_name(number: int) -> str:
    return "legend" if number == 1 else f"legend{number}"


def _signed_log(y: Array) -> Array:
    return np.sign(y) * np.log10(1.0 + np.abs(y))


def _mark(
    layout: dict[str, Any], name: str, suffix: str, *, log: bool, x: float | None = None, y: float | None = None,
    leftwards: bool = False,
) -> None:  # fmt: skip
    """A labelled grey line at y or at x. The label of a vertical line is at its bottom, on the right or leftwards; that of a
    horizontal one above it, from its left end or leftwards from its right end.
    """
    along, across, at = ("x", "y", y) if y is not None else ("y", "x", x)
    assert at is not None
    layout["shapes"].append(
        {
            "type": "line", f"{along}ref": f"{along}{suffix} domain", f"{along}0": 0, f"{along}1": 1,
            f"{across}ref": f"{across}{suffix}", f"{across}0": at, f"{across}1": at,
            "line": {"color": "#52606d", "width": 1.2, "dash": "dash"},
        }
    )  # fmt: skip
    end = {"x": 0.99 if leftwards else 0.01, "y": 0.02}
    layout["annotations"].append(
        {
            "text": name, "showarrow": False, "font": {"size": 11, "color": "#3e4c59"}, "bgcolor": "rgba(255,255,255,0.85)",
            f"{along}ref": f"{along}{suffix} domain", along: end[along], f"{across}ref": f"{across}{suffix}",
            across: math.log10(at) if log else at, "xanchor": "right" if leftwards else "left", "yanchor": "bottom",
        }
    )  # fmt: skip


def _heat(panel: Heat, suffix: str, box: Box, data: list, layout: dict[str, Any], *, bar: bool) -> None:
    left, right, bottom, top = box
    _axes(panel, suffix, box, layout)
    low, high = panel.limits or (float(np.nanmin(panel.z)), float(np.nanmax(panel.z)))
    trace: dict[str, Any] = {
        "type": "heatmap", "z": _encode(panel.z), "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "zmin": low,
        "zmax": high if high > low else low + 1.0, "colorscale": DIVERGING if panel.diverging else SEQUENTIAL,
        "hovertemplate": "i %{y}, j %{x}: %{z:.4g}<extra></extra>" if panel.labels else "%{y}, %{x}: %{z:.4g}<extra></extra>",
        "colorbar": {
            "x": right + 4 / layout["width"], "y": (bottom + top) / 2, "len": top - bottom, "lenmode": "fraction",
            "thickness": 10, "thicknessmode": "pixels", "xanchor": "left", "outlinewidth": 0, "xpad": 0,
            "tickfont": {"size": 10}, "title": {"text": panel.unit, "side": "right", "font": {"size": 10}}, "nticks": 5,
        },
    }  # fmt: skip
    trace["showscale"] = bar
    if panel.labels is None:
        trace |= {"x": _encode(panel.x), "y": _encode(panel.y)}
    else:
        rows, columns = panel.labels
        # tokens may repeat, so cells are numbered and tokens are tick texts
        for axis, names in (("xaxis", columns), ("yaxis", rows)):
            every = range(0, len(names), 1 if len(names) <= MAX_TICKS else math.ceil(len(names) / SPARSE_TICKS))
            layout[f"{axis}{suffix}"] |= {
                "tickangle": -60 if axis == "xaxis" and _has_long_tokens(panel) else 0, "tickmode": "array", "tickvals": list(every),
                "ticktext": [_isolated(names[n]) for n in every],
            }  # fmt: skip
    layout[f"yaxis{suffix}"]["autorange"] = "reversed"
    for axis in ("xaxis", "yaxis"):
        layout[f"{axis}{suffix}"]["showgrid"] = False
    data.append(trace)


def _shortened(word: str) -> str:
    return word if len(word) <= 12 else word[:11] + "…"


def _isolated(word: str) -> str:
    """A token as a tick text: isolated, so that right-to-left text does not affect its neighbours, and without markup."""
    return "\u2068" + _shortened(word).replace("&", "&amp;").replace("<", "&lt;") + "\u2069"
