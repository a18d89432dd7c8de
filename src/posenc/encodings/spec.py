"""An encoding and its options in one word, as people type them: "t5", "rope:base=500000", "t5:buckets=64,causal=true"."""

from __future__ import annotations

import ast
from typing import Any

from ..core.errors import OptionError
from .registry import ENCODINGS, info

LONGEST = 200
"""Characters of one value."""


def parse(word: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of NAME or NAME:OPTION=VALUE,OPTION=VALUE. Values are Python literals, true, false, none or text."""
    name, colon, tail = word.partition(":")
    info(name)
    options: dict[str, Any] = {}
    for part in tail.split(",") if colon else []:
        option, equals, text = part.partition("=")
        if not (option.strip().isidentifier() and equals and text.strip()):
            raise OptionError(f"{part!r} in {word!r} is not OPTION=VALUE; write {name}:option=value,option=value")
        options[option.strip()] = value(text.strip())
    return name, options


def value(text: str) -> Any:
    """The Python value of an option's text."""
    plain = {"true": True, "false": False, "none": None}
    if len(text) > LONGEST:
        raise OptionError(f"an option's value has {len(text):,} characters; at most {LONGEST} are read, shorten it")
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
