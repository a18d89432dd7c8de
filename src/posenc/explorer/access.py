"""AccessControl: middleware that accepts requests only from the explorer's own pages and from programs on this machine.

A browser lets any web page send requests to 127.0.0.1. It states the origin of that page (Origin, Sec-Fetch-Site) and
the host name it used (Host), and a page can forge neither:

    Host is 127.0.0.1 or localhost      blocks foreign names that resolve to this machine (DNS rebinding)
    Origin, if present, equals Host     including the port: another local server is another origin
    Sec-Fetch-Site is same-origin       except for navigation: a link on any site may open the page itself

Uploads are disabled, and the size of a request body is limited.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost")
MAX_BODY = 8_000_000
"""Bytes of a request body: room for a text of a million characters, which is refused with a sentence."""
DISABLED = ("upload", "upload_progress", "deep_link", "component_server", "monitoring", "login", "stream")
"""Gradio routes that no page here uses: they write files or hold connections open."""
PAGES = ("/", "/zh", "/zh/")


class AccessControl:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = check_request(scope["method"], scope["path"], Headers(scope=scope))
            if refusal is not None:
                status, why = refusal
                await PlainTextResponse(why, status_code=status)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # no page uses web sockets
        await self.app(scope, receive, send)


def check_request(method: str, path: str, headers: Headers) -> tuple[int, str] | None:
    """(status, reason) if a request is refused, else None."""
    host = headers.get("host", "")
    name, _, port = host.partition(":")
    if name not in HOSTS or (port and not port.isdigit()) or len(headers.getlist("host")) != 1:
        return 400, f"Host must be 127.0.0.1 or localhost, got {host[:80]!r}"
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    is_navigation = method == "GET" and path in PAGES and headers.get("sec-fetch-mode") == "navigate"
    if (origin is not None and origin != f"http://{host}") or (
        site not in ("same-origin", "none") and not is_navigation
    ):
        return 403, "the explorer accepts requests from its own pages only; open its address in the browser"
    parts = path.split("/")
    if any(part in DISABLED or part.startswith(("proxy=", "file=")) for part in parts):
        return 403, "this route is disabled: the explorer neither accepts nor serves files"
    if method not in ("GET", "HEAD", "OPTIONS"):
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > MAX_BODY:
            return 413, f"a request needs a Content-Length of at most {MAX_BODY:,} bytes"
    return None
