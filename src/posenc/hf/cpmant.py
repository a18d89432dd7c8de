"""CPM-Ant: T5's buckets within a segment, and one number for each pair of segments elsewhere.

    s = q·k / sqrt(d) + b[h, bucket(j - i)]          both of one segment (512 buckets up to distance 2048)
                      + b[h, segment_i, segment_j]   of two: the prompt of 32 vectors and the text

The model makes the bias once for all layers, [B, H, Lq, Lk], and that stays. CpmAntAttention (modeling_cpmant.py 61-160 of transformers
5.22) calls no interface: each layer adds it to its scores and fills what is masked, before and after the softmax. Here CpmAntEncoder
(334-395) joins bias and mask once, and the layers attend with that.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.cpmant import modeling_cpmant

from .. import Plan, Positions
from . import masks
from .family import Family, tiny_model
from .layer import Layer, Part, Sample, split, zeros_beside


class CpmAntAttention(Layer, modeling_cpmant.CpmAntAttention):
    original = modeling_cpmant.CpmAntAttention
    encoding = "t5"
    relies_on = {
        "forward": ("hidden_q", "hidden_kv", "attention_mask", "position_bias", "output_attentions", "past_key_values")
    }

    def posenc_sample(self, length: int) -> Sample:
        mask = zeros_beside(self.project_q, 1, self.num_heads, length, length)
        return self.num_heads, self.dim_head, Plan(Positions(length)), {"mask": mask}

    def forward(
        self, hidden_q, hidden_kv, attention_mask, position_bias, output_attentions=False, past_key_values=None,
        use_cache=None, **kwargs,
    ):  # fmt: skip
        if attention_mask is not None:  # the encoder's original runs
            given = hidden_q, hidden_kv, attention_mask, position_bias, output_attentions, past_key_values, use_cache
            return super().forward(*given, **kwargs)
        q = split(self.project_q(hidden_q), self.dim_head)
        k, v = (split(project(hidden_kv), self.dim_head) for project in (self.project_k, self.project_v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        drop = 0.0 if self.dropout is None else self.dropout.p
        out = self.posenc_run_dense(q, k, v, position_bias, self.dim_head**-0.5, drop)
        # padding sees nothing, and gives zeros
        empty = position_bias[:, 0, :, :1] == torch.finfo(position_bias.dtype).min
        return self.attention_out(out.masked_fill(empty, 0.0)), None


class CpmAntEncoder(Part, modeling_cpmant.CpmAntEncoder):
    original = modeling_cpmant.CpmAntEncoder
    relies_on = {"forward": ("hidden_states", "attention_mask", "position_bias", "output_attentions")}

    def forward(self, hidden_states, attention_mask, position_bias, output_attentions=None, *args, **kwargs):
        if output_attentions:
            masks.log_dense()
        else:
            # a query that sees nothing has the lowest number for each key: kernels may give NaN where all are -inf
            visible = attention_mask[:, None].bool()
            sees = visible.any(-1, keepdim=True)
            lowest = position_bias.new_full(sees.shape, torch.finfo(position_bias.dtype).min)
            hidden = lowest.masked_fill(sees, -float("inf"))
            position_bias = torch.where(visible, position_bias, hidden)
            attention_mask = None
        return super().forward(hidden_states, attention_mask, position_bias, output_attentions, *args, **kwargs)


def tiny(folder: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    sizes = dict(
        vocab_size=32, hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=16, num_hidden_layers=2, prompt_length=5,
        prompt_types=3, segment_types=4, position_bias_num_buckets=16, position_bias_max_distance=40, init_std=0.1,
    )  # fmt: skip
    ids = torch.arange(120).reshape(2, 60) % 30 + 2
    ids[1, :20] = 0  # padding
    return tiny_model("CpmAnt", **{**sizes, **options}), {"input_ids": ids}


FAMILY = Family(tiny, parts=(CpmAntAttention, CpmAntEncoder))
