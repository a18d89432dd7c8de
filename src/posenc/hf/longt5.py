"""LongT5: the decoder is T5's; the local encoder is a window of T5's bias.

    local        s = q·k + b[bucket(j - i), h],   |j - i| <= local_radius

The original cuts the text into blocks and lets each see its neighbours, three blocks with a mask. The transient-global
encoder adds summaries of 16 tokens each to the keys of every block: one softmax over a window and over keys outside it.
That is two calls of `attend` joined by their log-sums, which no engine returns with a gradient; so it stays as it is, with
scores [B, blocks, H, radius, 3 · radius + L / 16].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.longt5 import modeling_longt5

from .. import Plan, Where
from .layer import split
from .t5 import Bucketed, Threaded, before_stack


class LongT5Attention(Threaded, modeling_longt5.LongT5Attention):
    original = modeling_longt5.LongT5Attention


class LongT5LocalAttention(Bucketed, modeling_longt5.LongT5LocalAttention):
    original = modeling_longt5.LongT5LocalAttention
    scaling = 1.0

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        table = self.q.weight.new_zeros(self.relative_attention_num_buckets, self.n_heads)
        plan = self.posenc_plan(Where(length), table)
        return self.n_heads, self.key_value_proj_dim, plan, {"window": self.block_len - 1}

    def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
        if output_attentions:
            return super().forward(hidden_states, mask, position_bias, output_attentions)
        table = position_bias
        if table is None and self.has_relative_attention_bias:
            table = self.posenc_table().clone()  # not a parameter, for reentrant checkpointing
        q, k, v = (split(project(hidden_states), self.key_value_proj_dim) for project in (self.q, self.k, self.v))
        length = q.shape[2]
        seen = {"window": self.block_len - 1, "key_mask": None if mask is None else _padding(mask, length)}
        plan = self.posenc_plan(Where(length), table)
        return self.o(self.posenc_run(q, k, v, plan, seen, self.dropout)), table


def _padding(mask: Tensor, length: int) -> Tensor:
    """[B, 1, blocks, block, 3 block] -> [B, L]: a token is real where it may see itself."""
    block = mask.shape[-2]
    return mask[:, 0].diagonal(offset=block, dim1=-2, dim2=-1).flatten(1)[:, :length] > 0


def before_long_stack(stack: Any, args: tuple, kwargs: dict[str, Any]):
    """The encoder makes its own, linear masks from the padding; the decoder is T5's."""
    return before_stack(stack, args, kwargs) if stack.is_decoder else (args, kwargs)


PARTS = (LongT5Attention, LongT5LocalAttention)
HOOKS = {modeling_longt5.LongT5Stack: before_long_stack}
NOTES = {
    modeling_longt5.LongT5TransientGlobalAttention: "longt5: the transient-global encoder layers stay as they are; "
    "they are block-wise already"
}
