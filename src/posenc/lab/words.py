"""Tasks and encodings as people type them.

copy:unique=true              a task and its options
rope:base=500000              an encoding and its options
rope+ntk:8                    an encoding, and a context extension that is switched on for evaluation only
rope+yarn:8,beta_fast=4       a bare number is the extension's factor
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..encodings.spec import value
from .errors import LabError


class Word(NamedTuple):
    name: str
    options: dict[str, Any]


class SchemeWord(NamedTuple):
    trained: str  # the encoding that is trained, as typed
    extension: str | None  # what is added for evaluation


def split(word: str, *, bare: str | None = None) -> Word:
    """NAME or NAME:OPTION=VALUE,..; a value without a name is the option `bare`, where there is one."""
    name, colon, tail = word.strip().partition(":")
    options: dict[str, Any] = {}
    for part in tail.split(",") if colon else []:
        option, equals, text = part.partition("=")
        if not equals and bare is not None and bare not in options and part.strip():
            option, text = bare, part
        elif not (option.strip().isidentifier() and equals and text.strip()):
            raise LabError(f"{part!r} in {word!r} is not OPTION=VALUE; write {name}:option=value,option=value")
        options[option.strip()] = value(text.strip())
    return Word(name, options)


def encoding(word: str) -> SchemeWord:
    """The trained encoding and the extension of an encoding's word."""
    trained, plus, extension = word.strip().partition("+")
    if plus and not extension:
        raise LabError(f"{word!r} names no extension after '+'; for example rope+ntk:8")
    return SchemeWord(trained, extension if plus else None)
