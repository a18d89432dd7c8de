"""HTML and SVG elements. Every string is escaped unless it is Markup, which only this module makes.

    tag("td", encoding)                       a <td> with the escaped text of `encoding`
    tag("tr", tag("td", a), tag("td", b))     `tag` returns Markup, which is not escaped again

An f-string or a sum of strings is a plain string again: a mistake escapes too much, never too little.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


EMPTY = {"meta", "input", "path", "rect"}  # elements that have no content


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element. An attribute's underscores are hyphens (stroke_width), one at its end is dropped (class_)."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    if name in EMPTY:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(content)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Concatenate parts; those that are not Markup are escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else html.escape(str(part)) for part in parts))


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """An HTML table; cells that are Markup are used unchanged."""
    lines = [tag("tr", *(name if isinstance(name, Markup) else tag("th", name) for name in head))]
    for row in rows:
        lines.append(tag("tr", *(cell if isinstance(cell, Markup) else tag("td", cell) for cell in row)))
    return tag("div", tag("table", *lines), class_="scroll", tabindex=0)  # arrow keys scroll it
