"""The fields of configurations, each with what it may hold. Whatever dialect reads them, values are validated here.

A configuration comes from a file or a clipboard, so it may hold anything: text for a number, NaN, a head of 10^12
channels, a list for a name. `field` returns a value that the arithmetic behind it can take, or raises OptionError with
what was given and what is allowed. The ranges are far beyond every published model, and small enough that no table
built from them is large and no power of them overflows.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import OptionError
from .model_defaults import KEYLESS

LARGEST_HEAD = 2**16
LONGEST = 2**40
Check = Callable[[str, Any], Any]

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlist = _short.maxtuple = _short.maxdict = 3
_short.maxlevel = 2


def short_repr(value: Any) -> str:
    """A short repr for messages, however large or deep the value is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return _short.repr(value)
    except (ValueError, RecursionError):  # a whole number inside with more digits than Python writes
        return f"a {type(value).__name__}"


def whole(low: int, high: int, *, rounded: bool = False) -> Check:
    """A whole number within bounds; `rounded` takes 4096.0 too, which some files write."""

    def check(name: str, value: Any) -> int:
        ok = isinstance(value, int) and not isinstance(value, bool)
        if rounded and isinstance(value, float):
            ok = value.is_integer()
        if not ok or not low <= value <= high:
            raise OptionError(f"{name}={short_repr(value)} must be a whole number from {low} to {high}; correct it")
        return value

    return check


def number(low: float, high: float) -> Check:
    """A finite number within bounds."""

    def check(name: str, value: Any) -> float:
        # the comparison is false for NaN, and exact for whole numbers that no float holds
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise OptionError(f"{name}={short_repr(value)} must be a number from {low:g} to {high:g}; correct it")
        return value

    return check


def numbers(low: float, high: float, most: int) -> Check:
    """A list of up to `most` finite numbers within bounds."""
    one = number(low, high)

    def check(name: str, value: Any) -> list[float]:
        value = value.tolist() if hasattr(value, "tolist") else value  # an array or a tensor
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= most:
            size = f" with {len(value)} entries" if isinstance(value, (list, tuple)) else ""
            raise OptionError(f"{name}={short_repr(value)}{size} must be a list of 1 to {most} numbers; correct it")
        return [one(f"{name}[{index}]", each) for index, each in enumerate(value)]

    return check


