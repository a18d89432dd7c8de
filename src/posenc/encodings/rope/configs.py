"""Dialects: the RoPE of a model's configuration, read and written strictly.

The same keys mean different things to different libraries:

                     hf                         vllm                       llama.cpp                deepseek
    dynamic          follows the length         fixed at factor · original  -                        as hf
    longrope         follows the length         fixed at the served length  fixed at its length      -
    yarn's magnitude attention_factor, mscale   attn_factor · (0.1 ln s+1)  attn_factor · (...)      mscale, scores too
    llama3           its own keys               its own keys                tensor rope_freqs        -
    deepseek's yarn  mscale, scores unscaled    type deepseek_yarn         yarn_log_multiplier      yarn
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.checks import nearest, show_value
from ...core.errors import OptionError
from . import fields
from .fields import ALWAYS, MODEL, field, keys
from .model_defaults import BASES, BY_LAYER, INTERLEAVED, LAYERED
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
YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
LISTS = {"short_factor", "long_factor", "original_max_position_embeddings"}
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
DEEPSEEK_YARN = (YARN | {"mscale", "mscale_all_dim"}) - {"truncate"}
KEYS: dict[str, dict[str, set[str]]] = {
    "hf": {
        "default": set(), "linear": {"factor"}, "dynamic": {"factor"}, "proportional": {"factor"}, "llama3": LLAMA3,
        "yarn": YARN | {"attention_factor", "mscale", "mscale_all_dim"}, "longrope": LISTS | {"factor", "attention_factor"},
    },
    "vllm": {
        "default": set(), "linear": {"factor"}, "ntk": {"factor", "mixed_b"}, "dynamic": {"factor", "alpha"}, "llama3": LLAMA3,
        "yarn": YARN | {"attn_factor", "apply_yarn_scaling"}, "deepseek_yarn": DEEPSEEK_YARN | {"attn_factor"},
        "longrope": LISTS | {"short_mscale", "long_mscale"},
    },
    "deepseek": {"default": set(), "linear": {"factor"}, "dynamic": {"factor"}, "yarn": DEEPSEEK_YARN},
}  # fmt: skip
"""Every key that a kind of scaling may have beyond ALWAYS."""
SAME_KIND = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class Setup:
    """The rotation of a configuration; None for what it does not state."""

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
            raise OptionError("the configuration does not state the head size; give the whole config.json, or head_dim")
        if self.layout is None:
            raise OptionError("the configuration does not state the layout; give layout='half' or 'interleaved'")
        found = {name: getattr(self, name) for name in ("head_dim", "rotary_dim", "layout", "scaling")}
        found["base"] = 10000.0 if self.base is None else self.base
        return {**found, "values": True} if self.values else found


def read(config, dialect: str = "hf", *, layer_type: str | None = None, length: int | None = None) -> Setup:
    """See `posenc.scaling.from_config`."""
    _known(dialect)
    layer_type, length = fields.validate("layer_type", layer_type), fields.validate("length", length)
    if dialect == "llama.cpp":
        from .gguf import read_gguf

        return read_gguf(_mapping(config), length)
    whole = _mapping(config, layer_type)
    is_model = whole.get("model_type") is not None
    if is_model and not fields.has_rotation(whole) and not _parts(fields.text_part(whole)):
        raise OptionError(fields.no_rotation(whole))
    model, rope = _split(whole, layer_type, dialect)
    kind = _kind(rope, model, dialect)
    allowed = KEYS[dialect][kind] | ALWAYS
    unknown = sorted(set(rope) - allowed)
    if unknown:
        raise OptionError(_unknown_keys(unknown, allowed, kind, dialect))
    rope = {key: value for key, value in rope.items() if value is not None}
    head_dim, rotary_dim = _sizes(model, rope, kind)
    scaling = _READERS[kind](_Keys(rope, model, kind, dialect, length))
    if isinstance(scaling, LongRoPE) and rotary_dim is not None and len(scaling.short) != rotary_dim // 2:
        raise OptionError(f"short_factor has {len(scaling.short)} numbers, the rotation has {rotary_dim // 2} pairs")
    model_type = field(model, "model_type", "")
    interleaved = field(model, "rope_interleave", model_type in INTERLEAVED)
    sections = field(rope, "mrope_section")
    if sections is not None and model_type.startswith("ernie4_5_vl"):
        raise OptionError(
            "Ernie 4.5-VL's mrope_section are rows, columns and time, rows and columns alternating; MRoPE does not have this order"
        )
    return Setup(
        scaling, _base(model, rope), head_dim, rotary_dim, "interleaved" if interleaved else "half", sections,
        field(rope, "mrope_interleaved", False), field(model, "rotary_value", False),
    )  # fmt: skip


# ---- reading: the parts of a configuration ------------------------------------------------------------------
def _known(dialect: str) -> None:
    if dialect not in DIALECTS:
        raise OptionError(f"dialect={show_value(dialect)} is unknown; use one of {', '.join(map(repr, DIALECTS))}")


def _mapping(config, layer_type: str | None = None) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return keys("the configuration", config)
    if hasattr(config, "to_dict"):  # a transformers config; its attributes hold what to_dict leaves out
        found = config.to_dict()
        for name in ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_parameters"):
            try:
                value = getattr(config, name, None)
            except RuntimeError:  # differs from layer to layer
                value = None if layer_type is None else getattr(config.per_layer_config[layer_type], name)
                found[name] = value
            if value is not None:
                found.setdefault(name, value)
        return found
    raise OptionError(f"a configuration is a dict or a transformers config, got {type(config).__name__}")


def _split(config: dict[str, Any], layer_type: str | None, dialect: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the model's keys, the rotation's keys)."""
    config = fields.text_part(config)
    if parts := _parts(config):
        raise OptionError(f"this configuration has parts, each read by itself: give one of {', '.join(parts[:8])}")
    new, old = field(config, "rope_parameters"), field(config, "rope_scaling")
    if new and old and not fields.same(new, old):
        raise OptionError("rope_parameters and rope_scaling disagree; keep one of them")
    rope = new or old
    layers = any(isinstance(value, Mapping) and not ALWAYS.isdisjoint(value) for value in config.values())
    if rope is None and (layers or "rope_type" in config or "type" in config or "factor" in config):
        model, rope = {}, config
    else:
        model, rope = config, dict(rope or {})
    _check_model(model, rope)
    rope = _by_layer(model, rope)
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        if layer_type in rope and rope[layer_type] is None:
            raise OptionError(f"layers of type {layer_type!r} have no rotation in this model")
        if layer_type is None or layer_type not in nested:
            raise OptionError(
                f"this model has a rotation for each of {', '.join(nested[:8])}; choose one with layer_type"
            )
        own = keys(layer_type, rope[layer_type])
        beside = {key: value for key, value in rope.items() if key not in nested and value is not None}
        if beside.get("rope_type") == "default":  # transformers 5.16 writes it where a type of layer has no layer
            del beside["rope_type"]
        for key in beside:
            raise OptionError(f"{key!r} is given next to the rotations of the layers; put it into each of them")
        if dialect == "hf" and own.get("truncate") is False:
            raise OptionError(
                f"transformers ignores the truncate of a layer's rotation ({layer_type}) and rounds the ramp's ends; "
                "take truncate out for its numbers, or use another dialect for its meaning"
            )
        outside = {key: value for key, value in model.items() if key not in own or key in ALL_LAYERS}
        if layer_type == "full_attention" and model.get("global_head_dim"):
            outside["head_dim"] = field(model, "global_head_dim")
        return outside, own
    if layer_type is not None:
        raise OptionError(f"layer_type={layer_type!r} was given, but this model has one rotation for all layers")
    return model, dict(rope)


