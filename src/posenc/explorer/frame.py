"""The frame around every page: controls at the left, figures at the right, code, link and exports below."""

from __future__ import annotations

import itertools
import logging
import os
from html import escape
from typing import Any

# Before gradio is imported: it must not call home, and it must work where there is no network at all.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gradio as gr
from gradio.components.plot import PlotData

from ..plot.words import Words
from .compare import Compare
from .extend import Extend
from .figures import as_json, mosaic, plotly
from .gallery import Gallery
from .results import Results
from .sentence import Sentence
from .state import State, link, read
from .texts import LANGUAGES, PATHS
from .view import Controls, Page, View

PAGES: dict[str, Page] = {page.key: page for page in (Gallery(), Compare(), Sentence(), Extend(), Results())}
logger = logging.getLogger(__name__)

# queue=False answers in the request itself; always_last drops slider positions that were passed over
FAST: dict[str, Any] = {
    "queue": False, "show_progress": "hidden", "trigger_mode": "always_last", "api_visibility": "private",
}  # fmt: skip
LONG: dict[str, Any] = {**FAST, "show_progress": "minimal"}


class Built:
    """A page's components in one language."""

    def __init__(self, page: Page, words: Words, tab: Any):
        self.page, self.words, self.tab = page, words, tab
        self.controls: Controls
        self.outputs: list[Any] = []
        self.finer: Any = None
        self.drawings = itertools.count(1)

    def build(self) -> None:
        page, words = self.page, self.words
        gr.Markdown(words(f"{page.key} intro"), elem_classes="intro")
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=250, elem_classes="controls"):
                self.controls = page.controls(words)
            with gr.Column(scale=4, min_width=420, elem_id=f"{page.key}-figures"):
                status = gr.HTML("", elem_id=f"{page.key}-status")
                html = gr.HTML("", elem_id=f"{page.key}-html", render=page.html_first)
                plots = [
                    gr.Plot(label=words("figure label", number=n + 1), show_label=False, elem_id=f"{page.key}-plot-{n}")
                    for n in range(page.figures)
                ]
                if not page.html_first:
                    html.render()
                with gr.Accordion(words("code"), open=False, elem_id=f"{page.key}-code"):
                    code = gr.HTML("")
                tools = gr.HTML("", elem_id=f"{page.key}-tools")
                # changes when a view was drawn coarsely, and so asks for the finer one
                self.finer = gr.Textbox("", visible="hidden", elem_id=f"{page.key}-finer", interactive=False)
        self.outputs = [status, *plots, html, code, tools, self.finer]

    def wire(self) -> None:
        """Every control redraws; what a long view leaves out at first follows by itself."""
        for component in self.controls.components:
            if component not in self.controls.quiet:
                for event in _events(component):
                    self._follow(event(self.redraw, self.controls.components, self.outputs, **FAST))
        for event, function, inputs, outputs in self.controls.first:
            before = event(function, inputs, outputs, **FAST)
            self._follow(before.then(self.redraw, self.controls.components, self.outputs, **FAST))
        self.finer.change(self.refine, self.controls.components, self.outputs, **LONG)
        self.tab.select(None, None, None, js=f"() => posencAddress('{self.page.key}')", **FAST)

    def _follow(self, event: Any) -> None:
        """The address follows what is shown."""
        event.then(None, None, None, js=f"() => posencAddress('{self.page.key}')", **FAST)

    # ---- what events call -----------------------------------------------------------------------------------
    def redraw(self, *values: Any) -> list[Any]:
        return self._show(values, coarse=True)

    def refine(self, *values: Any) -> list[Any]:
        """The finer picture of a view that was drawn coarsely."""
        return self._show(values, coarse=False)

    def nothing(self) -> list[Any]:
        """Leave the page as it is."""
        return [gr.skip()] * (len(self.controls.components) + len(self.outputs))

    def restore(self, state: State) -> list[Any]:
        """Values of the controls, then the outputs, of a link."""
        try:
            written = self.controls.write(state)
        except (ValueError, TypeError, KeyError):  # drawing the same state says what is wrong with it
            written = [gr.skip()] * len(self.controls.components)
        return written + self.show(state, coarse=True)

    def _show(self, values: tuple[Any, ...], *, coarse: bool) -> list[Any]:
        try:
            state = self.controls.read(*values)
        except (ValueError, TypeError) as error:
            return self._sorry(str(error))
        return self.show(state, coarse=coarse)

    def show(self, state: State, *, coarse: bool) -> list[Any]:
        try:
            view = self.page.draw(state, self.words, coarse=coarse)
        except ValueError as error:
            return self._sorry(str(error))
        except Exception as error:
            logger.exception("drawing %s failed", self.page.key)
            return self._sorry(self.words("failed", error=f"{type(error).__name__}: {error}"))
        figures = [(mosaic if f.mosaic else plotly)(f.panels, columns=f.columns, height=f.height) for f in view.figures]
        plots: list[Any] = [PlotData(type="plotly", plot=as_json(figure)) for figure in figures]
        plots += [None] * (self.page.figures - len(plots))
        asked = str(next(self.drawings)) if view.finer else gr.skip()
        return [self._status(view), *plots, view.html, self._code(view.code), self._tools(state), asked]

    def _sorry(self, sentence: str) -> list[Any]:
        """The sentence, and everything else as it was."""
        told = f'<p class="sentence" role="alert">{escape(sentence)}</p>'
        return [told, *[gr.skip()] * (len(self.outputs) - 1)]

    def _status(self, view: View) -> str:
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in view.notes)
        titles = "; ".join(panel.title for panel in view.panels())
        words = self.words("refining" if view.finer else "drawn")
        return f'<div role="status" aria-live="polite">{notes}<p class="for-readers">{escape(f"{words} {titles}")}</p></div>'

    def _code(self, text: str) -> str:
        words = self.words
        return (
            f'<pre class="code" tabindex="0" aria-label="{escape(words("code label"))}"><code>{escape(text)}</code></pre>'
            f'<div class="tools"><button type="button" onclick="posencCopyCode(this)" data-done="{escape(words("copied"))}">'
            f"{escape(words('copy code'))}</button></div>"
        )

    def _tools(self, state: State) -> str:
        words, key = self.words, self.page.key
        query = escape(link(key, state, self.page.defaults))
        language = words("language")
        return (
            f'<div class="tools" role="group" aria-label="{escape(words("tools"))}">'
            f'<a id="{key}-link" href="{query}">{escape(words("link"))}</a>'
            f'<button type="button" onclick="posencCopy(this, \'{key}\')" data-done="{escape(words("copied"))}">'
            f"{escape(words('copy'))}</button>"
            f'<a id="{key}-csv" href="/export.csv{query}&amp;lang={language}" download="posenc-{key}.csv">'
            f"{escape(words('csv'))}</a>"
            f'<button type="button" id="{key}-png" onclick="posencPng(\'{key}\')">{escape(words("png"))}</button></div>'
        )


