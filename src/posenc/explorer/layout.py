"""The Gradio layout: tabs of pages, each with controls on the left and figures, code, link and exports on the right."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import wraps
from html import escape
from itertools import chain
from typing import Any, TypeVar

# Set before gradio is imported: no telemetry, and no network access.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gradio as gr

from ..core.translation import Translation
from .pages import PAGES
from .pages.base import Controls, Page
from .texts import LANGUAGES, PATHS
from .url_state import parse_query

# queue=False responds in the request itself; always_last skips intermediate slider positions
SERVER_EVENT: dict[str, Any] = {
    "queue": False, "show_progress": "hidden", "trigger_mode": "always_last", "api_visibility": "private",
}  # fmt: skip
BROWSER_EVENT: dict[str, Any] = {**SERVER_EVENT, "trigger_mode": "multiple"}
"""Events that page.js handles without the server."""


class PageLayout:
    """The components of one page in one language."""

    def __init__(self, page: Page, words: Translation, tab: Any):
        self.page, self.words, self.tab = page, words, tab
        self.controls: Controls

    def build(self) -> None:
        page, words = self.page, self.words
        gr.HTML(f'<p class="intro">{escape(words(f"{page.key} intro"))}</p>', padding=False)
        with gr.Row(equal_height=False, elem_classes="page-row"):
            with gr.Column(scale=1, min_width=250, elem_classes="controls", elem_id=f"{page.key}-controls"):
                gr.HTML(_jump(f"{page.key}-figures", words("to figures")), elem_classes="jump-block", padding=False)
                self.controls = page.controls(words)
            with gr.Column(scale=4, min_width=320, elem_classes="figures"):
                gr.HTML(_view_html(page, words), elem_id=f"{page.key}-figures", js_on_load=None, padding=False)

    def connect_events(self) -> None:
        """Let every control redraw the view, after its server-side handler if it has one."""
        draw = f"(...values) => posenc.draw('{self.page.key}', values)"
        components = self.controls.components
        for component in components:
            if component not in self.controls.quiet:
                for event in _events(component):
                    event(None, components, None, js=draw, **BROWSER_EVENT)
        for event, function, inputs, outputs, *script in self.controls.handlers:
            more = {**SERVER_EVENT, **({"js": script[0]} if script else {})}
            event(function, inputs, outputs, **more).then(None, components, None, js=draw, **BROWSER_EVENT)
        on_open = f"(...values) => posenc.open('{self.page.key}', values)"
        self.tab.select(None, components, None, js=on_open, **BROWSER_EVENT)

    def restore(self, query: str) -> list[Any]:
        """The controls' values for a link. They stay unchanged for an invalid link; drawing it reports the error."""
        try:
            return self.controls.write(self.page.complete(parse_query(query, self.words), self.words))
        except (ValueError, TypeError, KeyError, OverflowError):
            return self.unchanged()

    def unchanged(self) -> list[Any]:
        """Updates that leave the controls as they are."""
        return [gr.skip()] * len(self.controls.components)


def _jump(target: str, text: str) -> str:
    """A link to another part of the page; only narrow windows show it. A plain #target would leave the page's address."""
    return (
        f'<a class="jump" href="#{target}" onclick="event.preventDefault(); '
        f"document.getElementById('{target}').scrollIntoView()\">{escape(text)}</a>"
    )


