"""The state of a page as a URL query, and typed reading of its parameters:

    ?view=compare&a=t5:buckets=16&b=alibi&length=512

`Page.draw` is a function of this state alone, so a link restores a view, and an export repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..core.translation import Translation

State = dict[str, str]
# parameter -> key of its control's label in texts.py
LABELS = {
    "length": "length", "train": "train", "head": "which head", "encoding": "encoding", "strength": "strength",
    "first": "first word", "second": "second word", "shift": "shift by", "change": "change", "causal": "causal",
    "head_dim": "head size", "base": "base", "original": "original", "target": "target", "scaling": "scaling",
    "options": "rotation options", "chapter": "chapter", "number": "number of figures",
}  # fmt: skip
MAX_QUERY = 20_000
"""Characters of a query; the explorer makes no longer ones."""


class InputError(ValueError):
    """Input that cannot be drawn; the message is a sentence in the user's language. `clear` removes the previous view."""

    def __init__(self, sentence: str, *, clear: bool = False):
        super().__init__(sentence)
        self.clear = clear


def make_link(page: str, state: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> str:
    """The query of a view, without parameters that have their default."""
    kept = {key: value for key, value in state.items() if defaults is None or defaults.get(key) != value}
    return "?" + urlencode({"view": page, **kept}, safe=":,=")


def parse_query(query: str, words: Translation) -> State:
    """The parameters of a query."""
    if len(query) > MAX_QUERY:
        raise InputError(words("link long", length=len(query), most=MAX_QUERY))
    return dict(parse_qsl(query.lstrip("?"), keep_blank_values=True))


def to_text(value: Any) -> str:
    """A control's value as a link writes it; None and values of unexpected types become an empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:.12g}"
    return value if isinstance(value, str) else ""


def read_int(state: Mapping[str, str], key: str, low: int, high: int, words: Translation) -> int:
    """A parameter as an integer from `low` to `high`."""
    value = _parse_number(state, key, low, high, words)
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise InputError(words("not whole", name=label(key, words), given=state[key][:40], low=low, high=high))
    return int(value)


def read_float(state: Mapping[str, str], key: str, low: float, high: float, words: Translation) -> float:
    """A parameter as a float from `low` to `high`."""
    value = _parse_number(state, key, low, high, words)
    if not low <= value <= high:
        raise InputError(
            words("not between", name=label(key, words), given=state[key][:40], low=f"{low:g}", high=f"{high:g}")
        )
    return value


def _parse_number(state: Mapping[str, str], key: str, low: float, high: float, words: Translation) -> float:
    text = state[key].strip()
    try:
        return float(text)
    except ValueError:
        why = "no number" if not text else "not a number"
        raise InputError(
            words(why, name=label(key, words), given=text[:40], low=f"{low:g}", high=f"{high:g}")
        ) from None


def read_choice(state: Mapping[str, str], key: str, choices: Iterable[str], words: Translation) -> str:
    """A parameter that must be one of `choices`."""
    choices = list(choices)
    if state[key] not in choices:
        given = state[key][:40]
        raise InputError(words("no such choice", name=label(key, words), given=given, choices=", ".join(choices)))
    return state[key]


def label(key: str, words: Translation) -> str:
    """The label of a parameter's control, with the parameter's name."""
    return f"{words(LABELS[key])} ({key})" if key in LABELS else key


def format_encoding(name: str, options: Mapping[str, Any]) -> str:
    """NAME:OPTION=VALUE,... of an encoding; the inverse of encodings.spec.parse."""
    parts = [f"{key}={_format_value(value)}" for key, value in options.items()]
    return name + (":" + ",".join(parts) if parts else "")


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value):
        return f"{value:.1f}"
    return str(value)
