"""XLNet: one or two streams, memories, segments.

    s = [ (q + u)·k_j + (q + v)·W_R R(i - j) + (q + w)·g[segment_i != segment_j] ] / sqrt(d)

Replaces XLNetRelativeAttention (modeling_xlnet.py 38-284) of transformers 5.22. The original expands the padding to
[L, L, B] and the segments to [L, L, B, 2]. A hook takes both out of the model's call and passes them to the layers in their
own shape, [B, L], as a `Call`. The `Call` travels as the argument `output_attentions`, which the model and its layers pass on
unchanged; nothing is stored, so threads and recomputed layers cannot mix their calls. A permutation mask stays dense.
In the content stream every token sees itself, a padded one too, because memories keep its state.
In training one dropout of the positions serves the batch (the original draws one for every row). With bi_data half of
the batch has distances of the other sign, hence its own table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.xlnet import modeling_xlnet

from .. import Index, Lookup, Plan, Positions, attend, merge
from ..encodings.transformer_xl import SAME_OR_NOT, beyond_shift
from . import masks
from .family import Family, tiny_model, tiny_text
from .interface import prefers_dense
from .layer import Layer, NoAttentions, Sample, log_once

FEW = (0, 15)  # segments of a compiled model; the tokenizer's are 0 to 3: two texts, the class token, padding


@dataclass(frozen=True, eq=False)
class Call(NoAttentions):
    """Padding and segments of one call of the model."""

    key_mask: Tensor | None = None  # bool [B, klen]
    segments: Tensor | None = None  # [B, qlen]
    bounds: tuple[int, int] = FEW  # the lowest and the highest segment, memory's 0 among them
    two_ways: bool = False  # bi_data
    made: dict[str, Tensor] = field(default_factory=dict)

    def hidden_keys(self) -> Tensor | None:
        """bool [B, 1, 1, klen]"""
        return None if self.key_mask is None else ~self.key_mask[:, None, None]

    def hidden_from_content(self, length: int) -> Tensor | None:
        """bool [B, 1, qlen, klen], made once for all layers: every token sees itself."""
        if self.key_mask is None:
            return None
        if "hidden" not in self.made:
            at = torch.arange(self.key_mask.shape[1], device=self.key_mask.device)
            self.made["hidden"] = ~self.key_mask[:, None, None] & (at[at.shape[0] - length :, None] != at)
        return self.made["hidden"]

    def same_segments(self, keys: int) -> Tensor:
        """bool [B, 1, qlen, klen], made once for all layers; memories have segment 0."""
        assert self.segments is not None
        if "same" not in self.made:
            memory = self.segments.new_zeros(self.segments.shape[0], keys - self.segments.shape[1])
            both = torch.cat((memory, self.segments), dim=1)
            self.made["same"] = (self.segments[:, :, None] == both[:, None])[:, None]
        return self.made["same"]

    def half(self, number: int) -> Call:
        key_mask, segments = (None if x is None else x.chunk(2)[number] for x in (self.key_mask, self.segments))
        return Call(key_mask, segments, self.bounds)


class Content(NamedTuple):
    """Marks the content stream's mask: in the query stream a token does not see itself."""

    mask: Tensor | None


