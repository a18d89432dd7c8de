"""Where a page of the documentation is: on the site that the package's metadata names, or in a clone."""

from __future__ import annotations

from pathlib import Path

PLACEHOLDER = "https://example.org/"
"""What pyproject.toml has until a maintainer fills in where the project lives."""


def page_of(name: str, language: str = "en") -> str:
    """The address of an encoding's page, or, as long as there is no site, how to build it."""
    return address_of(f"encodings/{name}.html", language)


def address_of(page: str, language: str = "en") -> str:
    """The address of any page, such as course/08-rope.html, or how to build it."""
    path, address = path_of(page, language), _site()
    return f"out/site/{path} (make docs)" if address is None else f"{address}/{path}"


def path_of(page: str, language: str = "en") -> str:
    """A page's path inside the site."""
    return page if language == "en" else f"{language}/{page}"


def built_site() -> Path | None:
    """The folder of the site that `make docs` built in this clone, if there is one."""
    root = Path(__file__).parents[3]
    folder = root / "out" / "site"
    return folder if (root / "mkdocs.yml").exists() and (folder / "index.html").exists() else None


def _site() -> str | None:
    from importlib import metadata  # only here: it costs more than the rest of a command's start

    try:
        urls = metadata.metadata("posenc").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    found = dict(url.split(", ", 1) for url in urls).get("Documentation", PLACEHOLDER)
    return None if found.startswith(PLACEHOLDER) else found.rstrip("/")
