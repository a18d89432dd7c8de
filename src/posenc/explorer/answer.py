"""What the page's script asks, and the answer: a view's figures and text as JSON.

    {"page": "compare", "values": [...]}     what the controls hold
    {"page": "compare", "query": "?a=t5"}    what a link says

Gradio holds the controls; figures do not pass through it, for its own way to a figure draws everything twice and takes
longer than the browser needs for the figure itself. The server turns either into a question, which names a page's state;
`of_question` answers it, in the process that draws (worker.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from html import escape
from typing import Any

from ..plot.panels import csv
from ..plot.words import Words
from .figures import as_json, mosaic, plotly
from .pages import PAGES
from .state import Sorry, State, link, read
from .texts import LANGUAGES
from .view import Controls, Page, View

logger = logging.getLogger(__name__)
Answer = dict[str, Any]
Question = dict[str, Any]
"""{"page", "language", "state", "width", "coarse", "notes"}; with "export", the CSV is wanted."""
NARROW, SMALL = 300, 130
"""A panel is at least this wide, and a small one of many, in CSS pixels; a narrow window gets fewer in a row."""
OTHER_WORDS = {"view", "lang", "__theme"}
"""Words of an address that are not a page's own."""


def of_values(page: Page, controls: Controls, words: Words, values: Any, *, width: int, coarse: bool) -> Answer:
    """The view that the controls ask for."""
    try:
        state = state_of_values(controls, words, values)
    except ValueError as error:
        return sorry(error, words)
    return of_state(page, words, state, width=width, coarse=coarse)


def state_of_values(controls: Controls, words: Words, values: Any) -> State:
    """What a page's controls hold, as the words of a link."""
    try:
        if not isinstance(values, list) or len(values) != len(controls.components):
            raise Sorry(words("bad request"))
        return controls.read(*values)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def of_query(page: Page, words: Words, query: str, *, width: int, coarse: bool) -> Answer:
    """The view of a link."""
    try:
        state, notes = state_of_query(page, words, query)
    except ValueError as error:
        return sorry(error, words)
    return of_state(page, words, state, width=width, coarse=coarse, notes=notes)


def state_of_query(page: Page, words: Words, query: str) -> tuple[State, list[str]]:
    """The words of a link, and notes: those that no page has are named, not dropped in silence."""
    given = read(query, words)
    unknown = sorted(set(given) - set(page.defaults) - OTHER_WORDS)
    notes = [words("unknown words", unknown=", ".join(word[:40] for word in unknown[:5]))] if unknown else []
    if given.get("view", page.key) != page.key:
        notes.append(words("unknown page", name=given["view"][:40]))
    return page.complete(given), notes


def of_question(question: Question) -> tuple[Answer, bool]:
    """(the answer, whether memory ran out). An export is {"csv": text}, or {"sentence": why not}."""
    page, words = PAGES[question["page"]], LANGUAGES[question["language"]]
    state = page.complete(question["state"])
    try:
        if question.get("export"):
            return _exported(page, words, state), False
        size = {"width": question["width"], "coarse": question["coarse"]}
        return of_state(page, words, state, **size, notes=question.get("notes", ())), False
    except MemoryError:
        return refusal(question, words("too large")), True


def _exported(page: Page, words: Words, state: State) -> Answer:
    try:
        return {"csv": csv(page.export(state, words))}
    except ValueError as error:
        return {"sentence": str(error)}
    except Exception as error:
        return {"sentence": str(_unexpected(error, page, words))}


def _unexpected(error: Exception, page: Page, words: Words) -> Sorry:
    """The sentence for an error that nobody wrote one for; memory that ran out is passed on."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch has no class for it
        raise MemoryError from None
    logger.exception("drawing %s failed", page.key)
    return Sorry(words("failed", error=f"{type(error).__name__}: {error}"))


def too_long(question: Question) -> Answer:
    """The answer to a drawing that was stopped."""
    return refusal(question, LANGUAGES[question["language"]]("too slow"))


def refusal(question: Question, sentence: str) -> Answer:
    if question.get("export"):
        return {"sentence": sentence}
    return sorry(Sorry(sentence), LANGUAGES[question["language"]])


def of_state(
    page: Page, words: Words, state: State, *, width: int, coarse: bool, notes: Sequence[str] = ()
) -> Answer:  # fmt: skip
    try:
        view = page.draw(state, words, coarse=coarse)
        plots = [as_json(figure) for figure in figures(view, width)]
    except ValueError as error:
        return sorry(error, words)
    except Exception as error:
        return sorry(_unexpected(error, page, words), words)
    query = link(page.key, state, page.defaults)
    return {
        "status": _status(view, [*notes, *view.notes], words),
        "plots": plots,
        "titles": ["; ".join(panel.title for panel in figure.panels) for figure in view.figures],
        "html": view.html,
        "code": view.code,
        "link": query,
        "csv": f"/export.csv{query}&lang={words('language')}",
        "finer": view.finer,
    }


def as_bytes(answer: Answer) -> bytes:
    """The JSON that the page's script reads. Half of a character that a text may hold becomes a question mark."""
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")


def figures(view: View, width: int) -> list[dict[str, Any]]:
    """The view's figures for a window of this width."""
    drawn = []
    for f in view.figures:
        draw, least = (mosaic, SMALL) if f.mosaic else (plotly, NARROW)
        drawn.append(draw(f.panels, columns=max(1, min(f.columns, width // least)), height=f.height, width=width))
    return drawn


def sorry(error: Exception, words: Words) -> Answer:
    """The sentence alone: everything else stays as it was, unless the error says that it must go."""
    sentence = str(error) if isinstance(error, Sorry) else words("library", error=error)
    sentence = (
        sentence if len(sentence) <= 600 else f"{sentence[:400]} … {sentence[-150:]}"
    )  # it may repeat a long input
    told: Answer = {"status": f'<p class="sentence" role="alert">{escape(sentence)}</p>'}
    return told | {"cleared": True} if getattr(error, "clear", False) else told


def _status(view: View, notes: Sequence[str], words: Words) -> str:
    told = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    titles = "; ".join(panel.title for panel in view.panels())
    drawn = words("refining" if view.finer else "drawn")
    return f'{told}<p class="for-readers">{escape(f"{drawn} {titles}")}</p>'
