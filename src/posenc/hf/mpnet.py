"""MPNet: T5's buckets in one table for the encoder, and 1/sqrt(d).

    s = q·k / sqrt(d) + b[bucket(j - i), h]           32 buckets up to distance 128, whatever the configuration says, as in the original

Replaces MPNetSelfAttention (modeling_mpnet.py 115-176) and the bias of MPNetEncoder (264-350) of transformers 5.22. The
original makes the bias dense, [B, H, L, L], and repeats it for every row of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mpnet import modeling_mpnet

from .. import Lookup, Plan, Positions
from ..core import index
from . import masks
from .family import SIZES, Family, tiny_model, tiny_text
from .layer import Layer, Part, Sample, split, zeros_beside

BUCKETS = index.log_buckets(32, 128, causal=False)


class MPNetSelfAttention(Layer, modeling_mpnet.MPNetSelfAttention):
    original = modeling_mpnet.MPNetSelfAttention
    encoding = "t5"

    def posenc_plan(self, length: int, table: Tensor | None) -> Plan:
        lookups = () if table is None else (Lookup(BUCKETS, bias=table[:32].t()),)
        return Plan(Positions(length), lookups=lookups)

    def posenc_sample(self, length: int) -> Sample:
        table = zeros_beside(self.q, 32, self.num_attention_heads)
        return self.num_attention_heads, self.attention_head_size, self.posenc_plan(length, table), {}

    def forward(self, hidden_states, attention_mask=None, position_bias=None, output_attentions=False, **kwargs):
        if output_attentions or (position_bias is not None and position_bias.dim() == 4):
            if position_bias is not None and position_bias.dim() == 2:
                position_bias = _dense(position_bias, *hidden_states.shape[:2])
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
        q, k, v = (split(project(hidden_states), self.attention_head_size) for project in (self.q, self.k, self.v))
        plan = self.posenc_plan(q.shape[2], position_bias)
        options = masks.mask_options(attention_mask, q.shape[2], causal=False)
        return (self.o(self.posenc_run(q, k, v, plan, options, self.dropout.p)),)


class MPNetEncoder(Part, modeling_mpnet.MPNetEncoder):
    """An encoder whose position bias is the table itself; with output_attentions the layers expand it."""

    original = modeling_mpnet.MPNetEncoder

    @staticmethod
    def refuses(module: Any) -> str | None:
        rows = module.relative_attention_bias.weight.shape[0]
        return None if rows >= 32 else f"has a table of {rows} rows, and its bucket function needs 32"

    def compute_position_bias(self, x, position_ids=None, num_buckets=32):
        if position_ids is not None or masks.is_short(self, x, dropout=self.config.attention_probs_dropout_prob):
            return super().compute_position_bias(x, position_ids, num_buckets)
        return self.relative_attention_bias.weight


def _dense(table: Tensor, rows: int, length: int) -> Tensor:
    """The original's position bias, [B, H, L, L]."""
    r = torch.arange(length, device=table.device) - torch.arange(length, device=table.device)[:, None]
    bias = nn.functional.embedding(modeling_mpnet.MPNetEncoder.relative_position_bucket(r), table)
    return bias.permute(2, 0, 1).expand(rows, -1, -1, -1)


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    if masks.wants_attentions(model, kwargs):
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = masks.tokens_of(kwargs)
    if tokens is not None and not masks.is_short(model, tokens, dropout=model.config.attention_probs_dropout_prob):
        kwargs["attention_mask"] = masks.padding(kwargs.get("attention_mask"), tokens.shape[1], tokens.device)
    return (), kwargs


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    return tiny_model("MPNet", vocab_size=32, **SIZES, max_position_embeddings=192), tiny_text()


FAMILY = Family(tiny, parts=(MPNetSelfAttention, MPNetEncoder), hooks={modeling_mpnet.MPNetModel: before_model})
