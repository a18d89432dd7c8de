"""Texts in English and Simplified Chinese: files `texts.toml` of an application, key = [English, Chinese]."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
"""The order of a key's two texts."""


@dataclass(frozen=True, eq=False)
class Translation:
    """words(key, **values) -> a sentence of one language. Unknown keys are returned unchanged, so that names pass through."""

    table: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        return self.table.get(key, key).format(**values)


def read_texts(module_file: str) -> dict[str, Any]:
    """The file texts.toml beside a module, given as its __file__."""
    return tomllib.loads(Path(module_file).with_name("texts.toml").read_text(encoding="utf-8"))


def translate(texts: Mapping[str, tuple[str, str]], language: str) -> dict[str, str]:
    """Key -> text in one language."""
    column = LANGUAGES.index(language)
    return {key: both[column] for key, both in texts.items()}
