"""Render a view as JSON: figures, text, code and link, from the page's controls or from a link.

    {"page": "compare", "values": [...]}     the values of the controls
    {"page": "compare", "query": "?a=t5"}    the query of a link

Gradio holds the controls, but figures bypass it: its own figure component draws everything twice and takes longer than
the browser needs for the figure itself. The server converts both forms to a Request that holds the page's state, and
`render_request` runs in the drawing process (render_worker.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from html import escape
from typing import Any

from ..core.translation import Translation
from ..plot.panels import csv
from .pages import PAGES
from .pages.base import Controls, Page, View
from .plotly_figures import as_json, mosaic, subplots
from .texts import LANGUAGES
from .url_state import InputError, State, make_link, parse_query

logger = logging.getLogger(__name__)
ViewData = dict[str, Any]
"""The JSON object that page.js reads."""
Request = dict[str, Any]
"""{"page", "language", "state", "width", "coarse", "notes"}; with "export", the number of a table, the response is CSV."""
PANEL_WIDTH, MOSAIC_WIDTH = 300, 130
"""Smallest width in CSS pixels of a panel, and of a tile of a mosaic; narrow windows get fewer per row."""
COMMON_PARAMETERS = {"view", "lang", "table", "__theme"}
"""Parameters of a query that belong to no page."""


def state_of_values(controls: Controls, words: Translation, values: Any) -> State:
    """The state of a page from the values of its controls."""
    try:
        if not isinstance(values, list) or len(values) != len(controls.components):
            raise InputError(words("bad request"))
        return controls.read(*values)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def state_of_query(page: Page, words: Translation, query: str) -> tuple[State, list[str]]:
    """(the state of a link, notes): a note names the parameters that the page does not have."""
    given = parse_query(query, words)
    unknown = sorted(set(given) - set(page.defaults) - COMMON_PARAMETERS)
    notes = [words("unknown parameters", unknown=", ".join(name[:40] for name in unknown[:5]))] if unknown else []
    if given.get("view", page.key) != page.key:
        notes.append(words("unknown page", name=given["view"][:40]))
    return page.complete(given, words), notes


def render_request(request: Request) -> tuple[ViewData, bool]:
    """(the response, whether memory ran out). An export is {"csv": text}, or {"sentence": why it failed}."""
    page, words = PAGES[request["page"]], LANGUAGES[request["language"]]
    state = page.complete(request["state"], words)
    try:
        if request.get("export"):
            return _export(page, words, state, request["export"]), False
        size = {"width": request["width"], "coarse": request["coarse"]}
        return render_state(page, words, state, **size, notes=request.get("notes", ())), False
    except MemoryError:
        return refuse(request, words("too large")), True


def _export(page: Page, words: Translation, state: State, number: int) -> ViewData:
    try:
        tables = page.export(state, words)
        if not 1 <= number <= len(tables):
            raise InputError(words("no such table", number=number, last=len(tables)))
        return {"csv": csv(tables[number - 1])}
    except ValueError as error:
        return {"sentence": str(error)}
    except Exception as error:
        return {"sentence": str(_unexpected(error, page, words))}


def _unexpected(error: Exception, page: Page, words: Translation) -> InputError:
    """A sentence for an error without one of its own; out-of-memory errors are raised as MemoryError."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch raises a plain RuntimeError
        raise MemoryError from None
    logger.exception("drawing %s failed", page.key)
    return InputError(words("failed", error=f"{type(error).__name__}: {error}"))


def time_limit_response(request: Request) -> ViewData:
    """The response to a drawing that exceeded its time limit."""
    return refuse(request, LANGUAGES[request["language"]]("too slow"))


def refuse(request: Request, sentence: str) -> ViewData:
    """A response that consists of a sentence only."""
    if request.get("export"):
        return {"sentence": sentence}
    return error_response(InputError(sentence), LANGUAGES[request["language"]])


def render_state(
    page: Page, words: Translation, state: State, *, width: int, coarse: bool, notes: Sequence[str] = ()
) -> ViewData:  # fmt: skip
    """The view of a page's state, for a window of this width."""
    try:
        view = page.draw(state, words, coarse=coarse)
        plots = _plots(view, width)
    except ValueError as error:
        return error_response(error, words)
    except Exception as error:
        return error_response(_unexpected(error, page, words), words)
    query = make_link(page.key, state, page.defaults_in(words))
    return {
        "status": _status(view, [*notes, *view.notes], words),
        "plots": plots,
        "titles": ["; ".join(panel.title for panel in figure.panels) for figure in view.figures],
        "html": view.html,
        "code": view.code,
        "link": query,
        "csv": [
            [words("csv table", number=n, title=panel.title), f"/export.csv{query}&lang={words('language')}&table={n}"]
            for n, panel in enumerate(view.panels(), 1)
        ],
        "finer": view.finer,
    }


def to_json_bytes(response: ViewData) -> bytes:
    """UTF-8 JSON; lone surrogates in a text become question marks."""
    return json.dumps(response, ensure_ascii=False).encode("utf-8", "replace")


def _plots(view: View, width: int) -> list[str]:
    drawn = []
    for f in view.figures:
        draw, least = (mosaic, MOSAIC_WIDTH) if f.mosaic else (subplots, PANEL_WIDTH)
        columns = max(1, min(f.columns, width // least))
        drawn.append(as_json(draw(f.panels, columns=columns, height=f.height, width=width)))
    return drawn


def error_response(error: Exception, words: Translation) -> ViewData:
    """The error's sentence alone: the page keeps its figures, unless the error clears them."""
    sentence = str(error) if isinstance(error, InputError) else words("library", error=error)
    if len(sentence) > 600:  # it may quote a long input
        sentence = f"{sentence[:400]} … {sentence[-150:]}"
    response: ViewData = {"status": f'<p class="input-error" role="alert">{escape(sentence)}</p>'}
    return response | {"cleared": True} if getattr(error, "clear", False) else response


def _status(view: View, notes: Sequence[str], words: Translation) -> str:
    listed = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    titles = "; ".join(panel.title for panel in view.panels())
    drawn = words("refining" if view.finer else "drawn")
    return f'{listed}<p class="for-readers">{escape(f"{drawn} {titles}")}</p>'
