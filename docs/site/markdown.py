"""Pages as text: their code blocks, formulas and headings, and running the code."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posenc.encodings import registry
from posenc.engines import choose

FENCE = re.compile(r"^(```+)(\w*)([^\n]*)\n(.*?)^\1\n?", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"^\$\$\n.*?^\$\$$", re.MULTILINE | re.DOTALL)
PART = re.compile(FENCE.pattern + r"|(?:^\|[^\n]*\n?)+", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A Python block of a page and what it prints, if the page shows it."""

    source: str
    output: str | None
    text: str  # as it stands in the page, fences included


def code_blocks(text: str) -> list[Block]:
    """The Python blocks that start a line; a `text` block right after one is its output."""
    return [Block(m[1], m[2], m[0].rstrip("\n")) for m in CODE.finditer(text)]


def formulas(text: str) -> list[str]:
    """The displayed formulas, `$$` lines included."""
    return FORMULA.findall(text)


def parts(text: str) -> list[str]:
    """The fenced blocks and tables of a page, in order."""
    return [m[0].rstrip("\n") for m in PART.finditer(text)]


def headings(text: str) -> list[tuple[int, str]]:
    """(level, title) of every heading outside of code."""
    return [(len(m[1]), m[2].strip()) for m in re.finditer(r"^(#+) (.+)$", FENCE.sub("", text), re.MULTILINE)]


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table: its head, and a row of cells for each line."""
    first, *lines = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return "\n".join([first, "| --- " * (first.count(" | ") + 1) + "|", *lines])


@contextlib.contextmanager
def registries_restored() -> Iterator[None]:
    """What examples register is gone after them."""
    held = (registry.ENCODINGS, registry.ENCODINGS_BY_CLASS, registry.CAUSAL, registry._REGISTERED, choose.ENGINES)
    before = [dict(table) for table in held]
    try:
        yield
    finally:
        for table, entries in zip(held, before, strict=True):
            table.clear()
            table.update(entries)


def run_blocks(page: Path, text: str | None = None) -> list[tuple[Block, str]]:
    """Run a page's Python blocks in order, in one namespace; each with what it printed."""
    text = page.read_text(encoding="utf-8") if text is None else text
    names: dict = {"__name__": "__main__"}
    done = []
    with registries_restored():
        for block in code_blocks(text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.source, str(page), "exec"), names)
            done.append((block, printed.getvalue()))
    return done


def output_faults(page: Path) -> list[str]:
    """A sentence for each block that prints something else than its page shows, or does not run."""
    try:
        done = run_blocks(page)
    except Exception as error:
        return [f"{page.name}: a code block does not run: {type(error).__name__}: {error}"]
    return [
        f"{page.name}: a code block prints\n{printed}and the page shows\n{block.output or ''}"
        f"`python -m docs.site.markdown {page}` writes the new output"
        for block, printed in done
        if printed != (block.output or "")
    ]


def fill_output(page: Path) -> bool:
    """Write what the blocks print into the page; whether anything changed. For writing a page, never for a test."""
    text = page.read_text(encoding="utf-8")
    for block, printed in run_blocks(page):
        shown = f"```python\n{block.source}```"
        if printed:
            shown += f"\n\n```text\n{printed}```"
        text = text.replace(block.text, shown, 1)
    changed = text != page.read_text(encoding="utf-8")
    if changed:
        page.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        print("changed" if fill_output(Path(name)) else "unchanged", name)
