"""extend: give a rotary model a longer context, in memory and in its configuration.

    posenc.hf.extend(model, posenc.scaling.YaRN(factor=4, original=4096))
    model.save_pretrained(folder)                # from_pretrained makes the same rotation, without posenc

transformers' own class makes the rotation from the new configuration, and its frequencies must equal those of posenc's
scaling: the model runs the rotation that from_pretrained will load. Where transformers has no rope_type for a scaling that
does not depend on the length, the configuration uses LongRoPE's, a divisor for each pair (Phi-3 has no other).

Length-dependent scalings need a cache of unrotated keys: unrotated.py. Where each kind of layer has its own rotation
(Gemma 3), only those without a window are scaled: a window does not grow with the text. GPT-J's layers read a table, and
its configuration has no field for a scaling: `extend` replaces the table, and must be called again after from_pretrained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gptj import modeling_gptj

from .. import Positions, RoPE
from ..encodings.rope import convert as rotary
from ..encodings.rope.configs import read
from ..encodings.rope.scaling import LongRoPE, Proportional, Scaling
from .layer import change_class, log_once, own_class
from .swap import Model, UnsupportedModel, require_model
from .unrotated import GPTJ, UNROTATED, CosSin

KEPT = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Fields of a configuration's rotation that no scaling changes."""


class Rotary(nn.Module):
    """(x, position_ids) -> (cos, sin), halves: a `model.rotary_emb` by posenc, for models with one kind of layer or more."""

    def __init__(self, ropes: dict[str | None, RoPE]):
        super().__init__()
        self.__dict__["ropes"] = ropes  # a plain attribute, not a submodule

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> CosSin:
        rope = self.__dict__["ropes"][layer_type]
        positions = position_ids.expand(x.shape[0], -1) if rope.length_dependent else position_ids
        return CosSin.of(rope, positions, x.dtype)


@dataclass
class Change:
    """A checked replacement of one rotary_emb."""

    parent: Any
    child: Any
    made: nn.Module
    values: dict[str, Any]  # new values of the configuration's attributes
    before: dict[str, Any]
    length_dependent: set[str | None]  # the kinds of layers whose rotation depends on the length


def extend(model: Model, scaling: Scaling | None, *, max_length: int | None = None) -> Model:
    """Swap the rotation of a Llama-like model; returns the same model.

    scaling      an object of posenc.scaling (None: plain RoPE)
    max_length   max_position_embeddings of the configuration; default: factor · original (dynamic NTK: the original,
                 which transformers reads there)

    The configuration gets transformers' own fields for the scaling. `restore` undoes both. Everything is checked before
    anything is changed.

    Raises UnsupportedModel for a model without such a rotation and for a scaling that its configuration cannot express, TypeError
    for what is no model.

        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4))
        >>> posenc.hf.extend(model, posenc.scaling.YaRN(factor=4.0, original=2048)).config.max_position_embeddings
        8192
    """
    require_model(model)
    if any("posenc_before" in module.__dict__ for module in model.modules()):
        raise UnsupportedModel("this model is already extended; call posenc.hf.restore(model) first")
    original = getattr(scaling, "original", 1)
    if max_length is not None and max_length < original:
        raise ValueError(f"max_length={max_length} is shorter than the original length of {scaling}")
    tables = [module for module in model.modules() if own_class(type(module)) is modeling_gptj.GPTJAttention]
    found = _found(model)
    if not found and not tables:
        raise UnsupportedModel(
            f"{type(model).__name__} has no rotary_emb to swap; Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX have one, "
            "and GPT-J's tables are supported"
        )
    changes = []
    for parent, child in found:
        try:
            changes.append(_change(parent, child, scaling, max_length))
        except ValueError:
            raise
        except Exception as error:  # a configuration that has no head_dim but one for each layer, and whatever comes
            raise UnsupportedModel(f"{type(child).__name__}: {_last_line(error)}") from error
    own = [_rope(layer.config, None, scaling) for layer in tables]
    kinds = set().union(*(one.length_dependent for one in changes))
    if any(rope.length_dependent for rope in own):
        kinds.add(None)
    layers = _unrotated([one.parent for one in changes] + tables, scaling, kinds) if kinds else []

    for layer in layers:
        change_class(layer, UNROTATED[own_class(type(layer))])
    for one in changes:
        one.made.__dict__["posenc_before"] = (one.child, one.before)
        one.parent.rotary_emb = one.made
        for name, value in one.values.items():
            setattr(one.child.config, name, value)
    if tables:
        _tables(tables, own, max_length)
    return model


def undo(model: nn.Module) -> None:
    """Restore a model's rotation and its configuration."""
    for parent in list(model.modules()):
        now: Any = getattr(parent, "rotary_emb", None)
        if isinstance(now, nn.Module) and "posenc_before" in now.__dict__:
            child, before = now.__dict__["posenc_before"]
            for name, value in before.items():
                setattr(child.config, name, value)
            parent.rotary_emb = child
        layer: Any = parent
        if isinstance(layer, modeling_gptj.GPTJAttention) and "posenc_before" in layer.__dict__:
            layer.embed_positions, layer.max_positions = layer.__dict__["posenc_before"]
            layer.config.max_position_embeddings = layer.max_positions


