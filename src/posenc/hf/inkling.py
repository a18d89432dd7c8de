"""Inkling: each token mixes a bank of bias-against-distance profiles; full and sliding layers, a query temperature.

    s = τ_i ( scale q_i·k_j + r_i·bank[:, i - j] ),   0 <= i - j < max_distance, else nothing is added;   causal

Replaces InklingAttention (modeling_inkling.py 187-286) of transformers 5.22, which makes r·bank dense, [B, H, L, L], in every
layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.models.inkling import modeling_inkling

from .. import Index, Plan, Positions
from ..core import index
from ..encodings.relative_logits import plan_bank
from . import masks
from .layer import Layer, split


class InklingAttention(Layer, modeling_inkling.InklingAttention):
    original = modeling_inkling.InklingAttention
    encoding = "relative_logits"

    def posenc_index_of(self) -> Index:
        return index.clip(self.rel_extent, 1)  # a row of zeros at each end of the bank

    def posenc_plan(self, positions: Positions, states: Tensor) -> Plan:
        """states [B, H, Lq, d_rel]"""
        floor = None if self.is_sliding else self.config.log_scaling_n_floor
        temper = None if floor is None else (self.config.log_scaling_alpha, floor)
        assert self.posenc_index is not None
        return plan_bank(positions, self.posenc_index, states, self.rel_logits_proj.proj, self.scaling, temper)

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        states = self.q_proj.weight.new_zeros(1, self.num_heads, length, self.config.d_rel)
        window = (self.sliding_window - 1, None) if self.is_sliding else None
        return (
            self.num_heads,
            self.head_dim,
            self.posenc_plan(Positions(length), states),
            dict(causal=True, window=window),
        )

    def forward(self, hidden_states, attention_mask, conv_mask=None, past_key_values=None, **kwargs):
        static = past_key_values is not None and past_key_values.is_compileable
        if static or masks.wants_attentions(self, kwargs):
            return super().forward(
                hidden_states, attention_mask, conv_mask=conv_mask, past_key_values=past_key_values, **kwargs
            )
        q = self.q_norm(split(self.q_proj(hidden_states), self.head_dim))
        k = self.k_sconv(self.k_proj(hidden_states), past_key_values=past_key_values, conv_mask=conv_mask)
        v = self.v_sconv(self.v_proj(hidden_states), past_key_values=past_key_values, conv_mask=conv_mask)
        k, v = self.k_norm(split(k, self.head_dim)), split(v, self.head_dim)
        states = split(self.r_proj(hidden_states), self.config.d_rel)
        queries, keys, first_query, first_key = q.shape[2], q.shape[2], 0, 0
        if past_key_values is not None:
            keys, first_key = past_key_values.get_mask_sizes(queries, self.layer_idx)
            first_query = past_key_values.get_query_offset(self.layer_idx)
            k, v = past_key_values.update(k, v, self.layer_idx)
        plan = self.posenc_plan(Positions((first_query, queries), (first_key, keys)), states)
        options = masks.mask_options(attention_mask, queries, causal=True)
        if masks.is_compact(attention_mask):
            if options["key_mask"] is not None:
                options["key_mask"] = options["key_mask"][:, first_key : first_key + keys]
            if self.is_sliding:
                options["window"] = (self.sliding_window - 1, None)
        return self.o_proj(self.posenc_run(q, k, v, plan, options, self.attention_dropout)), None


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Pass both kinds of layer and the convolutions the padding itself, not a dense mask."""
    kwargs = dict(masks.by_name(model, args, kwargs))
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    tokens = masks.tokens_of(kwargs)
    is_made = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() != 2)
    packed = mask is None and kwargs.get("position_ids") is not None and cache is None
    static = cache is not None and cache.is_compileable
    if is_made or packed or static or tokens is None or masks.wants_attentions(model, kwargs):
        return (), kwargs
    compact = masks.padding(mask, masks.past(cache) + tokens.shape[1], tokens.device)
    if masks.is_compact(compact):
        shape = torch.empty(*tokens.shape[:2], 0, device=tokens.device)
        kwargs["attention_mask"] = {
            "full_attention": compact,
            "sliding_attention": compact,
            "linear_attention": create_recurrent_attention_mask(
                config=model.config, inputs_embeds=shape, attention_mask=mask, past_key_values=cache
            ),
        }
    return (), kwargs


PARTS = (InklingAttention,)
HOOKS = {modeling_inkling.InklingTextModel: before_model}
