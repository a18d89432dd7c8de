"""Speech encoders: wav2vec2-conformer, wav2vec2-BERT, Seamless v1 and v2.

    relative       s = [ (q + u)·k_j + (q + v)·W_R R(i - j) ] / sqrt(d)                       (Transformer-XL's)
    relative_key   s = [ q·k_j + q·a[clip(j - i, -left, right)] ] / sqrt(d)                   (Shaw's, on keys)

Replaces, in transformers 5.22, Wav2Vec2ConformerSelfAttention (modeling_wav2vec2_conformer.py 496-599),
Wav2Vec2BertSelfAttention (modeling_wav2vec2_bert.py 321-433), SeamlessM4TConformerSelfAttention (modeling_seamless_m4t.py
516-621), SeamlessM4Tv2ConformerSelfAttention (modeling_seamless_m4t_v2.py 395-483) and the masks of their encoders. The
originals make the second term dense, [B, H, L, L], in every layer, and the padding mask, [B, 1, L, L], once. Their encoders
read the padding [B, L] themselves, too; here the layers get it in that form as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.seamless_m4t import modeling_seamless_m4t
from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from .. import Index, Lookup, Plan, Positions
from ..core import index
from ..encodings.transformer_xl import beyond_shift
from . import masks
from .layer import Layer, Part, split


class Conformer(Layer):
    @property
    def encoding(self) -> str:  # type: ignore[override]
        return {"relative": "transformer_xl", "relative_key": "shaw", "rotary": "rope"}.get(
            self.position_embeddings_type, "none"
        )

    @staticmethod
    def refuses(module: Any) -> str | None:
        kind = module.position_embeddings_type
        if kind in (None, "relative", "relative_key", "rotary"):
            return None
        return f"has position_embeddings_type={kind!r}; supported are relative, relative_key and rotary"

    def posenc_index_of(self) -> Index | None:
        if self.position_embeddings_type != "relative_key":
            return None
        return index.clip(self.left_max_position_embeddings, self.right_max_position_embeddings)

    def posenc_plan(self, length: int, waves: Tensor | None, dtype: torch.dtype) -> Plan:
        positions = Positions(length)
        if self.position_embeddings_type == "relative_key":
            table = self.distance_embedding.weight.to(dtype)[None]
            return Plan(positions, lookups=(Lookup(self.posenc_index, dot_query=table),), scale=self.scaling)
        if self.position_embeddings_type == "relative" and waves is not None:
            # rows run from i - j = L - 1 down to 1 - L
            table = self.linear_pos(waves[0]).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
            shift = beyond_shift(self.pos_bias_v, self.pos_bias_u)
            lookup = Lookup(Index(1 - length, length - 1), dot_query=table, query_shift=shift)
            return Plan(positions, shift=self.pos_bias_u, lookups=(lookup,), scale=self.scaling)
        return Plan(positions, scale=self.scaling)

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        weight = self.linear_q.weight
        waves = weight.new_zeros(1, 2 * length - 1, weight.shape[1])
        return self.num_heads, self.head_size, self.posenc_plan(length, waves, weight.dtype), {}

    def posenc_mask_options(self, mask: Tensor | None, length: int) -> dict[str, Any]:
        if mask is None or mask.dim() == 2:
            return {"key_mask": None if mask is None else mask.bool()}
        if _chunked(self.config, length):
            return masks.mask_options(mask, length, causal=False)
        row = mask[:, 0, 0]  # under torch.compile: the original's dense mask, whose rows are equal
        return {"key_mask": row if row.dtype == torch.bool else row == 0}

    def forward(self, hidden_states, attention_mask=None, relative_position_embeddings=None, **kwargs):
        if masks.wants_attentions(self, kwargs):
            if relative_position_embeddings is not None:
                kwargs["relative_position_embeddings"] = relative_position_embeddings
            if attention_mask is not None and attention_mask.dim() == 2:
                attention_mask = create_bidirectional_mask(
                    config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
                )
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        rotated = hidden_states
        if self.position_embeddings_type == "rotary":
            rotated = self._apply_rotary_embedding(hidden_states, relative_position_embeddings)
        q, k = split(self.linear_q(rotated), self.head_size), split(self.linear_k(rotated), self.head_size)
        v = split(self.linear_v(hidden_states), self.head_size)
        plan = self.posenc_plan(q.shape[2], relative_position_embeddings, q.dtype)
        options = self.posenc_mask_options(attention_mask, q.shape[2])
        return self.linear_out(self.posenc_run(q, k, v, plan, options, self.dropout.p)), None


class Wav2Vec2ConformerSelfAttention(Conformer, modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention):
    original = modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention


class Wav2Vec2BertSelfAttention(Conformer, modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention):
    original = modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention


class SeamlessM4TConformerSelfAttention(Conformer, modeling_seamless_m4t.SeamlessM4TConformerSelfAttention):
    original = modeling_seamless_m4t.SeamlessM4TConformerSelfAttention


class SeamlessM4Tv2ConformerSelfAttention(Conformer, modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention):
    original = modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention


class PaddingMaskConfig:
    """The model's configuration, except that transformers makes the mask of FlashAttention from it: the padding [B, L]."""

    _attn_implementation = "flash_attention_2"

    def __init__(self, config: Any):
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Encoder(Part):
    """An encoder that makes no dense mask."""

    def posenc_prepare(self) -> None:
        self.posenc_config = self.__dict__["config"]  # `config` itself sends torch 2.11 into an endless recursion

    @property
    def config(self) -> Any:
        own = self.posenc_config
        return own if torch.compiler.is_compiling() else PaddingMaskConfig(own)  # making that mask reads its values


class Wav2Vec2ConformerEncoder(_Encoder, modeling_wav2vec2_conformer.Wav2Vec2ConformerEncoder):
    original = modeling_wav2vec2_conformer.Wav2Vec2ConformerEncoder


class Wav2Vec2BertEncoder(_Encoder, modeling_wav2vec2_bert.Wav2Vec2BertEncoder):
    original = modeling_wav2vec2_bert.Wav2Vec2BertEncoder


class SeamlessM4TConformerEncoder(_Encoder, modeling_seamless_m4t.SeamlessM4TConformerEncoder):
    original = modeling_seamless_m4t.SeamlessM4TConformerEncoder


class SeamlessM4Tv2ConformerEncoder(_Encoder, modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder):
    original = modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder

    def _apply_chunk_attention(self, attention_mask, hidden_states):
        if not _chunked(self.config, hidden_states.shape[1]):
            return attention_mask  # one chunk masks nothing
        return super()._apply_chunk_attention(attention_mask, hidden_states)


def _chunked(config: Any, length: int) -> bool:
    """Whether chunks mask anything; their mask is dense."""
    size = getattr(config, "speech_encoder_chunk_size", None)
    return size is not None and length > size


PARTS = (
    Wav2Vec2ConformerSelfAttention,
    Wav2Vec2BertSelfAttention,
    SeamlessM4TConformerSelfAttention,
    SeamlessM4Tv2ConformerSelfAttention,
    Wav2Vec2ConformerEncoder,
    Wav2Vec2BertEncoder,
    SeamlessM4TConformerEncoder,
    SeamlessM4Tv2ConformerEncoder,
)
HOOKS: dict[type[nn.Module], Any] = {}
