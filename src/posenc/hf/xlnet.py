"""XLNet: one or two streams, memories, segments.

    s = [ (q + u)·k_j + (q + v)·W_R R(i - j) + (q + w)·g[segment_i != segment_j] ] / sqrt(d)

The original spreads the padding over [L, L, B] and the segments over [L, L, B, 2]. A hook takes both out of the
model's call and hands them to the layers as they are, [B, L], in a `Call`. It is an argument, so that threads and
layers that are computed again in backward have their own: the model gives its layers, and these their attention,
`output_attentions` as it is. A permutation mask is dense by nature and stays.
Every token of the content stream sees itself, a padded one too, and memories keep what it becomes.
In training the positions' dropout is drawn once for the batch (the original draws it for every row). With bi_data half of
the batch has distances of the other sign, a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.xlnet import modeling_xlnet

from .. import Index, Lookup, Plan, Positions, attend, explain
from ..encodings.transformer_xl import SAME_OR_NOT
from . import masks
from .layer import Layer, NoAttentions, against, say

FEW = (0, 15)  # segments of a compiled model; the tokenizer's are 0 to 3: two texts, the class token, padding


@dataclass(frozen=True, eq=False)
class Call(NoAttentions):
    """What the hook keeps from being spread."""

    key_mask: Tensor | None = None  # bool [B, klen]
    segments: Tensor | None = None  # [B, qlen]
    bounds: tuple[int, int] = FEW  # the lowest and the highest segment, memory's 0 among them
    two_ways: bool = False  # bi_data

    def half(self, number: int) -> Call:
        key_mask, segments = (None if x is None else x.chunk(2)[number] for x in (self.key_mask, self.segments))
        return Call(key_mask, segments, self.bounds)


class Content(NamedTuple):
    """The content stream's mask: the query stream's does not show a token to itself."""

    mask: Tensor | None


class XLNetRelativeAttention(Layer, modeling_xlnet.XLNetRelativeAttention):
    original = modeling_xlnet.XLNetRelativeAttention
    encoding = "xlnet"

    def posenc_plan(self, q_length: int, k_length: int, table: Tensor, call: Call, slots: Tensor | None = None) -> Plan:
        """table [rows, H, D]: rows for i - j = klen down to 1 - qlen (or 0); the first is never read. slots: these queries only."""
        table = table[1:].transpose(0, 1)
        rows = Index(1 - k_length, table.shape[1] - k_length)
        by_distance = Lookup(rows, bias=against(self.r_r_bias, self.r_w_bias, table, self.scale), dot_query=table)
        start = k_length - q_length
        positions = Positions((start, q_length) if slots is None else slots + start, k_length)
        lookups = [by_distance]
        if call.segments is not None:
            memory = call.segments.new_zeros(call.segments.shape[0], start)
            every = torch.cat((memory, call.segments), dim=1)
            own = call.segments if slots is None else call.segments[:, slots]
            positions = Positions(positions.q, positions.k, more=[(own, every, call.bounds)])
            pair = self.seg_embed.transpose(0, 1)
            lookups.append(
                Lookup(SAME_OR_NOT, bias=against(self.r_s_bias, self.r_w_bias, pair, self.scale), dot_query=pair)
            )
        return Plan(positions, shift=self.r_w_bias, lookups=tuple(lookups), scale=self.scale)

    def posenc_sample(self, length: int) -> tuple[int, int, Plan, dict[str, Any]]:
        table = self.r.new_zeros(2 * length, self.n_head, self.d_head)
        return self.n_head, self.d_head, self.posenc_plan(length, length, table, Call()), {}

    def forward(
        self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, output_attentions=False
    ):
        if isinstance(output_attentions, Call):
            # all rows of the batch are alike; with bi_data those of each half
            r = r[:, [0, r.shape[1] // 2]] if output_attentions.two_ways else r[:, :1]
            attn_mask_h = Content(attn_mask_h)
        elif not output_attentions and h.shape[1]:
            say("an XLNet layer that is called without its model runs the original attention, with its dense scores")
        return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, output_attentions)

    def rel_attn_core(
        self, q_head, k_head_h, v_head_h, k_head_r, seg_mat=None, attn_mask=None, output_attentions=False
    ):
        call = output_attentions
        if not isinstance(call, Call):
            return super().rel_attn_core(q_head, k_head_h, v_head_h, k_head_r, seg_mat, attn_mask, output_attentions)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
        content = isinstance(attn_mask, Content)
        attn_mask = attn_mask.mask if content else attn_mask
        mask = None if attn_mask is None else (attn_mask == 0).permute(2, 3, 0, 1)
        if not call.two_ways:
            return self.posenc_core(q, k, v, k_head_r[:, 0], mask, call, content)
        halves = []
        for one in (0, 1):
            own = mask if mask is None or mask.shape[0] == 1 else mask.chunk(2)[one]
            ours, keys, values = (x.chunk(2)[one] for x in (q, k, v))
            halves.append(self.posenc_core(ours, keys, values, k_head_r[:, one], own, call.half(one), content))
        return torch.cat(halves, dim=1)

    def posenc_core(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor | None, call: Call, content: bool
    ) -> Tensor:
        """[B, H, L, D] each -> [L, B, H, D]."""
        plan = self.posenc_plan(q.shape[2], k.shape[2], table, call)
        seen: dict[str, Any] = {"key_mask": call.key_mask, "mask": mask}
        if content and call.key_mask is not None:
            return self.posenc_padded(q, k, v, table, plan, seen, call).permute(2, 0, 1, 3)
        # the first token of a permutation sees nothing
        blind = None if mask is None else ~mask.any(-1)[:, 0]
        out = self.posenc_run(q, k, v, plan, seen, self.dropout.p, blind)
        return out.unflatten(-1, (self.n_head, self.d_head)).transpose(0, 1)

    def posenc_padded(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, plan: Plan, seen: dict[str, Any], call: Call
    ) -> Tensor:
        """Padded tokens see themselves, too: a key more for them, whose share needs the others' sum.

        The triton engine has all sums at hand. Elsewhere they cost more than attention, so only slots with padding ask for them.
        """
        length = q.shape[2]
        padded = ~seen["key_mask"][:, -length:]
        given: dict[str, Any] = {"dropout": self.dropout.p if self.training else 0.0, "engine": self.posenc_engine}
        engine = explain(q, k, v, plan, **seen).engine if self.posenc_engine == "auto" else self.posenc_engine
        slots = out = None
        own_k, own_v = k[:, :, -length:], v[:, :, -length:]
        if engine != "triton" and not torch.compiler.is_compiling():
            out = attend(q, k, v, plan, **seen, **given)
            slots = padded.any(0).nonzero()[:, 0]
            plan = self.posenc_plan(length, k.shape[2], table, call, slots)
            q, own_k, own_v = (x[:, :, slots] for x in (q, own_k, own_v))
            padded = padded[:, slots]
            mask = seen["mask"]
            seen = {**seen, "mask": None if mask is None else mask[:, :, slots]}
        some, lse = attend(q, k, v, plan, **seen, **given, return_lse=True)
        share = torch.sigmoid(self.posenc_own(q, own_k, table[k.shape[2]], call) - lse)
        share = share.masked_fill(~padded[:, None], 0.0)[..., None]
        some = (some + share * (own_v - some)).to(q.dtype)
        return some if out is None or slots is None else out.index_copy(2, slots, some)

    def posenc_own(self, q: Tensor, k: Tensor, here: Tensor, call: Call) -> Tensor:
        """[B, H, L]: the score of each token with itself; here [H, D] is the table's row for no distance.

        (q + u)·k + (q + v)·here, with products of matrices: Inductor 2.13 fuses sums over biases wrongly on a CPU.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide), k.to(wide)
        fixed = [(self.r_r_bias, here)]
        if call.segments is not None:
            fixed.append((self.r_s_bias, self.seg_embed[0]))
        score = (q * k).sum(-1) + (k @ self.r_w_bias.to(wide).unsqueeze(-1)).squeeze(-1)
        for bias, vector in fixed:
            vector = vector.to(wide)
            score = score + (q @ vector.unsqueeze(-1)).squeeze(-1) + (bias * vector).sum(-1, keepdim=True)
        return score * self.scale


