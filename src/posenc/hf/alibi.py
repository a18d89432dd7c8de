"""BLOOM and MPT: ALiBi.

    s = q·k / sqrt(d) - m_h (i - j),   causal

Replaces BloomAttention (modeling_bloom.py 166-312), BloomModel.build_alibi_tensor and MptAttention (modeling_mpt.py 65-136)
of transformers 5.22. BLOOM counts positions over real tokens only, so rows with padding have their own: a bias for each key.
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
from .family import Family, tiny_model, tiny_text
from .interface import is_free, prefers_original
from .layer import Layer, NoAttentions, Part, Sample, split, zeros_beside


class Sloped(Layer):
    encoding = "alibi"
    posenc_shares_sequences = True

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
        """alibi: empty without padding, positions [B, Lk] with padding, or the original's [B * H, 1, Lk]."""
        if alibi.dim() == 1:
            return Plan(positions, scale=self.inv_norm_factor, slopes=self.posenc_slope(alibi.device))
        if alibi.dim() == 2:
            keys = self.posenc_slope(alibi.device)[:, None] * alibi[:, None, :]
        else:
            keys = alibi.reshape(-1, self.num_heads, alibi.shape[-1])
        zeros = keys.new_zeros(1, self.num_heads, positions.q_length)
        return Plan(positions, scale=self.inv_norm_factor, decay=(zeros, -keys))

    def posenc_sample(self, length: int) -> Sample:
        no_padding = zeros_beside(self.dense, 0)
        return self.num_heads, self.head_dim, self.posenc_plan(Positions(length), no_padding), {"causal": True}

    def forward(
        self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False,
        output_attentions=False, **kwargs,
    ):  # fmt: skip
        # a dense mask: the text is short, or no engine is faster with it
        if output_attentions or (not masks.is_compact(attention_mask) and is_free(self, hidden_states.device)):
            given = hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions
            return super().forward(*given, **kwargs)
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        start = 0 if layer_past is None else layer_past.get_seq_length(self.layer_idx)
        start = start.clone().reshape(1) if isinstance(start, Tensor) else start
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        positions = Positions((start, q.shape[2]), k.shape[2])
        plan = self.posenc_planned(lambda positions: self.posenc_plan(positions, alibi), positions)
        options = masks.mask_options(attention_mask, self.posenc_length(q), causal=True)
        fully_masked = masks.before_all_keys(options, q.shape[2])
        out = self.dense(self.posenc_run(q, k, v, plan, options, self.attention_dropout.p, fully_masked))
        return residual + nn.functional.dropout(out, self.hidden_dropout, self.training), None


class BloomModel(Part, modeling_bloom.BloomModel):
    original = modeling_bloom.BloomModel

    def build_alibi_tensor(self, attention_mask, num_heads, dtype):
        if not masks.is_compact(attention_mask):
            return super().build_alibi_tensor(attention_mask, num_heads, dtype)
        if attention_mask.shape[-1] == 1:
            return torch.empty(0, device=attention_mask.device)
        real = attention_mask[:, 0, 0].float()
        if self.posenc_context is None:
            return (real.cumsum(-1) - 1.0) * real
        from ..parallel import unsplit_sequence

        upto = unsplit_sequence(real, self.posenc_context).cumsum(-1)  # over all ranks
        return (upto[:, self.posenc_context.slots(real.shape[1], real.device)] - 1.0) * real


class Padding(NamedTuple):
    """MPT's mask without causality. Its own type marks it: the model converts masks to bool, so their dtype cannot."""

    padding: Tensor  # bool [B, 1, 1, Lk] or [1, 1, 1, 1], True for padding


