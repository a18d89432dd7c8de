"""Dialects: how configurations say which RoPE they want, read and written strictly.

The same words mean different things to different readers:

                     hf                         vllm                       llama.cpp                deepseek
    dynamic          follows the length         fixed at factor · original  -                        as hf
    longrope         follows the length         fixed at the served length  fixed at its length      -
    yarn's magnitude attention_factor, mscale   attn_factor · (0.1 ln s+1)  attn_factor · (...)      mscale, scores too
    llama3           its own keys               its own keys                tensor rope_freqs        -
    deepseek's yarn  mscale, scores unscaled    type deepseek_yarn         yarn_log_multiplier      yarn
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .model_types import BASES, BY_LAYER, INTERLEAVED, LAYERED
from .scaling import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    Linear,
    Llama3,
    LongRoPE,
    MixedNTK,
    Proportional,
    Scaling,
    YaRN,
    yarn_factor,
)

DIALECTS = ("hf", "vllm", "llama.cpp", "deepseek")
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
LISTS = {"short_factor", "long_factor", "original_max_position_embeddings"}
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
KEYS: dict[str, dict[str, set[str]]] = {
    "hf": {
        "default": set(),
        "linear": {"factor"},
        "dynamic": {"factor"},
        "yarn": YARN | {"attention_factor", "mscale", "mscale_all_dim"},
        "longrope": LISTS | {"factor", "attention_factor"},
        "llama3": LLAMA3,
        "proportional": {"factor"},
    },
    "vllm": {
        "default": set(),
        "linear": {"factor"},
        "ntk": {"factor", "mixed_b"},
        "dynamic": {"factor", "alpha"},
        "yarn": YARN | {"attn_factor", "apply_yarn_scaling"},
        "deepseek_yarn": (YARN | {"mscale", "mscale_all_dim", "attn_factor"}) - {"truncate"},
        "longrope": LISTS | {"short_mscale", "long_mscale"},
        "llama3": LLAMA3,
    },
    "deepseek": {
        "default": set(),
        "linear": {"factor"},
        "dynamic": {"factor"},
        "yarn": (YARN | {"mscale", "mscale_all_dim"}) - {"truncate"},
    },
}
"""Every key that a kind of scaling may have beyond ALWAYS."""
SAME_KIND = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class Setup:
    """What a configuration says of its rotation; None where it does not say."""

    scaling: Scaling | None
    base: float | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None
    layout: str | None = "half"
    sections: tuple[int, ...] | None = None
    interleaved_sections: bool = False
    values: bool = False

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `posenc.RoPE`."""
        if self.head_dim is None:
            raise ValueError("the configuration does not say the head size; give the whole config.json, or head_dim")
        if self.layout is None:
            raise ValueError("the configuration does not say the layout; give layout='half' or 'interleaved'")
        base = 10000.0 if self.base is None else self.base
        turned = {"values": True} if self.values else {}
        return dict(
            head_dim=self.head_dim, rotary_dim=self.rotary_dim, base=base, layout=self.layout, scaling=self.scaling,
            **turned,
        )  # fmt: skip


def read(config, dialect: str = "hf", *, layer_type: str | None = None, length: int | None = None) -> Setup:
    """See `posenc.scaling.from_config`."""
    _known(dialect)
    if dialect == "llama.cpp":
        from .gguf import read_gguf

        return read_gguf(_mapping(config), length)
    model, rope = _split(_mapping(config, layer_type), layer_type, dialect)
    kind = _kind(rope, model, dialect)
    allowed = KEYS[dialect][kind] | ALWAYS
    unknown = sorted(set(rope) - allowed)
    if unknown:
        raise ValueError(_unknown_keys(unknown, allowed, kind, dialect))
    rope = {key: value for key, value in rope.items() if value is not None}
    head_dim, rotary_dim = _sizes(model, rope, kind)
    scaling = _READERS[kind](_Keys(rope, model, kind, dialect, length))
    if isinstance(scaling, LongRoPE) and rotary_dim is not None and len(scaling.short) != rotary_dim // 2:
        raise ValueError(f"short_factor has {len(scaling.short)} numbers, the rotation has {rotary_dim // 2} pairs")
    interleaved = model.get("rope_interleave", model.get("model_type") in INTERLEAVED)
    sections = rope.get("mrope_section")
    if sections is not None and str(model.get("model_type")).startswith("ernie4_5_vl"):
        raise ValueError(
            "Ernie 4.5-VL's mrope_section are rows, columns and time, rows and columns in turn; MRoPE does not deal so"
        )
    return Setup(
        scaling,
        _base(model, rope),
        head_dim,
        rotary_dim,
        "interleaved" if interleaved else "half",
        None if sections is None else tuple(sections),
        bool(rope.get("mrope_interleaved", False)),
        bool(model.get("rotary_value", False)),
    )


