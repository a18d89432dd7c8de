"""The encoding of each layer of a model: rotation in some layers only, a rotation for each type of layer, temperatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.encoding import Encoding
from ...core.errors import OptionError
from ..none import NoPosition
from ..tempered import Tempered
from .rope import RoPE

SLIDING = "sliding_attention"


def by_layer(config: Any) -> list[Encoding]:
    """One encoding for each layer of a configuration of transformers; layers with the same rotation share one.

        no_rope_layers   [1, 1, 1, 0, ...], 0: not rotated          Llama 4, SmolLM3
        layer_types      only sliding layers are rotated            Cohere2, AFMoE, Flint, EXAONE 4 and Kolibri with a window
        layer_rope_theta 0: not rotated                             Muse
        rope_parameters  a rotation for each type of layer          Gemma 3, OLMo 3, ModernBERT
        temperatures     of Llama 4's unrotated layers; of all of Ministral 3's

    Windows and chunks are masks: give them to each `Attention`.

    Raises OptionError for a configuration without rotations.

        >>> from transformers import SmolLM3Config
        >>> layers = posenc.rope.by_layer(SmolLM3Config(num_hidden_layers=4, pad_token_id=0))
        >>> [type(layer).__name__ for layer in layers]
        ['RoPE', 'RoPE', 'RoPE', 'NoPosition']
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or [None] * layers
    rotated = _rotated(config, types, layers)
    parameters = getattr(config, "rope_parameters", None) or {}
    bases = set(getattr(config, "layer_rope_theta", None) or ()) - {0}
    if len(bases) > 1:
        raise OptionError(f"layer_rope_theta has several bases, {sorted(bases)}; make a RoPE for each of them")
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    made: dict[tuple[bool, str | None], Encoding] = {}
    found = []
    for kind, is_rotated in zip(types, rotated, strict=True):
        key = is_rotated, kind if nested and is_rotated else None
        if key not in made:
            made[key] = _rotary(config, key[1], parameters) if is_rotated else _plain(config)
        found.append(made[key])
    return found


def _rotated(config: Any, types: list, layers: int) -> list[bool]:
    listed = getattr(config, "no_rope_layers", None)
    if listed:
        if len(listed) < layers:
            raise OptionError(f"no_rope_layers has {len(listed)} entries for {layers} layers; give one for each")
        return [bool(each) for each in listed[:layers]]
    bases = getattr(config, "layer_rope_theta", None)
    if bases:
        return [bool(base) for base in bases[:layers]]
    kind = getattr(config, "model_type", "")
    if kind == "granitemoehybrid":
        return [config.position_embedding_type == "rope"] * layers
    with_window = kind.startswith(ROTATE_SLIDING_IF_ANY) and getattr(config, "sliding_window", None) is not None
    if kind.startswith(ROTATE_SLIDING) or with_window:
        return [each == SLIDING for each in types]
    return [True] * layers


ROTATE_SLIDING = ("cohere2", "afmoe", "flint")
"""Models of transformers that rotate in their sliding layers only; ..."""
ROTATE_SLIDING_IF_ANY = ("exaone", "kolibri")
"""... these, if they have a window, else in all."""


NOT_OF_THE_ROTATION = ("llama_4_scaling_beta", "max_position_embeddings")
"""What Ministral 3 and Mistral 4 have among the rotation's keys, as transformers' configurations say; it reads the model's own length."""


def _rotary(config: Any, layer_type: str | None, parameters: Mapping) -> Encoding:
    if parameters.get("llama_4_scaling_beta") is None:
        return RoPE.from_config(config, layer_type=layer_type)
    rope = rotation_alone(config)
    return with_temperature(config, rope, rope.head_dim)


def rotation_alone(config: Any) -> RoPE:
    """The rotation of a configuration whose queries have temperatures besides."""
    others = {key: value for key, value in config.rope_parameters.items() if key not in NOT_OF_THE_ROTATION}
    return RoPE.from_config({**config.to_dict(), "rope_parameters": others})


def with_temperature(config: Any, rope: RoPE, head_dim: int) -> Tempered:
    parameters = config.rope_parameters
    floor = float(parameters["original_max_position_embeddings"])
    return Tempered(
        head_dim=head_dim, encoding=rope, alpha=parameters["llama_4_scaling_beta"], floor=floor, form="ministral3"
    )


def _plain(config: Any) -> Encoding:
    if not getattr(config, "attn_temperature_tuning", False):
        return NoPosition()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Tempered(head_dim=size, alpha=config.attn_scale, floor=float(config.floor_scale))
