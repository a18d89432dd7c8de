"""extend: give a rotary model a longer context, in memory and in its configuration.

    posenc.hf.extend(model, posenc.scaling.YaRN(factor=4, original=4096))
    model.save_pretrained(folder)                # transformers' own words: from_pretrained finds the same rotation

Length-dependent scalings need keys that are cached unrotated: unrotated.py. Where each kind of layer has a rotation of
its own (Gemma 3), the full-attention layers are scaled; those with a window never see further than it. GPT-J's layers
read a table, and its configuration has no word for a scaling: the table is made anew, and again after from_pretrained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gptj import modeling_gptj

from .. import RoPE, Where, rotary
from ..scaling import Scaling
from . import versions
from .layer import say
from .swap import UnsupportedModel
from .unrotated import UNROTATED, GPTJAttention, Turns

FULL = "full_attention"


class Rotary(nn.Module):
    """(x, position_ids) -> (cos, sin), halves: what `model.rotary_emb` is asked for, with a kind of layer or without."""

    def __init__(self, ropes: dict[str | None, RoPE], before: nn.Module, config_before: dict[str, Any]):
        super().__init__()
        # plain attributes: none is part of the model
        self.__dict__["ropes"], self.__dict__["before"], self.config_before = ropes, before, config_before

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Turns:
        rope = self.__dict__["ropes"][layer_type]
        positions = position_ids.expand(x.shape[0], -1) if rope.length_dependent else position_ids
        return Turns.of(rope, positions, x.dtype)


def extend(model: nn.Module, scaling: Scaling | None, *, max_length: int | None = None) -> nn.Module:
    """Swap the rotation of a Llama-like model; returns the same model.

    scaling      an object of posenc.scaling (None: plain RoPE)
    max_length   the context length that the configuration is to state; default: factor · original

    The configuration is changed to transformers' own words for it. `restore` undoes both.
    """
    versions.check()
    if any(isinstance(module, Rotary) or "posenc_before" in module.__dict__ for module in model.modules()):
        raise UnsupportedModel("this model is extended already; posenc.hf.restore(model) first")
    found = [
        (parent, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == "rotary_emb" and hasattr(child, "config")
    ]
    tables = [module for module in model.modules() if type(module) is modeling_gptj.GPTJAttention]
    if not found and not tables:
        raise UnsupportedModel(
            f"{type(model).__name__} has no rotary_emb to swap; Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX have one, "
            "and GPT-J's tables are known"
        )
    ropes = [_ropes(child, scaling) for _, child in found]
    own = [_scaled(layer.config, None, scaling) for layer in tables]
    following = {kind for some in ropes for kind, rope in some.items() if rope.length_dependent}
    if following or any(rope.length_dependent for rope in own):
        _cache_unrotated(model, scaling, following or {None})
    for (parent, child), some in zip(found, ropes, strict=True):
        parent.rotary_emb = Rotary(some, child, _update(child.config, some, max_length))
    if tables:
        _tables(tables, own, max_length)
    return model


def undo(model: nn.Module) -> None:
    """Give a model its rotation and its configuration back."""
    for parent in list(model.modules()):
        child = getattr(parent, "rotary_emb", None)
        if isinstance(child, Rotary):
            before: Any = child.__dict__["before"]
            for name, value in child.config_before.items():
                setattr(before.config, name, value)
            parent.rotary_emb = before
        layer: Any = parent
        if "posenc_before" in layer.__dict__:
            layer.embed_positions, layer.max_positions = layer.__dict__["posenc_before"]
            layer.config.max_position_embeddings = layer.max_positions


def _cache_unrotated(model: nn.Module, scaling: Scaling | None, kinds: set[str | None]) -> None:
    """Swap the layers of these kinds (None: every layer); the others' rotation does not follow the length."""
    layers = [
        m
        for m in model.modules()
        if any(hasattr(m, name) for name in ("q_proj", "query_key_value"))
        and (None in kinds or getattr(m, "layer_type", None) in kinds)
    ]
    strange = {type(m).__name__ for m in layers if type(m) not in UNROTATED} or (set() if layers else {"none"})
    if strange:
        raise UnsupportedModel(
            f"{scaling} follows the length, so keys must be cached unrotated; that is known for "
            f"{', '.join(sorted(one.__name__ for one in UNROTATED))}, not for {', '.join(sorted(strange))}"
        )
    for layer in layers:
        layer.__class__ = UNROTATED[type(layer)]


