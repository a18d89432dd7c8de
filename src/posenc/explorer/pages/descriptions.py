"""The gallery's description of each encoding in both languages (descriptions.toml); encodings without one use their EncodingInfo."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from ...encodings.registry import find_card

_READ = tomllib.loads(Path(__file__).with_name("descriptions.toml").read_text(encoding="utf-8"))


class About(NamedTuple):
    family: str
    enters: str
    parameters: str
    extrapolates: str
    when: str


def describe(name: str, language: str) -> About:
    """The description of an encoding in a language ("en", "zh")."""
    which, own = find_card(name), _READ["encodings"].get(name)
    if own is None:
        when = f"When you load a model that has it: {which.used_by}."
    else:
        when = own["when"][language == "zh"]
    if own is None or language == "en":
        return About(which.family, which.enters, which.parameters, which.extrapolates, when)
    family, enters = (
        _READ[table].get(text, text) for table, text in (("families", which.family), ("enters", which.enters))
    )
    return About(family, enters, own["parameters"], own["extrapolates"], when)
