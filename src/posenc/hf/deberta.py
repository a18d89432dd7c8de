"""DeBERTa v1, v2 and v3: content against position, both ways.

    s = [ q_i·k_j + q_i·K_r[δ(i-j)] + k_j·Q_r[δ(i-j)] ] / sqrt(t d)        t = 1 + number of terms

K_r and Q_r are projections of the shared table: by the layer's own position projections, or (v2, v3: share_att_key) by
those of its keys and queries. Replaces DisentangledSelfAttention (modeling_deberta.py 149-346, modeling_deberta_v2.py
137-348) of transformers 5.22, and the mask [B, 1, L, L] and the distances [1, L, L] of DebertaEncoder and DebertaV2Encoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2

from .. import Index, Plan, Positions
from ..core import index
from ..encodings.deberta import plan_disentangled, project_terms
from . import masks
from .family import SIZES, Family, tiny_model, tiny_text, variants
from .layer import Layer, Part, Sample, split, zeros_beside

TERMS = {"c2p", "p2c"}


class Disentangled(Layer):
    """The part that v1 and v2 share. Theirs are

    posenc_projected(hidden_states, query_states)    q, k and v [B, H, L, D]
    posenc_projections()                             the modules that project the table to K_r and to Q_r
    posenc_distances(states)                         those that the original's own function computes, or None
    """

    encoding = "deberta"
    posenc_shares_sequences = True

    @staticmethod
    def refuses(module: Any) -> str | None:
        unknown = set(module.pos_att_type) - TERMS
        if unknown:
            return f"has the position term {', '.join(sorted(unknown))}; only c2p and p2c are known"
        if getattr(module, "talking_head", False):
            return "mixes the heads' scores (talking_head=True), which needs all of them at once"
        return None

    def posenc_index_of(self) -> Index | None:
        if not self.relative_attention:
            return None
        most, buckets = self.max_relative_positions, getattr(self, "position_buckets", -1)
        return index.deberta_buckets(buckets, most) if buckets > 0 else index.deberta_buckets(most)

    def posenc_plan(self, positions: Positions, length: int, table: Tensor | None) -> Plan:
        """length: of the whole sequence."""
        terms = self.pos_att_type
        k_r = q_r = rows = None
        if table is not None and self.relative_attention:
            some, rows = self.posenc_rows(length)
            key, query = self.posenc_projections()
            k_r, q_r = project_terms(self.pos_dropout(table), terms, key, query, self.num_attention_heads, some)
        return plan_disentangled(positions, self.attention_head_size, len(terms), rows, k_r, q_r)

    def posenc_rows(self, length: int) -> tuple[slice, Index]:
        """The table's rows that a length needs, and their index."""
        return slice(self.posenc_index.n), self.posenc_index

    def posenc_sample(self, length: int) -> Sample:
        linear = self.in_proj if hasattr(self, "in_proj") else self.query_proj
        table = None
        if self.relative_attention:
            table = zeros_beside(linear, 2 * self.max_relative_positions, linear.in_features)
        plan = self.posenc_plan(Positions(length), length, table)
        return self.num_attention_heads, self.attention_head_size, plan, {}

    def forward(
        self, hidden_states, attention_mask, output_attentions=False, query_states=None, relative_pos=None, rel_embeddings=None
    ):  # fmt: skip
        if output_attentions or relative_pos is not None:
            if self.posenc_context is not None:
                raise ValueError("output_attentions and relative_pos cannot go with context_parallel; leave them out")
            if output_attentions:
                masks.log_dense()
            attention_mask = _dense(attention_mask, hidden_states.shape[1])
            relative_pos = self.posenc_distances(hidden_states) if relative_pos is None else relative_pos
            given = {"query_states": query_states, "relative_pos": relative_pos, "rel_embeddings": rel_embeddings}
            return super().forward(hidden_states, attention_mask, output_attentions, **given)
        q, k, v = self.posenc_projected(hidden_states, query_states)
        length = self.posenc_length(k)
        plan = self.posenc_planned(
            lambda positions: self.posenc_plan(positions, length, rel_embeddings), Positions(k.shape[2])
        )
        options = masks.mask_options(_boolean(attention_mask), q.shape[2], causal=False)
        fully_masked = _fully_masked(attention_mask, options)
        return self.posenc_run(q, k, v, plan, options, self.dropout.p, fully_masked), None


