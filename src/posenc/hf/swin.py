"""Windows of images: Swin (v1), Donut's, MaskFormer's and CLAP's copies of it, Swin v2 and Swin2SR.

    v1   s = q·k / sqrt(d) + b[h, row_i - row_j, column_i - column_j]
    v2   s = τ_h cos(q, k) + 16 sigmoid(MLP(g(row_i - row_j), g(column_i - column_j)))_h

    windows shifted by half of themselves get -100 where two tokens are no neighbours in the image; v2 adds it twice

Swin calls the interface, but adds bias and mask itself, [B * windows, H, L, L]; its forward is replaced. The others call none.
They stand for, in transformers 5.22, DonutSwinSelfAttention (modeling_donut_swin.py 317-407), MaskFormerSwinSelfAttention
(modeling_maskformer_swin.py 268-358), ClapAudioSelfAttention (modeling_clap.py 324-414), Swinv2SelfAttention
(modeling_swinv2.py 366-499) and Swin2SRSelfAttention (modeling_swin2sr.py 205-338). The originals read the table, and (v2) run
its network, in every call, though it changes in training only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from .. import Index, Lookup, Plan, Positions
from ..encodings.grid.positions import flatten, reach_of
from ..nn import blocks
from .family import Family, InterfaceLayer, tiny_model, variants
from .layer import Layer, split

ALL = slice(None)


def plan_window(table: Tensor, window: tuple[int, int], scale: float) -> Plan:
    """table [(2 rows - 1)(2 columns - 1), H], query minus key."""
    reach = reach_of(window)
    positions = flatten(Positions(window[0] * window[1]), window, table.device)
    return Plan(positions, lookups=(Lookup(Index(-reach, reach), bias=table.t().flip(1)),), scale=scale)


def attend_window(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tables: tuple[Tensor, ...],
    table: Callable[[], Tensor], index: Tensor, window: tuple[int, int], *, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """mask: [windows of an image, L, L], added to the scores; q, k and v are [B * windows, H, L, D].
    tables: the parameters that table() is made of; index: int64, its row for each pair."""
    length = q.shape[2]
    if blocks.is_auto(module) and not blocks.on_cpu(q):  # a window is too small for an engine on a GPU
        bias = blocks.read_table(table(), index.view(length, length))
        bias = blocks.add_window_mask(slice(0, q.shape[0]), ALL, bias, mask)
        dropout = dropout if module.training else 0.0
        out = scaled_dot_product_attention(q, k, v, bias.to(q.dtype), dropout, scale=scale)
        return out.transpose(1, 2).flatten(2)
    bias = blocks.keep(
        module, (q.dtype, length), tables, lambda: blocks.read_table(table(), index.view(length, length)).to(q.dtype)
    )
    tensors = (bias,) if mask is None else (bias, mask.to(q.dtype))
    return blocks.run(
        module, q, k, v, blocks.add_window_mask, tensors, lambda: plan_window(table(), window, scale),
        lambda: {} if mask is None else {"mask": mask.repeat(q.shape[0] // len(mask), 1, 1)[:, None]},
        scale=scale, dropout=dropout, plain_gradients=True,
    )  # fmt: skip


# ---- Swin ------------------------------------------------------------------------------------------------------------
def swin_forward(module: Any, original: Callable, hidden_states, attention_mask=None, **kwargs):
    if kwargs.get("output_attentions"):
        return original(hidden_states, attention_mask, **kwargs)
    q, k, v = (split(f(hidden_states), module.head_dim) for f in (module.q_proj, module.k_proj, module.v_proj))
    bias = module.relative_position_bias
    table = bias.relative_position_bias_table
    out = attend_window(
        module, q, k, v, attention_mask, (table,), lambda: table, bias.relative_position_index, bias.window_size,
        scale=module.scaling, dropout=module.attention_dropout,
    )  # fmt: skip
    return module.o_proj(out), None


class Swin(InterfaceLayer):
    encoding = "grid_bias"
    relies_on = {"forward": ("hidden_states", "attention_mask")}
    attributes = (
        "q_proj", "k_proj", "v_proj", "o_proj", "relative_position_bias", "head_dim", "scaling", "attention_dropout",
    )  # fmt: skip
    replaces = {"forward": swin_forward}
    on_cpu, on_gpu = blocks.NAME, "sdpa"

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        return None


# ---- its copies, and v2 ----------------------------------------------------------------------------------------------
class Window(Layer):
    """Window attention with a table over the rows and columns of the window."""

    encoding = "grid_bias"
    on_cpu, on_gpu = blocks.NAME, "sdpa"
    relies_on = {"forward": ("hidden_states", "attention_mask", "output_attentions")}

    def posenc_table(self) -> Tensor:
        return self.relative_position_bias_table

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        if output_attentions:
            return super().forward(hidden_states, attention_mask, output_attentions)
        size = self.attention_head_size
        q, k, v = (split(project(hidden_states), size) for project in (self.query, self.key, self.value))
        return (self.posenc_attend(q, k, v, attention_mask),)

    def posenc_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        tables = (self.relative_position_bias_table,)
        return attend_window(
            self, q, k, v, mask, tables, self.posenc_table, self.relative_position_index, self.window_size,
            scale=self.attention_head_size**-0.5, dropout=self.dropout.p,
        )  # fmt: skip


class CosineWindow(Window):
    encoding = "continuous_bias"

    def posenc_table(self) -> Tensor:
        heads = self.num_attention_heads
        return 16 * self.continuous_position_bias_mlp(self.relative_coords_table).view(-1, heads).sigmoid()

    def posenc_attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        tables = tuple(self.continuous_position_bias_mlp.parameters())
        scale = self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()
        return attend_window(
            self, normalize(q, dim=-1) * scale, normalize(k, dim=-1), v, None if mask is None else 2 * mask, tables,
            self.posenc_table, self.relative_position_index, self.window_size, scale=1.0, dropout=self.dropout.p,
        )  # fmt: skip


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    """Two stages of two layers each, windows of 4 x 4 in images of 8 x 8 patches."""
    if folder == "clap":
        model = tiny_model(
            "ClapAudio", spec_size=32, patch_size=4, patch_stride=[4, 4], patch_embeds_hidden_size=16, depths=[2, 2],
            num_hidden_layers=2, num_attention_heads=[2, 4], window_size=4, num_mel_bins=32, hidden_size=32,
            drop_path_rate=0.0, enable_fusion=False,
        )  # fmt: skip
        return model, {"input_features": torch.randn(2, 1, 32, 32), "is_longer": torch.zeros(2, 1, dtype=torch.bool)}
    sizes: dict[str, Any] = dict(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0
    )
    if folder == "swin2sr":
        sizes.update(patch_size=1, depths=[2], num_channels_out=3, upscale=2)
    if folder == "maskformer":
        from transformers.models.maskformer import modeling_maskformer_swin

        config = modeling_maskformer_swin.MaskFormerSwinConfig(**sizes)
        model = modeling_maskformer_swin.MaskFormerSwinModel(config)
    else:
        names = {"swin": "Swin", "donut": "DonutSwin", "swinv2": "Swinv2", "swin2sr": "Swin2SR"}
        model = tiny_model(names[folder], **sizes)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}


COPIES = (
    "donut.modeling_donut_swin.DonutSwinSelfAttention", "maskformer.modeling_maskformer_swin.MaskFormerSwinSelfAttention",
    "clap.ClapAudioSelfAttention",
)  # fmt: skip
FAMILY = Family(
    tiny,
    parts=(
        *variants(Swin, "swin.SwinAttention"),
        *variants(Window, *COPIES),
        *variants(CosineWindow, "swinv2.Swinv2SelfAttention", "swin2sr.Swin2SRSelfAttention"),
    ),
)
