"""LongT5: the decoder is T5's; the encoder attends to a window with T5's bias, alone or with summaries of the whole text.

    local               s = q·k + b[bucket(j - i), h],   |j - i| <= local_radius
    transient-global    the same, and in the same softmax, for every summary g,   q·k_g + c[bucket(g - block(i)), h]

The decoder's layers call the attention interface. The encoder's do not: they cut the text into blocks, each of which attends
to three of them with a mask. LongT5LocalAttention (modeling_longt5.py 532-703 of transformers 5.22) and
LongT5TransientGlobalAttention (704-943) are overridden. A summary is the normalised sum of a block of 16 tokens
(`global_block_size`).

Window and summaries are two plans, whose results `merge` joins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.longt5 import modeling_longt5

from .. import Index, Plan, Positions, attend, merge
from ..core import index
from ..core.tables import expand_table
from . import masks, rules
from .family import Family, tiny_model
from .interface import is_free
from .layer import Layer, Sample, split, zeros_beside
from .t5 import T5_SIZES, T5Attention, expand_bias, plan_bias, tiny_pair


class LongT5Attention(T5Attention):
    original = modeling_longt5.LongT5Attention
    shares_sequences = False


def prefers_blocks(module: Any, block: int, tokens: Tensor) -> bool:
    """Whether the original, which cuts the text [B, L, ...] into blocks, is faster."""
    kind = "window" if isinstance(module, LongT5LocalAttention) else "bias"
    return masks.is_short(module, tokens, kind=kind) or (block < rules.BLOCK and is_free(module, tokens.device))


class Windowed(Layer):
    """The part that the encoder's two layers share."""

    encoding = "t5"

    def posenc_index_of(self) -> Index:
        buckets, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        return index.log_buckets(buckets, most, causal=False)

    def posenc_plan(self, positions: Positions, bias: Tensor) -> Plan:
        return plan_bias(positions, index=self.posenc_index, bias=bias, scale=1.0)

    def posenc_sample(self, length: int) -> Sample:
        bias = zeros_beside(self.q, self.n_heads, self.posenc_index.span)
        plan = self.posenc_plan(Positions(length), bias)
        return self.n_heads, self.key_value_proj_dim, plan, {"window": self.block_len - 1}


class LongT5LocalAttention(Windowed, modeling_longt5.LongT5LocalAttention):
    original = modeling_longt5.LongT5LocalAttention

    def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
        if output_attentions or prefers_blocks(self, self.block_len, hidden_states):
            return super().forward(hidden_states, mask, position_bias, output_attentions)
        bias = expand_bias(self) if position_bias is None else position_bias
        q, k, v = (split(project(hidden_states), self.key_value_proj_dim) for project in (self.q, self.k, self.v))
        length = q.shape[2]
        options = {"window": self.block_len - 1, "key_mask": None if mask is None else _padding(mask, length)}
        plan = self.posenc_plan(Positions(length), bias)
        return self.o(self.posenc_run(q, k, v, plan, options, self.dropout)), bias


def _padding(mask: Tensor, length: int) -> Tensor:
    """[B, 1, blocks, block, 3 block] -> [B, L]: a real token is visible to itself."""
    block = mask.shape[-2]
    return mask[:, 0].diagonal(offset=block, dim1=-2, dim2=-1).flatten(1)[:, :length] > 0


