"""WavLM: T5's buckets in one table, and a gate for each query that its own state opens.

    s = q·k / sqrt(d) + g_i b[bucket(j - i), h]        g = a (b c_h - 1) + 2,   a, b = sigmoid(linear of the head's input)

WavLMAttention (modeling_wavlm.py 112-276 of transformers 5.22) calls no interface, but F.multi_head_attention_forward, which
keeps the probabilities of all heads and averages them. It makes the bias [B * H, L, L] in the first layer, which hands it to the
others, and its gated copy in every layer. Here the bias of each distance travels, [H, 2 L - 1]. The original multiplies with the
weights of its projections, so that adapters around them (LoRA) have no effect before they are merged; here the projections are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import Index, Lookup, Plan, Positions
from ..core import index
from ..core.tables import expand_table
from ..nn import blocks
from .family import SIZES, Family, tiny_model, variants
from .layer import Layer, Sample, split, zeros_beside

FEW = 192
"""Frames, 4 seconds, up to which blocks are not faster in training."""


class Gated(Layer):
    encoding = "t5"
    on_cpu = blocks.NAME
    relies_on = {
        "forward": ("hidden_states", "attention_mask", "position_bias"),
        "compute_bias": ("query_length", "key_length"),
    }

    def posenc_index_of(self) -> Index | None:
        return index.log_buckets(self.num_buckets, self.max_distance, causal=False)

    def posenc_plan(self, bias: Tensor, gate: Tensor) -> Plan:
        """bias [H, 2 L - 1] by key minus query from 1 - L on; gate [B, H, L, 1]."""
        length = gate.shape[2]
        lookup = Lookup(Index(1 - length, length - 1), dot_query=(bias / self.scaling)[..., None], states=gate)
        return Plan(Positions(length), lookups=(lookup,), scale=self.scaling)

    def posenc_sample(self, length: int) -> Sample:
        bias = zeros_beside(self.q_proj, self.num_heads, 2 * length - 1)
        gate = zeros_beside(self.q_proj, 1, self.num_heads, length, 1)
        return self.num_heads, self.head_dim, self.posenc_plan(bias, gate), {}

    def posenc_gate(self, states: Tensor) -> Tensor:
        """[B, H, L, 1]"""
        halves = self.gru_rel_pos_linear(split(states, self.head_dim)).unflatten(-1, (2, 4)).sum(-1).sigmoid()
        gate_a, gate_b = halves.chunk(2, dim=-1)
        return gate_a * (gate_b * self.gru_rel_pos_const - 1.0) + 2.0

    def forward(self, hidden_states, attention_mask=None, position_bias=None, index=0, **kwargs):
        length = hidden_states.shape[1]
        bias = position_bias
        if bias is None:
            bias = expand_table(self.rel_attn_embed.weight.t(), self.posenc_index, 1 - length, length - 1)
        if kwargs.get("output_attentions"):
            dense = bias.unfold(1, length, 1).flip(1).repeat(len(hidden_states), 1, 1)
            out, weights, _ = super().forward(hidden_states, attention_mask, dense, index, **kwargs)
            return out, weights, bias
        q, k, v = (split(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        gate = self.posenc_gate(hidden_states)
        key_mask = None if attention_mask is None else attention_mask == 1
        if key_mask is not None and not torch.compiler.is_compiling() and key_mask.is_cpu and bool(key_mask.all()):
            key_mask = None
        # With the queries in reverse order, the bias of query i and key j depends on i + j: it is a view of the table.
        is_reversed = blocks.in_blocks(self, q)
        hidden = () if key_mask is None else (~key_mask[:, None, None],)
        out = blocks.run(
            self, q.flip(2) if is_reversed else q, k, v, _gate_distances, (gate.flip(2), bias, *hidden),
            lambda: self.posenc_plan(bias, gate), lambda: {"key_mask": key_mask}, scale=self.scaling, dropout=self.dropout,
            by_query=1, plain_gradients=length <= FEW,
        )  # fmt: skip
        return self.out_proj(out.flip(1) if is_reversed else out), None, bias


def _gate_distances(images: slice, rows: slice, gate: Tensor, bias: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Row s holds the distances from s + 1 - L on; the part of the table is cut before it is unfolded, for its gradient's sake."""
    length = (bias.shape[1] + 1) // 2
    made = bias[:, rows.start : rows.stop - 1 + length].unfold(1, length, 1) * gate
    return made if hidden is None else made.masked_fill(hidden[images], float("-inf"))


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    model = tiny_model(
        "WavLM", **SIZES, conv_dim=[8], conv_kernel=[4], conv_stride=[4], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_buckets=8, max_bucket_distance=12, feat_extract_norm="layer",
        do_stable_layer_norm=True, apply_spec_augment=False,
    )  # fmt: skip
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 56:] = 0
    return model, {"input_values": torch.randn(2, 80), "attention_mask": mask}


FAMILY = Family(tiny, parts=variants(Gated, "wavlm.WavLMAttention"))
