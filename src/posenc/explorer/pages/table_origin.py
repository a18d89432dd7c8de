"""Sentences about the origin of learned tables: trained by the lab, or untrained and random."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.translation import Translation
from ...plot import trained
from ...plot.analysis import Subject, Tables

SEVERAL_AXES = ("mrope", "axial", "sinusoidal_2d")


def untrained_notes(subjects: Iterable[Subject], words: Translation) -> list[str]:
    """A note that names the encodings whose tables are random."""
    names = _names(subjects, "untrained")
    return [words("tables untrained", names=words("comma").join(names))] if names else []


def trained_notes(subjects: Iterable[Subject], words: Translation) -> list[str]:
    """Notes on the models that the trained tables come from."""
    names = _names(subjects, "trained")
    if not names:
        return []
    sizes = {key: trained.origin()[key] for key in ("layers", "width", "heads", "steps", "batch", "length")}
    notes = [words("tables trained", names=words("comma").join(names), **sizes)]
    return [*notes, words("mean query")] if any(trained.queries(name) is not None for name in names) else notes


def axes_notes(subjects: Iterable[Subject], words: Translation) -> list[str]:
    """A note on how encodings of several axes are drawn."""
    names = list(dict.fromkeys(subject.name for subject in subjects if subject.name in SEVERAL_AXES))
    return [words("several axes", names=words("comma").join(names))] if names else []


def _names(subjects: Iterable[Subject], tables: Tables) -> list[str]:
    return list(dict.fromkeys(subject.name for subject in subjects if subject.tables == tables))
