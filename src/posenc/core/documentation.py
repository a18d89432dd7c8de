"""Where the page of an encoding is: on the site that the package's metadata names, or in a clone."""

from __future__ import annotations

PLACEHOLDER = "https://example.org/"
"""What pyproject.toml has until a maintainer fills in where the project lives."""


def page_of(name: str, language: str = "en") -> str:
    """The address of an encoding's page, or, as long as there is no site, how to build it."""
    path = f"{'' if language == 'en' else f'{language}/'}encodings/{name}.html"
    address = _site()
    return f"out/site/{path} (make docs)" if address is None else f"{address}/{path}"


def _site() -> str | None:
    from importlib import metadata  # only here: it costs more than the rest of a command's start

    try:
        urls = metadata.metadata("posenc").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    found = dict(url.split(", ", 1) for url in urls).get("Documentation", PLACEHOLDER)
    return None if found.startswith(PLACEHOLDER) else found.rstrip("/")
