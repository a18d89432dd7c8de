"""Convert panels to Plotly JSON directly: building Plotly's Python objects takes longer than drawing them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..plot.canvas import PALETTE
from ..plot.panels import Array, Heat, Lines, Panel

DASHES = ("solid", "dash", "dashdot", "dot")
# the colour maps of posenc.plot: ColorBrewer's RdBu and cividis, readable with every common kind of colour vision
_BLUE_TO_RED = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip
DIVERGING = [[n / 10, colour] for n, colour in enumerate(_BLUE_TO_RED)]
SEQUENTIAL = "Cividis"
MAX_TICKS, SPARSE_TICKS = 18, 12
"""Token labels per axis: all of up to 18, else about 12 of them, because every label costs the browser time."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"


def subplots(panels: Sequence[Panel], *, columns: int = 2, height: int = 380, width: int = 1050) -> dict[str, Any]:
    """One figure with the panels in a grid, `width` pixels wide; each row is `height` pixels high."""
    columns = max(1, min(columns, len(panels)))
    rows = math.ceil(len(panels) / columns)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": height * rows,
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
    }
    room = width // columns - LEFT - 8
    titles = [_wrapped(panel.title, int(room / 7.3)) for panel in panels]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        beside = titles[row * columns : (row + 1) * columns]
        above = 14 + 17 * max(title.count("<br>") + 1 for title in beside)
        bars = _bars(panels[row * columns : (row + 1) * columns])
        bar = bars[column]
        # heat maps in a row are compared, so they have one size, with or without a colour bar
        right = BAR if isinstance(panel, Heat) and any(bars) else 14
        box = Box(
            (column * width / columns + LEFT) / width,
            ((column + 1) * width / columns - right) / width,
            1 - ((row + 1) * height - (BELOW_TOKENS if isinstance(panel, Heat) and panel.labels else BELOW)) / height / rows,
            1 - (row * height + above) / height / rows,
        )  # fmt: skip
        suffix = "" if number == 0 else str(number + 1)
        layout["annotations"].append(
            {
                "text": titles[number], "x": box.left, "y": box.top + 6 / (height * rows), "xref": "paper",
                "yref": "paper", "xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False,
                "font": {"size": 13, "color": "#102a43"},
            }
        )  # fmt: skip
        if isinstance(panel, Lines):
            first = next(
                other for other in panels if isinstance(other, Lines) and list(other.series) == list(panel.series)
            )
            _lines(panel, suffix, box, data, layout, legend=first is panel)
        else:
            _heat(panel, suffix, box, data, layout, bar=bar)
        layout[f"xaxis{suffix}"]["title"]["text"] = _wrapped(panel.x_label, int((box.right - box.left) * width / 6))
        layout[f"yaxis{suffix}"]["title"]["text"] = _wrapped(
            panel.y_label, int((box.top - box.bottom) * height * rows / 6)
        )
        before = panels[number - 1] if column else None
        if before is not None and before.y_label == panel.y_label:
            layout[f"yaxis{suffix}"]["title"]["text"] = ""
            if isinstance(panel, Heat) and isinstance(before, Heat) and panel.labels and panel.labels == before.labels:
                layout[f"yaxis{suffix}"]["showticklabels"] = False
    return {"data": data, "layout": layout, "config": {"displaylogo": False}}


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
        names.append((panel.title, column * step - 0.5, row * step + gap - 0.6))
    whole = Heat("", np.arange(z.shape[1]), np.arange(z.shape[0]), z, panels[0].x_label, panels[0].y_label,
                 panels[0].unit, panels[0].limits, panels[0].diverging)  # fmt: skip
    height = min(height, width // columns + 20)
    figure = subplots([whole], columns=1, height=height * rows + 60, width=width)
    layout = figure["layout"]
    layout["annotations"] = [
        {
            "text": _wrapped(title, width // columns // 7), "x": x, "y": y, "xref": "x", "yref": "y", "xanchor": "left",
            "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": "#102a43"},
        }
        for title, x, y in names
    ]  # fmt: skip
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"showticklabels": False, "showline": False, "ticks": ""}
    layout["xaxis"]["domain"][0] = 36 / width
    layout["yaxis"]["domain"] = [36 / layout["height"], 1.0]
    figure["data"][0]["hovertemplate"] = "%{z:.4g}<extra></extra>"
    return figure


def as_json(figure: dict[str, Any]) -> str:
    return json.dumps(figure, ensure_ascii=False, allow_nan=False)


# pixels around a panel: labels of the y axis, labels of the x axis (numbers, tokens), colour bar
LEFT, BELOW, BELOW_TOKENS, BAR = 74, 58, 100, 76


class Box(NamedTuple):
    """The plotting area of a panel, as fractions of the figure."""

    left: float
    right: float
    bottom: float
    top: float


def _bars(row: Sequence[Panel]) -> list[bool]:
    """Whether each panel of a row has a colour bar; a panel shares that of an equal neighbour on its right."""

    def same(panel: Heat, other: Panel) -> bool:
        return isinstance(other, Heat) and (other.limits, other.unit) == (panel.limits, panel.unit)

    return [
        isinstance(panel, Heat)
        and panel.colour_bar
        and not any(same(panel, other) for other in row[number + 1 : number + 2])
        for number, panel in enumerate(row)
    ]


def _wrapped(title: str, most: int) -> str:
    """A title broken into lines at spaces and between Chinese characters, which are two columns wide."""
    pieces: list[str] = []
    for word in title.split(" "):
        gap = " " if pieces else ""
        for character in word:
            if _wide(character) or not pieces or gap or _wide(pieces[-1][-1]):
                pieces.append(gap + character)
            else:
                pieces[-1] += character
            gap = ""
    lines, line = [], ""
    for piece in pieces:
        if line and sum(1 + _wide(c) for c in line + piece) > most:
            lines.append(line)
            piece = piece.lstrip()
            line = ""
        line += piece
    return "<br>".join(part.replace("&", "&amp;").replace("<", "&lt;") for part in (*lines, line))


