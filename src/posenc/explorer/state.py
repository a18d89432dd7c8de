"""Links. A view is a page's name and a few words, and a link is those words as an address's query:

    ?view=compare&a=t5:buckets=16&b=alibi&length=512

`draw` of a page is a function of them alone, so a link restores a view, and an export is the same view again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from .. import spec
from ..errors import OptionError

State = dict[str, str]
LONGEST = 20_000
"""Characters of a query; longer ones are not links of ours."""


def link(page: str, state: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> str:
    """The query of a view; what is at its default is left out."""
    kept = {key: value for key, value in state.items() if defaults is None or defaults.get(key) != value}
    return "?" + urlencode({"view": page, **kept}, safe=":,=")


def read(query: str) -> State:
    """The words of a query."""
    if len(query) > LONGEST:
        raise ValueError(f"the link is {len(query)} characters long; links of this page have at most {LONGEST}")
    return dict(parse_qsl(query.lstrip("?"), keep_blank_values=True))


def number(state: Mapping[str, str], key: str, low: int, high: int) -> int:
    """A whole number of a state, within bounds."""
    text = state[key]
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key}={text[:40]!r} is not a number; give {low} to {high}") from None
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise ValueError(f"{key}={text[:40]} must be a whole number from {low} to {high}")
    return int(value)


def real(state: Mapping[str, str], key: str, low: float, high: float) -> float:
    """A number of a state, within bounds."""
    text = state[key]
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key}={text[:40]!r} is not a number; give {low:g} to {high:g}") from None
    if not low <= value <= high:
        raise ValueError(f"{key}={text[:40]} must lie between {low:g} and {high:g}")
    return value


def choice(state: Mapping[str, str], key: str, choices) -> str:
    if state[key] not in choices:
        raise ValueError(f"{key}={state[key][:40]!r} is unknown; choose {', '.join(map(str, choices))}")
    return state[key]


def scheme(word: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of NAME:OPTION=VALUE,..."""
    try:
        return spec.parse(word)
    except OptionError as error:
        raise ValueError(str(error)) from None


def word(name: str, options: Mapping[str, Any]) -> str:
    """NAME:OPTION=VALUE,... of a scheme; the inverse of `scheme`."""
    parts = [f"{key}={_text(value)}" for key, value in options.items()]
    return name + (":" + ",".join(parts) if parts else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value):
        return f"{value:.1f}"
    return str(value)
