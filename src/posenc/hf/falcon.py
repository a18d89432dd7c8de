"""Falcon with ALiBi (alibi=True; its other models are rotary): a bias for each key, in steps of bfloat16.

    s = (q·k + bf16(m_h) p_j) / sqrt(d),   causal                     p_j counts real tokens only, rounded to bfloat16

FalconAttention (modeling_falcon.py 199-410 of transformers 5.22) calls no interface, and FalconModel (732-774) adds the bias to a
dense mask, [B, H, L, L]. Here the model makes neither (`use_alibi` is False), and the mask that its layers get is made before its
forward: [B, H, 1, Lk], the bias, and the lowest number for padding. Where the original is faster the mask is the original's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon import modeling_falcon

from .. import Plan, Positions
from . import masks, rules
from .family import Family, tiny_text
from .interface_mask import nothing_padded
from .layer import Layer, Part, Sample, zeros_beside

SHORT, SHORT_TRAINED = 41.0, 8.0
"""The original is faster up to 1024 tokens on a CPU, rules.BIASED times 41, and with gradients up to 452; 32 heads, ms of a layer:
forward 31 against 39 at 512, 122 against 139 at 1024; with the backward pass 118 against 112, and 497 against 356."""


class FalconAttention(Layer, modeling_falcon.FalconAttention):
    original = modeling_falcon.FalconAttention
    encoding = "alibi"
    relies_on = {
        "forward": ("hidden_states", "alibi", "attention_mask", "position_ids", "layer_past", "use_cache", "output_attentions"),
        "_split_heads": ("fused_qkv",),
    }  # fmt: skip

    @staticmethod
    def concerns(module: Any) -> bool:
        return module.config.alibi

    @staticmethod
    def refuses(module: Any) -> str | None:
        name = module.config._attn_implementation
        if name == "sdpa":
            return None
        return f"adds ALiBi twice with attn_implementation={name!r}; load the model with 'sdpa'"

    def posenc_plan(self, positions: Positions, keys: Tensor) -> Plan:
        """keys [B, H, Lk]"""
        zeros = keys.new_zeros(1, self.num_heads, positions.q_length)
        return Plan(positions, scale=self.inv_norm_factor, decay=(zeros, -keys))

    def posenc_sample(self, length: int) -> Sample:
        keys = zeros_beside(self.dense, 1, self.num_heads, length)
        return self.num_heads, self.head_dim, self.posenc_plan(Positions(length), keys), {"causal": True}

    def forward(
        self, hidden_states, alibi, attention_mask, position_ids=None, layer_past=None, use_cache=False,
        output_attentions=False, **kwargs,
    ):  # fmt: skip
        length = hidden_states.shape[1]
        if length == 1 or attention_mask.shape[2] > 1:
            alibi = _undo_mask(attention_mask) / self.inv_norm_factor if output_attentions else attention_mask
            given = hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions
            return super().forward(*given, **kwargs)
        q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        real = attention_mask[:, 0, 0] > torch.finfo(attention_mask.dtype).min
        options = {"causal": True, "key_mask": None if nothing_padded(real) else real}
        positions = Positions((k.shape[2] - length, length), k.shape[2])
        plan = self.posenc_plan(positions, _undo_mask(attention_mask)[:, :, 0])
        fully_masked = masks.before_all_keys(options, length)
        return self.dense(self.posenc_run(q, k, v, plan, options, self.attention_dropout.p, fully_masked)), None


def _undo_mask(mask: Tensor) -> Tensor:
    """[B, H, 1, Lk]: the bias alone. The last query sees every key but padding."""
    last = mask[:, :, -1:]
    return last.masked_fill(last == torch.finfo(mask.dtype).min, 0.0)


class FalconModel(Part, modeling_falcon.FalconModel):
    original = modeling_falcon.FalconModel
    use_alibi = property(lambda self: False)

    @staticmethod
    def concerns(module: Any) -> bool:
        return module.config.alibi


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    if not isinstance(model, FalconModel):
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens, cache = masks.tokens_of(kwargs), kwargs.get("past_key_values")
    if tokens is None:
        return (), kwargs  # the original raises
    keys = masks.past(cache) + tokens.shape[1]
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones(tokens.shape[0], keys, dtype=torch.long, device=tokens.device)
    if mask.dim() != 2 or mask.shape[1] != keys:
        raise ValueError(
            f"attention_mask must be [B, {keys}] with ALiBi, got {list(mask.shape)}; give the mask of the tokens"
        )
    dtype = tokens.dtype if tokens.is_floating_point() else model.word_embeddings.weight.dtype
    alibi = modeling_falcon.build_alibi_tensor(mask, model.num_heads, dtype).unflatten(0, (mask.shape[0], -1))
    visible = mask[:, None, None, :].bool()
    times = SHORT_TRAINED if torch.is_grad_enabled() else SHORT
    is_dense = masks.wants_attentions(model, kwargs) or model.config._attn_implementation != "sdpa"
    is_dense = is_dense or masks.is_short(model, tokens, few=int(times * rules.BIASED), kind="falcon")
    if tokens.shape[1] > 1 and is_dense:
        at = torch.arange(keys, device=tokens.device)
        visible = visible & (at <= at[keys - tokens.shape[1] :, None])
    scale = (model.embed_dim // model.num_heads) ** 0.5
    kwargs["attention_mask"] = (alibi / scale).masked_fill(~visible, torch.finfo(dtype).min)
    return (), kwargs


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    from transformers import FalconConfig

    config = FalconConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True, multi_query=False,
        parallel_attn=False, bias=True, new_decoder_architecture=False,
    )  # fmt: skip
    return modeling_falcon.FalconModel._from_config(config, attn_implementation="sdpa"), tiny_text(1030)


HOOKS = {modeling_falcon.FalconModel: before_model, FalconModel: before_model}
FAMILY = Family(tiny, parts=(FalconAttention, FalconModel), hooks=HOOKS)
