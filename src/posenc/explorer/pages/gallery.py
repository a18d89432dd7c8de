"""Gallery: one encoding with its formula, figures, parameters, users and advice on when to choose it."""

from __future__ import annotations

from ...core.html_tags import Markup, tag
from ...core.translation import Translation
from ...encodings.registry import OWN_ATTENTION, find_card, list_encodings
from ...plot import analysis, panels
from ..url_state import State, read_choice, to_text
from . import own_attention, snippets
from .base import Controls, Figure, Page, View, documentation_link
from .descriptions import describe
from .table_origin import axes_notes, trained_notes, untrained_notes

LENGTH = 96


class Gallery(Page):
    key = "gallery"
    html_first = True
    defaults = {"encoding": "t5"}

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        name = read_choice(state, "encoding", names(), words)
        if name in OWN_ATTENTION:
            drawn = own_attention.draw(name, LENGTH, words)
            code = own_attention.code(name, LENGTH)
            return View([Figure(drawn, columns=2, height=370)], code=code, html=_card(name, None, words))
        subject = analysis.subject(name)
        drawn = panels.overview(subject, LENGTH, words=words)
        return View(
            [Figure(drawn, columns=2, height=370)],
            code=snippets.kernel(subject, {}, LENGTH),
            html=_card(name, subject, words),
            notes=[*untrained_notes([subject], words), *axes_notes([subject], words)],
        )

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        encoding = self.component(gr.Radio, "encoding", words, names(), value=self.defaults["encoding"])
        return Controls([encoding], lambda name: {"encoding": to_text(name)}, lambda state: [state["encoding"]])


def names() -> list[str]:
    return [*list_encodings(), *OWN_ATTENTION]


def _card(name: str, subject: analysis.Subject | None, words: Translation) -> Markup:
    which, description = find_card(name), describe(name, words.table["language"])
    size = ""
    if subject is not None:
        sizes = {"d_model": subject.d_model, "heads": subject.heads}
        size = f" ({words('sizes drawn', parameters=f'{subject.parameters:,}', **sizes)})"
    rows = {
        words("family"): description.family,
        words("enters"): description.enters,
        words("parameters"): f"{description.parameters}{size}",
        words("extrapolates"): description.extrapolates,
        words("used by"): which.used_by,
        words("when"): description.when,
    }
    if subject is not None and subject.tables == "trained":
        rows[words("values drawn")] = " ".join(trained_notes([subject], words))
    if which.module.startswith("posenc."):  # one that the user registered has no page
        rows[words("documentation")] = documentation_link(f"encodings/{name}.html", words("page of", name=name), words)
    facts = [tag(kind, text) for row in rows.items() for kind, text in zip(("dt", "dd"), row)]
    title = tag("h2", f"{name} ", tag("code", which.public_name))
    return tag("article", title, tag("p", which.formula, class_="formula"), tag("dl", *facts), class_="card")