# ---- reading: the parts of a configuration ------------------------------------------------------------------
def _known(dialect: str) -> None:
    if dialect not in DIALECTS:
        raise ValueError(f"dialect={dialect!r} is unknown; use one of {', '.join(map(repr, DIALECTS))}")


def _mapping(config, layer_type: str | None = None) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):  # a transformers config; its attributes hold what to_dict leaves out
        fields = config.to_dict()
        for name in ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_parameters"):
            try:
                value = getattr(config, name, None)
            except RuntimeError:  # differs from layer to layer
                value = None if layer_type is None else getattr(config.per_layer_config[layer_type], name)
                fields[name] = value
            if value is not None:
                fields.setdefault(name, value)
        return fields
    raise ValueError(f"a configuration is a dict or a transformers config, got {type(config).__name__}")


LOCAL_BASES = {"rope_local_base_freq": "rope_theta", "local_rope_theta": "global_rope_theta"}
"""Older files: the base of sliding-window layers, and of the others."""
MODEL = {
    "rope_theta", "rotary_emb_base", *LOCAL_BASES, *LOCAL_BASES.values(), "rope_parameters", "rope_scaling", "rope_interleave", "rotary_dim",
    "rotary_pct", "rotary_value", "rope_type",
}  # fmt: skip


def _split(config: dict[str, Any], layer_type: str | None, dialect: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the model's keys, the rotation's keys)."""
    if not any(key in config for key in MODEL) and isinstance(config.get("text_config"), Mapping):
        return _split(dict(config["text_config"]), layer_type, dialect)  # a model of images and text
    parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)]
    if parts and not any(key in config for key in (*MODEL, "hidden_size", "head_dim")):
        raise ValueError(f"this configuration has parts, each with its own rotation: give one of {', '.join(parts)}")
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and dict(new) != dict(old):
        raise ValueError("rope_parameters and rope_scaling disagree; keep one of them")
    rope = new or old
    if rope is None and ("rope_type" in config or "type" in config or "factor" in config):
        model, rope = {}, config
    else:
        model, rope = config, dict(rope or {})
    _check_model(model, rope)
    rope = _by_layer(model, rope)
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        if layer_type in rope and rope[layer_type] is None:
            raise ValueError(f"layers of type {layer_type!r} have no rotation in this model")
        if layer_type is None or layer_type not in nested:
            raise ValueError(f"this model has a rotation for each of {', '.join(nested)}; say which with layer_type")
        own = dict(rope[layer_type])
        beside = {key: value for key, value in rope.items() if key not in nested and value is not None}
        if beside.get("rope_type") == "default":  # transformers 5.16 writes it where a type of layer has no layer
            del beside["rope_type"]
        for key in beside:
            raise ValueError(f"{key!r} stands beside the rotations of the layers; say it in each of them")
        if dialect == "hf" and own.get("truncate") is False:
            raise ValueError(
                f"transformers ignores the truncate of a layer's rotation ({layer_type}) and rounds the ramp's ends; "
                "take truncate out for its numbers, or use another dialect for what it says"
            )
        outside = {key: value for key, value in model.items() if key not in own or key in ALL_LAYERS}
        if layer_type == "full_attention" and model.get("global_head_dim"):
            outside["head_dim"] = model["global_head_dim"]
        return outside, own
    if layer_type is not None:
        raise ValueError(f"layer_type={layer_type!r} was given, but this model has one rotation for all layers")
    return model, dict(rope)


ALL_LAYERS = ("original_max_position_embeddings",)
"""Keys that a layer's rotation must not contradict. Others of its keys stand before the model's."""


def _check_model(model: dict[str, Any], rope: dict[str, Any]) -> None:
    """Refuse what is a rotation of another kind, or a misspelt key of the model."""
    pictures = "patch_size" in model and ("image_size" in model or "num_channels" in model)
    if pictures or "axial" in (rope.get("rope_type"), rope.get("type")):
        raise ValueError("this is the configuration of an image model, whose rotation has two axes: posenc.AxialRoPE")
    unknown = sorted(key for key in model if key.startswith(("rope_", "rotary_")) and key not in MODEL)
    if unknown:
        near = difflib.get_close_matches(unknown[0], MODEL, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"the configuration has {unknown[0]!r}{hint}, which may change the rotation and is not known here; "
            "rename it, or take it out if it says nothing of the frequencies"
        )


def _by_layer(model: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Older files of models with sliding windows, as newer ones say it."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return rope
    kind = str(model.get("model_type"))
    if kind in BY_LAYER:
        raise ValueError(
            f"{kind} has a rotation for each type of layer, and this file does not say them; "
            "read it with transformers' AutoConfig, and give that"
        )
    named = next(((local, others) for local, others in LOCAL_BASES.items() if local in model), None)
    if named is None and kind not in LAYERED:
        return rope
    local, others = named or ("rope_local_base_freq", "rope_theta")
    bases = LAYERED.get(kind, {})
    full = {"rope_theta": model.get(others, bases.get("full_attention")), **rope}
    scaled = rope if local == "local_rope_theta" else {}  # ModernBERT scales both, Gemma 3 and Olmo 3 the full layers
    sliding = {**scaled, "rope_theta": model.get(local, bases.get("sliding_attention"))}
    return {"full_attention": full, "sliding_attention": sliding}


def _kind(rope: dict[str, Any], model: dict[str, Any], dialect: str) -> str:
    new, old = rope.get("rope_type"), rope.get("type")
    kinds = {SAME_KIND.get(name, name) for name in (new, old) if name is not None}
    if len(kinds) > 1:
        raise ValueError(f"rope_type={new!r} and type={old!r} disagree; keep one of them")
    kind = kinds.pop() if kinds else "default"
    if dialect == "vllm" and kind == "yarn" and str(model.get("model_type")).startswith(("deepseek_v2", "deepseek_v3")):
        kind = "deepseek_yarn"  # its model's code renames it
    if kind not in KEYS[dialect]:
        raise ValueError(f"{dialect} has no RoPE of type {kind!r}; its types are {', '.join(KEYS[dialect])}")
    if not (new or old) and "factor" in rope:
        raise ValueError("factor was given without rope_type; say which scaling it belongs to")
    return kind


def _unknown_keys(unknown: list[str], allowed: set[str], kind: str, dialect: str) -> str:
    if "llama_4_scaling_beta" in unknown:
        return (
            "llama_4_scaling_beta multiplies queries by 1 + beta ln(1 + floor(position / original)), which is no part of "
            "RoPE; take it out of the rotation's keys and scale the queries"
        )
    hints = []
    for key in unknown:
        near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
        hints.append(repr(key) + (f" (did you mean {near[0]!r}?)" if near else ""))
    return f"{dialect} reads no {', '.join(hints)} for {kind!r}; it reads {', '.join(sorted(allowed - {'type'}))}"


def _agree(name: str, *values):
    """The one value among those that are given."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given[1:]):
        raise ValueError(f"{name} is given as {' and as '.join(map(str, given))}; keep one")
    return given[0] if given else None


