"""SEW-D: DeBERTa's terms (deberta.py) on frames of speech, squeezed two to one; padded frames are queries like any other.

Replaces DisentangledSelfAttention (modeling_sew_d.py 630-837 of transformers 5.22), which calls no interface, and the distances
[1, L, L] of SEWDTransformerEncoder.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.sew_d import modeling_sew_d

from .. import Positions
from . import masks
from .deberta import DebertaV2SelfAttention, Disentangled, _boolean, _Encoder
from .family import SIZES, Family, tiny_model


class SEWDSelfAttention(Disentangled, modeling_sew_d.DisentangledSelfAttention):
    original = modeling_sew_d.DisentangledSelfAttention
    relies_on = {"forward": ("hidden_states", "attention_mask", "query_states", "relative_pos", "rel_embeddings")}
    posenc_shares_sequences = False
    posenc_projected = DebertaV2SelfAttention.posenc_projected
    posenc_projections = DebertaV2SelfAttention.posenc_projections

    def forward(  # type: ignore[override]
        self, hidden_states, attention_mask, query_states=None, relative_pos=None, rel_embeddings=None, **kwargs
    ):
        if kwargs.get("output_attentions") or relative_pos is not None:
            given = hidden_states, attention_mask, query_states, relative_pos, rel_embeddings
            return self.original.forward(self, *given, **kwargs)
        q, k, v = self.posenc_projected(hidden_states, query_states)
        plan = self.posenc_plan(Positions(k.shape[2]), k.shape[2], rel_embeddings)
        options = masks.mask_options(_boolean(attention_mask), q.shape[2], causal=False)
        return self.posenc_run(q, k, v, plan, options, self.dropout.drop_prob), None


class SEWDTransformerEncoder(_Encoder, modeling_sew_d.SEWDTransformerEncoder):
    original = modeling_sew_d.SEWDTransformerEncoder


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    model = tiny_model(
        "SEWD", **SIZES, conv_dim=[8], conv_kernel=[4], conv_stride=[2], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, max_position_embeddings=40, position_buckets=8, feat_extract_norm="layer",
        apply_spec_augment=False,
    )  # fmt: skip
    mask = torch.ones(2, 684, dtype=torch.long)
    mask[1, 430:] = 0
    return model, {"input_values": torch.randn(2, 684), "attention_mask": mask}


HOOKS = {modeling_sew_d.SEWDEncoder: masks.pass_attentions}
FAMILY = Family(tiny, parts=(SEWDSelfAttention, SEWDTransformerEncoder), hooks=HOOKS)
