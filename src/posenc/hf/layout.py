"""LayoutLMv2, LayoutLMv3 and PP-DocLayoutV2's reading order: a bias by the boxes of two words, made once for all layers.

    LayoutLMv3   s = (q·k + b[bucket(j - i)] + x[bucket(x_j - x_i)] + y[bucket(y_j - y_i)]) / sqrt(d)      T5's buckets
    LayoutLMv2   the same with the three terms unscaled
    PP-DocLayoutV2   s = q·k / sqrt(d) + a projection of waves of the boxes' distances and sizes

The layers call no interface. They stand for LayoutLMv3SelfAttention and LayoutLMv3Encoder (modeling_layoutlmv3.py 202-288, 371-481 of
transformers 5.22), LayoutLMv2's (modeling_layoutlmv2.py 99-178, 333-417) and PPDocLayoutV2ReadingOrder's (modeling_pp_doclayout_v2.py
140-226, 333-437), which write the scores of all heads seven times in each layer and keep them for the gradients. Boxes differ
between pages, so the bias is dense here too, [B, H, L, L], with the mask in it; the tables get no gradient from the originals.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .. import Plan, Positions
from ..core import index
from ..core.tables import expand_table
from . import masks
from .family import SIZES, Family, tiny_model, variants
from .interface_mask import Mask
from .layer import Layer, Part, Sample, split, zeros_beside


class Boxes(Layer):
    encoding = "t5"
    on_cpu = "sdpa"
    relies_on = {"forward": ("hidden_states", "attention_mask", "rel_pos", "rel_2d_pos")}

    def posenc_sample(self, length: int) -> Sample:
        linear = self.qkv_linear if getattr(self, "fast_qkv", False) else self.query
        mask = zeros_beside(linear, 1, self.num_attention_heads, length, length)
        return self.num_attention_heads, self.attention_head_size, Plan(Positions(length)), {"mask": mask}

    def posenc_projected(self, states: Tensor) -> tuple[Tensor, ...]:
        if hasattr(self, "compute_qkv"):
            return self.compute_qkv(states)
        return self.query(states), self.key(states), self.value(states)

    def forward(self, hidden_states, attention_mask=None, rel_pos=None, rel_2d_pos=None, **kwargs):
        if (
            kwargs.get("output_attentions") or rel_pos is not None or rel_2d_pos is not None
        ):  # the original encoder runs
            return super().forward(hidden_states, attention_mask, rel_pos, rel_2d_pos, **kwargs)
        q, k, v = (split(x, self.attention_head_size) for x in self.posenc_projected(hidden_states))
        return self.posenc_run_dense(q, k, v, attention_mask, q.shape[3] ** -0.5, self.dropout.p), None


class BoxEncoder(Part):
    """Makes the bias and the mask into one, which its layers get as their mask."""

    def posenc_scale(self) -> float:
        """Of the biases."""
        return self.layer[0].attention.self.attention_head_size ** -0.5

    def posenc_bias(self, bbox: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
        """[B or 1, H, L, L]"""
        found = None
        with torch.no_grad():
            if self.has_relative_attention_bias:
                assert position_ids is not None
                found = _read(self.rel_pos_bias.weight, position_ids, self.max_rel_pos)
            if self.has_spatial_attention_bias:
                for linear, corner in ((self.rel_pos_x_bias, 0), (self.rel_pos_y_bias, 3)):
                    made = _read(linear.weight, bbox[:, :, corner], self.max_rel_2d_pos)  # type: ignore[index]
                    found = made if found is None else found.add_(made)
        return found if found is None else found.mul_(self.posenc_scale())

    def posenc_merge(self, bias: Tensor | None, mask: Any) -> Tensor | None:
        """The mask in the bias; the original's is added to the scores."""
        if isinstance(mask, Mask):
            mask = mask.whole()
        if mask is None or bias is None:
            return mask if bias is None else bias
        if mask.dtype == torch.bool:
            return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        return bias + mask

    def forward(self, hidden_states, *args, **kwargs):
        kwargs = masks.by_name(self, (hidden_states, *args), kwargs)
        if masks.wants_attentions(self, kwargs):
            return super().forward(**{**kwargs, "output_attentions": True})
        names = ("hidden_states", "bbox", "attention_mask", "position_ids", "patch_height", "patch_width")
        states, bbox, mask, positions, *_ = (kwargs.get(name) for name in names)
        passed = {name: x for name, x in kwargs.items() if name not in names}
        mask = self.posenc_merge(self.posenc_bias(bbox, positions), mask)
        for layer in self.layer:
            states = layer(states, mask, **passed)
        return BaseModelOutput(last_hidden_state=states)