def _base(model: dict[str, Any], rope: dict[str, Any]) -> float | None:
    given = _agree("rope_theta", rope.get("rope_theta"), model.get("rope_theta"), model.get("rotary_emb_base"))
    if given is None:
        return BASES.get(model.get("model_type", ""))
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ValueError(f"rope_theta={given!r} must be a number")
    return given


def _sizes(model: dict[str, Any], rope: dict[str, Any], kind: str) -> tuple[int | None, int | None]:
    """(head_dim, rotary_dim)."""
    if model.get("qk_rope_head_dim"):  # DeepSeek: keys are [position | content] channels, position first here
        return model["qk_rope_head_dim"] + model.get("qk_nope_head_dim", 0), model["qk_rope_head_dim"]
    head_dim = model.get("head_dim")
    hidden, heads = model.get("hidden_size", model.get("n_embd")), model.get("num_attention_heads", model.get("n_head"))
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    part = _agree(
        "partial_rotary_factor",
        rope.get("partial_rotary_factor"),
        model.get("partial_rotary_factor"),
        model.get("rotary_pct"),
    )
    if kind == "proportional" or head_dim is None:
        return head_dim, head_dim
    if model.get("rotary_dim"):
        return head_dim, model["rotary_dim"]
    return head_dim, head_dim if part is None else int(head_dim * part)


