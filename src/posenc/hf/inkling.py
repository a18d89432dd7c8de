"""Inkling: each token mixes a bank of bias-against-distance profiles; full and sliding layers, a query temperature.

    s = τ_i ( scale q_i·k_j + r_i·bank[:, i - j] ),   0 <= i - j < max_distance, else nothing is added;   causal

Inkling 2 has τ in r already and a sink for each query, which the interface adds. The layers call the attention interface. `rel_logits_proj` makes r·bank dense, [B, H, L, L], in every layer; its forward is
replaced and gives r itself, which the layer multiplies by τ, as it does q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import Positions
from ..core import index
from ..encodings.relative_logits import plan_bank
from .family import Family, InterfaceLayer, tiny_text, variants
from .interface import is_free, prefers_original
from .interface_mask import Mask
from .layer import zeros_beside


class Mixture:
    """r [B, Lq, H, d_rel], which stands for the dense bias: the layer multiplies it by τ [1, 1, Lq, 1] in float32."""

    def __init__(self, states: Tensor, make: Callable[[Tensor], Tensor]):
        self.states, self.make = states, make  # make: r -> the dense bias

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    def float(self) -> Mixture:
        return Mixture(self.states.float(), self.make)

    def to(self, dtype: torch.dtype) -> Mixture:
        return Mixture(self.states.to(dtype), self.make)

    def times(self, factor: Tensor) -> Mixture:
        return Mixture(self.states * factor.transpose(1, 2), self.make)

    __mul__ = times

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> Mixture:
        """How torch.compile multiplies it by a tensor, in either order."""
        if getattr(function, "__name__", "") not in ("mul", "__mul__", "__rmul__"):
            return NotImplemented
        one, other = args
        return one.times(other) if isinstance(one, Mixture) else other.times(one)

    def dense(self) -> Tensor:
        return self.make(self.states)


def keep_states(module: Any, original: Callable, relative_states, query_positions, key_positions) -> Mixture | Tensor:
    queries, keys, device = query_positions.shape[0], key_positions.shape[0], relative_states.device
    rate = module.attention_dropout
    if (queries == 1 and is_free(module, device)) or prefers_original(module, queries, keys, device, dropout=rate):
        return original(relative_states, query_positions, key_positions)
    return Mixture(relative_states, lambda states: original(states, query_positions, key_positions))


class Layer(InterfaceLayer):
    encoding = "relative_logits"
    relies_on = {"forward": ("hidden_states", "attention_mask", "conv_mask", "past_key_values")}
    attributes = ("rel_extent", "rel_logits_proj", "is_sliding", "scaling", "attention_dropout")
    replaces = {"rel_logits_proj.forward": keep_states}

    @staticmethod
    def prepare(module):
        return {"posenc_index": index.clip(module.rel_extent, 1)}  # a row of zeros at each end of the bank

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        if isinstance(position_bias, Tensor) or not isinstance(kwargs.get("attention_mask"), Mask):
            return None  # no Mask: a static cache, whose keys are not the tokens so far
        return partial(
            plan_bank, index=module.posenc_index, states=position_bias.states.transpose(1, 2),
            bank=module.rel_logits_proj.proj, scale=scaling, temper=None,
        )  # fmt: skip

    @staticmethod
    def sample(module, length):
        states = zeros_beside(module.q_proj, 1, module.num_heads, length, module.config.d_rel)
        bank = module.rel_logits_proj.proj
        plan = plan_bank(Positions(length), module.posenc_index, states, bank, module.scaling, None)
        window = (module.sliding_window - 1, None) if module.is_sliding else None
        return module.num_heads, module.head_dim, plan, {"causal": True, "window": window}


class FullLayer(Layer):
    relies_on = {
        "forward": (
            "hidden_states", "key_hidden_states", "value_hidden_states", "attention_mask", "conv_mask", "past_key_values"
        )
    }  # fmt: skip


PARTS = (
    *variants(Layer, "inkling.InklingAttention", "inkling2.Inkling2SlidingAttention"),
    *variants(FullLayer, "inkling2.Inkling2FullAttention"),
)
SIZES = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=8, sliding_window_size=5, rel_extent=7, d_rel=4,
    log_scaling_n_floor=5, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip


def tiny(folder: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    if folder == "inkling":
        more = dict(intermediate_size=16, local_layer_ids=[1], mlp_layer_types=["dense", "dense"])
        name = "Inkling"
    else:
        more = dict(
            moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1, layer_types=["hybrid", "hybrid_sliding"],
            unpadded_vocab_size=32, n_layers_per_attn_res_block=1,
        )  # fmt: skip
        name = "Inkling2"
    found = import_module(f"transformers.models.{folder}.configuration_{folder}")
    config = getattr(found, f"{name}TextConfig")(**{**SIZES, **more, **options})
    model = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), f"{name}TextModel")
    return model(config), tiny_text()


FAMILY = Family(tiny, parts=PARTS)
