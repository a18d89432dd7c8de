"""Specifications as text: a name with options, for encodings, their context extensions and the lab's tasks.

t5                            an encoding
t5:buckets=64,causal=true     an encoding and its options
rope+yarn:8,beta_fast=4       an encoding and a context extension; a bare value is the extension's factor
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from ..core.errors import OptionError
from .registry import ENCODINGS, info

MAX_VALUE_LENGTH = 200
"""Characters of one value."""


class Spec(NamedTuple):
    name: str
    options: dict[str, Any]


def parse(text: str) -> Spec:
    """An encoding's specification; an unknown name raises a ValueError with a suggestion."""
    info(text.strip().partition(":")[0])
    return parse_options(text)


def parse_options(text: str, *, bare: str | None = None) -> Spec:
    """NAME or NAME:OPTION=VALUE,OPTION=VALUE, whatever the name stands for.

    Values are Python literals, true, false, none or text. `bare` names the option of a value without OPTION=.
    """
    name, colon, tail = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in tail.split(",") if colon else []:
        option, equals, given = part.partition("=")
        if not equals and bare is not None and bare not in options and part.strip():
            option, given = bare, part
        elif not (option.strip().isidentifier() and equals and given.strip()):
            raise OptionError(f"{part!r} in {text!r} is not OPTION=VALUE; write {name}:option=value,option=value")
        options[option.strip()] = value(given.strip())
    return Spec(name, options)


def split_extension(text: str) -> tuple[str, str | None]:
    """ENCODING or ENCODING+EXTENSION as (encoding, extension or None)."""
    encoding, plus, extension = text.strip().partition("+")
    if plus and not extension:
        raise OptionError(f"{text!r} has no extension after '+'; for example rope+ntk:8")
    return encoding, extension if plus else None


def value(text: str) -> Any:
    """The Python value of an option's text."""
    plain = {"true": True, "false": False, "none": None}
    if len(text) > MAX_VALUE_LENGTH:
        raise OptionError(
            f"an option's value has {len(text):,} characters; at most {MAX_VALUE_LENGTH} are allowed, shorten it"
        )
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep to be a value
        return text


def normalise(text: str) -> str:
    """The text with the registered name of its encoding, from a name or class name in any case: "T5:buckets=8" becomes
    "t5:buckets=8". Unknown names are unchanged.
    """
    name, colon, tail = text.partition(":")
    known = {spelling.lower(): card.name for card in ENCODINGS.values() for spelling in (card.class_name, card.name)}
    return known.get(name.strip().lower().replace("-", "_"), name) + colon + tail
