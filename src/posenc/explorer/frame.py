"""The frame around every page: controls at the left, figures at the right, code, link and exports below."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import wraps
from html import escape
from typing import Any, TypeVar

# Before gradio is imported: it must not call home, and it must work where there is no network at all.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gradio as gr

from ..plot.words import Words
from .pages import PAGES
from .state import read
from .texts import LANGUAGES, PATHS
from .view import Controls, Page

# queue=False answers in the request itself; always_last drops slider positions that were passed over
FAST: dict[str, Any] = {
    "queue": False, "show_progress": "hidden", "trigger_mode": "always_last", "api_visibility": "private",
}  # fmt: skip
HERE: dict[str, Any] = {**FAST, "trigger_mode": "multiple"}
"""Events that the page's script handles without the server."""


class Built:
    """A page's components in one language."""

    def __init__(self, page: Page, words: Words, tab: Any):
        self.page, self.words, self.tab = page, words, tab
        self.controls: Controls

    def build(self) -> None:
        page, words = self.page, self.words
        gr.Markdown(words(f"{page.key} intro"), elem_classes="intro")
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=250, elem_classes="controls"):
                self.controls = page.controls(words)
            with gr.Column(scale=4, min_width=320):
                gr.HTML(_places(page, words), elem_id=f"{page.key}-figures", js_on_load=None)

    def wire(self) -> None:
        """Every control redraws; what some do first is done on the server."""
        draw = f"(...values) => posenc.draw('{self.page.key}', values)"
        components = self.controls.components
        for component in components:
            if component not in self.controls.quiet:
                for event in _events(component):
                    event(None, components, None, js=draw, **HERE)
        for event, function, inputs, outputs in self.controls.first:
            event(function, inputs, outputs, **FAST).then(None, components, None, js=draw, **HERE)
        opened = f"(...values) => posenc.open('{self.page.key}', values)"
        self.tab.select(None, components, None, js=opened, **HERE)

    def restore(self, query: str) -> list[Any]:
        """Values of the controls of a link; where it is wrong they stay, and drawing it says why."""
        try:
            return self.controls.write(self.page.complete(read(query, self.words)))
        except (ValueError, TypeError, KeyError, OverflowError):
            return self.nothing()

    def nothing(self) -> list[Any]:
        """Leave the controls as they are."""
        return [gr.skip()] * len(self.controls.components)


def _places(page: Page, words: Words) -> str:
    """Where the page's script puts what the server answers (page.js)."""
    key = page.key
    html = f'<div id="{key}-html" class="told"></div>'
    plots = "".join(f'<div id="{key}-plot-{n}" class="plot"><div></div></div>' for n in range(page.figures))
    return (
        f'<div class="view" aria-busy="true" data-page="{key}" data-language="{words("language")}" data-silent="{escape(words("silent"))}">'
        f'<div id="{key}-progress" class="progress" role="progressbar" aria-label="{escape(words("drawing"))}" hidden></div>'
        f'<div id="{key}-status" role="status" aria-live="polite"></div>'
        f"{html + plots if page.html_first else plots + html}"
        f'<details id="{key}-code" class="code" hidden><summary>{escape(words("code"))}</summary>'
        f'<pre tabindex="0" aria-label="{escape(words("code label"))}"><code></code></pre><div class="tools">'
        f"{_button('copy code', words, 'posenc.copyCode(this)', copied=True)}</div></details>"
        f'<div id="{key}-tools" class="tools" role="group" aria-label="{escape(words("tools"))}" hidden>'
        f'<a id="{key}-link" href="">{escape(words("link"))}</a>'
        f"{_button('copy', words, f'posenc.copyLink(this, `{key}`)', copied=True)}"
        f'<a id="{key}-csv" href="" download="posenc-{key}.csv">{escape(words("csv"))}</a>'
        f"{_button('png', words, f'posenc.png(`{key}`)', name=f'{key}-png')}</div></div>"
    )


def _button(text: str, words: Words, click: str, *, name: str = "", copied: bool = False) -> str:
    more = f' id="{name}"' * bool(name) + f' data-done="{escape(words("copied"))}"' * copied
    return f'<button type="button" onclick="{click}"{more}>{escape(words(text))}</button>'


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


Made = TypeVar("Made")


def in_a_loop(make: Callable[..., Made]) -> Callable[..., Made]:
    """Run `make` inside an event loop. Gradio's locks make themselves one wherever none runs, and never close it."""

    @wraps(make)
    def made(*given: Any) -> Made:
        async def run() -> Made:
            return make(*given)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run())
        return make(*given)

    return made


@in_a_loop
def blocks(language: str) -> tuple[gr.Blocks, dict[str, Built]]:
    """The whole page in one language, and its pages by name."""
    words = LANGUAGES[language]
    other = "zh" if language == "en" else "en"
    with gr.Blocks(title=words("title"), analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(
            f'<header class="top" data-pages="{" ".join(PAGES)}"><a class="skip" href="#main-tabs">{escape(words("skip"))}</a>'
            f"<h1>{escape(words('title'))}</h1><p>{escape(words('subtitle'))}</p>"
            f'<a class="switch" lang="{"zh-CN" if other == "zh" else "en"}" href="{PATHS[other].rstrip("/")}/" '
            f'aria-label="{escape(words("switch label"))}" onclick="this.search = location.search">'
            f"{escape(words('switch'))}</a></header>"
        )
        built: dict[str, Built] = {}
        with gr.Tabs(selected="gallery", elem_id="main-tabs") as tabs:
            for page in PAGES.values():
                with gr.Tab(words(page.key), id=page.key, elem_id=f"tab-{page.key}") as tab:
                    built[page.key] = Built(page, words, tab)
                    built[page.key].build()
        for one in built.values():
            one.wire()

        def load(request: gr.Request) -> list[Any]:
            """The page of the address, and its controls."""
            key = request.query_params.get("view")
            updates: list[Any] = [gr.Tabs(selected=key if key in PAGES else "gallery")]
            for one in built.values():
                updates += one.restore(str(request.query_params)) if one.page.key == key else one.nothing()
            return updates

        everything = [component for one in built.values() for component in one.controls.components]
        loaded = demo.load(load, None, [tabs, *everything], **FAST)
        for key, one in built.items():
            known = f"(...values) => posenc.restored('{key}', values)"
            loaded.then(None, one.controls.components, None, js=known, **HERE)
    return demo, built