def _view_html(page: Page, words: Translation) -> str:
    """The elements that page.js fills with the server's response."""
    key = page.key
    html = f'<div id="{key}-html" class="view-html"></div>'
    plots = "".join(f'<div id="{key}-plot-{n}" class="plot"><div></div></div>' for n in range(page.figures))
    return (
        f'<div class="view" aria-busy="true" data-page="{key}" data-language="{words("language")}" data-no-response="{escape(words("no response"))}">'
        f"{_jump(f'{key}-controls', words('to controls'))}"
        f'<div id="{key}-progress" class="progress" role="progressbar" aria-label="{escape(words("drawing"))}" hidden></div>'
        f'<div id="{key}-status" role="status" aria-live="polite"></div>'
        f"{html + plots if page.html_first else plots + html}"
        f'<p class="hint">{escape(words("zoom"))}</p>'
        f'<details id="{key}-code" class="code" hidden><summary>{escape(words("code"))}</summary>'
        f'<pre tabindex="0" aria-label="{escape(words("code label"))}"><code></code></pre><div class="tools">'
        f"{_button('copy code', words, 'posenc.copyCode(this)', copied=True)}</div></details>"
        f'<div id="{key}-tools" class="tools" role="group" aria-label="{escape(words("tools"))}" hidden>'
        f'<a id="{key}-link" href="">{escape(words("link"))}</a>'
        f"{_button('copy', words, f'posenc.copyLink(this, `{key}`)', copied=True)}"
        f"{_button('png', words, f'posenc.png(`{key}`)', name=f'{key}-png')}"
        f'<details id="{key}-csv" class="tables"><summary>{escape(words("csv"))}</summary><ul></ul></details></div></div>'
    )


def _button(text: str, words: Translation, click: str, *, name: str = "", copied: bool = False) -> str:
    more = f' id="{name}"' * bool(name) + f' data-done="{escape(words("copied"))}"' * copied
    return f'<button type="button" onclick="{click}"{more}>{escape(words(text))}</button>'


def _events(component: Any) -> list[Any]:
    """The events of a control that stand for user input. A text box's input event misses deletions and pasting, so its
    change event is used. A number's change event also fires while a link is restored, when other controls still have old
    values; its input and blur events do not.
    """
    if isinstance(component, gr.Textbox):
        return [component.change]
    return [component.input, *([component.blur] if isinstance(component, gr.Number) else [])]


Result = TypeVar("Result")


def inside_event_loop(make: Callable[..., Result]) -> Callable[..., Result]:
    """Run `make` inside an event loop: without one, Gradio's locks create a loop and never close it."""

    @wraps(make)
    def wrapper(*given: Any) -> Result:
        async def run() -> Result:
            return make(*given)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run())
        return make(*given)

    return wrapper


@inside_event_loop
def build_blocks(language: str) -> tuple[gr.Blocks, dict[str, PageLayout]]:
    """(the Gradio application in one language, its pages by key)."""
    words = LANGUAGES[language]
    other, tags = "zh" if language == "en" else "en", {"en": "en", "zh": "zh-CN"}
    with gr.Blocks(title=words("title"), analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(
            f'<header class="top" data-pages="{" ".join(PAGES)}" data-language="{tags[language]}"><a class="skip" href="#main-tabs">{escape(words("skip"))}</a>'
            f"<h1>{escape(words('title'))}</h1><p>{escape(words('subtitle'))}</p>"
            f'<a class="switch" lang="{tags[other]}" href="{PATHS[other].rstrip("/")}/" '
            f'aria-label="{escape(words("switch label"))}" '
            f"onclick=\"posenc.chooseLanguage(this, '{other}')\">"
            f"{escape(words('switch'))}</a></header>"
        )
        built: dict[str, PageLayout] = {}
        with gr.Tabs(selected="gallery", elem_id="main-tabs") as tabs:
            for page in PAGES.values():
                with gr.Tab(words(page.key), id=page.key, elem_id=f"tab-{page.key}") as tab:
                    built[page.key] = PageLayout(page, words, tab)
                    built[page.key].build()
        for one in built.values():
            one.connect_events()

        def load(request: gr.Request) -> list[Any]:
            """Select the page of the URL and restore its controls."""
            wanted, query = request.query_params.get("view"), str(request.query_params)
            restored = [one.restore(query) if key == wanted else one.unchanged() for key, one in built.items()]
            return [gr.Tabs(selected=wanted if wanted in PAGES else "gallery"), *chain(*restored)]

        everything = chain(*(one.controls.components for one in built.values()))
        loaded = demo.load(load, None, [tabs, *everything], **SERVER_EVENT)
        for key, one in built.items():
            on_restored = f"(...values) => posenc.restored('{key}', values)"
            loaded.then(None, one.controls.components, None, js=on_restored, **BROWSER_EVENT)
    return demo, built