def _parts(config: dict[str, Any]) -> list[str]:
    """The parts of a model of several, none of which is its text model; the model itself has no sizes."""
    if any(key in config for key in (*MODEL, "hidden_size", "head_dim")):
        return []
    return [key for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)]


ALL_LAYERS = ("original_max_position_embeddings",)
"""Keys that a layer's rotation must not contradict; its other keys override the model's."""


def _check_model(model: dict[str, Any], rope: dict[str, Any]) -> None:
    """Refuse rotations of another kind, and misspelt keys of the model."""
    pictures = "patch_size" in model and ("image_size" in model or "num_channels" in model)
    if pictures or "axial" in (rope.get("rope_type"), rope.get("type")):
        raise OptionError("this is the configuration of an image model, whose rotation has two axes: posenc.AxialRoPE")
    unknown = sorted(key for key in model if key.startswith(("rope_", "rotary_")) and key not in MODEL)
    if unknown:
        raise OptionError(
            f"the configuration has {show_value(unknown[0])}{nearest(unknown[0], MODEL)}, which may change the rotation and is not known here; "
            "rename it, or remove it if it does not concern the frequencies"
        )


def _by_layer(model: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Older files of models with sliding windows, in the form of newer ones."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return rope
    kind = field(model, "model_type", "")
    if kind in BY_LAYER:
        raise OptionError(
            f"{kind} has a rotation for each type of layer, and this file does not state them; "
            "read it with transformers' AutoConfig, and give that"
        )
    named = next(((local, others) for local, others in fields.LOCAL_BASES.items() if local in model), None)
    if named is None and kind not in LAYERED:
        return rope
    local, others = named or ("rope_local_base_freq", "rope_theta")
    bases = LAYERED.get(kind, {})
    full = {"rope_theta": field(model, others, bases.get("full_attention")), **rope}
    scaled = rope if local == "local_rope_theta" else {}  # ModernBERT scales both, Gemma 3 and Olmo 3 the full layers
    sliding = {**scaled, "rope_theta": field(model, local, bases.get("sliding_attention"))}
    return {"full_attention": full, "sliding_attention": sliding}


def _kind(rope: dict[str, Any], model: dict[str, Any], dialect: str) -> str:
    new, old = field(rope, "rope_type"), field(rope, "type")
    kinds = {SAME_KIND.get(name, name) for name in (new, old) if name is not None}
    if len(kinds) > 1:
        raise OptionError(f"rope_type={new!r} and type={old!r} disagree; keep one of them")
    kind = kinds.pop() if kinds else "default"
    is_deepseek = field(model, "model_type", "").startswith(("deepseek_v2", "deepseek_v3"))
    if dialect == "vllm" and kind == "yarn" and is_deepseek:
        kind = "deepseek_yarn"  # its model's code renames it
    if kind not in KEYS[dialect]:
        raise OptionError(f"{dialect} has no RoPE of type {show_value(kind)}; its types are {', '.join(KEYS[dialect])}")
    if not (new or old) and "factor" in rope:
        raise OptionError("factor was given without rope_type; give the rope_type that it belongs to")
    return kind


def _unknown_keys(unknown: list[str], allowed: set[str], kind: str, dialect: str) -> str:
    if "llama_4_scaling_beta" in unknown:
        return (
            "llama_4_scaling_beta multiplies queries by 1 + beta ln(1 + floor(position / original)), which is not part of "
            "RoPE; take it out of the rotation's keys and scale the queries"
        )
    hints = [show_value(key) + nearest(key, allowed) for key in unknown[:5]]
    return f"{dialect} reads no {', '.join(hints)} for {kind!r}; it reads {', '.join(sorted(allowed - {'type'}))}"


def _agree(name: str, *values):
    """The one value among those that are given."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given[1:]):
        raise OptionError(f"{name} is given as {' and as '.join(map(str, given))}; keep one")
    return given[0] if given else None


def _base(model: dict[str, Any], rope: dict[str, Any]) -> float | None:
    bases = field(rope, "rope_theta"), field(model, "rope_theta"), field(model, "rotary_emb_base")
    given = _agree("rope_theta", *bases)
    return BASES.get(field(model, "model_type", "")) if given is None else given


def _sizes(model: dict[str, Any], rope: dict[str, Any], kind: str) -> tuple[int | None, int | None]:
    """(head_dim, rotary_dim)."""
    if width := field(model, "qk_rope_head_dim"):  # DeepSeek: [position | content] channels, position first here
        return width + field(model, "qk_nope_head_dim", 0), width
    # Zamba 2 and JetMoE have heads that are wider than hidden_size / num_attention_heads
    head_dim = field(model, "head_dim") or field(model, "attention_head_dim") or field(model, "kv_channels")
    if head_dim is None:
        hidden = field(model, "hidden_size") or field(model, "n_embd")
        heads = None if hidden is None else field(model, "num_attention_heads") or field(model, "n_head")
        head_dim = fields.head_of(hidden, heads) if hidden and heads else None
    name = "partial_rotary_factor"
    part = _agree(name, field(rope, name), field(model, name), field(model, "rotary_pct"))
    if kind == "proportional" or head_dim is None:
        return head_dim, head_dim
    if width := field(model, "rotary_dim"):
        return head_dim, width
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
            raise OptionError(f"{self.kind!r} needs {name}, which the configuration does not have")
        return field(self.rope, name)

    def get(self, name: str, default=None):
        return field(self.rope, name, default)

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these keys that are there."""
        return {name: field(self.rope, name) for name in names if name in self.rope}

    @property
    def max_length(self) -> int:
        value = field(self.model, "max_position_embeddings")
        if value is None:
            raise OptionError(
                f"{self.kind!r} depends on max_position_embeddings; give the whole config.json, not its RoPE part"
            )
        return value

    @property
    def original(self) -> int:
        name = "original_max_position_embeddings"
        value = _agree(name, field(self.rope, name), field(self.model, name))
        return self.max_length if value is None else value

    @property
    def factor(self) -> float:
        """As given, or the ratio of the two lengths."""
        return self.get("factor") or self.max_length / self.original


# ---- reading: the kinds ---------------------------------------------------------------------------------------
def _read_dynamic(keys: _Keys) -> Scaling:
    if "alpha" in keys.rope:
        if "factor" in keys.rope:
            raise OptionError("dynamic takes alpha or factor, not both")
        return NTK(factor=keys.need("alpha"))
    factor, original = keys.need("factor"), keys.max_length
    if keys.dialect == "vllm":
        return DynamicNTK(factor=factor, original=original, freeze_at=int(factor * original))
    return DynamicNTK(factor=factor, original=original)


def _read_yarn(keys: _Keys) -> Scaling:
    yarn = YaRN(factor=keys.factor, original=keys.original, **keys.given("beta_fast", "beta_slow", "truncate"))
    if keys.kind == "yarn" and keys.dialect == "vllm":
        magnitude = yarn.magnitude if keys.get("apply_yarn_scaling", True) else 1.0
        given = magnitude * keys.get("attn_factor", 1.0)
        return yarn if given == yarn.magnitude else replace(yarn, attention_factor=given)
    if keys.dialect in ("deepseek", "vllm"):
        mscale, all_dims = keys.get("mscale", 1.0), keys.get("mscale_all_dim", 0.0)
        own = keys.get("attn_factor", 1.0)
        if not all_dims:
            return replace(yarn, attention_factor=own * yarn_factor(yarn.factor, mscale))
        scaled = replace(yarn, mscale=mscale, mscale_all_dim=all_dims, scale_scores=True)
        return scaled if own == 1.0 else replace(scaled, attention_factor=own * scaled.magnitude)
    scaled = replace(yarn, **keys.given("mscale", "mscale_all_dim"))
    given = keys.get("attention_factor")
    if given is None:
        return scaled
    if scaled.mscale and scaled.mscale_all_dim and scaled.magnitude != given:
        raise OptionError(
            f"attention_factor={given} contradicts mscale and mscale_all_dim, which make it "
            f"{scaled.magnitude}; keep one"
        )
    return replace(scaled, attention_factor=given)


def _read_longrope(keys: _Keys) -> Scaling:
    short, long = keys.need("short_factor"), keys.need("long_factor")
    if keys.dialect == "vllm":
        freeze_at, factor = keys.length or keys.max_length, keys.max_length / keys.original
        magnitude = keys.get("long_mscale" if freeze_at > keys.original else "short_mscale")
    else:
        freeze_at, magnitude = None, keys.get("attention_factor")
        factor = 1.0 if magnitude is not None and "factor" not in keys.rope else keys.factor
    return LongRoPE(
        short=short, long=long, original=keys.original, factor=factor, attention_factor=magnitude, freeze_at=freeze_at
    )


def _read_llama3(keys: _Keys) -> Scaling:
    low, high = keys.need("low_freq_factor"), keys.need("high_freq_factor")
    return Llama3(factor=keys.need("factor"), low=low, high=high, original=keys.original)


def _read_proportional(keys: _Keys) -> Scaling:
    name = "partial_rotary_factor"
    part = _agree(name, keys.get(name), field(keys.model, name))
    return Proportional(fraction=1.0 if part is None else part, factor=keys.get("factor", 1.0))


_READERS = {
    "default": lambda keys: None,
    "linear": lambda keys: Linear(factor=keys.need("factor")),
    "ntk": lambda keys: MixedNTK(factor=keys.need("factor"), b=keys.get("mixed_b", 1.0)),
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
        raise OptionError(f"to_config takes a scaling, None or a RoPE, got {type(given).__name__}")
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
            raise _cannot(rope, dialect, "it does not rotate values")
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
                "factor": scaling.factor, "low_freq_factor": scaling.low, "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }  # fmt: skip
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
    raise _cannot(scaling, dialect, "it has no key for it")


def _write_longrope(scaling: LongRoPE, dialect: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    keys: dict[str, Any] = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    keys["original_max_position_embeddings"] = scaling.original
    if dialect == "vllm":
        if scaling.freeze_at is None:
            raise _cannot(scaling, dialect, "it fixes the list at the served length; give it as freeze_at")
        keys |= {"short_mscale": scaling.magnitude, "long_mscale": scaling.magnitude}
        return "longrope", keys, {"max_position_embeddings": scaling.freeze_at}
    if scaling.freeze_at is not None:
        raise _cannot(scaling, dialect, "it follows the length, and cannot be fixed (freeze_at)")
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
        "factor": scaling.factor, "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
    }  # fmt: skip
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


def _cannot(scaling, dialect: str, why: str) -> OptionError:
    return OptionError(f"{dialect} cannot express {scaling}: {why}")
