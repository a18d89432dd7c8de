"""A pasted config.json: the form that it fills in, and the difference between it and the form's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from ...core.html_tags import join, tag
from ...core.translation import Translation
from ...encodings.rope import scaling as kinds
from ...encodings.rope.rope import RoPE
from ...encodings.rope.scaling import Scaling
from .. import url_state
from ..url_state import InputError
from .base import facts_table

KINDS: dict[str, type[Scaling]] = {
    "linear": kinds.Linear, "ntk": kinds.NTK, "dynamic": kinds.DynamicNTK, "yarn": kinds.YaRN, "llama3": kinds.Llama3,
    "longrope": kinds.LongRoPE, "proportional": kinds.Proportional,
}  # fmt: skip
FORM = ("head_dim", "base", "original", "target", "scaling", "options", "factors", "short")
SEPARATE = {"original", "short", "long", "freeze_at"}
"""Fields of a scaling that have their own control, or none on this page."""
LONGEST = 4000
"""Characters of a configuration that a link keeps whole; of a longer one it keeps what concerns the rotation."""
CONCERNS = (
    "rope", "rotary", "position", "head", "hidden_size", "n_embd", "d_model", "model_type", "text_config", "factor",
)  # fmt: skip


class Pasted(NamedTuple):
    """The settings of a pasted config.json, one value per control; None if it is absent."""

    head_dim: int | None
    base: float
    original: int | None
    target: int | None
    scaling: str
    options: str
    factors: str
    short: str

    def summary(self, words: Translation) -> str:
        """The settings as a sentence."""
        given = {url_state.label(key, words): value for key, value in zip(FORM, self) if value not in (None, "")}
        return words("comma").join(f"{name} {str(value)[:120]}" for name, value in given.items())


def parse(text: str, words: Translation) -> dict[str, Any]:
    """The keys of a pasted config.json that has a rotation of one axis."""
    if len(text) > 100_000:
        raise InputError(words("config long", length=len(text)))
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(words("not json", error=error.msg, line=error.lineno, column=error.colno)) from None
    except RecursionError:
        raise InputError(words("not config")) from None
    if not isinstance(config, dict):
        raise InputError(words("not config"))
    from ...encodings.rope.fields import has_rotation, keys

    config = keys("config.json", config)
    if not has_rotation(config):
        raise InputError(words("no rotation"))
    return config


def compact(text: str) -> str:
    """A configuration as a link keeps it; a text that is none, as it is."""
    text = text.strip()
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return text[:LONGEST]
    written = json.dumps(config, separators=(",", ":"), ensure_ascii=False)
    if len(written) <= LONGEST or not isinstance(config, dict):
        return written[:LONGEST]
    kept = {key: value for key, value in config.items() if any(part in key for part in CONCERNS)}
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False)


def from_json(text: str, words: Translation, *, clear: bool = False) -> Pasted:
    """The form for a pasted config.json; with `clear`, an error removes the figures."""
    try:
        return _from_json(text, words)
    except ValueError as error:
        sentence = str(error) if isinstance(error, InputError) else words("library", error=error)
        raise InputError(sentence, clear=clear) from None


def _from_json(text: str, words: Translation) -> Pasted:
    from ...encodings.rope.configs import read
    from ...encodings.rope.fields import field, text_part

    config = parse(text, words)
    setup = read(config)
    if setup.sections is not None:
        raise InputError(words("config sections"))
    scaling, longest = setup.scaling, field(text_part(config), "max_position_embeddings")
    kind = next((name for name, made in KINDS.items() if type(scaling) is made), "none")
    options: dict[str, Any] = {}
    if scaling is not None:
        given = {each.name: getattr(scaling, each.name) for each in fields(scaling) if each.name not in SEPARATE}
        plain = {each.name: each.default for each in fields(scaling)}
        options = {name: value for name, value in given.items() if name == "factor" or value != plain[name]}
    if setup.rotary_dim != setup.head_dim:
        options["rotary_dim"] = setup.rotary_dim
    options |= {"layout": setup.layout} if setup.layout != "half" else {}
    options |= {"values": True} if setup.values else {}
    original = getattr(scaling, "original", None) or longest
    if longest is None and original is not None:
        longest = int(original * options.get("factor", 1.0))
    long, short = (listed(getattr(scaling, name, ())) for name in ("long", "short"))
    written = url_state.format_encoding("", options).removeprefix(":")
    return Pasted(
        setup.head_dim, 10000.0 if setup.base is None else setup.base, None if original is None else int(original),
        None if longest is None else int(longest), kind, written, long, short,
    )  # fmt: skip


def listed(factors: tuple[float, ...]) -> str:
    """LongRoPE's factors as their control shows them."""
    return ", ".join(map(str, factors))


def differences(text: str, form: Mapping[str, Any], words: Translation) -> list[tuple[str, str, str, bool]]:
    """(setting, pasted, here, whether they are equal) for every setting of the two JSONs, in one spelling: both are read
    and written again, so that a default and its value are equal, however the pasted one is written.
    """
    from ...encodings.rope.fields import field, text_part

    config = parse(text, words)
    pasted = kinds.to_config(RoPE.from_config(config, head_dim=form.get("head_dim")))
    longest = field(text_part(config), "max_position_embeddings")
    if longest is not None:
        pasted["max_position_embeddings"] = longest
    theirs, ours = _flat(pasted), _flat(form)
    absent = words("json absent")
    rows = []
    for name in dict.fromkeys((*ours, *theirs)):
        left, right = (_shown(side[name]) if name in side else absent for side in (theirs, ours))
        rows.append((name, left, right, name in theirs and name in ours and theirs[name] == ours[name]))
    return rows


def compared(text: str, form: Mapping[str, Any], words: Translation) -> str:
    """The comparison as HTML; nothing where there is no configuration to compare with."""
    if not text:
        return ""
    try:
        rows = differences(text, form, words)
    except ValueError:  # the form was filled in by hand after a text that is no configuration
        return ""
    rows = sorted(rows, key=lambda row: row[3])  # differences first
    differing = sum(not equal for *_, equal in rows)
    return join([
        tag("h2", words("json compared")), tag("p", words("json differs", number=differing) if differing else words("json same")),
        facts_table(
            [words(f"json {name}") for name in ("setting", "pasted", "here")],
            [(name if equal else f"≠ {name}", *values) for name, *values, equal in rows],
            ["same" if equal else "differs" for *_, equal in rows], id="extend-compared",
        ),
    ])  # fmt: skip


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys as names with dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _shown(value: Any) -> str:
    written = json.dumps(value)
    return written if len(written) <= 60 else f"{written[:40]} … {written[-15:]}"
