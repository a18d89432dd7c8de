"""Attention layers that cache unrotated keys and rotate all of them at each call.

Length-dependent scalings (dynamic NTK, LongRoPE) change the rotation of every key as the text grows. transformers
caches rotated keys, so its cache mixes rotations; here every key is rotated for the current length of its row.

Each layer replaces the attention class of the same name of transformers 5.22 (modeling_llama.py, modeling_mistral.py, ...); one that
a release does not have is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import Positions, RoPE
from . import masks
from .family import variants
from .layer import Layer, split, zeros_beside


class CosSin(tuple):
    """(cos, sin) as transformers' layers unpack them, with the rope and the positions for the layers below."""

    rope: RoPE
    positions: Tensor

    @classmethod
    def of(cls, rope: RoPE, positions: Tensor, dtype: torch.dtype) -> CosSin:
        phases = rope.rotation(Positions(positions)).q
        assert phases is not None
        made = cls(torch.cat((part, part), dim=-1).to(dtype) for part in phases)
        made.rope, made.positions = rope, positions
        return made


class Unrotated(Layer):
    """With Llama's attribute names; other layers override what differs."""

    encoding = "rope"

    def posenc_qkv(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, L, D] each, not rotated."""
        q, k, v = (split(project(states), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        return (self.q_norm(q), self.k_norm(k), v) if hasattr(self, "q_norm") else (q, k, v)

    def posenc_out(self, merged: Tensor) -> Tensor:
        return self.o_proj(merged)

    def posenc_size(self) -> tuple[float, float]:
        """Scale and dropout."""
        return self.scaling, self.attention_dropout

    def posenc_sample(self, length: int) -> tuple[int, int, Any, dict[str, Any]]:
        q, _, _ = self.posenc_qkv(zeros_beside(self, 1, 1, self.config.hidden_size))
        return q.shape[1], q.shape[3], RoPE(head_dim=q.shape[3]).plan(Positions(length)), {"causal": True}

    def posenc_attend(self, states: Tensor, rope: RoPE, positions: Tensor, mask, cache, kwargs: dict[str, Any]):
        if masks.wants_attentions(self, kwargs):
            raise ValueError(
                "output_attentions=True is not supported with length-dependent rotations; call hf.restore(model) first"
            )
        q, k, v = self.posenc_qkv(states)
        last, first = q.shape[2] - 1, 0  # tokens of the last query and of the first key slot
        if cache is not None:
            last = cache.get_seq_length(self.layer_idx) + last
            first = cache.get_mask_sizes(q.shape[2], self.layer_idx)[1]
            k, v = cache.update(k, v, self.layer_idx)
            if mask is None and cache.is_compileable:  # the start of a text, which fills the first slots
                k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        keys = positions
        if k.shape[2] != q.shape[2]:
            # tokens are consecutive, so a row's last position determines all of them; padding before the text stays at 0,
            # and the empty slots of a static cache must not lengthen the text
            ahead = torch.arange(k.shape[2], device=positions.device) + (first - last)
            keys = (positions[:, -1:] + ahead.clamp(max=0)).clamp(min=0)
        scale, dropout = self.posenc_size()
        plan = replace(rope.plan(Positions(positions, keys)), scale=scale)
        options = masks.mask_options(mask, q.shape[2], causal=getattr(self, "is_causal", True))
        return self.posenc_out(self.posenc_run(q, k, v, plan, options, dropout)), None

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        rope, positions = position_embeddings.rope, position_embeddings.positions
        return self.posenc_attend(hidden_states, rope, positions, attention_mask, past_key_values, kwargs)


class Phi(Unrotated):
    def posenc_qkv(self, states):
        q, k, v = super().posenc_qkv(states)
        return (self.q_layernorm(q), self.k_layernorm(k), v) if self.qk_layernorm else (q, k, v)

    def posenc_out(self, merged):
        return self.dense(merged)


class Phi3(Unrotated):
    def posenc_qkv(self, states):
        heads, keys = self.config.num_attention_heads, self.num_key_value_heads
        return split(self.qkv_proj(states), self.head_dim).split((heads, keys, keys), dim=1)


class GPTNeoX(Unrotated):
    def posenc_qkv(self, states):
        return split(self.query_key_value(states), 3 * self.head_size).chunk(3, dim=-1)

    def posenc_out(self, merged):
        return self.dense(merged)

    def forward(  # type: ignore[override]
        self, hidden_states, attention_mask, layer_past=None, position_embeddings=None, **kwargs
    ):
        return super().forward(hidden_states, position_embeddings, attention_mask, layer_past, **kwargs)


class GPTJ(Unrotated):
    """Its layers rotate themselves: each has its own rope, `posenc_rope`."""

    posenc_rope: RoPE

    def posenc_out(self, merged):
        return self.resid_dropout(self.out_proj(merged))

    def posenc_size(self):
        return 1.0 / self.scale_attn, self.attn_dropout.p

    def forward(  # type: ignore[override]
        self, hidden_states, layer_past=None, attention_mask=None, position_ids=None, **kwargs
    ):
        positions = position_ids.expand(hidden_states.shape[0], -1)
        return self.posenc_attend(hidden_states, self.posenc_rope, positions, attention_mask, layer_past, kwargs)


LAYERS = (
    *variants(
        Unrotated, "llama.LlamaAttention", "mistral.MistralAttention", "mixtral.MixtralAttention", "qwen2.Qwen2Attention",
        "qwen2_moe.Qwen2MoeAttention", "qwen3.Qwen3Attention", "qwen3_moe.Qwen3MoeAttention", "gemma.GemmaAttention",
        "gemma3.Gemma3Attention",
    ),
    *variants(Phi, "phi.PhiAttention"),
    *variants(Phi3, "phi3.Phi3Attention"),
    *variants(GPTNeoX, "gpt_neox.GPTNeoXAttention"),
    *variants(GPTJ, "gptj.GPTJAttention"),
)  # fmt: skip
UNROTATED = {part.original: part for part in LAYERS}
