"""Every text of the explorer (texts.toml), with those of the figures and the course that it draws."""

from __future__ import annotations

from ..core.translation import Translation, read_texts, translate
from ..plot.translations import COURSE, FIGURES

TEXTS = read_texts(__file__)
BOTH = COURSE | TEXTS
LANGUAGES = {language: Translation(translate(BOTH | FIGURES, language)) for language in ("en", "zh")}
PATHS = {"en": "/", "zh": "/zh"}
