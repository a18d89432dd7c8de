"""BLOOM and MPT: ALiBi.

    s = q·k / sqrt(d) - m_h (i - j),   causal

BLOOM counts positions over real tokens only, so padded rows carry their own: a bias for each key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from .. import Plan, Positions
from ..core import formulas
from ..core.constants import constant
from . import masks
from .layer import Layer, NoAttentions, Part, split


class Sloped(Layer):
    encoding = "alibi"

    def posenc_prepare(self) -> None:
        super().posenc_prepare()
        self.posenc_slopes = formulas.alibi_slopes(self.num_heads if hasattr(self, "num_heads") else self.n_heads)

    def posenc_slope(self, device: torch.device) -> Tensor:
        """[H]"""
        return constant(self.posenc_slopes, device)


class BloomAttention(Sloped, modeling_bloom.BloomAttention):
    original = modeling_bloom.BloomAttention

    @staticmethod
    def refuses(module: Any) -> str | None:
        if module.pretraining_tp > 1 and module.slow_but_exact:
            return "adds the output projection in slices (slow_but_exact=True with pretraining_tp > 1)"
        return None

    def posenc_plan(self, positions: Positions, alibi: Tensor) -> Plan:
        """alibi: empty without padding, positions [B, Lk] with it, or the original's [B * H, 1, Lk]."""
        if alibi.dim() == 1:
            return Plan(positions, scale=self.inv_norm_factor, slopes=self.posenc_slope(alibi.device))
        if alibi.dim() == 2:
            keys = self.posenc_slope(alibi.device)[:, None] * alibi[:, None, :]
        else:
            keys = alibi.reshape(-1, self.num_heads, alibi.shape[-1])
        still = keys.new_zeros(1, self.num_heads, positions.q_length)
        return Plan(positions, scale=self.inv_norm_factor, decay=(still, -keys))

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        nothing = self.dense.weight.new_zeros(0)
        return self.num_heads, self.head_dim, self.posenc_plan(Positions(length), nothing), {"causal": True}

    def forward(
        self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False,
        output_attentions=False, **kwargs,
    ):  # fmt: skip
        if output_attentions:
            return super().forward(
                hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs
            )
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        start = 0 if layer_past is None else layer_past.get_seq_length(self.layer_idx)
        start = start.clone().reshape(1) if isinstance(start, Tensor) else start
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        plan = self.posenc_plan(Positions((start, q.shape[2]), k.shape[2]), alibi)
        seen = masks.seen(attention_mask, q.shape[2], causal=True)
        blind = masks.before_all_keys(seen, q.shape[2])
        out = self.dense(self.posenc_run(q, k, v, plan, seen, self.attention_dropout.p, blind))
        return residual + nn.functional.dropout(out, self.hidden_dropout, self.training), None


class BloomModel(Part, modeling_bloom.BloomModel):
    original = modeling_bloom.BloomModel

    def build_alibi_tensor(self, attention_mask, num_heads, dtype):
        if not masks.is_compact(attention_mask):
            return super().build_alibi_tensor(attention_mask, num_heads, dtype)
        if attention_mask.shape[-1] == 1:
            return torch.empty(0, device=attention_mask.device)
        real = attention_mask[:, 0, 0].float()
        return (real.cumsum(-1) - 1.0) * real


class Padding(NamedTuple):
    """MPT's mask without causality, for it loses its dtype on the way: [B, 1, 1, Lk] or [1, 1, 1, 1]."""

    hidden: Tensor  # bool, True for padding


class MptAttention(Sloped, modeling_mpt.MptAttention):
    """Its masks are boolean with True for what may not be seen, padding included."""

    original = modeling_mpt.MptAttention

    def posenc_plan(self, positions: Positions, device: torch.device) -> Plan:
        return Plan(positions, scale=self.softmax_scale, slopes=self.posenc_slope(device))

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        plan = self.posenc_plan(Positions(length), self.out_proj.weight.device)
        return self.n_heads, self.head_dim, plan, {"causal": True}

    def forward(self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **kwargs):
        if not isinstance(attention_mask, Padding):
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (split(part, self.head_dim) for part in mixed.chunk(3, dim=-1))
        start = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        plan = self.posenc_plan(Positions((start, q.shape[2]), k.shape[2]), q.device)
        hidden = attention_mask.hidden
        key_mask = None if hidden.shape[-1] == 1 else ~hidden[:, 0, 0]
        seen = {"causal": q.shape[2] > 1, "key_mask": key_mask}
        blind = masks.before_all_keys(seen, q.shape[2])
        return self.out_proj(self.posenc_run(q, k, v, plan, seen, self.attn_dropout_p, blind)), None


class MptBlock(Part, modeling_mpt.MptBlock):
    """Marks the mask for its attention; in a block, so that a checkpointed one does it again."""

    original = modeling_mpt.MptBlock

    def forward(self, hidden_states, position_bias, attention_mask, layer_past=None, use_cache=False,
                output_attentions=False, **kwargs):  # fmt: skip
        if isinstance(output_attentions, NoAttentions):
            attention_mask = Padding(attention_mask)
        return super().forward(
            hidden_states, position_bias, attention_mask, layer_past, use_cache, output_attentions, **kwargs
        )


def before_bloom(model: Any, args: tuple, kwargs: dict[str, Any]):
    if masks.wants_attentions(model, kwargs):
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    cache = kwargs.get("past_key_values")
    mask = kwargs.get("attention_mask")
    whole = mask is None or not mask.is_floating_point()  # the original counts positions in fractions, too
    if tokens is not None and masks.grows(cache) and whole:
        keys = masks.past(cache) + tokens.shape[1]
        kwargs["attention_mask"] = masks.padding(mask, keys, tokens.device)
    return (), kwargs


def before_mpt(model: Any, args: tuple, kwargs: dict[str, Any]):
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if masks.wants_attentions(model, kwargs) or tokens is None or not masks.grows(cache):
        return (), kwargs
    compact = masks.padding(mask, masks.past(cache) + tokens.shape[1], tokens.device)
    if masks.is_compact(compact):
        kwargs["attention_mask"] = 1 - compact  # the model turns it to bool: True is masked
        kwargs["output_attentions"] = NoAttentions()
    return (), kwargs


PARTS = (BloomAttention, BloomModel, MptAttention, MptBlock)
HOOKS = {modeling_bloom.BloomModel: before_bloom, BloomModel: before_bloom, modeling_mpt.MptModel: before_mpt}