class LayoutLMv2(BoxEncoder):
    relies_on = {"forward": ("hidden_states", "attention_mask", "bbox", "position_ids")}

    def posenc_scale(self) -> float:
        return 1.0

    def posenc_merge(self, bias, mask):
        """Its mask is true, or any number but 0, where masked."""
        hidden = mask.to(torch.bool)
        if bias is None:
            return ~hidden
        return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)


class LayoutLMv3(BoxEncoder):
    relies_on = {"forward": ("hidden_states", "bbox", "attention_mask", "position_ids")}


class ReadingOrder(BoxEncoder):
    relies_on = {"forward": ("hidden_states", "bbox", "attention_mask", "position_ids"), "_cal_2d_pos_emb": ("bbox",)}

    def posenc_bias(self, bbox, position_ids):
        if self.has_spatial_attention_bias:
            return self._cal_2d_pos_emb(bbox)
        return super().posenc_bias(bbox, position_ids)


def _read(table: Tensor, places: Tensor, most: int) -> Tensor:
    """table [H, buckets], places int [B, L] -> [B, H, L, L], the row of key minus query."""
    rows = expand_table(table, index.log_buckets(table.shape[1], most, causal=False), -most, most)
    r = (places[:, None, :] - places[:, :, None]).clamp(-most, most) + most
    return torch.stack([rows.index_select(1, one.reshape(-1)).view(-1, *one.shape) for one in r])


class Pages(torch.nn.Module):
    """LayoutLMv2's encoder: the model around it needs another library."""

    def __init__(self, encoder: Any):
        super().__init__()
        self.encoder = encoder

    def forward(self, states: Tensor, bbox: Tensor, attention_mask: Tensor, **kwargs: Any) -> tuple[Tensor]:
        mask = (1.0 - attention_mask[:, None, None, :].to(states.dtype)) * torch.finfo(states.dtype).min
        places = torch.arange(states.shape[1], device=states.device)[None].expand(states.shape[:2])
        return (self.encoder(states, mask, bbox=bbox, position_ids=places, **kwargs).last_hidden_state,)


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    import transformers

    config: Any = {
        **SIZES, "vocab_size": 32, "max_position_embeddings": 64, "max_2d_position_embeddings": 64, "coordinate_size": 3,
        "shape_size": 2, "rel_pos_bins": 8, "max_rel_pos": 20, "rel_2d_pos_bins": 16, "max_rel_2d_pos": 30,
    }  # fmt: skip
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    corner = torch.randint(0, 30, (2, 40, 2))
    boxes = torch.cat((corner, corner + torch.randint(1, 30, (2, 40, 2))), dim=-1)
    if folder == "layoutlmv2":
        config = transformers.LayoutLMv2Config(**config)
        encoder = importlib.import_module("transformers.models.layoutlmv2.modeling_layoutlmv2").LayoutLMv2Encoder
        return Pages(encoder(config)), {"states": torch.randn(2, 40, 16), "bbox": boxes, "attention_mask": mask}
    if folder == "pp_doclayout_v2":
        module = importlib.import_module("transformers.models.pp_doclayout_v2.modeling_pp_doclayout_v2")
        config = module.PPDocLayoutV2Config().reading_order_config.__class__(**{**config, "vocab_size": 4})
        return module.PPDocLayoutV2ReadingOrder(config), {"boxes": boxes.float(), "mask": mask.bool()}
    ids, pixels = torch.arange(80).reshape(2, 40) % 30 + 2, torch.randn(2, 3, 8, 8)
    inputs = {"input_ids": ids, "bbox": boxes, "attention_mask": mask, "pixel_values": pixels}
    return tiny_model("LayoutLMv3", **config, input_size=8, patch_size=4), inputs


V2, V3 = "layoutlmv2.LayoutLMv2", "layoutlmv3.LayoutLMv3"
ORDER = "pp_doclayout_v2.PPDocLayoutV2ReadingOrder"
FAMILY = Family(
    tiny,
    parts=(
        *variants(Boxes, f"{V2}SelfAttention", f"{V3}SelfAttention", f"{ORDER}SelfAttention"),
        *variants(LayoutLMv2, f"{V2}Encoder"),
        *variants(LayoutLMv3, f"{V3}Encoder"),
        *variants(ReadingOrder, f"{ORDER}Encoder"),
    ),
)
