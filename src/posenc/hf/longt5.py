"""LongT5: the decoder is T5's; the encoder sees a window with T5's bias, alone or with summaries of the whole text.

    local               s = q·k + b[bucket(j - i), h],   |j - i| <= local_radius
    transient-global    the same, and in the same softmax, for every summary g,   q·k_g + c[bucket(g - block(i)), h]

The original cuts the text into blocks and lets each see its neighbours, three blocks with a mask. A summary is the
normalised sum of a block of 16 tokens (`global_block_size`). Keys in a window and keys for everybody are two plans. The
triton engine runs one after the other, and their results are merged. Elsewhere some queries at a time meet just the keys that
they may see, with the biases as their mask:

    queries      keys            summaries        scores of one step [B, H, ROWS, ROWS + 2 radius + L / 16];
      ▒      . ╲▒▒▒▒╲ . . .      ▒▒▒▒▒▒▒▒▒        with gradients it is computed again in the backward pass
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from transformers.models.longt5 import modeling_longt5

from .. import Plan, Positions, attend, explain, merge
from . import masks
from .layer import split
from .t5 import Bucketed, Threaded, before_stack

ROWS = 128
"""Queries at a time: more of them see more keys in vain, fewer make small products. 64 to 256 take the same time."""
NEVER = float("-inf")


class LongT5Attention(Threaded, modeling_longt5.LongT5Attention):
    original = modeling_longt5.LongT5Attention


class LongT5LocalAttention(Bucketed, modeling_longt5.LongT5LocalAttention):
    original = modeling_longt5.LongT5LocalAttention
    scaling = 1.0

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        table = self.q.weight.new_zeros(self.relative_attention_num_buckets, self.n_heads)
        plan = self.posenc_plan(Positions(length), table)
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
        plan = self.posenc_plan(Positions(length), table)
        return self.o(self.posenc_run(q, k, v, plan, seen, self.dropout)), table


def _padding(mask: Tensor, length: int) -> Tensor:
    """[B, 1, blocks, block, 3 block] -> [B, L]: a token is real where it may see itself."""
    block = mask.shape[-2]
    return mask[:, 0].diagonal(offset=block, dim1=-2, dim2=-1).flatten(1)[:, :length] > 0


class LongT5TransientGlobalAttention(Bucketed, modeling_longt5.LongT5TransientGlobalAttention):
    """What travels to the layers after the first is both tables, [2, buckets, heads]: of tokens, of summaries."""

    original = modeling_longt5.LongT5TransientGlobalAttention
    scaling = 1.0

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        plan = self.posenc_plan(
            Positions(length), self.q.weight.new_zeros(self.relative_attention_num_buckets, self.n_heads)
        )
        return self.n_heads, self.key_value_proj_dim, plan, {"window": self.block_len - 1}

    def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
        if mask is None:  # a stack that is compiled gives none, and the original fails
            mask = hidden_states.new_ones(hidden_states.shape[:2])
        if output_attentions:
            return super().forward(hidden_states, mask, position_bias, output_attentions)
        tables = position_bias
        if tables is None:
            tables = torch.stack((self.relative_attention_bias.weight, self.global_relative_attention_bias.weight))
        blocks, places, seen, padded = _blocks(mask, self.global_block_size)
        length = hidden_states.shape[1]
        summaries = self.global_input_layer_norm(_sums(hidden_states, places, seen.shape[1] - length))
        q, k, v, far_k, far_v = (
            split(project(states), self.key_value_proj_dim)
            for project, states in (
                (self.q, hidden_states), (self.k, hidden_states), (self.v, hidden_states),
                (self.k, summaries), (self.v, summaries),
            )
        )  # fmt: skip
        radius = self.block_len - 1
        plan = self.posenc_plan(Positions(length), tables[0])
        engine = explain(q, k, v, plan, window=radius).engine if self.posenc_engine == "auto" else self.posenc_engine
        if engine == "triton":
            far = self.posenc_plan(Positions(blocks, far_k.shape[2]), tables[1])
            both: tuple[tuple[Any, ...], ...] = (
                (q, k, v, plan, {"window": radius, "key_mask": seen[:, :length] if padded else None}),
                (q, far_k, far_v, far, {"key_mask": seen[:, length:] if padded else None}),
            )
            dropout = self.dropout if self.training else 0.0
            parts = [
                attend(*given, **masked, dropout=dropout, engine=engine, return_lse=True) for *given, masked in both
            ]
            return self.o(merge(parts)[0].transpose(1, 2).flatten(2)), tables
        near = self.posenc_near(tables[0], min(ROWS, length))
        outs = []
        for i0 in range(0, length, ROWS):
            i1 = min(i0 + ROWS, length)
            j0, j1 = max(i0 - radius, 0), min(i1 + radius, length)
            first = radius + j0 - i0
            arguments = (
                *(q[:, :, i0:i1], k[:, :, j0:j1], v[:, :, j0:j1], far_k, far_v),
                *(near[:, : i1 - i0, first : first + j1 - j0], tables[1], blocks[:, i0:i1]),
                torch.cat((seen[:, j0:j1], seen[:, length:]), dim=1) if padded else None,
            )
            if torch.is_grad_enabled():
                outs.append(checkpoint(self.posenc_rows, *arguments, use_reentrant=False))
            else:
                outs.append(self.posenc_rows(*arguments))
        return self.o(torch.cat(outs, dim=1)), tables

    def posenc_near(self, table: Tensor, rows: int) -> Tensor:
        """[H, rows, rows + 2 radius]: the window's bias, for the keys from `radius` before the first query on."""
        radius = self.block_len - 1
        keys = torch.arange(-radius, rows + radius, device=table.device)
        r = keys - torch.arange(rows, device=table.device)[:, None]
        bias = embedding(self.posenc_index.lookup(r), table).permute(2, 0, 1)
        return bias.masked_fill(r.abs() > radius, NEVER)

    def posenc_rows(self, q, k, v, far_k, far_v, near, table, blocks, seen) -> Tensor:
        """Some queries of blocks [B or 1, rows] over their window and all summaries; seen [B, keys] where one is padding."""
        r = torch.arange(far_k.shape[2], device=q.device) - blocks[..., None]
        far = embedding(self.posenc_index.lookup(r), table).permute(0, 3, 1, 2)
        bias = torch.cat((near.expand(far.shape[0], -1, -1, -1), far), dim=-1)
        if seen is not None:
            bias = bias.masked_fill(~seen[:, None, None], NEVER)
        k, v = torch.cat((k, far_k), dim=2), torch.cat((v, far_v), dim=2)
        plan = Plan(Positions(q.shape[2], k.shape[2]), scale=self.scaling)
        return self.posenc_run(q, k, v, plan, {"mask": bias}, self.dropout)


