"""T5, mT5, UMT5: a bias for each bucket of distance, one table for a stack (UMT5: for a layer), scale 1.

    self-attention     s = q·k + b[bucket(j - i), h]
    cross-attention    s = q·k            (the original adds a dense bias of zeros)

Replaces T5Attention (modeling_t5.py 176-371), MT5Attention (modeling_mt5.py 182-378) and UMT5Attention (modeling_umt5.py
188-371) of transformers 5.22. The original passes the dense bias of layer 0 to the next layers as `position_bias`; here
that argument is the bias of each distance, [heads, distances].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from .. import Index, Lookup, Plan, Positions
from ..core import index
from ..core.tables import expand_table
from . import masks
from .layer import Layer, split


class Bucketed(Layer):
    """The part that the three attention layers share."""

    encoding = "t5"

    def posenc_table(self) -> Tensor | None:
        return self.relative_attention_bias.weight if self.has_relative_attention_bias else None

    def posenc_index_of(self) -> Index:
        buckets, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        return index.log_buckets(buckets, most, causal=self.is_decoder)

    def posenc_bias(self) -> Tensor | None:
        """The bias of each distance, [heads, distances], for all layers that share the table."""
        table, buckets = self.posenc_table(), self.posenc_index
        return None if table is None else expand_table(table.t(), buckets, buckets.lo, buckets.hi)

    def posenc_plan(self, positions: Positions, bias: Tensor | None) -> Plan:
        buckets = self.posenc_index
        lookups = () if bias is None else (Lookup(Index(buckets.lo, buckets.hi), bias=bias),)
        return Plan(positions, lookups=lookups, scale=self.scaling)

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        bias = self.posenc_bias()
        crosses = bias is None and self.is_decoder and not self.is_causal
        if bias is None and not crosses:
            bias = self.q.weight.new_zeros(self.n_heads, self.posenc_index.span)
        plan = self.posenc_plan(Positions(length), bias)
        return self.n_heads, self.key_value_proj_dim, plan, {"causal": self.is_decoder and not crosses}

    def posenc_attend(self, states: Tensor, other: Tensor | None, mask, bias: Tensor | None, cache) -> Tensor:
        """states [B, L, d_model] over themselves and the cache, or over `other` (cross-attention)."""
        q = split(self.q(states), self.key_value_proj_dim)
        start = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        if isinstance(start, Tensor):  # a static cache counts in place
            start = start.clone()
        k, v = self.posenc_keys(states if other is None else other, other is not None, cache)
        if other is not None:
            positions, causal, bias = Positions(q.shape[2], k.shape[2]), False, None
        else:
            first = start.reshape(1) if isinstance(start, Tensor) else start
            positions, causal = Positions((first, q.shape[2]), k.shape[2]), self.is_decoder
        plan = self.posenc_planned(lambda positions: self.posenc_plan(positions, bias), positions)
        options = masks.mask_options(mask, self.posenc_length(q), causal=causal)
        fully_masked = masks.before_all_keys(options, q.shape[2])
        return self.o(self.posenc_run(q, k, v, plan, options, self.dropout, fully_masked))

    def posenc_keys(self, states: Tensor, crosses: bool, cache) -> tuple[Tensor, Tensor]:
        """Keys and values, through the cache; those of an encoder are computed once."""
        pair = hasattr(cache, "cross_attention_cache")
        if pair and crosses and cache.is_updated.get(self.layer_idx):
            kept = cache.cross_attention_cache.layers[self.layer_idx]
            return kept.keys, kept.values
        k, v = (split(project(states), self.key_value_proj_dim) for project in (self.k, self.v))
        if cache is None:
            return k, v
        own = (cache.cross_attention_cache if crosses else cache.self_attention_cache) if pair else cache
        k, v = own.update(k, v, self.layer_idx)
        if pair and crosses:
            cache.is_updated[self.layer_idx] = True
        return k, v


class SharedTable(Bucketed):
    """A layer that receives the bias of each distance as `position_bias` and passes it on."""

    def forward(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
    ):
        if masks.wants_attentions(self, kwargs):
            return super().forward(
                hidden_states, mask=mask, key_value_states=key_value_states, position_bias=position_bias,
                past_key_values=past_key_values, **kwargs,
            )  # fmt: skip
        bias = position_bias
        if bias is None and key_value_states is None:
            bias = self.posenc_bias()
        out = self.posenc_attend(hidden_states, key_value_states, mask, bias, past_key_values)
        return out, None if key_value_states is not None else bias, None


class T5Attention(SharedTable, modeling_t5.T5Attention):
    original = modeling_t5.T5Attention
    posenc_shares_sequences = True


class MT5Attention(SharedTable, modeling_mt5.MT5Attention):
    original = modeling_mt5.MT5Attention
    posenc_shares_sequences = True


class UMT5Attention(Bucketed, modeling_umt5.UMT5Attention):
    original = modeling_umt5.UMT5Attention
    posenc_shares_sequences = True

    def forward(self, hidden_states, encoder_hidden_states=None, past_key_values=None, attention_mask=None, **kwargs):
        if masks.wants_attentions(self, kwargs):
            return super().forward(
                hidden_states, encoder_hidden_states=encoder_hidden_states, past_key_values=past_key_values,
                attention_mask=attention_mask, **kwargs,
            )  # fmt: skip
        return self.posenc_attend(
            hidden_states, encoder_hidden_states, attention_mask, self.posenc_bias(), past_key_values
        ), None


def before_stack(stack: Any, args: tuple, kwargs: dict[str, Any]):
    """Replace a stack's padding mask by the compact form, so that it builds no dense mask."""
    if masks.wants_attentions(stack, kwargs):
        return args, {**kwargs, "output_attentions": True}
    kwargs = masks.by_name(stack, args, kwargs)
    tokens = masks.tokens_of(kwargs)
    cache = kwargs.get("past_key_values") if stack.is_decoder else None
    if not masks.grows(cache):
        return (), kwargs
    device, keys = stack.embed_tokens.weight.device, masks.past(cache) + tokens.shape[1]
    kwargs = {**kwargs, "attention_mask": masks.padding(kwargs.get("attention_mask"), keys, device, stack)}
    other = kwargs.get("encoder_hidden_states")
    if stack.is_decoder and other is not None:
        own = masks.padding(kwargs.get("encoder_attention_mask"), other.shape[1], device, stack)
        kwargs["encoder_attention_mask"] = own
    return (), kwargs


PARTS = (T5Attention, MT5Attention, UMT5Attention)
HOOKS = {
    modeling_t5.T5Stack: before_stack,
    modeling_mt5.MT5Stack: before_stack,
    modeling_umt5.UMT5Stack: before_stack,
}