@dataclass(frozen=True)
class _Keys:
    """The keys of one rotation, with the model's around it."""

    rope: dict[str, Any]
    model: dict[str, Any]
    kind: str
    dialect: str
    length: int | None

    def need(self, name: str):
        if name not in self.rope:
            raise ValueError(f"{self.kind!r} needs {name}, which the configuration does not have")
        return self.rope[name]

    def given(self, **names: str) -> dict[str, Any]:
        """{ours: value} of the keys that are there, from ours=theirs."""
        return {ours: self.rope[theirs] for ours, theirs in names.items() if theirs in self.rope}

    @property
    def max_length(self) -> int:
        value = self.model.get("max_position_embeddings")
        if value is None:
            raise ValueError(
                f"{self.kind!r} depends on max_position_embeddings; give the whole config.json, not its RoPE part"
            )
        return value

    @property
    def original(self) -> int:
        value = _agree(
            "original_max_position_embeddings",
            self.rope.get("original_max_position_embeddings"),
            self.model.get("original_max_position_embeddings"),
        )
        return self.max_length if value is None else value

    @property
    def factor(self) -> float:
        """As given, or the ratio of the two lengths."""
        return self.rope["factor"] if "factor" in self.rope else self.max_length / self.original


# ---- reading: the kinds ---------------------------------------------------------------------------------------
def _read_dynamic(keys: _Keys) -> Scaling:
    if "alpha" in keys.rope:
        if "factor" in keys.rope:
            raise ValueError("dynamic takes alpha or factor, not both")
        return NTK(factor=keys.rope["alpha"])
    factor, original = keys.need("factor"), keys.max_length
    if keys.dialect == "vllm":
        return DynamicNTK(factor=factor, original=original, freeze_at=int(factor * original))
    return DynamicNTK(factor=factor, original=original)


def _read_yarn(keys: _Keys) -> Scaling:
    options = keys.given(beta_fast="beta_fast", beta_slow="beta_slow", truncate="truncate")
    yarn = YaRN(factor=keys.factor, original=keys.original, **options)
    if keys.kind == "yarn" and keys.dialect == "vllm":
        magnitude = yarn.magnitude if keys.rope.get("apply_yarn_scaling", True) else 1.0
        given = magnitude * keys.rope.get("attn_factor", 1.0)
        return yarn if given == yarn.magnitude else replace(yarn, attention_factor=given)
    if keys.dialect in ("deepseek", "vllm"):
        mscale, all_dims = keys.rope.get("mscale", 1.0), keys.rope.get("mscale_all_dim", 0.0)
        own = keys.rope.get("attn_factor", 1.0)
        if not all_dims:
            return replace(yarn, attention_factor=own * yarn_factor(yarn.factor, mscale))
        scaled = replace(yarn, mscale=mscale, mscale_all_dim=all_dims, scale_scores=True)
        return scaled if own == 1.0 else replace(scaled, attention_factor=own * scaled.magnitude)
    scaled = replace(yarn, **keys.given(mscale="mscale", mscale_all_dim="mscale_all_dim"))
    if "attention_factor" not in keys.rope:
        return scaled
    if scaled.mscale and scaled.mscale_all_dim and scaled.magnitude != keys.rope["attention_factor"]:
        raise ValueError(
            f"attention_factor={keys.rope['attention_factor']} contradicts mscale and mscale_all_dim, which make it "
            f"{scaled.magnitude}; keep one"
        )
    return replace(scaled, attention_factor=keys.rope["attention_factor"])


