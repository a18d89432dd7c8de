"""Texts of the figures and of the course (texts.toml) as translations."""

from __future__ import annotations

from ..core.translation import Translation, read_texts, translate

_TEXTS = read_texts(__file__)
FIGURES, COURSE = _TEXTS["figures"], _TEXTS["course"]
ENGLISH, CHINESE = (Translation(translate(FIGURES, language)) for language in ("en", "zh"))
COURSE_ENGLISH = Translation(translate(FIGURES | COURSE, "en"))
