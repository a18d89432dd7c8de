"""Write the sources of the site to out/docs, both languages.

Hand-written pages are docs/en/**/*.md and docs/zh/**/*.md. Markers in them:

    {{ code 2 }}, {{ formula 2 }}   in a Chinese page: the second code block or formula of the English one
    {{ table lab-quick }}           a table of docs/site/tables.py, from committed results
    {{ value lab-quick rope 512 }}  a number, likewise
    {{ api posenc.attend }}         the reference of a name, from its docstring
    {{ classes encodings }}         the references of all encodings
    {{ names rest }}                the references of public names that no page of docs/en/api lists
    {{ include DESIGN.md }}         a document of the repository, below the page's heading
    {{ part DESIGN.md 2 }}          its second fenced block or table, for a Chinese page of that document
    ![text](figure:rope-decay)      a figure of docs/site/figures.py, drawn by posenc
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import posenc

from . import encodings, figures, markdown, notebooks, plots, tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUT = ROOT / "out" / "docs"
STAMP = ROOT / "out" / ".docs-assembled"
LANGUAGES = ("en", "zh")
MARKER = re.compile(r"(?<!`)\{\{ (\w+) ([^}]+) \}\}")  # not in backticks, where a page is about markers
INCLUDE = re.compile(r"(?<!`)\{\{ include ([^}]+) \}\}")
INCLUDED = {
    "DESIGN.md": "project/design.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "docs/lab.md": "results/lab.md",
    "docs/claims.md": "results/claims.md",
    "docs/uses.md": "results/uses.md",
    "docs/rotary.md": "guides/rotary.md",
    "docs/parallel.md": "guides/parallel.md",
    "bench/results/README.md": "results/benchmarks-full.md",
    "README.md": "index.md",
}
"""Documents of the repository that are pages of the site; each page includes its document."""


def assemble(*, run_notebooks: bool = True) -> Path:
    """All pages, figures and assets; returns their folder."""
    done: dict = {}
    shutil.rmtree(OUT, ignore_errors=True)
    STAMP.parent.mkdir(parents=True, exist_ok=True)
    STAMP.touch()  # before reading: an edit during the assembly counts as newer
    for language in LANGUAGES:
        for source in sorted((DOCS / language).rglob("*.md")):
            name = source.relative_to(DOCS / language)
            if name.parts[0] == "encodings" and name.stem != "index":
                continue  # "when to use it", a part of the generated page
            write(language, name.as_posix(), render(source.read_text(encoding="utf-8"), language, name.as_posix()))
        for name, text in encodings.pages(language).items():
            write(language, name, render(text, language, name))
        notebooks.pages(language, OUT, done, execute=run_notebooks)
    for folder in ("assets", "figures"):
        if (DOCS / folder).exists():
            shutil.copytree(DOCS / folder, OUT / "en" / folder, dirs_exist_ok=True)
    plots.write(OUT / "en" / "assets")
    mathjax = find_mathjax()
    shutil.copy(mathjax, OUT / "en" / "assets" / "tex-svg.js")
    return OUT


def is_outdated() -> bool:
    """Whether a page or its sources changed after the last assembly."""
    sources = [*DOCS.rglob("*.md"), *DOCS.rglob("*.py"), *DOCS.glob("assets/*"), *ROOT.glob("*.md")]
    return not STAMP.exists() or max(path.stat().st_mtime for path in sources) > STAMP.stat().st_mtime


def find_mathjax() -> Path:
    """MathJax in one file, from the package that `make docs` installs beside the environment."""
    for folder in (ROOT / ".venv" / "mathjax", ROOT / "out" / "mathjax"):
        path = folder / "sphinx-mathjax-offline" / "static" / "mathjax" / "tex-svg.js"
        if path.exists():
            return path
    raise FileNotFoundError(
        "MathJax is missing: run make docs, or pip install --no-deps --target .venv/mathjax sphinx-mathjax-offline"
    )


def write(language: str, name: str, text: str) -> None:
    path = OUT / language / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(text: str, language: str, name: str) -> str:
    """A page with its markers replaced."""
    english = DOCS / "en" / name
    original = english.read_text(encoding="utf-8") if english.exists() else ""

    def replace(match: re.Match) -> str:
        kind, argument = match[1], match[2].strip()
        if kind == "code":
            return markdown.code_blocks(original)[int(argument) - 1].text
        if kind == "formula":
            return markdown.formulas(original)[int(argument) - 1]
        if kind == "table":
            return tables.table(argument, language)
        if kind == "value":
            return tables.value(argument)
        if kind == "api":
            return f"::: {argument}"
        if kind == "classes":
            return "\n\n".join(f"::: posenc.{name}" for name in encodings.classes())
        if kind == "names":
            return "\n\n".join(f"::: {one}" for one in unlisted_names())
        if kind == "include":
            return include(argument, name, language)
        if kind == "part":
            return part(argument)
        raise ValueError(
            f"{language}/{name}: unknown marker {match[0]}; there are code, formula, table, value, include, part, api, classes, names"
        )

    text = MARKER.sub(replace, text if language == "en" else join_lines(text))
    return re.sub(r"\]\(figure:([\w.-]+)\)", lambda m: f"]({draw(m[1], name)})", text)


def unlisted_names() -> list[str]:
    """Public names and modules without a place of their own in docs/en/api: the reference is complete all the same."""
    listed = {f"posenc.{name}" for name in encodings.classes()}
    for page in (DOCS / "en" / "api").glob("*.md"):
        listed.update(re.findall(r"\{\{ api ([\w.]+) \}\}", page.read_text(encoding="utf-8")))
    folders = {"engines", "encodings", "nn"}  # their public names are posenc's own
    modules = [f"posenc.{target}" for target in posenc._MODULES.values() if target not in folders]
    return [name for name in (*(f"posenc.{name}" for name in posenc.__all__), *modules) if name not in listed]


def join_lines(text: str) -> str:
    """Chinese has no spaces between words, so a line break between two of its characters must not become one."""
    return re.sub(
        r"(?<=[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef])\n *(?=[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef])", "", text
    )


def draw(figure: str, name: str) -> str:
    """Draw a figure if no page has yet; its address from the page."""
    path = OUT / "en" / "figures" / f"{figure}.svg"
    if not path.exists():
        figures.draw(figure, path)
    return os.path.relpath(f"figures/{figure}.svg", os.path.dirname(name) or ".")


def include(document: str, name: str, language: str = "en") -> str:
    """A document of the repository without its first heading; links to other documents become links to their pages."""
    text = re.sub(r"<!-- [\w:]+ -->\n?", "", body(document))
    base = os.path.dirname(document)
    pages = {**INCLUDED, **{f"docs/en/{page}": page for page in handwritten()}}

    def link(match: re.Match) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(base, target)) if target else document
        if language != "en" and path != document:
            anchor = ""  # another document may be a text of its own in this language, with other sections
        if path in pages:
            return f"[{label}]({os.path.relpath(pages[path], os.path.dirname(name) or '.')}{anchor})"
        if not (ROOT / path).exists():
            raise ValueError(f"{document} links to {target}, which does not exist")
        return f"{label} (`{path}`)" if label.strip("`") != path else f"`{path}`"

    images = re.compile(r"!\[([^\]]*)\]\((?!http)([^)]+)\)")
    text = images.sub(lambda m: f"![{m[1]}]({image(os.path.normpath(os.path.join(base, m[2])), name)})", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:)([^)#]*)(#[^)]*)?\)", link, text)


def body(document: str) -> str:
    """A document of the repository without its first heading, which is the page's own."""
    return re.sub(r"\A# .*\n", "", (ROOT / document).read_text(encoding="utf-8"))


def part(argument: str) -> str:
    """`DESIGN.md 2`: the second fenced block or table of a document."""
    document, number = argument.split()
    return markdown.parts(body(document))[int(number) - 1]


def image(path: str, name: str) -> str:
    """Copy a picture of the repository into the site; its address from the page."""
    target = OUT / "en" / "figures" / Path(path).name
    if path.startswith(".."):
        return path
    target.parent.mkdir(parents=True, exist_ok=True)
    if (ROOT / path).exists():
        shutil.copy(ROOT / path, target)
    return os.path.relpath(f"figures/{Path(path).name}", os.path.dirname(name) or ".")


def handwritten(language: str = "en") -> list[str]:
    """Every hand-written page of a language, by its path in the site."""
    return sorted(path.relative_to(DOCS / language).as_posix() for path in (DOCS / language).rglob("*.md"))
