"""Links. A view is a page's name and a few words, and a link is those words as an address's query:

    ?view=compare&a=t5:buckets=16&b=alibi&length=512

`draw` of a page is a function of them alone, so a link restores a view, and an export is the same view again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..encodings import spec
from ..plot.words import Words

State = dict[str, str]
# what the control of each word of a link is called, in the tables of words
LABELS = {
    "length": "length", "train": "train", "head": "which head", "encoding": "encoding", "strength": "strength",
    "first": "first word", "second": "second word", "shift": "shift by", "change": "change", "causal": "causal",
    "head_dim": "head size", "base": "base", "original": "original", "target": "target", "scaling": "scaling",
    "options": "rotation options",
}  # fmt: skip
LONGEST = 20_000
"""Characters of a query; longer ones are not links of ours."""


class Sorry(ValueError):
    """A sentence for the reader, in the reader's language. `clear`: what was shown before would mislead beside it."""

    def __init__(self, sentence: str, *, clear: bool = False):
        super().__init__(sentence)
        self.clear = clear


def link(page: str, state: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> str:
    """The query of a view; what is at its default is left out."""
    kept = {key: value for key, value in state.items() if defaults is None or defaults.get(key) != value}
    return "?" + urlencode({"view": page, **kept}, safe=":,=")


def read(query: str, words: Words) -> State:
    """The words of a query."""
    if len(query) > LONGEST:
        raise Sorry(words("link long", length=len(query), most=LONGEST))
    return dict(parse_qsl(query.lstrip("?"), keep_blank_values=True))


def plain(value: Any) -> str:
    """What a control holds, as a link writes it. A control that is empty, or holds what it never does, is empty."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:.12g}"
    return value if isinstance(value, str) else ""


def number(state: Mapping[str, str], key: str, low: int, high: int, words: Words) -> int:
    """A whole number of a state, within bounds."""
    value = _number(state, key, low, high, words)
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise Sorry(words("not whole", name=label(key, words), given=state[key][:40], low=low, high=high))
    return int(value)


def real(state: Mapping[str, str], key: str, low: float, high: float, words: Words) -> float:
    """A number of a state, within bounds."""
    value = _number(state, key, low, high, words)
    if not low <= value <= high:
        raise Sorry(
            words("not between", name=label(key, words), given=state[key][:40], low=f"{low:g}", high=f"{high:g}")
        )
    return value


def _number(state: Mapping[str, str], key: str, low: float, high: float, words: Words) -> float:
    text = state[key].strip()
    try:
        return float(text)
    except ValueError:
        why = "no number" if not text else "not a number"
        raise Sorry(words(why, name=label(key, words), given=text[:40], low=f"{low:g}", high=f"{high:g}")) from None


def choice(state: Mapping[str, str], key: str, choices: Iterable[str], words: Words) -> str:
    choices = list(choices)
    if state[key] not in choices:
        given = state[key][:40]
        raise Sorry(words("no such choice", name=label(key, words), given=given, choices=", ".join(choices)))
    return state[key]


def label(key: str, words: Words) -> str:
    """A word of a link beside what its control is called."""
    return f"{words(LABELS[key])} ({key})" if key in LABELS else key


def encoding(word: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of NAME:OPTION=VALUE,..."""
    return spec.parse(word)


def word(name: str, options: Mapping[str, Any]) -> str:
    """NAME:OPTION=VALUE,... of an encoding; the inverse of `encoding`."""
    parts = [f"{key}={_text(value)}" for key, value in options.items()]
    return name + (":" + ",".join(parts) if parts else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value):
        return f"{value:.1f}"
    return str(value)
