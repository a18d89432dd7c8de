"""The server: both languages, views, exports and reports, for this machine alone."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from . import answer, frame  # sets gradio's environment before gradio is imported
from .guard import Guard
from .painter import Busy, Failed, Painter
from .results import run_folder
from .state import read
from .texts import LANGUAGES, PATHS

import gradio as gr  # isort: skip

HOST = "127.0.0.1"


@frame.in_a_loop
def make() -> FastAPI:
    """The application. Every answer is made here: nothing is fetched from elsewhere."""
    painter = Painter()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        painter.start()
        try:
            yield
        finally:
            painter.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.painter = painter
    app.add_middleware(Guard)
    made = {language: frame.blocks(language) for language in LANGUAGES}

    @app.post("/draw")
    async def draw(request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
            built = made[asked.get("language", "en")][1][asked["page"]]
            width, coarse = max(280, min(int(asked.get("width", 1200)), 20_000)), bool(asked.get("coarse", True))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return PlainTextResponse("not a question of this page", status_code=400)
        page, words = built.page, built.words
        question: answer.Question = {"page": page.key, "language": words("language"), "width": width, "coarse": coarse}
        try:
            if "query" in asked:
                question["state"], question["notes"] = answer.state_of_query(page, words, str(asked["query"]))
            else:
                question["state"] = answer.state_of_values(built.controls, words, asked.get("values"))
            drawn = await painter.ask(question, request.is_disconnected)
            return Response(drawn or b"", media_type="application/json")
        except ValueError as error:
            view = answer.sorry(error, words)
        except Busy:
            view = answer.refusal(question, words("busy"))
        except Failed:
            view = answer.too_long(question)
        return Response(answer.as_bytes(view), media_type="application/json")

    @app.get("/plotly.js")
    def plotly() -> Response:
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
        return Response(script, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    @app.get("/export.csv")
    async def export(request: Request) -> Response:
        try:
            words = LANGUAGES[request.query_params.get("lang", "en")]
            given = read(str(request.query_params), words)
            page = frame.PAGES[given["view"]]
            question = {"page": page.key, "language": words("language"), "state": page.complete(given), "export": True}
            found = json.loads(await painter.ask(question, request.is_disconnected) or b"{}")
        except (ValueError, KeyError) as error:
            return PlainTextResponse(str(error), status_code=400)
        except Busy:
            return PlainTextResponse(words("busy"), status_code=503)
        except Failed:
            found = answer.too_long(question)
        if "csv" not in found:
            return PlainTextResponse(found.get("sentence", ""), status_code=400)
        name = f'attachment; filename="posenc-{page.key}.csv"'
        # the mark at the start lets spreadsheets see that it is UTF-8
        return Response("\ufeff" + found["csv"], media_type="text/csv", headers={"Content-Disposition": name})

    @app.get("/report")
    def report(run: str) -> Response:
        folder = run_folder(run)
        if folder is None or not (folder / "report.html").is_file():
            return PlainTextResponse("not a run with a report", status_code=404)
        # A report may have been made by anybody: it gets no rights of this page.
        headers = {"Content-Security-Policy": "sandbox allow-scripts allow-downloads"}
        return FileResponse(folder / "report.html", media_type="text/html", headers=headers)

    assets = resources.files(__package__)
    look: dict[str, Any] = {
        "theme": gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
        ),
        "css": assets.joinpath("page.css").read_text(encoding="utf-8"),
        "head": f"<script>{assets.joinpath('page.js').read_text(encoding='utf-8')}</script>"
        '<script src="/plotly.js" async></script>',
        "footer_links": [],
        "show_error": False,
        "ssr_mode": False,
        "server_name": HOST,
    }
    for language in ("zh", "en"):  # the root last: it would catch every other path
        app = gr.mount_gradio_app(app, made[language][0], path=PATHS[language], **look)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return app