def _found(model: nn.Module) -> list[tuple[Any, Any]]:
    """(parent, rotation) of the text's layers."""
    texts = _texts(getattr(model, "config", None))
    found = [
        (parent, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == "rotary_emb" and hasattr(child, "config") and (not texts or child.config.model_type in texts)
    ]
    ours, kinds = {child for _, child in found}, {type(child) for _, child in found}
    others = [name for name, module in model.named_modules() if type(module) in kinds and module not in ours]
    others = [name for name in others if name.rsplit(".", 1)[-1] != "rotary_emb"]  # those of an image's layers
    if others:
        raise UnsupportedModel(f"{others[0]} rotates too; only modules named rotary_emb can be swapped")
    return found


def _texts(config: Any) -> set[str]:
    """The model types of the parts that read or write text; an empty set where a model has no parts."""
    parts = getattr(config, "sub_configs", None) or {}
    both = [getattr(config, name) for name in ("encoder", "decoder") if name in parts]
    return {part.get_text_config().model_type for part in both or [config]} if parts else set()


def _change(parent: Any, child: Any, scaling: Scaling | None, max_length: int | None) -> Change:
    """Everything that may fail."""
    config, name = child.config, type(child).__name__
    kinds = [kind for kind, value in (config.rope_parameters or {}).items() if isinstance(value, dict)]
    whole = [kind for kind in kinds if "sliding" not in kind]
    if kinds and len(whole) != 1:
        raise UnsupportedModel(f"{name} rotates {', '.join(kinds)}; one kind of layers without a window can be scaled")
    kind = whole[0] if kinds else None
    try:
        rope = _rope(config, kind, scaling)
        _check_width(child, kind, rope)
        others = {one: rotary.from_config(config, layer_type=one) for one in kinds if one != kind}
    except ValueError as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    current = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if current.get("mscale_all_dim") or getattr(scaling, "mscale_all_dim", None):
        raise UnsupportedModel(f"{name}: mscale_all_dim also changes every layer's scale, which `extend` leaves alone")
    reasons = []
    for values in _candidate_values(config, kind, rope, max_length):
        try:
            again = copy.deepcopy(config)
            for attribute, value in values.items():
                setattr(again, attribute, value)
            again = type(config).from_dict(again.to_dict())
            made = type(child)(again)
        except Exception as error:  # transformers' validators raise errors of any type
            reasons.append(f"{type(config).__name__} refuses {_rope_type(values, kind)!r}: {_last_line(error)}")
            continue
        if not _rotates_as(made, kind, rope):
            reasons.append(f"{type(config).__name__} reads {_rope_type(values, kind)!r} as another rotation")
            continue
        if rope.length_dependent:
            made = Rotary({**others, kind: rope})
        else:
            made.config = config
            made.to(next(iter(child.buffers())).device).train(child.training)
        before = {attribute: getattr(config, attribute) for attribute in values}
        values = {attribute: getattr(again, attribute) for attribute in values}
        return Change(parent, child, made, values, before, {kind} if rope.length_dependent else set())
    raise UnsupportedModel(f"{name}: no configuration expresses {scaling}, because " + "; ".join(reasons))


def _candidate_values(config: Any, kind: str | None, rope: RoPE, max_length: int | None) -> Iterator[dict[str, Any]]:
    """Values of the configuration's attributes that may express the scaling, its own rope_type first."""
    try:
        yield _config_values(config, kind, rope, rope.scaling, max_length)
        reason = None
    except ValueError as error:  # no rope_type for it
        reason = error
    if not rope.length_dependent and rope.scaling is not None and all(rope.frequencies()):
        pairs = zip(_bare(rope, None).frequencies(), rope.frequencies(), strict=True)
        divisors = tuple(plain / scaled for plain, scaled in pairs)
        original = getattr(rope.scaling, "original", None) or config.max_position_embeddings
        lists = LongRoPE(
            short=divisors, long=divisors, original=original, factor=getattr(rope.scaling, "factor", 1.0),
            attention_factor=rope.attention_factor,
        )  # fmt: skip
        yield _config_values(config, kind, rope, lists, max_length)
    elif reason is not None:
        raise UnsupportedModel(str(reason)) from reason


def _config_values(
    config: Any, kind: str | None, rope: RoPE, scaling: Scaling | None, max_length: int | None
) -> dict[str, Any]:
    written = rotary.to_config(_bare(rope, scaling), "hf")
    current = config.rope_parameters if kind is None else config.rope_parameters[kind]
    parameters = {**{key: current[key] for key in KEPT if key in current}, **written["rope_parameters"]}
    longest = written.get("max_position_embeddings", _longest(config, rope, max_length))
    if max_length not in (None, longest):
        raise ValueError(
            f"max_length={max_length} cannot go with {scaling}: transformers reads its original length, {longest}, "
            "from max_position_embeddings; leave max_length out"
        )
    values = {
        "rope_parameters": parameters if kind is None else {**config.rope_parameters, kind: parameters},
        "max_position_embeddings": longest,
    }
    original = "original_max_position_embeddings"
    if hasattr(config, original) and original in parameters:  # Phi-3's is read before the rotation's own
        values[original] = parameters[original]
    if getattr(config, "head_dim", 0) is None:  # Mixtral: some of transformers' formulas multiply it
        values["head_dim"] = rope.head_dim
    return values


def _rotates_as(made: Any, kind: str | None, rope: RoPE) -> bool:
    before = "" if kind is None else f"{kind}_"
    theirs, factor = getattr(made, f"{before}inv_freq", None), getattr(made, f"{before}attention_scaling", None)
    ours = torch.tensor(rope.frequencies(), dtype=torch.float64)
    if theirs is None or factor is None or theirs.shape != ours.shape:
        return False
    is_close = torch.allclose(theirs.double().cpu(), ours, rtol=1e-5, atol=0.0)
    return is_close and math.isclose(factor, rope.attention_factor, rel_tol=1e-5)


def _check_width(child: Any, kind: str | None, rope: RoPE) -> None:
    """Llama's like rotate whole heads without a scaling and read partial_rotary_factor with one, which their layers cannot run."""
    theirs = getattr(child, "inv_freq" if kind is None else f"{kind}_inv_freq", None)
    if theirs is not None and theirs.numel() != rope.rotary_dim // 2:
        raise ValueError(
            f"it rotates {2 * theirs.numel()} channels of each head, and the configuration says {rope.rotary_dim} "
            "(partial_rotary_factor); make the two agree"
        )


def _rope_type(values: dict[str, Any], kind: str | None) -> str:
    parameters = values["rope_parameters"]
    return (parameters if kind is None else parameters[kind])["rope_type"]


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def _unrotated(parents: list[Any], scaling: Scaling | None, kinds: set[str | None]) -> list[Any]:
    """The layers of these kinds (None: every layer), whose rotation depends on the length."""
    layers = [
        module
        for parent in parents
        for module in parent.modules()
        if any(hasattr(module, name) for name in ("q_proj", "qkv_proj", "query_key_value"))
        and (None in kinds or getattr(module, "layer_type", None) in (None, *kinds))
    ]
    unsupported = {type(layer).__name__ for layer in layers if own_class(type(layer)) not in UNROTATED}
    if unsupported or not layers:
        raise UnsupportedModel(
            f"{scaling} depends on the length, so keys must be cached unrotated; that is supported for "
            f"{', '.join(sorted(one.__name__ for one in UNROTATED))}, not for {', '.join(sorted(unsupported)) or 'this model'}"
        )
    other_masks = {str(layer.config._attn_implementation) for layer in layers} - {"eager", "sdpa", "posenc"}
    if other_masks:
        raise UnsupportedModel(
            f"layers that cache keys unrotated need the masks of 'posenc', 'eager' or 'sdpa', and this model makes those of "
            f"{', '.join(map(repr, sorted(other_masks)))}; call model.set_attn_implementation('sdpa') first (posenc's engines "
            "run either way)"
        )
    return layers


def _rope(config: Any, kind: str | None, scaling: Scaling | None) -> RoPE:
    """The configuration's rotation with this scaling."""
    setup = read(config, layer_type=kind)
    if isinstance(setup.scaling, Proportional) and not isinstance(scaling, Proportional):
        raise ValueError(
            f"its rotation is {setup.scaling}, which {scaling} would replace; give Proportional with the same fraction "
            "and a factor"
        )
    return RoPE(**{**setup.options(), "scaling": scaling})


def _bare(rope: RoPE, scaling: Scaling | None) -> RoPE:
    return RoPE(head_dim=rope.rotary_dim, base=rope.base, layout=rope.layout, scaling=scaling)


def _longest(config: Any, rope: RoPE, max_length: int | None) -> int:
    original = getattr(rope.scaling, "original", config.max_position_embeddings)
    return max_length or max(int(getattr(rope.scaling, "factor", 1.0) * original), original)


def _tables(layers: list[Any], ropes: list[RoPE], max_length: int | None) -> None:
    """GPT-J: a table [positions, sines then cosines] in every layer, or a rope in each where it depends on the length."""
    log_once(
        "gptj: its configuration has no field for a scaling, so only max_position_embeddings is saved; "
        "call posenc.hf.extend again after from_pretrained"
    )
    longest = _longest(layers[0].config, ropes[0], max_length)
    for layer, rope in zip(layers, ropes, strict=True):
        layer.__dict__["posenc_before"] = (layer.embed_positions, layer.max_positions)
        if isinstance(layer, GPTJ):
            layer.__dict__["posenc_rope"] = rope
        else:
            phases = rope.rotation(Positions(torch.arange(longest, device=layer.embed_positions.device))).q
            assert phases is not None
            cos, sin = (part[0].to(layer.embed_positions.dtype) for part in phases)
            layer.embed_positions = nn.Buffer(torch.cat((sin, cos), dim=-1), persistent=False)
        layer.max_positions = layer.config.max_position_embeddings = longest