class Blocks(NamedTuple):
    tokens: Tensor  # [B or 1, L]: the summary of each token; -1: padding
    places: Tensor  # int64 [B, L, 1]: the same with padding past the last
    seen: Tensor  # bool [B, L + summaries]
    padded: bool  # or not known


def _blocks(mask: Tensor, size: int) -> Blocks:
    """Kept with the mask, which all layers of a call share, until it changes."""
    now = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or mask.is_inference()
    now = now or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    state = None if now else (size, mask._version)
    kept = getattr(mask, "posenc_blocks", None)
    if state is not None and kept is not None and kept[0] == state:
        return kept[1]
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"attention_mask must hold 1 (real) and 0 (padding), got {mask.dtype} from {mask.min().item()} to "
            f"{mask.max().item()}; to LongT5's summaries every other number is neither; pass (mask != 0) of truth values"
        )
    blocks, real = modeling_longt5._make_global_fixed_block_ids(mask, size)
    places = torch.where(blocks < 0, real.shape[1], blocks).long()[..., None]
    seen = torch.cat((mask != 0, real != 0), dim=1)
    padded = not masks.nothing_padded(seen)
    made = Blocks(blocks if padded else blocks[:1], places, seen, padded)
    if state is not None:
        mask.posenc_blocks = state, made  # type: ignore[attr-defined]
    return made


def _sums(states: Tensor, places: Tensor, count: int) -> Tensor:
    """[B, L, d] -> [B, count, d], summed by block."""
    precise = states.to(torch.promote_types(states.dtype, torch.float32))
    sums = precise.new_zeros(states.shape[0], count + 1, states.shape[2])
    return sums.scatter_add(1, places.expand(states.shape), precise)[:, :count].to(states.dtype)


def before_long_stack(stack: Any, args: tuple, kwargs: dict[str, Any]):
    """The encoder makes its own, linear masks from the padding; the decoder is T5's."""
    return before_stack(stack, args, kwargs) if stack.is_decoder else (args, kwargs)


PARTS = (LongT5Attention, LongT5LocalAttention, LongT5TransientGlobalAttention)
HOOKS = {modeling_longt5.LongT5Stack: before_long_stack}
