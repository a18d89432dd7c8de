"""Speech encoders: wav2vec2-conformer, wav2vec2-BERT, Seamless v1 and v2.

    relative       s = [ (q + u)·k_j + (q + v)·W_R R(i - j) ] / sqrt(d)                       (Transformer-XL's)
    relative_key   s = [ q·k_j + q·a[clip(j - i, -left, right)] ] / sqrt(d)                   (Shaw's, on keys)

The layers call the attention interface, but their forward makes the second term dense first, [B, H, L, L], in every layer; so
`forward` is what is replaced, for these two kinds. Other kinds (rotary, none) keep their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.seamless_m4t import modeling_seamless_m4t
from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer

from .. import Index, Lookup, Plan, Positions
from ..core import index
from ..encodings.transformer_xl import beyond_shift
from . import interface
from .family import SIZES, Family, InterfaceLayer, InterfacePart, variants
from .layer import split, zeros_beside
from .masks import is_short

FEW = 1024  # tokens up to which the bias of chunks is dense
KINDS = {"relative": "transformer_xl", "relative_key": "shaw", "rotary": "rope"}


def forward(
    module: Any, original: Callable, hidden_states, attention_mask=None, **kwargs
) -> tuple[Tensor, Tensor | None]:
    kind = module.position_embeddings_type
    dropout = module.dropout.p if module.training else 0.0
    if kind not in ("relative", "relative_key") or (
        kind == "relative" and is_short(module, hidden_states, kind="transformer_xl", dropout=dropout)
    ):
        return original(hidden_states, attention_mask=attention_mask, **kwargs)
    waves = kwargs.pop("relative_position_embeddings", None)
    linears = module.linear_q, module.linear_k, module.linear_v
    q, k, v = (split(project(hidden_states), module.head_size) for project in linears)
    # chunks are a dense mask
    is_dense = isinstance(attention_mask, Tensor) and interface.is_free(module, q.device) and q.shape[2] <= FEW
    if kind == "relative_key" and (is_dense or is_short(module, hidden_states, dropout=dropout)):
        waves = dense_bias(module, q)
    out, probabilities = interface.attention(
        module, q, k, v, attention_mask, scaling=module.scaling, dropout=dropout, position_bias=waves, **kwargs
    )
    return module.linear_out(out.flatten(2)), probabilities


def dense_bias(module: Any, q: Tensor) -> Tensor:
    """[B, H, L, L]; the original reads a vector of the table for each pair."""
    at = torch.arange(q.shape[2], device=q.device)
    rows = (at - at[:, None]).clamp_(module.posenc_index.lo, module.posenc_index.hi) - module.posenc_index.lo
    products = q @ (module.distance_embedding.weight.to(q.dtype) * module.scaling).t()
    return products.gather(-1, rows.expand(*q.shape[:2], -1, -1))


def plan(positions: Positions, *, module: Any, waves: Tensor | None, dtype: torch.dtype) -> Plan:
    if waves is None:
        table = module.distance_embedding.weight.to(dtype)[None]
        return Plan(positions, lookups=(Lookup(module.posenc_index, dot_query=table),), scale=module.scaling)
    return plan_waves(positions, module.linear_pos(waves[0]), module.pos_bias_u, module.pos_bias_v, module.scaling)


def plan_waves(positions: Positions, table: Tensor, u: Tensor, v: Tensor, scale: float) -> Plan:
    """table [2 L - 1, H * d], the projected waves from i - j = L - 1 down to 1 - L, of L keys; u and v [H, d]."""
    length = positions.k_length
    rows = table.unflatten(-1, (u.shape[0], -1)).transpose(0, 1)
    lookup = Lookup(Index(1 - length, length - 1), dot_query=rows, query_shift=beyond_shift(v, u))
    return Plan(positions, shift=u, lookups=(lookup,), scale=scale)


class Conformer(InterfaceLayer):
    encoding = "none"
    relies_on = {"forward": ("hidden_states", "attention_mask")}
    attributes = ("linear_q", "linear_k", "linear_v", "linear_out", "dropout", "head_size", "num_heads", "scaling")
    replaces = {"forward": forward}

    @staticmethod
    def refuses(module):
        kind = module.position_embeddings_type
        if kind in (None, *KINDS):
            return None
        return f"has position_embeddings_type={kind!r}; supported are {', '.join(KINDS)}"

    @staticmethod
    def prepare(module):
        if module.position_embeddings_type != "relative_key":
            return {}
        return {"posenc_index": index.clip(module.left_max_position_embeddings, module.right_max_position_embeddings)}

    @staticmethod
    def encoding_of(module):
        return KINDS.get(module.position_embeddings_type)

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        kind = module.position_embeddings_type
        if kind not in ("relative", "relative_key") or (position_bias is not None and position_bias.dim() == 4):
            return None
        if kind == "relative" and position_bias is None:
            raise ValueError("relative_position_embeddings must be given, as the encoder does; got None")
        waves = position_bias if kind == "relative" else None
        return partial(plan, module=module, waves=waves, dtype=query.dtype)

    @classmethod
    def sample(cls, module, length):
        waves = zeros_beside(module.linear_q, 1, 2 * length - 1, module.linear_q.in_features)
        make = cls.plan_of(module, waves, None, waves, {})
        positions = Positions(length)
        return module.num_heads, module.head_size, Plan(positions) if make is None else make(positions), {}


def one_chunk(module: Any, original: Callable, attention_mask, hidden_states) -> Tensor | None:
    """A chunk that holds everything masks nothing; the original makes [L, L] for it."""
    is_whole = hidden_states.shape[1] <= module.config.speech_encoder_chunk_size
    return attention_mask if is_whole else original(attention_mask, hidden_states)


class SeamlessV2Encoder(InterfacePart):
    original = modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder
    relies_on = {"_apply_chunk_attention": ("attention_mask", "hidden_states")}
    replaces = {"_apply_chunk_attention": one_chunk}


class Tiny(torch.nn.Module):
    """An encoder on a copy of its input: wav2vec2-conformer's writes into it."""

    def __init__(self, encoder: Any):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        out = self.encoder(x.clone(), attention_mask=attention_mask)
        return (out if isinstance(out, Tensor) else out[0],)


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    from transformers import SeamlessM4TConfig, SeamlessM4Tv2Config, Wav2Vec2BertConfig, Wav2Vec2ConformerConfig

    sizes: dict[str, Any] = {"hidden_size": 16, "conv_depthwise_kernel_size": 3, "attn_implementation": "eager"}
    own = {**SIZES, **sizes, "num_hidden_layers": 1, "layerdrop": 0.0}
    speech = {
        **sizes, "speech_encoder_layers": 1, "speech_encoder_attention_heads": 2, "speech_encoder_intermediate_size": 16,
        "speech_encoder_layerdrop": 0.0,
    }  # fmt: skip
    config: Any
    if folder == "wav2vec2_conformer":
        conv = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        config = Wav2Vec2ConformerConfig(**own, **conv, position_embeddings_type="relative")
        cls: Any = modeling_wav2vec2_conformer.Wav2Vec2ConformerEncoder
    elif folder == "wav2vec2_bert":
        config = Wav2Vec2BertConfig(**own, left_max_position_embeddings=6)
        cls = modeling_wav2vec2_bert.Wav2Vec2BertEncoder
    elif folder == "seamless_m4t":
        config = SeamlessM4TConfig(**speech, position_embeddings_type="relative")
        cls = modeling_seamless_m4t.SeamlessM4TConformerEncoder
    else:
        speech["attn_implementation"] = "sdpa"  # "eager" adds a boolean mask to the scores
        config = SeamlessM4Tv2Config(**speech, position_embeddings_type="relative_key", left_max_position_embeddings=6)
        cls = modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder
    mask = torch.ones(2, 170, dtype=torch.bool)
    mask[1, 113:] = False
    return Tiny(cls(config)), {"x": torch.randn(2, 170, 16), "attention_mask": mask}


LAYERS = variants(
    Conformer, "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention", "wav2vec2_bert.Wav2Vec2BertSelfAttention",
    "seamless_m4t.SeamlessM4TConformerSelfAttention", "seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention",
)  # fmt: skip
FAMILY = Family(tiny, parts=(*LAYERS, SeamlessV2Encoder))