class XLNetRelativeAttention(Layer, modeling_xlnet.XLNetRelativeAttention):
    original = modeling_xlnet.XLNetRelativeAttention
    encoding = "xlnet"

    def posenc_plan(self, q_length: int, k_length: int, table: Tensor, call: Call) -> Plan:
        """table [rows, H, D]: rows for i - j = klen down to 1 - qlen (or 0); the first is never read."""
        table = table[1:].transpose(0, 1)
        rows = Index(1 - k_length, table.shape[1] - k_length)
        lookups = [Lookup(rows, dot_query=table, query_shift=beyond_shift(self.r_r_bias, self.r_w_bias))]
        start = k_length - q_length
        positions = Positions((start, q_length), k_length)
        if call.segments is not None:
            memory = call.segments.new_zeros(call.segments.shape[0], start)
            key_segments = torch.cat((memory, call.segments), dim=1)
            positions = Positions(positions.q, positions.k, more=[(call.segments, key_segments, call.bounds)])
            shift = beyond_shift(self.r_s_bias, self.r_w_bias)
            lookups.append(Lookup(SAME_OR_NOT, dot_query=self.seg_embed.transpose(0, 1), query_shift=shift))
        return Plan(positions, shift=self.r_w_bias, lookups=tuple(lookups), scale=self.scale)

    def posenc_sample(self, length: int) -> Sample:
        table = self.r.new_zeros(2 * length, self.n_head, self.d_head)
        return self.n_head, self.d_head, self.posenc_plan(length, length, table, Call()), {}

    def forward(
        self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, output_attentions=False
    ):
        if isinstance(output_attentions, Call):
            # all rows of the batch are equal; with bi_data those of each half
            r = r[:, [0, r.shape[1] // 2]] if output_attentions.two_ways else r[:, :1]
            attn_mask_h = Content(attn_mask_h)
        elif not output_attentions and h.shape[1] and not _is_short(self, h.transpose(0, 1), self.dropout.p):
            log_once(
                "an XLNet layer that is called without its model runs the original attention, with its dense scores"
            )
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
        if prefers_dense(self, q.shape[2] * k.shape[2], q.device, "xlnet"):
            return self.posenc_core_dense(q, k, v, table, mask, call, content)
        plan = self.posenc_plan(q.shape[2], k.shape[2], table, call)
        options: dict[str, Any] = {"key_mask": call.key_mask, "mask": mask}
        if content and call.key_mask is not None:
            dropout = self.dropout.p if self.training else 0.0
            visible = attend(q, k, v, plan, dropout=dropout, engine=self.posenc_engine, return_lse=True, **options)
            own = self.posenc_own(q, k, v, table[k.shape[2]], call)
            return merge([visible, own])[0].permute(2, 0, 1, 3)
        # the first token of a permutation has no visible key
        fully_masked = None if mask is None else ~mask.any(-1)[:, 0]
        out = self.posenc_run(q, k, v, plan, options, self.dropout.p, fully_masked)
        return out.unflatten(-1, (self.n_head, self.d_head)).transpose(0, 1)

    def posenc_core_dense(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor | None, call: Call, content: bool
    ) -> Tensor:
        """The same by PyTorch's attention with the terms as a dense bias, for short texts on a GPU."""
        length, keys = q.shape[2], k.shape[2]
        terms = (q + self.r_r_bias[:, None]) @ (table * self.scale).permute(1, 2, 0)  # by row, i - j = klen first
        if terms.shape[3] < length + keys:  # "uni": only masked pairs read what is added
            terms = nn.functional.pad(terms, (0, length + keys - terms.shape[3]))
        terms = terms.view(*q.shape[:2], -1, length)[:, :, 1:].reshape(*q.shape[:2], length, -1)[..., :keys]
        if call.segments is not None:
            scores = (q + self.r_s_bias[:, None]) @ (self.seg_embed * self.scale).permute(1, 2, 0)
            same, other = scores.chunk(2, -1)
            terms = terms + torch.where(call.same_segments(keys), same, other)
        hidden = call.hidden_from_content(length) if content else call.hidden_keys()
        if mask is not None:
            hidden = ~mask if hidden is None else hidden | ~mask
        if hidden is not None:  # the first token of a permutation has no visible key, and gives a mean
            terms = terms.masked_fill(hidden, torch.finfo(terms.dtype).min)
        out = self.posenc_run_dense(q + self.r_w_bias[:, None], k, v, terms, self.scale, self.dropout.p)
        return out.unflatten(-1, (self.n_head, self.d_head)).transpose(0, 1)

    def posenc_own(self, q: Tensor, k: Tensor, v: Tensor, here: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Each padded token's attention to itself, as a part for `merge`; here [H, D] is the table's row of distance 0.

        (q + u)·k + (q + v)·here, with products of matrices: Inductor 2.13 fuses sums over biases wrongly on a CPU.
        """
        assert call.key_mask is not None
        length, wide = q.shape[2], torch.promote_types(q.dtype, torch.float32)
        v, q, k = v[:, :, -length:], q.to(wide), k[:, :, -length:].to(wide)
        terms = [(self.r_r_bias, here)]
        if call.segments is not None:
            terms.append((self.r_s_bias, self.seg_embed[0]))
        score = (q * k).sum(-1) + (k @ self.r_w_bias.to(wide).unsqueeze(-1)).squeeze(-1)
        for bias, vector in terms:
            vector = vector.to(wide)
            score = score + (q @ vector.unsqueeze(-1)).squeeze(-1) + (bias * vector).sum(-1, keepdim=True)
        is_real = call.key_mask[:, None, -length:]
        return v, (score * self.scale).masked_fill(is_real, float("-inf"))


@torch.library.custom_op("posenc::few_segments", mutates_args=())
def few_segments(segments: Tensor) -> Tensor:
    """The segments, after a check of their range: a compiled model cannot read them, so its graph calls this."""
    capturing = segments.is_cuda and torch.cuda.is_current_stream_capturing()  # the warm-up has checked them
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


def _is_short(module: nn.Module, tokens: Tensor, dropout: float) -> bool:
    return masks.is_short(module, tokens, kind="xlnet", dropout=dropout)


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Take padding and segments out of the model's call, which would expand them to [L, L], and pass them in a `Call`."""
    if masks.wants_attentions(model, kwargs):
        return args, kwargs
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens = masks.tokens_of(kwargs)
    if tokens is None or not tokens.shape[0] or _is_short(model, tokens, model.config.dropout):
        return (), kwargs
    key_mask = None
    if kwargs.get("perm_mask") is None and kwargs.get("input_mask") is None:
        mask = kwargs.pop("attention_mask", None)
        real = None if mask is None else mask >= 1  # the original masks where 1 - mask > 0
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


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    model, text = tiny_model("XLNet", vocab_size=32, d_model=16, n_layer=2, n_head=2, d_inner=16), tiny_text()
    return model, {**text, "token_type_ids": (text["input_ids"] > 15).long()}


FAMILY = Family(tiny, parts=(XLNetRelativeAttention,), hooks={modeling_xlnet.XLNetModel: before_model})