class MptAttention(Sloped, modeling_mpt.MptAttention):
    """Its masks are boolean, True where masked."""

    original = modeling_mpt.MptAttention

    def posenc_plan(self, positions: Positions, device: torch.device) -> Plan:
        return Plan(positions, scale=self.softmax_scale, slopes=self.posenc_slope(device))

    def posenc_sample(self, length: int) -> Sample:
        plan = self.posenc_plan(Positions(length), zeros_beside(self.out_proj, 0).device)
        return self.n_heads, self.head_dim, plan, {"causal": True}

    def forward(self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **kwargs):
        if not isinstance(attention_mask, Padding):
            if self.posenc_context is not None:
                raise ValueError("context_parallel takes padding masks [B, L/N] and no weights (output_attentions)")
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (split(part, self.head_dim) for part in mixed.chunk(3, dim=-1))
        start = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        positions = Positions((start, q.shape[2]), k.shape[2])
        plan = self.posenc_planned(lambda positions: self.posenc_plan(positions, q.device), positions)
        padding = attention_mask.padding
        key_mask = None if padding.shape[-1] == 1 else ~padding[:, 0, 0]
        options = {"causal": self.posenc_length(q) > 1, "key_mask": key_mask}
        fully_masked = masks.before_all_keys(options, q.shape[2])
        return self.out_proj(self.posenc_run(q, k, v, plan, options, self.attn_dropout_p, fully_masked)), None


class MptBlock(Part, modeling_mpt.MptBlock):
    """Marks the mask for its attention. The block does so, so that a checkpointed block repeats it."""

    original = modeling_mpt.MptBlock

    def forward(self, hidden_states, position_bias, attention_mask, layer_past=None, use_cache=False,
                output_attentions=False, **kwargs):  # fmt: skip
        if isinstance(output_attentions, NoAttentions):
            attention_mask = Padding(attention_mask)
        given = hidden_states, position_bias, attention_mask, layer_past, use_cache, output_attentions
        return super().forward(*given, **kwargs)


def before_bloom(model: Any, args: tuple, kwargs: dict[str, Any]):
    if masks.wants_attentions(model, kwargs):
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = masks.tokens_of(kwargs)
    cache = kwargs.get("past_key_values")
    mask = kwargs.get("attention_mask")
    is_integer = mask is None or not mask.is_floating_point()  # with a float mask the original has fractional positions
    if tokens is not None and masks.grows(cache) and is_integer:
        compact = _padding(model, mask, cache, tokens, model.config.attention_dropout)
        kwargs["attention_mask"] = mask if compact is None else compact
    return (), kwargs


def _padding(model: Any, mask: Tensor | None, cache: Any, tokens: Tensor, dropout: float) -> Tensor | None:
    """The compact mask of a call; None: the original is faster."""
    keys = masks.past(cache) + tokens.shape[1]
    padded = mask is not None and not masks.nothing_padded(mask)
    facts: Any = {"kind": "alibi", "dropout": dropout, "padded": padded}
    short = prefers_original(model, tokens.shape[1], keys, tokens.device, **facts)
    return None if short else masks.padding(mask, keys, tokens.device, model)


def before_mpt(model: Any, args: tuple, kwargs: dict[str, Any]):
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = masks.tokens_of(kwargs)
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if masks.wants_attentions(model, kwargs) or tokens is None or not masks.grows(cache):
        return (), kwargs
    compact = _padding(model, mask, cache, tokens, model.config.attn_config.attn_pdrop)
    if masks.is_compact(compact):
        kwargs["attention_mask"] = 1 - compact  # the model converts it to bool: True is masked
        kwargs["output_attentions"] = NoAttentions()
    return (), kwargs


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    if folder == "bloom":
        return tiny_model("Bloom", vocab_size=32, hidden_size=16, n_layer=2, n_head=2), tiny_text()
    return tiny_model("Mpt", vocab_size=32, d_model=16, n_layers=2, n_heads=2, max_seq_len=192), tiny_text()


HOOKS = {modeling_bloom.BloomModel: before_bloom, BloomModel: before_bloom, modeling_mpt.MptModel: before_mpt}
FAMILY = Family(tiny, parts=(BloomAttention, BloomModel, MptAttention, MptBlock), hooks=HOOKS)