def _wide(character: str) -> bool:
    return ord(character) > 0x2E80


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
        "tickangle": 0, "ticklabeloverflow": "allow", "nticks": 6,
    }  # fmt: skip
    layout[f"xaxis{suffix}"] = {
        "domain": [left, right], "anchor": f"y{suffix}", "title": {"text": panel.x_label, "standoff": 6}, **common,
    }  # fmt: skip
    layout[f"yaxis{suffix}"] = {
        "domain": [bottom, top], "anchor": f"x{suffix}", "title": {"text": panel.y_label, "standoff": 6}, **common,
    }  # fmt: skip


def _lines(panel: Lines, suffix: str, box: Box, data: list, layout: dict[str, Any], *, legend: bool) -> None:
    _axes(panel, suffix, box, layout)
    several = len(panel.series) > 1 and legend
    for number, (name, y) in enumerate(panel.series.items()):
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": name, "x": _encode(panel.x), "y": _encode(y),
                "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "connectgaps": False,
                "legend": f"legend{suffix}", "showlegend": several,
                "line": {
                    "color": PALETTE[number % len(PALETTE)], "width": 2, "dash": DASHES[number % len(DASHES)],
                    "shape": "hvh" if panel.steps else "linear",
                },
            }
        )  # fmt: skip
    for axis, log in (("xaxis", panel.log_x), ("yaxis", panel.log_y)):
        if log:
            # Plotly draws powers a quarter larger than the given size
            layout[f"{axis}{suffix}"] |= {
                "type": "log", "exponentformat": "power", "dtick": 1, "tickfont": {"size": 10},
            }  # fmt: skip
    if panel.y_min is not None:
        top = max(float(np.nanmax(y, initial=panel.y_min)) for y in panel.series.values())
        edge = panel.y_min, top + 0.05 * (top - panel.y_min)
        layout[f"yaxis{suffix}"]["range"] = (
            [math.log10(v) for v in (panel.y_min, top * 2)] if panel.log_y else list(edge)
        )
    for name, level in panel.horizontal_marks.items():
        _mark(layout, name, suffix, y=float(level), log=panel.log_y)
    for name, x in panel.vertical_marks.items():
        start, end = float(panel.x[0]), float(panel.x[-1])
        # the legend is at the bottom left
        high = several and not panel.log_x and x < start + 0.3 * (end - start)
        _mark(layout, name, suffix, x=float(x), log=panel.log_x, high=high)
    if several:
        layout["showlegend"] = True
        layout[f"legend{suffix}"] = {
            "x": box.right if panel.log_y else box.left, "y": box.bottom, "xanchor": "right" if panel.log_y else "left",
            "yanchor": "bottom", "bgcolor": "rgba(255,255,255,0.75)",
            "font": {"size": 11},
        }  # fmt: skip


def _mark(
    layout: dict[str, Any], name: str, suffix: str, *, log: bool, x: float | None = None, y: float | None = None,
    high: bool = False,
) -> None:  # fmt: skip
    """A labelled grey line at y or at x; the label of a vertical line is at the bottom, or at the top if `high`."""
    line = {"color": "#52606d", "width": 1.2, "dash": "dash"}
    text = {
        "text": name,
        "showarrow": False,
        "font": {"size": 11, "color": "#52606d"},
        "bgcolor": "rgba(255,255,255,0.7)",
    }
    if y is not None:
        level = math.log10(y) if log else y
        layout["shapes"].append(
            {
                "type": "line",
                "xref": f"x{suffix} domain",
                "x0": 0,
                "x1": 1,
                "yref": f"y{suffix}",
                "y0": y,
                "y1": y,
                "line": line,
            }
        )
        layout["annotations"].append(
            text
            | {
                "xref": f"x{suffix} domain",
                "x": 0.01,
                "xanchor": "left",
                "yref": f"y{suffix}",
                "y": level,
                "yanchor": "bottom",
            }
        )
    elif x is not None:
        at = math.log10(x) if log else x
        layout["shapes"].append(
            {
                "type": "line",
                "yref": f"y{suffix} domain",
                "y0": 0,
                "y1": 1,
                "xref": f"x{suffix}",
                "x0": x,
                "x1": x,
                "line": line,
            }
        )
        layout["annotations"].append(
            text
            | {
                "yref": f"y{suffix} domain",
                "y": 0.98 if high else 0.02,
                "yanchor": "top" if high else "bottom",
                "xref": f"x{suffix}",
                "x": at,
                "xanchor": "left",
            }
        )


def _heat(panel: Heat, suffix: str, box: Box, data: list, layout: dict[str, Any], *, bar: bool) -> None:
    left, right, bottom, top = box
    _axes(panel, suffix, box, layout)
    low, high = panel.limits or (float(panel.z.min()), float(panel.z.max()))
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
                "tickangle": -60 if axis == "xaxis" else 0, "tickmode": "array", "tickvals": list(every),
                "ticktext": [_isolated(names[n]) for n in every],
            }  # fmt: skip
    layout[f"yaxis{suffix}"]["autorange"] = "reversed"
    for axis in ("xaxis", "yaxis"):
        layout[f"{axis}{suffix}"]["showgrid"] = False
    data.append(trace)


def _isolated(word: str) -> str:
    """A token as a tick text: isolated, so that right-to-left text does not affect its neighbours, and without markup."""
    short = word if len(word) <= 12 else word[:11] + "…"
    return "\u2068" + short.replace("&", "&amp;").replace("<", "&lt;") + "\u2069"
