"""Positions of images, one axis after the other: SAM, SAM-HQ, ViTDet, SegGPT, GOT-OCR2, and copies of SAM's vision encoder.

    s = q·k / sqrt(d) + q·R_rows[row_i - row_j] + q·R_columns[column_i - column_j]

These layers call no interface. They stand for SamVisionAttention and SamVisionSdpaAttention (modeling_sam.py 716-905 of
transformers 5.22), VitDetAttention (modeling_vitdet.py 201-268), SegGptAttention (modeling_seggpt.py 227-360), and the copies
of SAM's named below. The originals write both terms of all pairs, [B, H, L, L]: 800 MB for one image of 64 x 64 patches. Here they
stay compact: one number for each query and image row, and one for each query and image column.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .. import Index, Lookup, Plan, Positions, attend
from ..nn import blocks
from .family import Family, tiny_model, variants
from .interface import are_collected
from .layer import Layer


class Decomposed(Layer):
    """SAM's vision encoder."""

    encoding = "decomposed"
    on_cpu, on_gpu = blocks.NAME, "sdpa"
    relies_on = {"forward": ("hidden_states", "output_attentions")}
    posenc_heads = property(lambda self: self.num_attention_heads)
    posenc_has_positions = property(lambda self: bool(self.use_rel_pos))
    posenc_dropout = property(lambda self: self.dropout)

    def posenc_plan(self, grid: tuple[int, int]) -> Plan:
        tokens = torch.arange(grid[0] * grid[1], device=self.rel_pos_h.device)
        rows, columns = tokens // grid[1], tokens % grid[1]
        reach = grid[0] - 1
        at = Positions(rows, rows, reach=(-reach, reach), more=[(columns, columns, (0, grid[1] - 1))])
        lookups = []
        for axis, (size, table) in enumerate(zip(grid, (self.rel_pos_h, self.rel_pos_w), strict=True)):
            pairs = blocks.rows_of_pairs(table, size)
            # by key minus query, from 1 - size on; the plan's dot products stand inside the scale
            table = torch.cat((pairs[:, 0].flip(0), pairs[0, 1:])) / self.scale
            lookups.append(Lookup(Index(1 - size, size - 1, axis=axis), dot_query=table[None]))
        return Plan(at, lookups=tuple(lookups), scale=self.scale)

    def posenc_attend(self, states: Tensor) -> Tensor:
        """[B, rows, columns, channels] -> the same."""
        batch, height, width, channels = states.shape
        heads, length = self.posenc_heads, height * width
        shape = (batch, length, 3, heads, channels // heads)
        q, k, v = self.qkv(states).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.posenc_dropout if self.training else 0.0
        if blocks.is_auto(self):
            tables = self.rel_pos_h, self.rel_pos_w
            out = blocks.attend_axes(q, k, v, (height, width), *tables, scale=self.scale, dropout=dropout)
        else:
            out = attend(q, k, v, self.posenc_plan((height, width)), dropout=dropout, engine=self.posenc_engine)
        out = out.transpose(1, 2)
        return self.proj(out.reshape(batch, height, width, channels))

    def forward(self, hidden_states, output_attentions=None):
        if output_attentions or are_collected() or not self.posenc_has_positions:
            return super().forward(hidden_states, output_attentions)
        return self.posenc_attend(hidden_states), None


class WithoutDropout(Decomposed):
    """SAM's "sdpa" layers have none."""

    posenc_dropout = 0.0


class SegGpt(WithoutDropout):
    posenc_has_positions = property(lambda self: bool(self.use_relative_position_embeddings))


class VitDet(SegGpt):
    relies_on = {"forward": ("hidden_state", "output_attentions")}
    posenc_heads = property(lambda self: self.num_heads)

    def forward(self, hidden_state, output_attentions=False):
        if output_attentions or are_collected() or not self.posenc_has_positions:
            return super(Decomposed, self).forward(hidden_state, output_attentions)
        return (self.posenc_attend(hidden_state),)


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    """Two layers, one in windows of 3 x 3, in an image of 5 x 5 patches; those that end in a language model: their encoder."""
    pixels = torch.randn(2, 3, 10, 10)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=2)
    if folder == "vitdet":
        model = tiny_model(
            "VitDet", **sizes, image_size=10, pretrain_image_size=10, window_block_indices=[0], window_size=3,
            use_relative_position_embeddings=True, mlp_ratio=1,
        )  # fmt: skip
        return model, {"pixel_values": pixels}
    if folder == "seggpt":
        model = tiny_model(
            "SegGpt", **sizes, image_size=[12, 6], pretrain_image_size=6, mlp_dim=16, merge_index=0,
            intermediate_hidden_state_indices=[0, 1], decoder_hidden_size=4,
        )  # fmt: skip
        half = torch.randn(2, 3, 6, 6)
        return model, dict(pixel_values=half, prompt_pixel_values=half, prompt_masks=half)
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    prefix = ENCODERS[folder]
    config = getattr(configuration, f"{prefix}VisionConfig")(
        **sizes, output_channels=8, image_size=10, window_size=3, global_attn_indexes=[1], mlp_dim=16, mlp_ratio=1.0
    )
    for name, small in (("downsample_channels", [8, 8]), ("post_conv_in_channels", 8), ("decoder_hidden_size", 8)):
        if hasattr(config, name):
            setattr(config, name, small)
    cls = getattr(modeling, f"{prefix}VisionEncoder", None) or getattr(modeling, f"{prefix}VisionModel")
    return cls(config), {"pixel_values": pixels}


ENCODERS = {
    "sam": "Sam", "sam_hq": "SamHQ", "got_ocr2": "GotOcr2", "pp_formulanet": "PPFormulaNet", "slanext": "SLANeXt",
    "unlimited_ocr": "UnlimitedOcrSam", "deepseek_ocr2": "DeepseekOcr2Sam",
}  # fmt: skip
"""Folder -> the prefix of its copy of SAM's vision encoder."""
COPIES = [f"{folder}.{prefix}" for folder, prefix in ENCODERS.items()]

FAMILY = Family(
    tiny,
    parts=(
        *variants(Decomposed, *(f"{copy}VisionAttention" for copy in COPIES)),
        *variants(WithoutDropout, *(f"{copy}VisionSdpaAttention" for copy in COPIES)),
        *variants(SegGpt, "seggpt.SegGptAttention"),
        *variants(VitDet, "vitdet.VitDetAttention"),
    ),
)
