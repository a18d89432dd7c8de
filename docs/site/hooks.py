"""Loaded by MkDocs: the encodings of the navigation, new pages while serving, and which warnings do not count in strict mode."""

from __future__ import annotations

import logging
from typing import Any

EXPECTED = (
    # names of encodings come from the registry at run time; tests/docs/test_api.py compares them with the pages
    "Unsupported item in posenc.__all__",
)


def _counts(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in EXPECTED)


_serving = False


def on_startup(command: str = "build", **_: object) -> None:
    global _serving
    _serving = command == "serve"
    for name in ("griffe", "mkdocs.plugins.griffe", "mkdocs.plugins.mkdocs_autorefs", "mkdocs"):
        logging.getLogger(name).addFilter(_counts)
    for handler in logging.getLogger("mkdocs").handlers:
        handler.addFilter(_counts)


def on_pre_build(**_: object) -> None:
    """While serving, assemble again what was edited since. The new files call for another build, which finds nothing newer."""
    from docs.site import assemble

    if _serving and assemble.is_outdated():
        assemble.assemble(run_notebooks=False)


def on_config(config: Any) -> Any:
    from posenc.encodings.registry import ENCODINGS, OWN_ATTENTION

    for section in config.nav:
        if isinstance(section, dict) and "Encodings" in section:
            section["Encodings"] = [
                "encodings/index.md",
                *(f"encodings/{name}.md" for name in (*ENCODINGS, *OWN_ATTENTION)),
            ]
    return config
