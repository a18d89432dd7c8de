"""Specifications as text: a name with options, for encodings, their context extensions and the lab's tasks.

t5                            an encoding
t5:buckets=64,causal=true     an encoding and its options
grid_bias:window=(8,8)        a tuple
rope+yarn:8,beta_fast=4       an encoding and a context extension; a bare value is the extension's factor
"""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.checks import nearest
from ..core.errors import OptionError
from .registry import ENCODINGS, OWN_ATTENTION, info

if TYPE_CHECKING:
    from .rope.scaling import Scaling

EXTENSIONS = {"linear": "Linear", "ntk": "NTK", "dynamic": "DynamicNTK", "yarn": "YaRN", "llama3": "Llama3"}
"""Context extensions: their names in a specification, and their classes in rope/scaling.py."""
NEED_ORIGINAL = ("dynamic", "yarn", "llama3")

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
    """NAME or NAME:OPTION=VALUE,OPTION=VALUE, for any kind of name.

    Values are Python literals, true, false, none or text. `bare` names the option of a value without OPTION=.
    """
    name, colon, tail = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in _split(tail) if colon else []:
        option, equals, given = part.partition("=")
        if not equals and bare is not None and bare not in options and part.strip():
            option, given = bare, part
        elif not (option.strip().isidentifier() and equals and given.strip()):
            raise OptionError(f"{part!r} in {text!r} is not OPTION=VALUE; write {name}:option=value,option=value")
        option = option.strip()
        if option in options:
            raise OptionError(f"{option} is given twice in {text!r}; keep one")
        options[option] = value(given.strip())
    return Spec(name, options)


def _split(text: str) -> list[str]:
    """At commas, but not those inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def split_extension(text: str) -> tuple[str, str | None]:
    """ENCODING or ENCODING+EXTENSION as (encoding, extension or None)."""
    encoding, plus, extension = text.strip().partition("+")
    if plus and not extension:
        raise OptionError(f"{text!r} has no extension after '+'; for example rope+ntk:8")
    return encoding, extension if plus else None


def check(text: str, *, own_attention: bool = False) -> None:
    """Raise OptionError, with the nearest name, if the encoding or its extension is unknown. Loads no torch.

    own_attention: names of attention that is no encoding of a layer (cope, latent, ...) are known too.
    """
    encoding, extension = split_extension(text)
    known = own_attention and encoding.partition(":")[0] in OWN_ATTENTION
    try:
        name = (parse_options if known else parse)(encoding).name
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error)) from None
    if extension is not None:
        parse_extension(name, text, extension)


def parse_extension(name: str, text: str, extension: str) -> Spec:
    """The extension's name and options; `text` is the whole specification, for errors."""
    if name != "rope":
        raise OptionError(f"{text}: extensions rescale rotary frequencies; they apply to rope only")
    kind, given = parse_options(extension, bare="factor")
    if kind not in EXTENSIONS:
        raise OptionError(
            f"unknown extension {kind!r} in {text}{nearest(kind, EXTENSIONS)}; the extensions are {', '.join(EXTENSIONS)}"
        )
    return Spec(kind, given)


def make_extension(name: str, text: str, extension: str, original: int) -> Scaling:
    """The scaling of rope+yarn:8; `original` is the training length, for extensions that need it."""
    from .rope import scaling

    kind, given = parse_extension(name, text, extension)
    extended = getattr(scaling, EXTENSIONS[kind])
    known = [field.name for field in fields(extended)]
    unknown = [option for option in given if option not in known]
    if unknown:
        raise OptionError(f"{text}: {kind} has no option {', '.join(unknown)}; its options are {', '.join(known)}")
    if kind in NEED_ORIGINAL:
        given.setdefault("original", original)
    missing = [field.name for field in fields(extended) if field.default is MISSING and field.name not in given]
    if missing:
        raise OptionError(f"{text}: {kind} needs {', '.join(missing)}; for example rope+{kind}:8")
    try:
        return extended(**given)
    except OptionError as error:
        raise OptionError(f"{text}: {error}; for example rope+{kind}:8") from None


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
    text, plus, extension = text.partition("+")
    if plus:
        kind, mark, rest = extension.partition(":")
        plus += kind.strip().lower() + mark + rest
    name, colon, tail = text.partition(":")
    cards = (*ENCODINGS.values(), *OWN_ATTENTION.values())
    known = {spelling.lower(): card.name for card in cards for spelling in (card.class_name, card.name)}
    return known.get(name.strip().lower().replace("-", "_"), name) + colon + tail + plus
