"""Every sentence of the lab's reports (texts.toml), in English or Simplified Chinese."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.translation import read_texts

LANGUAGES = {"en": "English", "zh": "中文"}
TAGS = {"en": "en", "zh": "zh-Hans"}  # the languages' tags in HTML

_READ = read_texts(__file__)
TEXTS: dict[str, tuple[str, str]] = _READ["sentences"]
TITLES: dict[str, tuple[str, str]] = _READ["titles"]


class Words:
    """words(key, **values): a sentence in one language."""

    def __init__(self, language: str = "en"):
        self.language = language
        self._column = list(LANGUAGES).index(language)

    def __call__(self, key: str, /, **values: object) -> str:
        return TEXTS[key][self._column].format(**values)

    def has(self, key: str) -> bool:
        return key in TEXTS

    def number_of(self, key: str, names: Sequence[str], **values: object) -> str:
        """The sentence about several names, or its form for one: the key with " 1"."""
        return self(f"{key} 1" if len(names) == 1 else key, names=self.names(names), **values)

    def names(self, names: Sequence[str]) -> str:
        """a, b and c."""
        if len(names) < 2:
            return "".join(names)
        return self("comma").join(names[:-1]) + self("and") + names[-1]

    def join(self, *sentences: str) -> str:
        return self("space").join(sentence for sentence in sentences if sentence)

    def title(self, title: str) -> str:
        known = next((both for both in TITLES.values() if both[0] == title), None)
        return known[self._column] if known else title
