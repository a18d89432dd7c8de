"""T5, mT5, UMT5: a bias for each bucket of distance, one table for a stack (UMT5: for a layer), scale 1.

    self-attention     s = q·k + b[bucket(j - i), h]
    cross-attention    s = q·k            (the original adds a dense bias of zeros)

The layers call the attention interface. `compute_bias` makes [1, H, Lq, Lk] in the first layer, and the stack hands that to the
others; here it makes the bias of each distance, [heads, distances], which travels the same way. Cross-attention gets an
empty one, so that it makes no zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from .. import Index, Lookup, Plan, Positions
from ..core import index
from ..core.tables import expand_table
from ..core.torch_modes import cache_in_eager_mode
from ..nn import blocks
from . import rules
from .family import Family, InterfaceLayer, tiny_model, tiny_text
from .interface import NO_TERMS, is_free
from .layer import zeros_beside

STEP = 256


def compute_bias(module: Any, original: Callable, query_length, key_length, device=None, past_seen_tokens=0) -> Tensor:
    """The bias of each distance, [H, distances]; dense for a text that is short for a CPU, and where the keys are not the tokens so
    far (a static cache)."""
    weight = module.relative_attention_bias.weight
    if isinstance(past_seen_tokens, Tensor) or past_seen_tokens + query_length != key_length:
        return original(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    if is_free(module, weight.device if device is None else device) and rules.keeps_dense_bias(
        query_length * key_length, torch.is_grad_enabled() and weight.requires_grad, module.training and module.dropout > 0
    ):  # fmt: skip
        return dense_bias(module, query_length, key_length)
    return expand_bias(module)


def dense_bias(module: Any, queries: int, keys: int) -> Tensor:
    """[1, H, Lq, Lk] for the last `queries` of `keys` tokens, kept where the table does not learn. The original computes the
    bucket of every pair."""
    weight = module.relative_attention_bias.weight
    # a row for a single query serves the next steps too
    longest = keys if queries > 1 else -(-keys // STEP) * STEP

    def make() -> Tensor:
        by_distance = expand_table(weight.t(), module.posenc_index, 1 - longest, queries - 1)
        return by_distance.unfold(1, longest, 1).flip(1)[None]

    return blocks.keep(module, (queries, longest), (weight,), make)[..., longest - keys :]


def expand_bias(module: Any) -> Tensor:
    buckets = module.posenc_index
    return expand_table(module.relative_attention_bias.weight.t(), buckets, buckets.lo, buckets.hi)


def before_layer(module: Any, args: tuple, kwargs: dict[str, Any]):
    """Cross-attention: an empty bias in place of the zeros."""
    crosses = kwargs.get("key_value_states") is not None
    if crosses and kwargs.get("position_bias") is None and module.config._attn_implementation == "posenc":
        kwargs = {**kwargs, "position_bias": zeros_beside(module.q, module.n_heads, 0)}
        if module.training:
            kwargs["position_bias"].requires_grad_()  # reentrant checkpointing: as the original's zeros
    return args, kwargs


@cache_in_eager_mode(maxsize=64)
def every_distance(lo: int, hi: int) -> Index:
    """An index is validated when it is made, and every layer needs this one for every token."""
    return Index(lo, hi)


def plan_bias(positions: Positions, *, index: Index, bias: Tensor, scale: float) -> Plan:
    lookups = () if not bias.shape[-1] else (Lookup(every_distance(index.lo, index.hi), bias=bias),)
    return Plan(positions, lookups=lookups, scale=scale)


def crosses(module: Any) -> bool:
    """Whether it is a decoder's attention to the encoder."""
    return module.is_decoder and not module.is_causal


class Bucketed(InterfaceLayer):
    """The part that the attention layers share."""

    encoding = "t5"
    shares_sequences = True
    attributes = ("relative_attention_num_buckets", "relative_attention_max_distance", "has_relative_attention_bias")
    relies_on = {"compute_bias": ("query_length", "key_length", "device", "past_seen_tokens")}
    replaces = {"compute_bias": compute_bias}

    @staticmethod
    def prepare(module):
        buckets, most = module.relative_attention_num_buckets, module.relative_attention_max_distance
        return {"posenc_index": index.log_buckets(buckets, most, causal=module.is_decoder)}

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        if position_bias is None or position_bias.dim() != 2:
            return None
        if not position_bias.shape[1]:
            return NO_TERMS
        return partial(plan_bias, index=module.posenc_index, bias=position_bias, scale=scaling)

    @staticmethod
    def sample(module, length):
        bias = zeros_beside(module.q, module.n_heads, 0 if crosses(module) else module.posenc_index.span)
        plan = plan_bias(Positions(length), index=module.posenc_index, bias=bias, scale=module.scaling)
        return module.n_heads, module.key_value_proj_dim, plan, {"causal": module.is_causal}


SHARED = ("hidden_states", "mask", "key_value_states", "position_bias", "past_key_values")


class T5Attention(Bucketed):
    original = modeling_t5.T5Attention
    relies_on = {**Bucketed.relies_on, "forward": SHARED}
    hook = before_layer

    @staticmethod
    def needs_hook(module):
        return crosses(module)


class MT5Attention(T5Attention):
    original = modeling_mt5.MT5Attention


class UMT5Attention(Bucketed):
    """Each layer makes its own bias, and its forward makes zeros for cross-attention."""

    original = modeling_umt5.UMT5Attention

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        if not module.has_relative_attention_bias:
            return NO_TERMS
        return super().plan_of(module, position_bias, scaling, query, kwargs)


T5_SIZES: dict[str, Any] = dict(
    vocab_size=32, d_kv=8, d_ff=16, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=12, decoder_start_token_id=0,
)  # fmt: skip


def tiny_pair() -> dict[str, Tensor]:
    """The inputs of an encoder and a decoder."""
    text = tiny_text()
    return {**text, "decoder_input_ids": text["input_ids"][:, :165]}


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    name = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}[folder]
    # with "sdpa" UMT5's decoder sees later tokens in transformers 5.16
    return tiny_model(name, **T5_SIZES, d_model=16, attn_implementation="eager"), tiny_pair()


FAMILY = Family(tiny, parts=(T5Attention, MT5Attention, UMT5Attention))
