"""XLNet: one or two streams, memories, segments.

    s = [ (q + u)·k_j + (q + v)·W_R R(i - j) + (q + w)·g[segment_i != segment_j] ] / sqrt(d)

The original spreads the padding over [L, L, B] and the segments over [L, L, B, 2]. A hook takes both out of the
model's call and hands them to the layers as they are, [B, L]. A permutation mask is dense by nature and stays.
In training the positions' dropout is drawn once for the batch (the original draws it for every row).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.xlnet import modeling_xlnet

from .. import Index, Lookup, Plan, Where
from . import masks
from .layer import Layer, against

SAME_OR_NOT = Index(-1, 1, rows=(1, 0, 1), n=2, axis=1)


class XLNetRelativeAttention(Layer, modeling_xlnet.XLNetRelativeAttention):
    original = modeling_xlnet.XLNetRelativeAttention
    scheme = "xlnet"
    posenc_call: tuple[Tensor | None, Tensor | None] = (None, None)  # key mask [B, klen], segments [B, qlen]

    def posenc_plan(self, q_length: int, k_length: int, table: Tensor, segments: Tensor | None) -> Plan:
        """table [rows, H, D]: rows for i - j = klen down to 1 - qlen (or 0); the first is never read."""
        table = table[1:].transpose(0, 1)
        rows = Index(1 - k_length, table.shape[1] - k_length)
        positions = Lookup(rows, bias=against(self.r_r_bias, self.r_w_bias, table, self.scale), dot_query=table)
        where = Where((k_length - q_length, q_length), k_length)
        lookups = [positions]
        if segments is not None:
            memory = segments.new_zeros(segments.shape[0], k_length - q_length)
            where = Where(where.q, where.k, more=[(segments, torch.cat((memory, segments), dim=1))])
            pair = self.seg_embed.transpose(0, 1)
            lookups.append(
                Lookup(SAME_OR_NOT, bias=against(self.r_s_bias, self.r_w_bias, pair, self.scale), dot_query=pair)
            )
        return Plan(where, shift=self.r_w_bias, lookups=tuple(lookups), scale=self.scale)

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        table = self.r.new_zeros(2 * length, self.n_head, self.d_head)
        return self.n_head, self.d_head, self.posenc_plan(length, length, table, None), {}

    def forward(
        self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, output_attentions=False
    ):
        if not output_attentions:
            r = r[:, :1]
        return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, output_attentions)

    def rel_attn_core(
        self, q_head, k_head_h, v_head_h, k_head_r, seg_mat=None, attn_mask=None, output_attentions=False
    ):
        if output_attentions or seg_mat is not None:
            return super().rel_attn_core(q_head, k_head_h, v_head_h, k_head_r, seg_mat, attn_mask, output_attentions)
        key_mask, segments = self.posenc_call
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
        plan = self.posenc_plan(q.shape[2], k.shape[2], k_head_r[:, 0], segments)
        seen: dict[str, Any] = {"key_mask": key_mask}
        if attn_mask is not None:
            seen["mask"] = (attn_mask == 0).permute(2, 3, 0, 1)
        out = self.posenc_run(q, k, v, plan, seen, self.dropout.p).unflatten(-1, (self.n_head, self.d_head))
        if attn_mask is not None:
            # the first token of a permutation sees nothing, and the original then averages everything
            blind = ~seen["mask"].any(-1)[:, 0, :, None, None]
            out = torch.where(blind, v.mean(2)[:, None], out)
        return out.transpose(0, 1)


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Keep padding and segments from being spread over [L, L]; the layers get them as they are."""
    key_mask = segments = None
    if not masks.wants_attentions(model, kwargs):
        kwargs = dict(masks.by_name(model, args, kwargs))
        args = ()
        memory = kwargs.get("mems")
        before = 0 if not memory or memory[0] is None else memory[0].shape[0]
        if kwargs.get("perm_mask") is None and kwargs.get("input_mask") is None:
            mask = kwargs.pop("attention_mask", None)
            if mask is not None:
                real = mask != 0
                key_mask = torch.cat((real.new_ones(real.shape[0], before), real), dim=1)
        segments = kwargs.pop("token_type_ids", None)
    for block in model.layer:
        block.rel_attn.posenc_call = (key_mask, segments)
    return args, kwargs


def _refuses(model: Any) -> str | None:
    if model.bi_data:
        return "reads half of the batch backwards (bi_data=True), which only pre-training does"
    return None


before_model.refuses = _refuses  # type: ignore[attr-defined]
PARTS = (XLNetRelativeAttention,)
HOOKS = {modeling_xlnet.XLNetModel: before_model}
