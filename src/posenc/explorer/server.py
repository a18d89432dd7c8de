"""The web server: pages in both languages, views, exports and reports, for clients on this machine only."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from ..core import documentation
from . import layout, render  # layout sets gradio's environment before gradio is imported
from .access import AccessControl
from .language import LanguageChoice
from .pages import PAGES
from .pages.results import run_folder
from .render_queue import QueueFull, RenderFailed, RenderQueue
from .texts import LANGUAGES, PATHS
from .url_state import parse_query

import gradio as gr  # isort: skip

HOST = "127.0.0.1"


@layout.inside_event_loop
def create_app() -> FastAPI:
    """The application. It serves everything itself and sends no request to any other host."""
    queue = RenderQueue()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        queue.start()
        try:
            yield
        finally:
            queue.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.queue = queue
    app.add_middleware(LanguageChoice)
    app.add_middleware(AccessControl)  # the outer one: it sees every request first
    built = {language: layout.build_blocks(language) for language in LANGUAGES}

    @app.post("/draw")
    async def draw(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            page_layout = built[body.get("language", "en")][1][body["page"]]
            width, coarse = max(280, min(int(body.get("width", 1200)), 20_000)), bool(body.get("coarse", True))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return PlainTextResponse("malformed request: expected JSON with a page and its values", status_code=400)
        page, words = page_layout.page, page_layout.words
        wanted: render.Request = {"page": page.key, "language": words("language"), "width": width, "coarse": coarse}
        try:
            if "query" in body:
                wanted["state"], wanted["notes"] = render.state_of_query(page, words, str(body["query"]))
            else:
                wanted["state"] = render.state_of_values(page_layout.controls, words, body.get("values"))
            drawn = await queue.render(wanted, request.is_disconnected)
            return Response(drawn or b"", media_type="application/json")
        except ValueError as error:
            view = render.error_response(error, words)
        except QueueFull:
            view = render.refuse(wanted, words("busy"))
        except RenderFailed:
            view = render.time_limit_response(wanted)
        return Response(render.to_json_bytes(view), media_type="application/json")

    @app.get("/plotly.js")
    def plotly() -> Response:
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
        return Response(script, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    @app.get("/export.csv")
    async def export(request: Request) -> Response:
        try:
            words = LANGUAGES[request.query_params.get("lang", "en")]
            given = parse_query(str(request.query_params), words)
            page = PAGES[given["view"]]
            table = given.get("table", "1")
            number = int(table) if table.isascii() and table.isdigit() and len(table) < 6 else -1
            state = page.complete(given, words)
            wanted = {"page": page.key, "language": words("language"), "state": state, "export": number or -1}
            result = json.loads(await queue.render(wanted, request.is_disconnected) or b"{}")
        except (ValueError, KeyError) as error:
            return PlainTextResponse(str(error), status_code=400)
        except QueueFull:
            return PlainTextResponse(words("busy"), status_code=503)
        except RenderFailed:
            result = render.time_limit_response(wanted)
        if "csv" not in result:
            return PlainTextResponse(result.get("sentence", ""), status_code=400)
        name = f'attachment; filename="posenc-{page.key}-{number}.csv"'
        # the byte-order mark tells spreadsheets that the text is UTF-8
        return Response("\ufeff" + result["csv"], media_type="text/csv", headers={"Content-Disposition": name})

    @app.get("/report")
    def report(run: str) -> Response:
        folder = run_folder(run)
        if folder is None or not (folder / "report.html").is_file():
            return PlainTextResponse("not a run with a report", status_code=404)
        # The report may come from anybody, so it runs without the rights of this origin.
        headers = {"Content-Security-Policy": "sandbox allow-scripts allow-downloads"}
        return FileResponse(folder / "report.html", media_type="text/html", headers=headers)

    site = documentation.built_site()
    if site is not None:
        app.mount("/docs", StaticFiles(directory=site, html=True))
    assets = resources.files(__package__)
    appearance: dict[str, Any] = {
        "theme": gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
        ),
        "css": assets.joinpath("page.css").read_text(encoding="utf-8"),
        "head": f"<style>{assets.joinpath('frame.css').read_text(encoding='utf-8')}</style>"
        f"<script>{assets.joinpath('page.js').read_text(encoding='utf-8')}</script>"
        '<script src="/plotly.js" async></script>',
        "footer_links": [],
        "show_error": False,
        "ssr_mode": False,
        "server_name": HOST,
    }
    for language in ("zh", "en"):  # the root last: it matches every path
        app = gr.mount_gradio_app(app, built[language][0], path=PATHS[language], **appearance)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return app
