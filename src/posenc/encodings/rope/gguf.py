"""The dialect of llama.cpp: GGUF metadata, with or without the architecture's prefix, and its factor tensors.

llama.rope.freq_base            base
llama.rope.dimension_count      rotated channels
llama.rope.scaling.type         none, linear, yarn, longrope
llama.rope.scaling.factor       1 / freq_scale
deepseek2.rope.scaling.yarn_log_multiplier                0.1 mscale_all_dim; mistral3: mscale_all_dim itself
rope_freqs.weight               one divisor for each pair (how Llama 3's smoothing is stored)
rope_factors_long.weight, rope_factors_short.weight       LongRoPE's lists; chosen once, by the served length
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.checks import nearest, show_value
from ...core.errors import OptionError
from .configs import Setup, _cannot
from .fields import field, head_of
from .scaling import Linear, LongRoPE, Proportional, Scaling, YaRN, frequencies, yarn_factor

SCALING = {
    "none": set(),
    "linear": {"factor"},
    "yarn": {
        "factor", "original_context_length", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_beta_fast",
        "yarn_beta_slow", "yarn_log_multiplier",
    },
    "longrope": {"factor", "original_context_length", "attn_factor"},
}  # fmt: skip
INFORMATION = {"finetuned", "type"}  # without influence on the rotation
TENTHS = ("deepseek2", "deepseek32")
"""Architectures that store a tenth of mscale_all_dim, and whose attention multiplies scores by its factor squared."""
TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def read_gguf(metadata: dict[str, Any], length: int | None) -> Setup:
    """The rotation of a GGUF file."""
    keys = {_short(key): value for key, value in metadata.items()}
    rope = {key.removeprefix("rope."): value for key, value in keys.items() if key.startswith("rope.")}
    given = {k.removeprefix("scaling."): rope.pop(k) for k in list(rope) if k.startswith("scaling.")}
    unknown = sorted(set(rope) - {"freq_base", "dimension_count"})
    older = "longrope" if "rope_factors_long.weight" in keys else "none"  # older files of Phi-3
    kind = field(keys, "rope.scaling.type", older)
    if kind not in SCALING:
        raise OptionError(f"llama.cpp has no rope.scaling.type {show_value(kind)}; its types are {', '.join(SCALING)}")
    unknown += [f"scaling.{key}" for key in sorted(set(given) - SCALING[kind] - INFORMATION)]
    if unknown:
        allowed = ["freq_base", "dimension_count", *(f"scaling.{key}" for key in sorted(SCALING[kind]))]
        hint = nearest(unknown[0], allowed, prefix="rope.")
        raise OptionError(
            f"llama.cpp reads no {show_value('rope.' + unknown[0])} for {kind!r}{hint}; it reads {', '.join(allowed)}"
        )
    head_dim = field(keys, "attention.key_length")
    if head_dim is None and (width := field(keys, "embedding_length")) is not None:
        heads = field(keys, "attention.head_count")
        head_dim = None if heads is None else head_of(width, heads)
    rotary_dim = field(keys, "rope.dimension_count", head_dim)
    scaling = _scaling(kind, keys, length, _architecture(metadata))
    # the file does not hold the layout: llama.cpp knows it by architecture
    return Setup(scaling, field(keys, "rope.freq_base"), head_dim or rotary_dim, rotary_dim, layout=None)


def _short(key: str) -> str:
    """Without the architecture: llama.rope.freq_base -> rope.freq_base."""
    if key in TENSORS or key.startswith(("rope.", "attention.")) or "." not in key:
        return key
    return key.split(".", 1)[1]


def _architecture(metadata: dict[str, Any]) -> str | None:
    """The one that the file names, or the prefix of its keys."""
    prefixes = {key.split(".rope.", 1)[0] for key in metadata if ".rope." in key}
    return field(metadata, "general.architecture", min(prefixes, default=None))


def _scaling(kind: str, keys: dict[str, Any], length: int | None, architecture: str | None) -> Scaling | None:
    divisors = field(keys, "rope_freqs.weight")
    if divisors is not None:
        if kind != "none":
            raise OptionError(f"rope_freqs.weight and rope.scaling.type={kind!r} both scale the frequencies; keep one")
        return LongRoPE(short=divisors, long=divisors, original=1, attention_factor=1.0)
    if kind == "none":
        return None
    if kind == "linear":
        return Linear(factor=_need(keys, "rope.scaling.factor", kind))
    original = field(keys, "rope.scaling.original_context_length") or field(keys, "context_length")
    if original is None:
        raise OptionError(f"{kind!r} needs rope.scaling.original_context_length (or context_length, its default)")
    if kind == "longrope":
        served = length or field(keys, "context_length")
        if served is None:
            raise OptionError("llama.cpp chooses LongRoPE's list by the served length; give length=")
        short, long = (_need(keys, f"rope_factors_{name}.weight", kind) for name in ("short", "long"))
        magnitude = field(keys, "rope.scaling.attn_factor", 1.0)
        return LongRoPE(short=short, long=long, original=original, attention_factor=magnitude, freeze_at=served)
    factor = _need(keys, "rope.scaling.factor", kind)
    if (mixed := field(keys, "rope.scaling.yarn_ext_factor", 1.0)) not in (1.0, -1.0):
        raise OptionError(f"rope.scaling.yarn_ext_factor={mixed} mixes the ramp; only 1 is YaRN")
    if (overwritten := field(keys, "rope.scaling.yarn_attn_factor", 1.0)) != 1.0:
        raise OptionError(
            f"rope.scaling.yarn_attn_factor={overwritten} multiplied cos and sin in llama.cpp until the "
            "end of 2025 and is overwritten since; leave it out, or give what you mean as rope.scaling.attn_factor"
        )
    betas = {name: field(keys, f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    given = {name: value for name, value in betas.items() if value is not None}
    yarn = YaRN(factor=factor, original=original, **given)
    own, multiplier = (field(keys, f"rope.scaling.{name}") for name in ("attn_factor", "yarn_log_multiplier"))
    return _magnitude(yarn, 1.0 if own is None else own, multiplier or 0.0, architecture)


def _magnitude(yarn: YaRN, own: float, multiplier: float, architecture: str | None) -> YaRN:
    """YaRN with llama.cpp's factors: `own` is attn_factor, `multiplier` is yarn_log_multiplier as stored."""
    if architecture in TENTHS:
        if not multiplier or own != 1.0 or (architecture != "deepseek2" and multiplier != 0.1):
            raise OptionError(
                f"versions of llama.cpp differ on YaRN of {architecture} with yarn_log_multiplier={multiplier} and "
                f"attn_factor={own}; read the model's config.json with dialect='deepseek' (or 'hf') instead"
            )
        all_dims = round(10.0 * multiplier, 6)  # the file holds a float32
        return replace(yarn, mscale=all_dims, mscale_all_dim=all_dims, scale_scores=True)
    if multiplier:
        if architecture != "mistral3":
            raise OptionError(
                f"rope.scaling.yarn_log_multiplier means other things to other architectures; known are "
                f"{', '.join(TENTHS)} and mistral3, this is {architecture}: read the model's config.json instead"
            )
        yarn = replace(yarn, mscale=1.0, mscale_all_dim=multiplier)
    return yarn if own == 1.0 else replace(yarn, attention_factor=own * yarn.magnitude)


