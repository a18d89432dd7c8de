"""Links, anchors and addresses of a built site."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect") and found.get("href"):
            self.loads.append(found["href"])


def faults(site: Path) -> list[str]:
    """A sentence for each link that leads nowhere, each file that would be loaded from elsewhere, each table shown as text."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    found = [
        f"{path.relative_to(site.resolve())} shows a table as text: does it have a head and a line | --- |?"
        for path in pages
        if re.search(r"<p>\s*\| ", path.read_text(encoding="utf-8"))
    ]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if name.name == "404.html":
            continue  # its addresses are absolute, for a server
        for address in page.loads:
            if urlsplit(address).scheme in ("http", "https") or address.startswith("//"):
                found.append(f"{name} loads {address} from another machine; ship it with the site")
            elif not urlsplit(address).scheme and not _target(path, address).exists():
                found.append(f"{name} loads {address}, which does not exist")
        for address in page.links:
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            plain, anchor = urldefrag(address)
            target = _target(path, plain) if plain else path
            if not target.exists():
                found.append(f"{name} links to {address}, which does not exist")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                found.append(f"{name} links to {address}, and there is no such anchor")
    return found


def unreferenced(site: Path, names: dict[str, Any]) -> list[str]:
    """A sentence for each public name (name -> object) that no page of the API reference has."""
    anchors: set[str] = set()
    for path in (site / "api").glob("*.html"):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        anchors |= page.anchors
    own = {name: f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}" for name, one in names.items()}
    method = {name: f"posenc.{getattr(one, '__qualname__', '')}" for name, one in names.items()}  # RoPE.from_config
    return [
        f"{name} is on no page of the API reference; add {{{{ api {name} }}}} to a page in docs/en/api and docs/zh/api"
        for name in names
        if not {name, own[name], method[name]} & anchors
    ]


def _target(page: Path, address: str) -> Path:
    path = (page.parent / unquote(urlsplit(address).path)).resolve()
    return path / "index.html" if path.is_dir() else path
