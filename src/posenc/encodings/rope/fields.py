"""The fields of configurations, each with what it may hold. Whatever dialect reads them, values are validated here.

A configuration comes from a file or a clipboard, so it may hold anything: text for a number, NaN, a head of 10^12
channels, a list for a name. `field` returns a value that the arithmetic behind it can take, or raises OptionError with
what was given and what is allowed. The ranges are far beyond every published model, and small enough that no table
built from them is large and no power of them overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checks import Check, flag, keys, listed, number, show_value, text, whole
from ...core.errors import OptionError
from .model_defaults import KEYLESS

LARGEST_HEAD = 2**16
LONGEST = 2**40

_NAME = text(200)
_HEAD = whole(1, LARGEST_HEAD)
_PART = whole(0, LARGEST_HEAD)
_LENGTH = whole(1, LONGEST, rounded=True)
_BASE = number(1e-3, 1e30)
_FACTOR = number(1e-6, 1e9)
_SCALE = number(0.0, 1e6)
_FRACTION = number(0.0, 1.0)
_FACTORS = listed(_FACTOR, least=1, most=LARGEST_HEAD // 2)

FIELDS: dict[str, Check] = {
    # sizes
    "head_dim": _HEAD, "attention_head_dim": _HEAD, "kv_channels": _HEAD, "global_head_dim": _HEAD, "qk_rope_head_dim": _PART, "qk_nope_head_dim": _PART,
    "rotary_dim": _PART, "hidden_size": whole(1, 2**32), "n_embd": whole(1, 2**32),
    "num_attention_heads": whole(1, 2**32), "n_head": whole(1, 2**32), "partial_rotary_factor": _FRACTION,
    "rotary_pct": _FRACTION,
    "mrope_section": lambda name, value: tuple(listed(_PART, least=1, most=8)(name, value)),
    # bases and lengths
    "rope_theta": _BASE, "rotary_emb_base": _BASE, "rope_local_base_freq": _BASE, "local_rope_theta": _BASE,
    "global_rope_theta": _BASE, "max_position_embeddings": _LENGTH, "original_max_position_embeddings": _LENGTH,
    # scaling
    "factor": _FACTOR, "alpha": _FACTOR, "mixed_b": number(1e-3, 1e3), "beta_fast": _FACTOR, "beta_slow": _FACTOR,
    "low_freq_factor": _FACTOR, "high_freq_factor": _FACTOR, "attention_factor": number(1e-6, 1e6),
    "attn_factor": number(1e-6, 1e6), "mscale": _SCALE, "mscale_all_dim": _SCALE, "short_mscale": number(1e-6, 1e6),
    "long_mscale": number(1e-6, 1e6), "short_factor": _FACTORS, "long_factor": _FACTORS,
    # names, switches, parts
    "model_type": _NAME, "rope_type": _NAME, "type": _NAME, "position_embedding_type": _NAME, "truncate": flag,
    "apply_yarn_scaling": flag, "rope_interleave": flag, "rotary_value": flag, "mrope_interleaved": flag,
    "rope_parameters": keys, "rope_scaling": keys, "text_config": keys,
    # llama.cpp's metadata, without the architecture's prefix
    "rope.freq_base": _BASE, "rope.dimension_count": _PART, "rope.scaling.type": _NAME,
    "rope.scaling.factor": _FACTOR, "rope.scaling.original_context_length": _LENGTH,
    "rope.scaling.attn_factor": number(1e-6, 1e6), "rope.scaling.yarn_attn_factor": number(1e-6, 1e6),
    "rope.scaling.yarn_ext_factor": number(-1e6, 1e6), "rope.scaling.yarn_beta_fast": _FACTOR,
    "rope.scaling.yarn_beta_slow": _FACTOR, "rope.scaling.yarn_log_multiplier": _SCALE, "context_length": _LENGTH,
    "attention.head_count": whole(1, 2**32), "attention.key_length": _HEAD, "embedding_length": whole(1, 2**32),
    "general.architecture": _NAME, "rope_freqs.weight": _FACTORS, "rope_factors_long.weight": _FACTORS,
    "rope_factors_short.weight": _FACTORS,
    # arguments of the readers
    "layer_type": _NAME, "length": _LENGTH,
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
    inner = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)}
    parts = depth > 0 and any(has_rotation(keys(key, value), depth - 1) for key, value in inner.items())
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
        return f"this configuration{'' if kind is None else f' ({show_value(kind)})'} has no rotation: its model uses {other}"
    return (
        f"this configuration{'' if kind is None else f' ({show_value(kind)})'} has no rotation: none of rope_parameters, "
        "rope_scaling, rope_theta and rotary_dim is in it; if its model rotates queries and keys, add rope_theta"
    )