@torch.library.custom_op("posenc::few_segments", mutates_args=())
def few_segments(segments: Tensor) -> Tensor:
    """The segments, known to be few: a compiled model cannot look at them, so its graph calls this."""
    capturing = segments.is_cuda and torch.cuda.is_current_stream_capturing()  # looked at when it was warmed up
    if segments.numel() and not capturing:
        lowest, highest = torch.stack(torch.aminmax(segments)).tolist()
        if lowest < FEW[0] or highest > FEW[1]:
            raise ValueError(
                f"a compiled XLNet takes token_type_ids from {FEW[0]} to {FEW[1]}, got {lowest} to {highest}; "
                "renumber them (only whether two are the same counts), or call the model without torch.compile"
            )
    return segments.clone()


@few_segments.register_fake
def _(segments):
    return torch.empty_like(segments)


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Keep padding and segments from being spread over [L, L]; the layers get them as they are."""
    if masks.wants_attentions(model, kwargs):
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if tokens is None or not tokens.shape[0]:
        return (), kwargs
    key_mask = None
    if kwargs.get("perm_mask") is None and kwargs.get("input_mask") is None:
        mask = kwargs.pop("attention_mask", None)
        real = None if mask is None else mask >= 1  # the original hides where 1 - mask > 0
        if real is not None and not masks.nothing_padded(real):
            memory = kwargs.get("mems")
            before = 0 if not memory or memory[0] is None else memory[0].shape[0]
            key_mask = torch.cat((real.new_ones(real.shape[0], before), real), dim=1)
    segments, bounds = kwargs.pop("token_type_ids", None), FEW
    if segments is not None and torch.compiler.is_compiling():
        segments = few_segments(segments)
    elif segments is not None and segments.numel():
        lowest, highest = torch.stack(torch.aminmax(segments)).tolist()
        bounds = min(lowest, 0), max(highest, 0)
    kwargs["output_attentions"] = Call(key_mask, segments, bounds, model.bi_data)
    return (), kwargs


PARTS = (XLNetRelativeAttention,)
HOOKS = {modeling_xlnet.XLNetModel: before_model}
