"""Docstrings as Markdown. They are written for a terminal: drawings and examples are indented, options stand in aligned columns.

`show` turns drawings and examples into code blocks and columns into tables. As a Griffe extension it does so for the API reference.
"""

from __future__ import annotations

import inspect
import re
import textwrap

import griffe

ROW = re.compile(r"^(\S+(?:,? \S+)*?)(?:\s{3,}|  )(\S.*)$")


def show(text: str) -> str:
    """A docstring as Markdown."""
    shown: list[str] = []
    for part in re.split(r"\n[ \t]*\n", inspect.cleandoc(text)):
        lines = part.splitlines()
        if all(line.startswith("    ") for line in lines):
            block = textwrap.dedent(part)
            if block.startswith(">>> "):
                shown.append(f"```pycon\n{block}\n```")
                continue
            if shown and shown[-1].startswith("```text"):
                shown[-1] = shown[-1][: -len("\n```")] + f"\n\n{block}\n```"
            else:
                shown.append(f"```text\n{block}\n```")
        elif _is_columns(lines):
            shown.append(_table(lines))
        else:
            shown.append(_escape(part))
    return "\n\n".join(shown)


def _is_columns(lines: list[str]) -> bool:
    return bool(ROW.match(lines[0])) and all(ROW.match(line) or line.startswith("      ") for line in lines)


def _table(lines: list[str]) -> str:
    rows: list[list[str]] = []
    for line in lines:
        match = ROW.match(line)
        if match and not line.startswith(" "):
            rows.append([match[1], match[2]])
        else:
            rows[-1][1] += " " + line.strip()
    cells = [f"| `{name}` | {_escape(value).replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *cells])


def _escape(text: str) -> str:
    """Brackets, stars and angle brackets are text, but for those in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\[\]*_])", r"\\\1", part).replace("<", "&lt;") for part in parts
    )


class Extension(griffe.Extension):
    """Applied to every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = show(obj.docstring.value)