class LongT5TransientGlobalAttention(Windowed, modeling_longt5.LongT5TransientGlobalAttention):
    """`position_bias` is [2, heads, distances]: for tokens, for summaries. `mask` is [B, L] or its `Blocks`."""

    original = modeling_longt5.LongT5TransientGlobalAttention

    def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
        if mask is None:
            mask = hidden_states.new_ones(hidden_states.shape[:2])
        if output_attentions or (not isinstance(mask, Blocks) and prefers_blocks(self, self.block_len, hidden_states)):
            return super().forward(hidden_states, mask, position_bias, output_attentions)
        biases = position_bias
        if biases is None:
            both = torch.cat((self.relative_attention_bias.weight, self.global_relative_attention_bias.weight), dim=1)
            buckets = self.posenc_index
            biases = expand_table(both.t(), buckets, buckets.lo, buckets.hi).unflatten(0, (2, self.n_heads))
        blocks = mask if isinstance(mask, Blocks) else make_blocks(mask, self.global_block_size)
        summaries = self.global_input_layer_norm(_sum_blocks(hidden_states, blocks))
        q, k, v, far_k, far_v = (
            split(project(states), self.key_value_proj_dim)
            for project, states in (
                (self.q, hidden_states), (self.k, hidden_states), (self.v, hidden_states),
                (self.k, summaries), (self.v, summaries),
            )
        )  # fmt: skip
        return self.o(self.posenc_merged(q, k, v, far_k, far_v, biases, blocks)), biases

    def posenc_merged(
        self, q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, biases: Tensor, blocks: Blocks
    ) -> Tensor:
        """[B, H, L, D] each -> [B, L, H * D]: attention to the window and to the summaries, merged."""
        length, padded = q.shape[2], blocks.has_padding
        given: dict[str, Any] = {"dropout": self.dropout if self.training else 0.0, "engine": self.posenc_engine}
        near = attend(
            q, k, v, self.posenc_plan(Positions(length), biases[0]), return_lse=True, **given,
            window=self.block_len - 1, key_mask=blocks.is_real[:, :length] if padded else None,
        )  # fmt: skip
        far = attend(
            q, far_k, far_v, self.posenc_plan(Positions(blocks.of_token, far_k.shape[2]), biases[1]), return_lse=True,
            **given, key_mask=blocks.is_real[:, length:] if padded else None,
        )  # fmt: skip
        return merge([near, far])[0].transpose(1, 2).flatten(2)


class Blocks(NamedTuple):
    """The blocks of a padding mask. A hook of the encoder computes them once for all layers of a call."""

    of_token: Tensor  # [B or 1, L]: the summary of each token; -1: padding
    slots: Tensor  # int64 [B, L, 1]: the same, with padding after the last summary
    is_real: Tensor  # bool [B, L + summaries]
    has_padding: bool  # True where it is not known


def make_blocks(mask: Tensor, size: int) -> Blocks:
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"attention_mask must hold 1 (real) and 0 (padding), got {mask.dtype} from {mask.min().item()} to "
            f"{mask.max().item()}; LongT5's summaries treat other numbers as neither; pass a boolean mask != 0"
        )
    of_token, real = modeling_longt5._make_global_fixed_block_ids(mask, size)
    slots = torch.where(of_token < 0, real.shape[1], of_token).long()[..., None]
    is_real = torch.cat((mask != 0, real != 0), dim=1)
    has_padding = not masks.nothing_padded(is_real)
    return Blocks(of_token if has_padding else of_token[:1], slots, is_real, has_padding)


def _sum_blocks(states: Tensor, blocks: Blocks) -> Tensor:
    """[B, L, d] -> [B, summaries, d]"""
    count = blocks.is_real.shape[1] - states.shape[1]
    precise = states.to(torch.promote_types(states.dtype, torch.float32))
    sums = precise.new_zeros(states.shape[0], count + 1, states.shape[2])
    return sums.scatter_add(1, blocks.slots.expand(states.shape), precise)[:, :count].to(states.dtype)


def before_stack(stack: Any, args: tuple, kwargs: dict[str, Any]):
    """A transient-global encoder passes its layers `attention_mask` unchanged, so they get its blocks."""
    if stack.is_decoder or stack.config.encoder_attention_type == "local":
        return args, kwargs
    kwargs = masks.by_name(stack, args, kwargs)
    tokens, mask = masks.tokens_of(kwargs), kwargs.get("attention_mask")
    short = tokens is None or prefers_blocks(stack, stack.config.local_radius + 1, tokens)
    if short or masks.wants_attentions(stack, kwargs):
        return (), kwargs
    if mask is None:
        mask = torch.ones(tokens.shape[:2], device=stack.embed_tokens.weight.device)
    return (), {**kwargs, "attention_mask": make_blocks(mask, stack.config.global_block_size)}


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    blocks = dict(encoder_attention_type="transient-global", local_radius=3, global_block_size=4)
    return tiny_model("LongT5", **T5_SIZES, **blocks, d_model=16, attn_implementation="eager"), tiny_pair()


PARTS = LongT5Attention, LongT5LocalAttention, LongT5TransientGlobalAttention
FAMILY = Family(tiny, parts=PARTS, hooks={modeling_longt5.LongT5Stack: before_stack})
