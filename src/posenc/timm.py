"""posenc.timm: the drop-in for timm's vision models.

    posenc.timm.accelerate(model)      the same numbers; biases that change in training only are kept, the rest is made in blocks
    posenc.timm.report(model)          what was replaced
    posenc.timm.restore(model)         undo

    Swin, Swin v2 CR, BEiT, MaxViT, CoAtNet, GCViT, ViT with relative positions    the module's method that makes the bias, [1, H, L, L]
    Swin v2, SAM's encoder                                                         the forward of the attention

Methods of instances are replaced, and no class is: parameters, state_dict, hooks and training stay. Rotary models (EVA, NaFlexViT)
rotate queries and keys and then call PyTorch's attention, so there is nothing to do. `accelerate` compares each replaced method
with the original's result once, and refuses what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from .nn import blocks

__all__ = ["accelerate", "report", "restore"]

Model = TypeVar("Model", bound=nn.Module)
"""The class of the caller's model."""
KEPT = {
    "RelPosMlp": ("get_bias", "rel_coords_log"), "RelPosBiasTf": ("get_bias", "relative_position_bias_table"),
    "WindowMultiHeadAttention": ("_relative_positional_encodings", "logit_scale"),
}  # fmt: skip
"""Class -> the method that makes the bias of a network or of products, and a tensor that says where the module is."""


def accelerate(model: Model) -> Model:
    """Replace the attention biases of a timm model; returns the same model. `restore` undoes it."""
    found = [(module, name, function) for module in model.modules() for name, function in _replacements(module)]
    if not found and not report(model):
        raise ValueError(
            f"{type(model).__name__} has no relative position bias that posenc.timm knows; it knows those of Swin, Swin v2, "
            "BEiT, MaxViT, CoAtNet, GCViT, relative ViTs and SAM. Rotary and absolute positions need nothing"
        )
    for module, name, function in found:
        if name != "forward":
            _check(module, name, function)
    for module, name, function in found:
        module.__dict__[name] = partial(function, module)
        module.__dict__["posenc_replaced"] = name
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`; returns the same model."""
    for module in model.modules():
        name = module.__dict__.pop("posenc_replaced", None)
        if name is not None:
            del module.__dict__[name]
    return model


def report(model: nn.Module) -> dict[str, str]:
    """Module -> its class and the method that is replaced."""
    return {
        name: f"{type(module).__name__}.{module.__dict__['posenc_replaced']}"
        for name, module in model.named_modules()
        if "posenc_replaced" in module.__dict__
    }


def _replacements(module: nn.Module) -> list[tuple[str, Callable]]:
    cls = type(module)
    if not cls.__module__.startswith("timm.") or "posenc_replaced" in module.__dict__:
        return []
    file = cls.__module__.rsplit(".", 1)[1]
    for name in ("get_bias", "_get_rel_pos_bias"):
        table = getattr(module, "relative_position_bias_table", None)
        if hasattr(cls, name) and table is not None and table.dim() == 2:
            return [(name, partial(read_bias, name))]
    if cls.__name__ in KEPT:
        name, where = KEPT[cls.__name__]
        return [(name, partial(keep_bias, name, where))] if hasattr(cls, name) else []
    if file == "swin_transformer_v2" and cls.__name__ == "WindowAttention":
        return [("forward", attend_cosine)]
    if file == "vision_transformer_sam" and cls.__name__ == "Attention" and module.use_rel_pos:
        return [("forward", attend_decomposed)]
    return []


def _check(module: Any, name: str, function: Callable) -> None:
    trains = {one: one.training for one in module.modules()}
    with torch.no_grad():
        module.eval()  # networks that make biases have dropout
        theirs, ours = getattr(module, name)(), function(module)
    for one, was in trains.items():
        one.training = was
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
        raise ValueError(f"{type(module).__name__}.{name} of this timm does not make the bias that posenc expects")


# ---- biases, [1, H, L, L] --------------------------------------------------------------------------------------------
def read_bias(name: str, module: Any) -> Tensor:
    """What the method `name` reads out of a table [n, H]."""
    table = module.relative_position_bias_table
    if not table.is_cpu and not (torch.is_grad_enabled() and table.requires_grad):
        # a GPU gathers rows faster than columns; their gradient is what takes long there
        return getattr(type(module), name)(module)
    index = module.relative_position_index
    length = math.isqrt(index.numel())
    make = partial(blocks.read_table, table, index.view(length, length))
    return make() if module.training else blocks.keep(module, module.window_size, (table,), make)


def keep_bias(name: str, where: str, module: Any) -> Tensor:
    """What the method `name` makes, kept on a CPU; not in training, where networks have dropout. where: a tensor of the module."""
    original = getattr(type(module), name)
    if module.training or torch.is_grad_enabled() or not getattr(module, where).is_cpu:
        return original(module)
    tables = tuple(getattr(module, "meta_mlp", module).parameters())
    return blocks.keep(module, module.window_size, tables, partial(original, module))


# ---- attention -------------------------------------------------------------------------------------------------------
def attend_cosine(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin v2: τ_h cos(q, k) + 16 sigmoid(MLP(coordinates)); mask [windows, L, L]."""
    bias = None if module.q_bias is None else torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if bias is None or module.qkv_bias_separate:
        mixed = module.qkv(x) if bias is None else module.qkv(x) + bias
    else:
        mixed = linear(x, module.qkv.weight, bias)
    q, k, v = mixed.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    length = x.shape[1]
    index = module.relative_position_index.view(length, length)

    def make() -> Tensor:
        table = 16 * module.cpb_mlp(module.relative_coords_table).view(-1, module.num_heads).sigmoid()
        return blocks.read_table(table, index).to(q.dtype)

    made = blocks.keep(module, (module.window_size, q.dtype), tuple(module.cpb_mlp.parameters()), make)
    tensors = (made,) if mask is None else (made, mask.to(q.dtype))
    scale = module.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()
    out = blocks.attend_blocks(
        normalize(q, dim=-1) * scale, normalize(k, dim=-1), v, blocks.add_window_mask, tensors, scale=1.0,
        dropout=module.attn_drop.p if module.training else 0.0, plain_gradients=True,
    )  # fmt: skip
    return module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))


def attend_decomposed(module: Any, x: Tensor) -> Tensor:
    """SAM: q·k / sqrt(d) + q·R_rows + q·R_columns; x [B, rows, columns, channels]."""
    batch, height, width, channels = x.shape
    q, k, v = module.qkv(x.flatten(1, 2)).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = module.q_norm(q), module.k_norm(k)
    dropout = module.attn_drop.p if module.training else 0.0
    tables = module.rel_pos_h, module.rel_pos_w
    out = blocks.attend_axes(q, k, v, (height, width), *tables, scale=module.scale, dropout=dropout)
    return module.proj_drop(module.proj(out.transpose(1, 2).reshape(batch, height, width, channels)))
