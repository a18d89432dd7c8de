"""extend: give a rotary model a longer context, in memory and in its configuration.

    posenc.hf.extend(model, posenc.scaling.YaRN(factor=4, original=4096))
    model.save_pretrained(folder)                # transformers' own words: from_pretrained finds the same rotation

Length-dependent scalings (dynamic NTK, LongRoPE) change the rotation of every key as the text grows. transformers
caches rotated keys, so a cache mixes rotations; here the attention layers cache them unrotated and turn all of them
by the row's own length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from .. import RoPE, Where, rotary
from ..scaling import Scaling
from . import masks, versions
from .layer import Layer, split
from .swap import UnsupportedModel


class Turns(tuple):
    """(cos, sin) as transformers' layers unpack them, with the positions that layers of our own need."""

    rope: RoPE
    positions: Tensor

    @classmethod
    def of(cls, rope: RoPE, positions: Tensor, dtype: torch.dtype) -> Turns:
        phases = rope.rotation(Where(positions)).q
        assert phases is not None
        made = cls(torch.cat((part, part), dim=-1).to(dtype) for part in phases)
        made.rope, made.positions = rope, positions
        return made


class Rotary(nn.Module):
    """(x, position_ids) -> (cos, sin), halves: what `model.rotary_emb` is asked for."""

    def __init__(self, rope: RoPE, before: nn.Module, config_before: dict[str, Any]):
        super().__init__()
        self.rope = rope
        # plain attributes: neither is part of the model any more
        self.__dict__["before"], self.config_before = before, config_before

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Turns:
        positions = position_ids.expand(x.shape[0], -1) if self.rope.length_dependent else position_ids
        return Turns.of(self.rope, positions, x.dtype)


class Unrotated(Layer):
    """Attention that caches keys as they are and turns all of them at each call."""

    scheme = "rope"

    def posenc_sample(self, length: int):
        where = Where(length)
        heads = self.q_proj.weight.shape[0] // self.head_dim
        return heads, self.head_dim, replace(RoPE(head_dim=self.head_dim).plan(where)), {"causal": True}

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        if masks.wants_attentions(self, kwargs):
            raise ValueError(
                "output_attentions=True is not kept by length-dependent rotations; hf.restore(model) first"
            )
        rope, positions = position_embeddings.rope, position_embeddings.positions
        q, k, v = (split(project(hidden_states), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        keys = k.shape[2]
        # slots are consecutive, so a row's last position says all of them; padding before the text stays at 0
        back = torch.arange(1 - keys, 1, device=positions.device)
        where = Where(positions, (positions[:, -1:] + back).clamp(min=0))
        plan = replace(rope.plan(where), scale=self.scaling)
        seen = masks.seen(attention_mask, q.shape[2], causal=True)
        return self.o_proj(self.posenc_run(q, k, v, plan, seen, self.attention_dropout)), None


class LlamaAttention(Unrotated, modeling_llama.LlamaAttention):
    original = modeling_llama.LlamaAttention


class MistralAttention(Unrotated, modeling_mistral.MistralAttention):
    original = modeling_mistral.MistralAttention


class Qwen2Attention(Unrotated, modeling_qwen2.Qwen2Attention):
    original = modeling_qwen2.Qwen2Attention


class Qwen3Attention(Unrotated, modeling_qwen3.Qwen3Attention):
    original = modeling_qwen3.Qwen3Attention


class GemmaAttention(Unrotated, modeling_gemma.GemmaAttention):
    original = modeling_gemma.GemmaAttention


UNROTATED = {
    part.original: part for part in (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention, GemmaAttention)
}


def extend(model: nn.Module, scaling: Scaling | None, *, max_length: int | None = None) -> nn.Module:
    """Swap the rotation of a Llama-like model; returns the same model.

    scaling      an object of posenc.scaling (None: plain RoPE)
    max_length   the context length that the configuration is to state; default: factor · original

    The configuration is changed to transformers' own words for it. `restore` undoes both.
    """
    versions.check()
    found = [
        (parent, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == "rotary_emb" and hasattr(child, "config") and not isinstance(child, Rotary)
    ]
    if any(isinstance(module, Rotary) for module in model.modules()):
        raise UnsupportedModel("this model is extended already; posenc.hf.restore(model) first")
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} has no rotary_emb to swap; Llama, Mistral, Qwen, Gemma, Phi and GPT-NeoX have one"
            + (" (GPT-J keeps a table, and its configuration has no word for a scaling)" if _gptj(model) else "")
        )
    ropes = [_scaled(child, scaling) for _, child in found]
    if ropes[0].length_dependent:
        layers = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "o_proj")]
        strange = {type(m).__name__ for m in layers if type(m) not in UNROTATED} or (set() if layers else {"none"})
        if strange:
            raise UnsupportedModel(
                f"{scaling} follows the length, so keys must be cached unrotated; that is known for "
                f"{', '.join(sorted(one.__name__ for one in UNROTATED))}, not for {', '.join(sorted(strange))}"
            )
        for layer in layers:
            layer.__class__ = UNROTATED[type(layer)]
    for (parent, child), rope in zip(found, ropes):
        parent.rotary_emb = Rotary(rope, child, _update(child.config, rope, max_length))
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


def _scaled(child: Any, scaling: Scaling | None) -> RoPE:
    if any(isinstance(value, dict) for value in (child.config.rope_parameters or {}).values()):
        raise UnsupportedModel(f"{type(child).__name__} has a rotation for each kind of layer; one is supported")
    plain = rotary.from_config(child.config)
    if plain.layout != "half":
        raise UnsupportedModel(f"{type(child).__name__} turns neighbouring channels; the models above turn halves")
    return RoPE(head_dim=plain.head_dim, rotary_dim=plain.rotary_dim, base=plain.base, scaling=scaling)


def _update(config: Any, rope: RoPE, max_length: int | None) -> dict[str, Any]:
    """Change a configuration to say this rotation; returns what it said before."""
    said = rotary.to_config(rope, "hf")
    before = {
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
    }
    parameters = dict(said["rope_parameters"])
    if "partial_rotary_factor" in config.rope_parameters:
        parameters.setdefault("partial_rotary_factor", config.rope_parameters["partial_rotary_factor"])
    original = getattr(rope.scaling, "original", config.max_position_embeddings)
    longest = max_length or int(getattr(rope.scaling, "factor", 1.0) * original)
    config.max_position_embeddings = said.get("max_position_embeddings", max(longest, original))
    config.rope_parameters = parameters
    return before


def _gptj(model: nn.Module) -> bool:
    return "gptj" in type(model).__module__