def _events(component: Any) -> list[Any]:
    """What a person does to a control. A text's input event misses deletions and pasting, so it is its change event. A
    number's change event also fires while a link is being restored, when other controls still have their old values;
    typing and leaving it do not.
    """
    if isinstance(component, gr.Textbox):
        return [component.change]
    if isinstance(component, gr.Number):
        return [component.input, component.blur]
    return [component.input]


def blocks(language: str) -> gr.Blocks:
    """The whole page in one language."""
    words = LANGUAGES[language]
    other = "zh" if language == "en" else "en"
    with gr.Blocks(title=words("title"), analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(
            f'<header class="top"><a class="skip" href="#main-tabs">{escape(words("skip"))}</a>'
            f"<h1>{escape(words('title'))}</h1><p>{escape(words('subtitle'))}</p>"
            f'<a class="switch" lang="{"zh-CN" if other == "zh" else "en"}" href="{PATHS[other].rstrip("/")}/" '
            f'aria-label="{escape(words("switch label"))}" onclick="this.search = location.search">'
            f"{escape(words('switch'))}</a></header>"
        )
        built: list[Built] = []
        with gr.Tabs(selected="gallery", elem_id="main-tabs") as tabs:
            for page in PAGES.values():
                with gr.Tab(words(page.key), id=page.key, elem_id=f"tab-{page.key}") as tab:
                    one = Built(page, words, tab)
                    one.build()
                    built.append(one)
        for one in built:
            one.wire()

        def chosen(request: gr.Request) -> tuple[str, State]:
            try:
                given = read(str(request.query_params))
            except ValueError:
                given = {}
            return (given["view"] if given.get("view") in PAGES else "gallery"), given

        def load(request: gr.Request) -> list[Any]:
            """The view of the address."""
            key, given = chosen(request)
            updates: list[Any] = [gr.Tabs(selected=key)]
            for one in built:
                updates += one.restore(one.page.complete(given)) if one.page.key == key else one.nothing()
            return updates

        def load_others(request: gr.Request) -> list[Any]:
            """The other pages as they start, so that they are there when they are opened."""
            key, _ = chosen(request)
            updates: list[Any] = []
            for one in built:
                updates += one.nothing() if one.page.key == key else one.restore(one.page.complete({}))
            return updates

        everything = [c for one in built for c in (*one.controls.components, *one.outputs)]
        first = demo.load(load, None, [tabs, *everything], **FAST)
        first.then(load_others, None, everything, **FAST)
    return demo
