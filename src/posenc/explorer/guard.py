"""Guard: who is answered. Only pages that this server sent, and programs of this machine.

A browser lets any page on the web send requests to 127.0.0.1. It names the page that asks (Origin, Sec-Fetch-Site) and
the name under which it found this machine (Host), and a page cannot change either:

    Host is 127.0.0.1 or localhost      a name elsewhere that resolves to this machine gets nothing (DNS rebinding)
    Origin, where given, is that Host   its port too: another server of this machine is another origin
    Sec-Fetch-Site is this page's own   except that a link anywhere may open the page itself

Nothing here takes a file, so uploads are off, and a body is bounded.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

NAMES = ("127.0.0.1", "localhost")
LARGEST = 8_000_000
"""Bytes of a body: a text of a million characters is told that it is long, in words."""
OFF = ("upload", "upload_progress", "deep_link", "component_server", "monitoring", "login", "stream")
"""Gradio's own addresses that no page here uses: they write files, or hold connections."""
PAGES = ("/", "/zh", "/zh/")


class Guard:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = refused(scope["method"], scope["path"], Headers(scope=scope))
            if refusal is not None:
                status, why = refusal
                await PlainTextResponse(why, status_code=status)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # no page here opens a web socket
        await self.app(scope, receive, send)


def refused(method: str, path: str, headers: Headers) -> tuple[int, str] | None:
    """(status, sentence) where a request is not answered."""
    host = headers.get("host", "")
    name, _, port = host.partition(":")
    if name not in NAMES or (port and not port.isdigit()) or len(headers.getlist("host")) != 1:
        return 400, f"the explorer answers as 127.0.0.1 and localhost only, not as {host[:80]!r}"
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    opened = method == "GET" and path in PAGES and headers.get("sec-fetch-mode") == "navigate"
    if (origin is not None and origin != f"http://{host}") or (site not in ("same-origin", "none") and not opened):
        return 403, "the explorer answers its own page only; open its address in the browser"
    parts = path.split("/")
    if any(part in OFF or part.startswith(("proxy=", "file=")) for part in parts):
        return 403, "this is off: the explorer takes and serves no files"
    if method not in ("GET", "HEAD", "OPTIONS"):
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > LARGEST:
            return 413, f"a request must say its length and have at most {LARGEST:,} bytes"
    return None
