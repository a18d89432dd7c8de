"""Checks of values from files and from users: types, ranges, sizes. A file may be damaged, of another version, or hostile.

A check takes a value's name and the value, and returns it or raises OptionError: what was given, and what is allowed.

    steps = whole(1, 10**9)
    settings = record({"steps": steps}, {"rates": listed(number(0.0), most=100)})
    settings("task", {"steps": 0})            task.steps=0 must be a whole number from 1 to 1000000000
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import OptionError

Check = Callable[[str, Any], Any]

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlist = _short.maxtuple = _short.maxdict = 3
_short.maxlevel = 2


def show_value(value: Any) -> str:
    """A short repr for messages, however large or deep the value is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return _short.repr(value)
    except (ValueError, RecursionError):  # a whole number inside with more digits than Python writes
        return f"a {type(value).__name__}"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint for an unknown name, or nothing. prefix: what stands before the known names in a file."""
    near = difflib.get_close_matches(name[:60].lower(), list(known), n=1)
    return f" (did you mean {prefix + near[0]!r}?)" if near else ""


def refuse(name: str, value: Any, allowed: str) -> OptionError:
    return OptionError(f"{name or 'it'}={show_value(value)} must be {allowed}")


def whole(low: int, high: int, *, rounded: bool = False) -> Check:
    """A whole number within bounds; `rounded` takes 4096.0 too, which some files write."""

    def check(name: str, value: Any) -> int:
        ok = isinstance(value, int) and not isinstance(value, bool)
        if rounded and isinstance(value, float):
            ok = value.is_integer()
        if not ok or not low <= value <= high:
            raise refuse(name, value, f"a whole number from {low} to {high}")
        return value

    return check


def number(low: float = -1e300, high: float = 1e300) -> Check:
    """A finite number within bounds."""

    def check(name: str, value: Any) -> float:
        # the comparison is false for NaN, and exact for whole numbers that no float holds
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise refuse(name, value, f"a number from {low:g} to {high:g}")
        return value

    return check


def text(most: int) -> Check:
    def check(name: str, value: Any) -> str:
        # a lone surrogate cannot be encoded
        if not isinstance(value, str) or len(value) > most or any("\ud800" <= c <= "\udfff" for c in value):
            raise refuse(name, value, f"text of at most {most} characters")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def one_of(*allowed: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise refuse(name, value, " or ".join(allowed))
        return value

    return check


def maybe(inner: Check) -> Check:
    return lambda name, value: None if value is None else inner(name, value)


def listed(inner: Check, *, least: int = 0, most: int = 1000) -> Check:
    """A list (or an array or a tensor) of `least` to `most` values."""

    def check(name: str, value: Any) -> list[Any]:
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            size = f", has {len(value)}" if isinstance(value, (list, tuple)) else ""
            raise refuse(name, value, f"a list of {least} to {most} values{size}")
        return [inner(f"{name or 'it'}[{n}]", part) for n, part in enumerate(value)]

    return check


def keys(name: str, value: Any) -> dict[str, Any]:
    """An object of JSON: names and values."""
    if not isinstance(value, Mapping):
        raise refuse(name, value, "a table of keys and values (an object of JSON)")
    for key in value:
        if not isinstance(key, str):
            raise OptionError(f"{name} has the key {show_value(key)}; keys must be text")
    return dict(value)


def record(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    """A table of known fields; others are dropped, because a later version may have written them."""
    known = {**required, **(optional or {})}

    def check(name: str, value: Any) -> dict[str, Any]:
        given = keys(name, value)
        missing = [field for field in required if field not in given]
        if missing:
            raise OptionError(f"{name or 'it'} has no {', '.join(missing)}")
        inside = f"{name}." if name else ""
        return {field: known[field](inside + field, part) for field, part in given.items() if field in known}

    return check
