"""LanguageChoice: middleware that opens the explorer in the browser's language on a first visit.

    GET /    Accept-Language prefers Chinese, and no choice is stored    ->  redirect to /zh/, with the same query
             otherwise                                                   ->  English
    GET /zh/                                                             ->  Chinese, always

The page's language switch stores its choice in the cookie `posenc-language`.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .texts import PATHS

COOKIE = "posenc-language"


class LanguageChoice:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/":
            headers = Headers(scope=scope)
            chosen = cookie_parser(headers.get("cookie", "")).get(COOKIE)
            if (chosen or preferred(headers.get("accept-language", ""))) == "zh":
                query = scope["query_string"].decode("latin-1")
                where = f"{PATHS['zh']}/" + (f"?{query}" if query else "")
                answer = RedirectResponse(where, 307, {"Vary": "Accept-Language, Cookie", "Cache-Control": "no-store"})
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)


def preferred(accepted: str) -> str:
    """The language of the explorer that an Accept-Language header prefers; English if it names none of them."""
    best, most = "en", 0.0
    for part in accepted.split(","):
        tag, _, weight = part.strip().partition(";")
        language = tag.split("-")[0].strip().lower()
        try:
            share = float(weight.partition("=")[2]) if weight else 1.0
        except ValueError:
            continue
        if language in PATHS and share > most:  # of equal ones, the first
            best, most = language, share
    return best
