"""The server: both languages, exports and reports, for this machine alone."""

from __future__ import annotations

import logging
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..plot.panels import csv
from . import frame  # sets gradio's environment before gradio is imported
from .results import run_folder
from .state import read
from .texts import LANGUAGES, PATHS

import gradio as gr  # isort: skip

HOST = "127.0.0.1"


def make() -> FastAPI:
    """The application. Every answer is made here: nothing is fetched from elsewhere."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # A page elsewhere that resolves its own name to this machine must get nothing (DNS rebinding).
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    @app.get("/export.csv")
    def export(request: Request) -> Response:
        try:
            given = read(str(request.query_params))
            words = LANGUAGES[given.pop("lang", "en")]
            page = frame.PAGES[given.pop("view")]
            view = page.draw(page.complete(given), words)
        except (ValueError, KeyError) as error:
            return PlainTextResponse(str(error), status_code=400)
        name = f'attachment; filename="posenc-{page.key}.csv"'
        # the mark at the start lets spreadsheets see that it is UTF-8
        return Response("\ufeff" + csv(view.panels()), media_type="text/csv", headers={"Content-Disposition": name})

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
        "head": f"<script>{assets.joinpath('page.js').read_text(encoding='utf-8')}</script>",
        "footer_links": [],
        "show_error": False,
        "ssr_mode": False,
        "server_name": HOST,
    }
    for language in ("zh", "en"):  # the root last: it would catch every other path
        app = gr.mount_gradio_app(app, frame.blocks(language), path=PATHS[language], **look)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return app