def _ropes(child: Any, scaling: Scaling | None) -> dict[str | None, RoPE]:
    """A rope for each kind of layer; one for None where there is one kind."""
    config = child.config
    kinds = [kind for kind, value in (config.rope_parameters or {}).items() if isinstance(value, dict)]
    made: dict[str | None, RoPE]
    if not kinds:
        made = {None: _scaled(config, None, scaling)}
    elif FULL in kinds:
        made = {kind: rotary.from_config(config, layer_type=kind) for kind in kinds if kind != FULL}
        made[FULL] = _scaled(config, FULL, scaling)
    else:
        raise UnsupportedModel(f"{type(child).__name__} rotates {', '.join(kinds)}; which to scale is known for {FULL}")
    if any(rope.layout != "half" for rope in made.values()):
        raise UnsupportedModel(f"{type(child).__name__} turns neighbouring channels; known are halves, and GPT-J")
    return made


def _scaled(config: Any, kind: str | None, scaling: Scaling | None) -> RoPE:
    plain = rotary.from_config(config, layer_type=kind)
    return RoPE(
        head_dim=plain.head_dim, rotary_dim=plain.rotary_dim, base=plain.base, layout=plain.layout, scaling=scaling
    )


def _longest(config: Any, rope: RoPE, max_length: int | None) -> int:
    original = getattr(rope.scaling, "original", config.max_position_embeddings)
    return max(max_length or int(getattr(rope.scaling, "factor", 1.0) * original), original)


def _update(config: Any, ropes: dict[str | None, RoPE], max_length: int | None) -> dict[str, Any]:
    """Change a configuration to say this rotation; returns what it said before."""
    kind = FULL if FULL in ropes else None
    rope, told = ropes[kind], config.rope_parameters if kind is None else config.rope_parameters[kind]
    said = rotary.to_config(rope, "hf")
    before = {
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
    }
    parameters = dict(said["rope_parameters"])
    if "partial_rotary_factor" in told:
        parameters.setdefault("partial_rotary_factor", told["partial_rotary_factor"])
    config.max_position_embeddings = said.get("max_position_embeddings", _longest(config, rope, max_length))
    config.rope_parameters = parameters if kind is None else {**config.rope_parameters, kind: parameters}
    return before


def _tables(layers: list[Any], ropes: list[RoPE], max_length: int | None) -> None:
    """GPT-J: [positions, sines then cosines] in every layer, or, where they follow the length, a rope in each."""
    say(
        "gptj: its configuration has no word for a scaling, so only max_position_embeddings is saved; "
        "call posenc.hf.extend again after from_pretrained"
    )
    longest = _longest(layers[0].config, ropes[0], max_length)
    for layer, rope in zip(layers, ropes, strict=True):
        layer.__dict__["posenc_before"] = (layer.embed_positions, layer.max_positions)
        if isinstance(layer, GPTJAttention):
            layer.__dict__["posenc_rope"] = rope
        else:
            phases = rope.rotation(Where(torch.arange(longest, device=layer.embed_positions.device))).q
            assert phases is not None
            cos, sin = (part[0].to(layer.embed_positions.dtype) for part in phases)
            layer.embed_positions = nn.Buffer(torch.cat((sin, cos), dim=-1), persistent=False)
        layer.max_positions = layer.config.max_position_embeddings = longest
