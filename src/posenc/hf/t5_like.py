"""Switch Transformers, Pop2Piano, Pix2Struct's text decoder and UDOP: T5's attention under other names (t5.py).

UDOP's encoder adds biases by the boxes of words to T5's, dense, [B, H, L, L], and hands that to its layers: they differ between
pages, and stay dense. Switch Transformers' encoder makes its padding mask itself; here its layers read it as padding again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import Positions
from ..core import index
from .family import Family, tiny_model, tiny_text, variants
from .interface_mask import Mask
from .layer import zeros_beside
from .t5 import T5_SIZES, T5Attention, before_layer, plan_bias, tiny_pair


def before_switch(module: Any, args: tuple, kwargs: dict[str, Any]):
    args, kwargs = before_layer(module, args, kwargs)
    mask: Any = kwargs.get("mask")
    crosses = kwargs.get("key_value_states") is not None
    is_padding = isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 4 and mask.shape[2] == 1
    if is_padding and not torch.compiler.is_compiling() and mask.is_cpu:  # masks of fractions stay what they are
        is_padding = bool(((mask == 0) | (mask == torch.finfo(mask.dtype).min)).all())
    if is_padding and not crosses and not module.is_decoder and module.config._attn_implementation == "posenc":
        sizes = (0, mask.shape[3]), (0, mask.shape[3])
        kwargs = {**kwargs, "mask": Mask(
            mask.shape[0], *sizes, mask[:, 0, 0] == 0, causal=False, window=None, documents=None, device=mask.device
        )}  # fmt: skip
    return args, kwargs


class Switch(T5Attention):
    hook = before_switch

    @staticmethod
    def needs_hook(module):
        return True


def before_pix2struct(module: Any, args: tuple, kwargs: dict[str, Any]):
    crosses = kwargs.get("key_value_states") is not None
    if crosses and kwargs.get("position_bias") is None and module.config._attn_implementation == "posenc":
        empty = zeros_beside(module.query, module.n_heads, 0)
        kwargs = {**kwargs, "position_bias": empty.requires_grad_(module.training)}
    return args, kwargs


class Pix2Struct(T5Attention):
    hook = before_pix2struct

    @staticmethod
    def needs_hook(module):
        return not module.is_causal

    @staticmethod
    def prepare(module):
        buckets, most = module.relative_attention_num_buckets, module.relative_attention_max_distance
        return {"posenc_index": index.log_buckets(buckets, most, causal=True)}

    @staticmethod
    def sample(module, length):
        crosses = not module.is_causal
        bias = zeros_beside(module.query, module.n_heads, 0 if crosses else module.posenc_index.span)
        plan = plan_bias(Positions(length), index=module.posenc_index, bias=bias, scale=module.scaling)
        return module.n_heads, module.key_value_proj_dim, plan, {"causal": not crosses}


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    import transformers

    both = tiny_pair()
    if folder == "pix2struct":
        decoder = dict(hidden_size=16, is_decoder=True, initializer_range=0.02)
        return tiny_model("Pix2StructText", **T5_SIZES, **decoder), tiny_text()
    if folder == "switch_transformers":
        sparse = dict(num_sparse_encoder_layers=0, num_experts=2, num_sparse_decoder_layers=0, num_decoder_layers=2)
        return tiny_model("SwitchTransformers", **T5_SIZES, **sparse, d_model=16), both
    if folder == "pop2piano":
        model = transformers.Pop2PianoForConditionalGeneration(transformers.Pop2PianoConfig(**T5_SIZES, d_model=16))
        states = torch.randn(*both.pop("input_ids").shape, 16)
        return model, {"inputs_embeds": states, **both}
    image = dict(image_size=8, patch_size=4, max_2d_position_embeddings=50)
    corner = torch.rand(*both["input_ids"].shape, 2) / 2
    return tiny_model("Udop", **T5_SIZES, **image, d_model=16), {**both, "bbox": torch.cat((corner, corner + 0.3), -1)}


FAMILY = Family(
    tiny,
    parts=(
        *variants(T5Attention, "pop2piano.Pop2PianoAttention", "udop.UdopAttention"),
        *variants(Switch, "switch_transformers.SwitchTransformersAttention"),
        *variants(Pix2Struct, "pix2struct.Pix2StructTextAttention"),
    ),
)
