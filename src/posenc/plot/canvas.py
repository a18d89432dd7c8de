"""Draw panels with matplotlib, without touching its global state; equal panels give equal bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import files
from .panels import Heat, Lines, Panel
from .text_layout import break_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with every common kind of colour vision
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800")
DASHES = ("solid", "dashed", "dashdot", "dotted")
TITLE = 62
"""Characters of a title's line: a panel is as wide."""
STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so figures are the same on every machine
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "svg.hashsalt": "posenc",
    "svg.fonttype": "path",
    "figure.dpi": 100.0,
    "savefig.dpi": 150.0,
}


@contextmanager
def _style():
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("figures need matplotlib: pip install 'posenc[plot]'", name="matplotlib") from error
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": matplotlib.get_backend()}):
        yield


def figure(panels: Sequence[Panel], *, columns: int | None = None) -> Figure:
    """The panels side by side, row by row."""
    with _style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = min(len(panels), 2) if columns is None else columns
        rows = math.ceil(len(panels) / columns)
        drawing = Figure(figsize=(5.6 * columns, 4.2 * rows), layout="constrained")
        FigureCanvasAgg(drawing)
        for number, panel in enumerate(panels):
            axes = drawing.add_subplot(rows, columns, number + 1)
            if isinstance(panel, Lines):
                _lines(axes, panel)
            else:
                _heat(axes, panel)
        return drawing


def save(drawing: Figure, path: str | Path) -> Path:
    """Write a figure as png, svg or pdf, by its suffix; the file is complete or absent.

    Raises ValueError for another suffix.

        >>> import tempfile
        >>> posenc.plot.save(posenc.plot.buckets("t5"), f"{tempfile.mkdtemp()}/t5.svg").name
        't5.svg'
    """
    path = Path(path)
    kind = files.figure_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with _style():
        drawing.savefig(drawn, format=kind, metadata=undated)
    files.write(path, drawn.getvalue())
    return path


def _lines(axes: Axes, panel: Lines) -> None:
    for number, (name, y) in enumerate(panel.series.items()):
        colour, dash = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
        style = "steps-mid" if panel.steps else "default"
        axes.plot(panel.x, y, label=name, color=colour, linestyle=dash, drawstyle=style, linewidth=1.4)
    for number, (name, level) in enumerate(panel.horizontal_marks.items()):
        axes.axhline(level, label=name, color="#666666", linestyle=DASHES[1 + number % 3], linewidth=1.0)
    for number, (name, x) in enumerate(panel.vertical_marks.items()):
        axes.axvline(x, label=name, color="#666666", linestyle=DASHES[1 + number % 3], linewidth=1.0)
    axes.set_xscale("log" if panel.log_x else "linear")
    axes.set_yscale("log" if panel.log_y else "symlog" if panel.signed_log_y else "linear")
    if panel.y_min is not None:
        axes.set_ylim(bottom=panel.y_min)
    if len(panel.series) + len(panel.horizontal_marks) + len(panel.vertical_marks) > 1:
        axes.legend(fontsize=8, frameon=False)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    _set_titles(axes, panel)


def _heat(axes: Axes, panel: Heat) -> None:
    low, high = panel.limits or (float(panel.z.min()), float(panel.z.max()))
    step_x, step_y = (float(a[1] - a[0]) if len(a) > 1 else 1.0 for a in (panel.x, panel.y))
    edges = (
        float(panel.x[0]) - step_x / 2, float(panel.x[-1]) + step_x / 2,
        float(panel.y[-1]) + step_y / 2, float(panel.y[0]) - step_y / 2,
    )  # fmt: skip
    image = axes.imshow(
        panel.z, cmap="RdBu_r" if panel.diverging else "cividis", vmin=low, vmax=high, extent=edges,
        aspect="auto", interpolation="nearest",
    )  # fmt: skip
    if panel.labels is not None:
        rows, columns = panel.labels
        axes.set_xticks(panel.x, columns, rotation=60, ha="right")
        axes.set_yticks(panel.y, rows)
    axes.figure.colorbar(image, ax=axes, label=panel.unit)
    _set_titles(axes, panel)


def _set_titles(axes: Axes, panel: Panel) -> None:
    axes.set_title("\n".join(break_lines(panel.title, TITLE)), loc="left")  # matplotlib wraps at the figure's edge only
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
