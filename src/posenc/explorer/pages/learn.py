"""Learn: the chapters of the course one after another, each with its figures and one number to change."""

from __future__ import annotations

from typing import Any

from ...core.html_tags import Markup, tag
from ...core.translation import Translation
from .. import url_state
from ..url_state import State
from .base import Controls, Figure, Page, View, documentation_link
from .chapters import CHAPTERS, Chapter


class Learn(Page):
    key = "learn"
    figures = 2
    html_first = True
    defaults = {"chapter": "1", "number": ""}  # an empty number: the one of the course

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        chapter = CHAPTERS[url_state.read_int(state, "chapter", 1, len(CHAPTERS), words) - 1]
        number = _number(chapter, state, words)
        return View(
            [Figure(make(number, words=words), columns=2, height=370) for make in chapter.figures],
            code=chapter.code.replace("{0}", f"{number:g}"),
            html=_text(chapter, words),
        )

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        at = _language(words)
        names = [(f"{n}. {chapter.title[at]}", str(n)) for n, chapter in enumerate(CHAPTERS, 1)]
        number = gr.Slider(**_slider(CHAPTERS[0], at), elem_id="learn-number")
        with gr.Row():
            back = gr.Button(words("chapter before"), elem_id="learn-back", min_width=80)
            on = gr.Button(words("chapter after"), elem_id="learn-on", min_width=80)
        chapter = self.component(gr.Radio, "chapter", words, names, value="1")

        def write(wanted: State) -> list[Any]:
            chosen = CHAPTERS[int(wanted["chapter"]) - 1]
            return [wanted["chapter"], gr.update(**_slider(chosen, at) | {"value": _number(chosen, wanted, words)})]

        def choose(name: str) -> Any:
            """The slider of a chapter, at the course's own number."""
            return gr.update(**_slider(CHAPTERS[int(name) - 1], at))

        def move(name: str, by: int) -> list[Any]:
            wanted = str(min(len(CHAPTERS), max(1, int(name) + by)))
            return [wanted, choose(wanted)]

        def read(name: Any, value: Any) -> State:
            return {"chapter": url_state.to_text(name), "number": url_state.to_text(value)}

        handlers: list[tuple[Any, ...]] = [
            (chapter.input, choose, [chapter], [number]),
            (back.click, lambda name: move(name, -1), [chapter], [chapter, number]),
            (on.click, lambda name: move(name, 1), [chapter], [chapter, number]),
        ]
        return Controls([chapter, number], read, write, handlers, quiet={chapter})


def _language(words: Translation) -> int:
    """Which of a chapter's texts: 0 in English, 1 in Chinese."""
    return int(words("language") == "zh")


def _slider(chapter: Chapter, at: int) -> dict[str, Any]:
    return {
        "minimum": chapter.low, "maximum": chapter.high, "step": chapter.step, "value": chapter.start, "label": chapter.number[at],
    }  # fmt: skip


def _number(chapter: Chapter, state: State, words: Translation) -> float:
    """The number of a state, an integer where steps are."""
    if not state["number"]:
        return chapter.start
    found = url_state.read_float(state, "number", chapter.low, chapter.high, words)
    found = chapter.low + round((found - chapter.low) / chapter.step) * chapter.step
    return int(found) if isinstance(chapter.step, int) else round(found, 6)


def _text(chapter: Chapter, words: Translation) -> Markup:
    at = _language(words)
    link = documentation_link(f"course/{chapter.page}.html", words("whole chapter"), words)
    return tag(
        "article", tag("h2", f"{CHAPTERS.index(chapter) + 1}. {chapter.title[at]}"), tag("p", chapter.caption[at]),
        tag("p", tag("strong", words("try it")), f" {chapter.change[at]}"), tag("p", link), class_="card",
    )  # fmt: skip