def wholes(low: int, high: int, most: int) -> Check:
    one = whole(low, high)

    def check(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= most:
            raise OptionError(f"{name}={short_repr(value)} must be a list of 1 to {most} whole numbers; correct it")
        return tuple(one(f"{name}[{index}]", each) for index, each in enumerate(value))

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={short_repr(value)} must be true or false; correct it")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise OptionError(f"{name}={short_repr(value)} must be a name of at most 200 characters; correct it")
    return value


def keys(name: str, value: Any) -> dict[str, Any]:
    """An object of JSON: names and values."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name}={short_repr(value)} must hold keys and values (an object of JSON); correct it")
    for key in value:
        if not isinstance(key, str):
            raise OptionError(f"{name} has the key {short_repr(key)}; keys must be text")
    return dict(value)


_HEAD = whole(1, LARGEST_HEAD)
_PART = whole(0, LARGEST_HEAD)
_LENGTH = whole(1, LONGEST, rounded=True)
_BASE = number(1e-3, 1e30)
_FACTOR = number(1e-6, 1e9)
_SCALE = number(0.0, 1e6)
_FRACTION = number(0.0, 1.0)
_FACTORS = numbers(1e-6, 1e9, LARGEST_HEAD // 2)

FIELDS: dict[str, Check] = {
    # sizes
    "head_dim": _HEAD, "attention_head_dim": _HEAD, "kv_channels": _HEAD, "global_head_dim": _HEAD, "qk_rope_head_dim": _PART, "qk_nope_head_dim": _PART,
    "rotary_dim": _PART, "hidden_size": whole(1, 2**32), "n_embd": whole(1, 2**32),
    "num_attention_heads": whole(1, 2**32), "n_head": whole(1, 2**32), "partial_rotary_factor": _FRACTION,
    "rotary_pct": _FRACTION,
    "mrope_section": wholes(0, LARGEST_HEAD, 8),
    # bases and lengths
    "rope_theta": _BASE, "rotary_emb_base": _BASE, "rope_local_base_freq": _BASE, "local_rope_theta": _BASE,
    "global_rope_theta": _BASE, "max_position_embeddings": _LENGTH, "original_max_position_embeddings": _LENGTH,
    # scaling
    "factor": _FACTOR, "alpha": _FACTOR, "mixed_b": number(1e-3, 1e3), "beta_fast": _FACTOR, "beta_slow": _FACTOR,
    "low_freq_factor": _FACTOR, "high_freq_factor": _FACTOR, "attention_factor": number(1e-6, 1e6),
    "attn_factor": number(1e-6, 1e6), "mscale": _SCALE, "mscale_all_dim": _SCALE, "short_mscale": number(1e-6, 1e6),
    "long_mscale": number(1e-6, 1e6), "short_factor": _FACTORS, "long_factor": _FACTORS,
    # names, switches, parts
    "model_type": text, "rope_type": text, "type": text, "position_embedding_type": text, "truncate": flag,
    "apply_yarn_scaling": flag, "rope_interleave": flag, "rotary_value": flag, "mrope_interleaved": flag,
    "rope_parameters": keys, "rope_scaling": keys, "text_config": keys,
    # llama.cpp's metadata, without the architecture's prefix
    "rope.freq_base": _BASE, "rope.dimension_count": _PART, "rope.scaling.type": text,
    "rope.scaling.factor": _FACTOR, "rope.scaling.original_context_length": _LENGTH,
    "rope.scaling.attn_factor": number(1e-6, 1e6), "rope.scaling.yarn_attn_factor": number(1e-6, 1e6),
    "rope.scaling.yarn_ext_factor": number(-1e6, 1e6), "rope.scaling.yarn_beta_fast": _FACTOR,
    "rope.scaling.yarn_beta_slow": _FACTOR, "rope.scaling.yarn_log_multiplier": _SCALE, "context_length": _LENGTH,
    "attention.head_count": whole(1, 2**32), "attention.key_length": _HEAD, "embedding_length": whole(1, 2**32),
    "general.architecture": text, "rope_freqs.weight": _FACTORS, "rope_factors_long.weight": _FACTORS,
    "rope_factors_short.weight": _FACTORS,
    # arguments of the readers
    "layer_type": text, "length": _LENGTH,
}  # fmt: skip


def validate(name: str, value: Any) -> Any:
    """The validated value of a known field; None passes."""
    return None if value is None else FIELDS[name](name, value)


def field(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A field of a configuration, validated; the default where it is absent or null."""
    value = validate(name, config.get(name))
    return default if value is None else value


def same(a: Any, b: Any) -> bool:
    """Whether two values of fields are equal. Values that are nested too deep to compare raise."""
    try:
        return bool(a == b)
    except RecursionError:
        raise OptionError("the configuration is nested deeper than any rotation's; correct it") from None


def head_of(hidden: int, heads: int) -> int:
    """hidden / heads, where that is a head size."""
    if hidden < heads:
        raise OptionError(f"a width of {hidden} has no room for {heads} heads; correct one of them")
    return validate("head_dim", hidden // heads)


# ---- which configurations have a rotation ----------------------------------------------------------------------
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
LOCAL_BASES = {"rope_local_base_freq": "rope_theta", "local_rope_theta": "global_rope_theta"}
"""Older files: the base of sliding-window layers, and of the others."""
MODEL = {
    "rope_theta", "rotary_emb_base", *LOCAL_BASES, *LOCAL_BASES.values(), "rope_parameters", "rope_scaling", "rope_interleave", "rotary_dim",
    "rotary_pct", "rotary_value", "rope_type",
}  # fmt: skip
ROTATION = MODEL | ALWAYS | {"factor", "qk_rope_head_dim", "rotary_pct"}
"""Every model that rotates has at least one of these keys."""


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model of a model of images and text; the configuration itself elsewhere."""
    for _ in range(4):  # deeper than any published file
        if any(key in config for key in MODEL) or not isinstance(config.get("text_config"), Mapping):
            return config
        config = field(config, "text_config")
    raise OptionError("text_config is nested more than 4 deep; give the innermost one")


def has_rotation(config: dict[str, Any], depth: int = 4) -> bool:
    """Whether a configuration of a whole model, of its parts, or of a rotation alone, has a rotation."""
    config = text_part(config)
    if _instead(config) is not None:
        return False
    kind, embedding = field(config, "model_type", ""), field(config, "position_embedding_type", "")
    named = any(key.startswith(("rope_", "rotary_")) or key in ROTATION for key in config) or config.get("rope") is True
    parts = depth > 0 and any(
        key.endswith("_config") and isinstance(value, Mapping) and has_rotation(keys(key, value), depth - 1)
        for key, value in config.items()
    )
    return named or parts or embedding in ("rotary", "rope") or kind in KEYLESS


def _instead(config: dict[str, Any]) -> str | None:
    """The encoding that a model uses instead of a rotation, or None."""
    if config.get("alibi") is True or field(config, "position_embedding_type", "") == "alibi":
        return "ALiBi"
    return "no positions" if field(config, "position_embedding_type", "") == "nope" else None


def no_rotation(config: dict[str, Any]) -> str:
    """The error message for a configuration without a rotation."""
    kind, other = field(config, "model_type"), _instead(text_part(config))
    if other is not None:
        return f"this configuration{'' if kind is None else f' ({short_repr(kind)})'} has no rotation: its model uses {other}"
    return (
        f"this configuration{'' if kind is None else f' ({short_repr(kind)})'} has no rotation: none of rope_parameters, "
        "rope_scaling, rope_theta and rotary_dim is in it; if its model rotates queries and keys, add rope_theta"
    )