def _read_longrope(keys: _Keys) -> Scaling:
    short, long = keys.need("short_factor"), keys.need("long_factor")
    if keys.dialect == "vllm":
        freeze_at, factor = keys.length or keys.max_length, keys.max_length / keys.original
        magnitude = keys.rope.get("long_mscale" if freeze_at > keys.original else "short_mscale")
    else:
        freeze_at, magnitude = None, keys.rope.get("attention_factor")
        factor = 1.0 if magnitude is not None and "factor" not in keys.rope else keys.factor
    return LongRoPE(
        short=short, long=long, original=keys.original, factor=factor, attention_factor=magnitude, freeze_at=freeze_at
    )


def _read_llama3(keys: _Keys) -> Scaling:
    return Llama3(
        factor=keys.need("factor"),
        low=keys.need("low_freq_factor"),
        high=keys.need("high_freq_factor"),
        original=keys.original,
    )


def _read_proportional(keys: _Keys) -> Scaling:
    part = _agree(
        "partial_rotary_factor", keys.rope.get("partial_rotary_factor"), keys.model.get("partial_rotary_factor")
    )
    return Proportional(fraction=1.0 if part is None else part, factor=keys.rope.get("factor", 1.0))


_READERS = {
    "default": lambda keys: None,
    "linear": lambda keys: Linear(factor=keys.need("factor")),
    "ntk": lambda keys: MixedNTK(factor=keys.need("factor"), b=keys.rope.get("mixed_b", 1.0)),
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "deepseek_yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
}


# ---- writing --------------------------------------------------------------------------------------------------
def write(given, dialect: str = "hf") -> dict[str, Any]:
    """See `posenc.scaling.to_config`."""
    _known(dialect)
    rope = given if hasattr(given, "rotary_dim") else None
    scaling = rope.scaling if rope is not None else given
    if scaling is not None and not isinstance(scaling, Scaling):
        raise ValueError(f"to_config takes a scaling, None or a RoPE, got {type(given).__name__}")
    if isinstance(scaling, DynamicYaRN) and not scaling.length_dependent:
        scaling = scaling.fixed()
    if dialect == "llama.cpp":
        from .gguf import write_gguf

        return write_gguf(scaling, rope)
    base = None if rope is None else rope.base
    model: dict[str, Any] = {} if rope is None else {"head_dim": rope.head_dim}
    if getattr(rope, "layout", "half") == "interleaved":
        model["rope_interleave"] = True
    if getattr(rope, "values", False):
        if dialect != "hf":
            raise _cannot(rope, dialect, "it does not turn values")
        model["rotary_value"] = True
    if isinstance(scaling, NTK) and dialect != "vllm" and rope is not None:
        base, scaling = base * scaling.factor ** (rope.rotary_dim / (rope.rotary_dim - 2)), None
    kind, keys, outside = _write_kind(scaling, dialect)
    if kind not in KEYS[dialect]:
        raise _cannot(scaling, dialect, f"it has no type {kind!r}")
    parameters = {"rope_type": kind, **keys}
    if base is not None:
        parameters["rope_theta"] = base
    if getattr(rope, "sections", None) is not None:
        parameters["mrope_section"] = list(rope.sections)
        if rope.interleaved:
            parameters["mrope_interleaved"] = True
    if rope is not None and rope.rotary_dim != rope.head_dim:
        if kind == "proportional":
            raise _cannot(scaling, dialect, "proportional and partial rotary share a key")
        if int(rope.head_dim * (rope.rotary_dim / rope.head_dim)) != rope.rotary_dim:
            raise _cannot(scaling, dialect, f"no fraction of head_dim={rope.head_dim} gives {rope.rotary_dim}")
        parameters["partial_rotary_factor"] = rope.rotary_dim / rope.head_dim
    return {**model, **outside, "rope_parameters": parameters}


