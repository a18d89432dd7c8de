"""The chapters of the course as the learn page shows them (chapters.toml): figures with one number to change, texts, and code."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...plot import course
from ...plot.panels import Panel


@dataclass(frozen=True)
class Chapter:
    """`figures` draw for one number from `low` to `high`; every text is (English, Chinese)."""

    page: str  # of the course, without its ending
    title: Sequence[str]
    caption: Sequence[str]  # what the figures show
    change: Sequence[str]  # what to change, and what to watch
    number: Sequence[str]  # what the number is
    low: float
    high: float
    step: float
    start: float
    figures: Sequence[Callable[..., list[Panel]]]
    code: str  # computes `drawn`, a curve or matrix of the figures; {0} is the number


def _read(figures: Sequence[str], **fields: Any) -> Chapter:
    return Chapter(figures=[getattr(course, name) for name in figures], **fields)


CHAPTERS = tuple(
    _read(**fields)
    for fields in tomllib.loads(Path(__file__).with_name("chapters.toml").read_text(encoding="utf-8"))["chapter"]
)
