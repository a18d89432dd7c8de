"""BEiT and Data2VecVision: a bias for each difference of rows and columns of the whole image, and three for the class token.

    s = q·k / sqrt(d) + b[h, row_i - row_j, column_i - column_j]

BEiT's layers call the interface, which gets the bias as a dense mask, [1, H, L, L]. The module that makes it is overridden: it has
no configuration that could say which attention runs. It stands for BeitRelativePositionBias (modeling_beit.py 179-265 of
transformers 5.22) and Data2VecVisionRelativePositionBias (modeling_data2vec_vision.py 545-630), which interpolate the table to
its own size, gather rows of H numbers, and transpose them, in every layer and call. Data2VecVision's attention
(modeling_data2vec_vision.py 195-315) calls no interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import Plan, Positions
from ..core.memo import Memo, may_keep
from ..nn import blocks
from .family import SIZES, Family, InterfaceLayer, tiny_model, variants
from .layer import Layer, Part, split


class GridTable(Part):
    """The module that makes a dense bias out of the table."""

    relies_on = {"forward": ("window_size", "interpolate_pos_encoding", "dim_size")}

    def forward(self, window_size, interpolate_pos_encoding=False, dim_size=None):
        window = tuple(window_size)
        # the original interpolates the table as columns times rows, which is itself for a square only
        if interpolate_pos_encoding or window != tuple(self.window_size) or window[0] != window[1]:
            return super().forward(window_size, interpolate_pos_encoding, dim_size)
        table = self.relative_position_bias_table
        index = _on_device(self.generate_relative_position_index(window), window, table.device)
        if not blocks.on_cpu(table) and not (torch.is_grad_enabled() and table.requires_grad):
            # a GPU gathers rows faster than columns; their gradient is what takes long there
            return table[index].permute(2, 0, 1).contiguous()[None]
        return blocks.keep(self, window, (table,), lambda: blocks.read_table(table, index))


_indices = Memo(8, 1 << 24)


def _on_device(index: Tensor, window: tuple[int, int], device: torch.device) -> Tensor:
    """The original copies it to a GPU in every layer and call, and waits for that: 8 MiB for an image of 32 x 32 patches."""
    if index.device == device:
        return index
    found = _indices.get((window, device))
    if found is None:
        with torch.inference_mode(False):  # a later call may train
            found = index.to(device)
        if may_keep(device):
            _indices.put((window, device), found, found.numel())
    return found


class Beit(InterfaceLayer):
    encoding = "grid_bias"
    relies_on = {"forward": ("hidden_states", "attention_mask")}
    attributes = ("head_dim", "num_attention_heads", "scaling")
    on_cpu = on_gpu = "sdpa"

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        return None


class Data2VecVision(Layer):
    encoding = "grid_bias"
    on_cpu, on_gpu = blocks.NAME, "sdpa"
    relies_on = {
        "forward": (
            "hidden_states", "output_attentions", "relative_position_bias", "interpolate_pos_encoding", "resolution",
        )
    }  # fmt: skip

    def forward(
        self, hidden_states, output_attentions=False, relative_position_bias=None, interpolate_pos_encoding=False,
        resolution=None,
    ):  # fmt: skip
        own = self.relative_position_bias if self.has_relative_position_bias else None
        if output_attentions or (own is None and relative_position_bias is None):
            return super().forward(
                hidden_states, output_attentions, relative_position_bias, interpolate_pos_encoding, resolution
            )
        size = self.attention_head_size
        q, k, v = (split(project(hidden_states), size) for project in (self.query, self.key, self.value))
        bias = relative_position_bias
        if own is not None:
            patches = tuple(side // self.config.patch_size for side in resolution)
            made = own(patches, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            bias = made if bias is None else made + bias
        if not blocks.in_blocks(self, q):
            return self.posenc_run_dense(q, k, v, bias, size**-0.5, self.dropout.p), None
        out = blocks.run(
            self, q, k, v, _rows_of, (bias,), lambda: Plan(Positions(q.shape[2]), scale=size**-0.5), lambda: {"mask": bias},
            scale=size**-0.5, dropout=self.dropout.p, plain_gradients=True,
        )  # fmt: skip
        return out, None


def _rows_of(images: slice, rows: slice, bias: Tensor) -> Tensor:
    return bias[:, :, rows]


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    name = {"beit": "Beit", "data2vec": "Data2VecVision"}[folder]
    image = dict(image_size=8, patch_size=2, use_relative_position_bias=True, drop_path_rate=0.0)
    return tiny_model(name, vocab_size=9, **SIZES, **image), {"pixel_values": torch.randn(2, 3, 8, 8)}


VISION = "data2vec.modeling_data2vec_vision.Data2VecVision"
FAMILY = Family(
    tiny,
    parts=(
        *variants(GridTable, "beit.BeitRelativePositionBias", f"{VISION}RelativePositionBias"),
        *variants(Beit, "beit.BeitAttention"),
        *variants(Data2VecVision, f"{VISION}SelfAttention", f"{VISION}SdpaSelfAttention"),
    ),
)