def _write_kind(scaling: Scaling | None, dialect: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(type, its keys, the model's keys it depends on)."""
    match scaling:
        case None:
            return "default", {}, {}
        case Linear():
            return "linear", {"factor": scaling.factor}, {}
        case Proportional():
            return "proportional", {"partial_rotary_factor": scaling.fraction, "factor": scaling.factor}, {}
        case Llama3():
            keys = {
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
            return "llama3", keys, {}
        case NTK() if dialect == "vllm":
            return "dynamic", {"alpha": scaling.factor}, {}
        case MixedNTK() if dialect == "vllm":
            return "ntk", {"factor": scaling.factor, **({} if scaling.b == 1.0 else {"mixed_b": scaling.b})}, {}
        case NTK():
            raise _cannot(scaling, dialect, "it has no key for it; give the RoPE, whose base can be changed")
        case DynamicNTK():
            frozen = int(scaling.factor * scaling.original) if dialect == "vllm" else None
            if scaling.freeze_at != frozen:
                what = "follows the length" if frozen is None else f"is fixed at {frozen}"
                raise _cannot(scaling, dialect, f"its dynamic scaling {what}; freeze_at={scaling.freeze_at}")
            return "dynamic", {"factor": scaling.factor}, {"max_position_embeddings": scaling.original}
        case LongRoPE():
            return _write_longrope(scaling, dialect)
        case YaRN():
            return _write_yarn(scaling, dialect)
    raise _cannot(scaling, dialect, "it has no word for it")


def _write_longrope(scaling: LongRoPE, dialect: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    keys: dict[str, Any] = {
        "short_factor": list(scaling.short),
        "long_factor": list(scaling.long),
        "original_max_position_embeddings": scaling.original,
    }
    if dialect == "vllm":
        if scaling.freeze_at is None:
            raise _cannot(scaling, dialect, "it fixes the list at the served length; say which with freeze_at")
        keys |= {"short_mscale": scaling.magnitude, "long_mscale": scaling.magnitude}
        return "longrope", keys, {"max_position_embeddings": scaling.freeze_at}
    if scaling.freeze_at is not None:
        raise _cannot(scaling, dialect, "it follows the length; freeze_at is another model")
    keys["factor"] = scaling.factor
    if scaling.attention_factor is not None:
        keys["attention_factor"] = scaling.attention_factor
    return "longrope", keys, {}


def _write_yarn(scaling: YaRN, dialect: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    if scaling.ramp != "code":
        raise _cannot(scaling, dialect, "it knows the ramp of the code only")
    if scaling.scale_scores and dialect == "vllm":
        kind, written, outside = _write_yarn(scaling, "deepseek")
        return f"deepseek_{kind}", written, outside
    if scaling.scale_scores and dialect != "deepseek":
        raise _cannot(scaling, dialect, "its RoPE does not scale scores; the model's attention must")
    keys: dict[str, Any] = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    if dialect != "deepseek" and not scaling.truncate:
        keys["truncate"] = False
    if dialect == "vllm":
        plain = yarn_factor(scaling.factor)
        if scaling.magnitude != plain:
            keys |= {"apply_yarn_scaling": False, "attn_factor": scaling.magnitude}
    elif dialect == "hf":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(scaling, name) is not None:
                keys[name] = getattr(scaling, name)
    else:
        if not scaling.truncate or (scaling.mscale_all_dim and not scaling.scale_scores):
            raise _cannot(scaling, dialect, "it always rounds the ramp's ends and scales scores by mscale_all_dim")
        if scaling.attention_factor is not None:
            if scaling.mscale_all_dim or scaling.factor <= 1.0:
                raise _cannot(scaling, dialect, "it has no attention_factor")
            keys |= {"mscale": (scaling.attention_factor - 1.0) / (yarn_factor(scaling.factor) - 1.0)}
        else:
            keys["mscale"] = 1.0 if scaling.mscale is None else scaling.mscale
        keys["mscale_all_dim"] = scaling.mscale_all_dim or 0.0
    return "yarn", keys, {}


def _cannot(scaling, dialect: str, why: str) -> ValueError:
    return ValueError(f"{dialect} cannot say {scaling}: {why}")
