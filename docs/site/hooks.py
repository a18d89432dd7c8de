"""Loaded by MkDocs: the encodings of the navigation, and which warnings of other packages do not count in strict mode."""

from __future__ import annotations

import logging
from typing import Any

EXPECTED = (
    # names of encodings come from the registry at run time; tests/docs/test_api.py compares them with the pages
    "Unsupported item in posenc.__all__",
)


def _counts(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in EXPECTED)


def on_startup(**_: object) -> None:
    for name in ("griffe", "mkdocs.plugins.griffe", "mkdocs.plugins.mkdocs_autorefs", "mkdocs"):
        logging.getLogger(name).addFilter(_counts)
    for handler in logging.getLogger("mkdocs").handlers:
        handler.addFilter(_counts)


def on_config(config: Any) -> Any:
    from posenc.encodings.registry import ENCODINGS

    for section in config.nav:
        if isinstance(section, dict) and "Encodings" in section:
            section["Encodings"] = ["encodings/index.md", *(f"encodings/{name}.md" for name in ENCODINGS)]
    return config