def _need(keys: dict[str, Any], name: str, kind: str):
    value = field(keys, name)
    if value is None:
        raise OptionError(f"{kind!r} needs {name}, which the metadata does not have")
    return value


def write_gguf(scaling: Scaling | None, rope) -> dict[str, Any]:
    """Metadata (without a prefix) and factor lists that give these frequencies."""
    result: dict[str, Any] = {}
    if rope is not None:
        result = {"rope.freq_base": rope.base, "rope.dimension_count": rope.rotary_dim}
        result |= {"attention.key_length": rope.head_dim}
    match scaling:
        case None:
            return result
        case Linear():
            return result | {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
        case YaRN() if scaling.ramp == "code" and scaling.truncate:
            result |= {
                "rope.scaling.type": "yarn", "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast, "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }  # fmt: skip
            if scaling.scale_scores:
                if scaling.magnitude != 1.0 or not scaling.mscale_all_dim:
                    why = "where scores are scaled, cos and sin are not: mscale must equal mscale_all_dim"
                    raise _cannot(scaling, "llama.cpp", why)
                multiplier = 0.1 * scaling.mscale_all_dim
                return result | {"general.architecture": "deepseek2", "rope.scaling.yarn_log_multiplier": multiplier}
            if scaling.magnitude != yarn_factor(scaling.factor):
                result["rope.scaling.attn_factor"] = scaling.magnitude / yarn_factor(scaling.factor)
            return result
        case LongRoPE() if scaling.freeze_at is not None:
            return result | {
                "context_length": scaling.freeze_at, "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": scaling.original, "rope.scaling.attn_factor": scaling.magnitude,
                "rope_factors_short.weight": list(scaling.short), "rope_factors_long.weight": list(scaling.long),
            }  # fmt: skip
        case YaRN() | LongRoPE():
            raise _cannot(scaling, "llama.cpp", "it knows YaRN's ramp of the code and LongRoPE with freeze_at only")
        case Scaling() if scaling.length_dependent:
            raise _cannot(scaling, "llama.cpp", "its frequencies cannot follow the length; give freeze_at")
        case Scaling() if scaling.magnitude != 1.0:
            raise _cannot(scaling, "llama.cpp", "fixed frequencies have no magnitude there; use YaRN")
        case Proportional() if scaling.fraction < 1.0:
            raise _cannot(scaling, "llama.cpp", "pairs that are not rotated have no finite divisor")
    # Llama3 and NTK: any fixed frequencies are one divisor for each pair
    if rope is None:
        raise _cannot(scaling, "llama.cpp", "its divisors depend on the base and the sizes; give the RoPE")
    plain, scaled = frequencies(rope.rotary_dim, rope.base), rope.frequencies()
    return result | {"rope_freqs.weight": [a / b for a, b in zip(plain, scaled, strict=True)]}