class DebertaSelfAttention(Disentangled, modeling_deberta.DisentangledSelfAttention):
    original = modeling_deberta.DisentangledSelfAttention

    def posenc_projected(self, hidden_states, query_states):
        # in_proj holds [q, k, v] of head 0, then of head 1, ...
        shape = (self.num_attention_heads, 3, self.attention_head_size)
        q, k, v = self.in_proj(hidden_states).unflatten(-1, shape).permute(3, 0, 2, 1, 4)
        if query_states is not None:
            q = self.in_proj(query_states).unflatten(-1, shape).permute(3, 0, 2, 1, 4)[0]
        head = (self.num_attention_heads, 1, self.attention_head_size)
        return q + self.q_bias.view(head), k, v + self.v_bias.view(head)

    def posenc_rows(self, length):
        most = self.max_relative_positions
        span = min(length, most)
        if span == most:
            return slice(None), self.posenc_index
        return slice(most - span, most + span), index.deberta_buckets(span)

    def posenc_projections(self):
        return getattr(self, "pos_proj", None), getattr(self, "pos_q_proj", None)

    def posenc_distances(self, states):
        return modeling_deberta.build_relative_position(states, states) if self.relative_attention else None


class DebertaV2SelfAttention(Disentangled, modeling_deberta_v2.DisentangledSelfAttention):
    original = modeling_deberta_v2.DisentangledSelfAttention

    def posenc_projected(self, hidden_states, query_states):
        size = self.attention_head_size
        q = split(self.query_proj(hidden_states if query_states is None else query_states), size)
        return q, split(self.key_proj(hidden_states), size), split(self.value_proj(hidden_states), size)

    def posenc_projections(self):
        if self.share_att_key:
            return self.key_proj, self.query_proj
        return getattr(self, "pos_key_proj", None), getattr(self, "pos_query_proj", None)

    def posenc_distances(self, states):
        return None  # the original computes them itself


class _Encoder(Part):
    """An encoder that builds neither the mask nor the distances."""

    def posenc_is_short(self, tokens: Tensor) -> bool:
        """tokens: [B, L, ...]"""
        dropout = self.layer[0].attention.self.dropout
        rate = dropout.p if hasattr(dropout, "p") else dropout.drop_prob  # SEW-D's own
        return masks.is_short(self, tokens, kind="disentangled", dropout=rate)

    def get_attention_mask(self, attention_mask):
        if attention_mask.dim() > 2 or self.posenc_is_short(attention_mask):
            return super().get_attention_mask(attention_mask)  # type: ignore[misc]
        return masks.padding(attention_mask, attention_mask.shape[1], attention_mask.device, self)

    def get_rel_pos(self, hidden_states, query_states=None, relative_pos=None):
        if self.posenc_is_short(hidden_states):
            return super().get_rel_pos(hidden_states, query_states, relative_pos)  # type: ignore[misc]
        return relative_pos


def _boolean(mask: Tensor | None) -> Tensor | None:
    """A user's own mask holds ones and zeros of any dtype."""
    return mask if mask is None or masks.is_compact(mask) else mask.bool()


def _fully_masked(mask: Tensor | None, options: dict[str, Any]) -> Tensor | None:
    """[B, L]: padded queries, and those without a visible key in a user's own mask."""
    if masks.is_compact(mask):
        return None if options["key_mask"] is None else ~options["key_mask"]
    return ~options["mask"].any(-1)[:, 0] if "mask" in options else None


def _dense(mask: Tensor, length: int) -> Tensor:
    """The compact mask in the original's form: a padded query is fully masked."""
    if not masks.is_compact(mask):
        return mask
    return (mask * mask.transpose(-1, -2)).expand(-1, 1, length, length).to(torch.int64)


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Where ranks share the sequence, absolute positions are those of this rank's tokens."""
    cp = getattr(model, "posenc_context", None)
    if cp is None:
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = masks.tokens_of(kwargs)
    if kwargs.get("position_ids") is None and tokens is not None:
        kwargs["position_ids"] = cp.slots(tokens.shape[1], tokens.device)[None]
    return (), kwargs


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    name = {"deberta": "Deberta", "deberta_v2": "DebertaV2"}[folder]
    terms = dict(relative_attention=True, max_relative_positions=12, pos_att_type=["c2p", "p2c"])
    return tiny_model(name, vocab_size=32, **SIZES, **terms, position_biased_input=False), tiny_text()


ENCODERS = variants(_Encoder, "deberta.DebertaEncoder", "deberta_v2.DebertaV2Encoder")
HOOKS = {modeling_deberta.DebertaModel: before_model, modeling_deberta_v2.DebertaV2Model: before_model}
FAMILY = Family(tiny, parts=(DebertaSelfAttention, DebertaV2SelfAttention, *ENCODERS), hooks=HOOKS)
