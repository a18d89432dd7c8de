"""Gallery: every encoding with its formula, picture, parameters, who uses it and when to choose it."""

from __future__ import annotations

from html import escape

from ..encodings.registry import info, list_encodings
from ..plot import numbers, panels
from ..plot.words import Words
from . import snippets
from .about import about
from .state import State, choice, plain
from .view import Controls, Figure, Page, View

LENGTH = 96


class Gallery(Page):
    key = "gallery"
    html_first = True
    defaults = {"encoding": "t5"}

    def draw(self, state: State, words: Words, *, coarse: bool = False) -> View:
        name = choice(state, "encoding", list_encodings(), words)
        subject = numbers.subject(name)
        drawn = panels.overview(subject, LENGTH, words=words)
        return View(
            [Figure(drawn, columns=2, height=370)],
            code=snippets.kernel(subject, {}, LENGTH),
            html=_card(name, subject.parameters, words),
        )

    def controls(self, words: Words) -> Controls:
        import gradio as gr

        encoding = gr.Radio(
            list(list_encodings()), value=self.defaults["encoding"], label=words("encoding"), elem_id="gallery-encoding"
        )
        return Controls([encoding], lambda name: {"encoding": plain(name)}, lambda state: [state["encoding"]])


def _card(name: str, parameters: int, words: Words) -> str:
    which, told = info(name), about(name, words.table["language"])
    size = words("sizes drawn", parameters=f"{parameters:,}", **numbers.SIZES)
    rows = {
        words("family"): told.family,
        words("enters"): told.enters,
        words("parameters"): f"{told.parameters} ({size})",
        words("extrapolates"): told.extrapolates,
        words("used by"): which.used_by,
        words("when"): told.when,
    }
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in rows.items())
    return (
        f'<article class="card"><h2>{escape(name)} <code>posenc.{escape(which.class_name)}</code></h2>'
        f'<p class="formula">{escape(which.formula)}</p><dl>{facts}</dl></article>'
    )
