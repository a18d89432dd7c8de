"""to_posenc, from_posenc: one attention layer of a transformers model as a `posenc.Attention`, and back.

    attention = hf.to_posenc(model.encoder.block[0].layer[0].SelfAttention)
    hf.from_posenc(attention, model.encoder.block[0].layer[0].SelfAttention)

The weights are copied. Residual and LayerNorm around attention are not part of it. Some layers need a module that the model
shares between them, as `shared`: a T5 layer after the first needs the first one (it has the table); a DeBERTa layer needs the
encoder (table and LayerNorm). An XLNet layer knows its sizes alone: without the model as `shared` it is read as one with
attn_type="bi", without clamp_len and bi_data, as XLNet was published.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import T5, Attention, DeBERTa, RoPE, XLNet
from ..encodings.rope import convert as rotary
from .swap import UnsupportedModel

Pairs = list[tuple[Tensor, Tensor]]  # ours, and a view of theirs with the same elements in the same order


def to_posenc(module: nn.Module, shared: nn.Module | None = None) -> Attention:
    """A posenc.Attention with the weights of a T5, DeBERTa, XLNet or Llama-like attention layer.

    Both take x [B, L, d_model]. Raises UnsupportedModel for another kind of layer.

        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4))
        >>> posenc.hf.to_posenc(model.layers[0].self_attn)(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
    """
    make, pairs = _family(module)
    attention = make(module, shared)
    weight = next(module.parameters())
    attention.to(weight.device, weight.dtype).train(module.training)
    with torch.no_grad():
        for ours, theirs in pairs(attention, module, shared):
            ours.copy_(theirs.reshape(ours.shape))
    return attention


def from_posenc(attention: Attention, module: nn.Module, shared: nn.Module | None = None) -> nn.Module:
    """Copy an Attention's weights into a transformers layer of the kind it was made from; returns the layer.

    Raises UnsupportedModel for another kind of layer.

        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4))
        >>> there = model.layers[0].self_attn
        >>> posenc.hf.from_posenc(posenc.hf.to_posenc(there), there) is there
        True
    """
    _, pairs = _family(module)
    with torch.no_grad():
        both = pairs(attention, module, shared)
        for ours, theirs in both:
            if ours.numel() != theirs.numel():
                raise ValueError(f"{list(ours.shape)} does not fit {list(theirs.shape)} of {type(module).__name__}")
        for ours, theirs in both:
            theirs.copy_(ours.reshape(theirs.shape))
    return module


def _linears(attention: Attention, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> Pairs:
    result: Pairs = []
    for ours, theirs in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v), (attention.o_proj, o)):
        result.append((ours.weight, theirs.weight))
        if theirs.bias is not None:
            result.append((ours.bias, theirs.bias))
    return result


# ---- T5 --------------------------------------------------------------------------------------------------------
def _t5_table(module: Any, shared: Any) -> Tensor:
    owner = module if module.has_relative_attention_bias else shared
    if owner is None or not getattr(owner, "has_relative_attention_bias", False):
        raise ValueError("this layer has no table; pass the layer that has it: to_posenc(layer, first)")
    return owner.relative_attention_bias.weight


def _t5(module: Any, shared: Any) -> Attention:
    _t5_table(module, shared)
    return Attention(
        module.d_model, module.n_heads, head_dim=module.key_value_proj_dim, encoding=T5.from_hf(module),
        causal=module.is_decoder, dropout=module.dropout,
    )  # fmt: skip


def _t5_pairs(attention: Any, module: Any, shared: Any) -> Pairs:
    table = (attention.encoding.table, _t5_table(module, shared))
    return [*_linears(attention, module.q, module.k, module.v, module.o), table]


# ---- DeBERTa: the layer is DebertaAttention or DebertaV2Attention, `self` and `output` together ----------------------
def _deberta(module: Any, shared: Any) -> Attention:
    core, config = module.self, module.config
    if not core.relative_attention or shared is None or not hasattr(shared, "rel_embeddings"):
        raise ValueError("DeBERTa's table is the encoder's; pass it: to_posenc(layer.attention, model.encoder)")
    if getattr(core, "talking_head", False):
        raise UnsupportedModel("DeBERTa's talking heads mix the scores of all heads, which posenc.Attention does not")
    return Attention(
        config.hidden_size, core.num_attention_heads, head_dim=core.attention_head_size, encoding=DeBERTa.from_hf(config),
        dropout=core.dropout.p, bias=True,
    )  # fmt: skip


def _deberta_pairs(attention: Any, module: Any, shared: Any) -> Pairs:
    core, position = module.self, attention.encoding
    pairs: Pairs = [(position.table, shared.rel_embeddings.weight[: position.table.shape[0]])]
    if "layer_norm" in getattr(shared, "norm_rel_ebd", ()):
        pairs += [(position.norm.weight, shared.LayerNorm.weight), (position.norm.bias, shared.LayerNorm.bias)]
    output = module.output.dense
    if hasattr(core, "query_proj"):
        pairs += _linears(attention, core.query_proj, core.key_proj, core.value_proj, output)
        own = [("pos_key", "pos_key_proj"), ("pos_query", "pos_query_proj")]
    else:
        heads = core.in_proj.weight.view(core.num_attention_heads, 3, core.attention_head_size, -1)
        for number, ours in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            pairs.append((ours.weight, heads[:, number]))
        attention.k_proj.bias.data.zero_()  # v1's keys have none
        pairs += [(attention.q_proj.bias, core.q_bias), (attention.v_proj.bias, core.v_bias)]
        pairs += [(attention.o_proj.weight, output.weight), (attention.o_proj.bias, output.bias)]
        own = [("pos_key", "pos_proj"), ("pos_query", "pos_q_proj")]
    for name, theirs in own:
        if getattr(position, name) is not None:
            linear = getattr(core, theirs)
            pairs.append((getattr(position, name).weight, linear.weight))
            if linear.bias is not None:
                pairs.append((getattr(position, name).bias, linear.bias))
    return pairs


# ---- XLNet -----------------------------------------------------------------------------------------------------
def _xlnet(module: Any, shared: Any) -> Attention:
    config = None if shared is None else getattr(shared, "config", None)
    if shared is not None and not hasattr(config, "clamp_len"):
        raise ValueError(f"an XLNet layer's shared module is the model, got {type(shared).__name__}")
    encoding = XLNet.from_hf(module if config is None else config)
    return Attention(
        module.d_model, module.n_head, head_dim=module.d_head, encoding=encoding, causal=encoding.attn_type == "uni",
        dropout=module.dropout.p,
    )  # fmt: skip


def _xlnet_pairs(attention: Any, module: Any, shared: Any) -> Pairs:
    position = attention.encoding
    linears = zip((attention.q_proj, attention.k_proj, attention.v_proj, position.position_proj), "qkvr", strict=True)
    pairs: Pairs = [(ours.weight, getattr(module, name).permute(1, 2, 0)) for ours, name in linears]
    pairs += [(attention.o_proj.weight, module.o), (position.segment_table, module.seg_embed)]
    biases = {"content_bias": "r_w_bias", "position_bias": "r_r_bias", "segment_bias": "r_s_bias"}
    return pairs + [(getattr(position, ours), getattr(module, theirs)) for ours, theirs in biases.items()]


# ---- Llama-like ------------------------------------------------------------------------------------------------
def _llama(module: Any, shared: Any) -> Attention:
    if hasattr(module, "q_norm"):
        raise UnsupportedModel(f"{type(module).__name__} normalises queries and keys, which posenc.Attention does not")
    rope: RoPE = rotary.from_config(module.config)
    if rope.rotary_dim != module.head_dim:
        raise UnsupportedModel(
            f"{type(module).__name__} rotates whole heads of {module.head_dim} channels, and its configuration's "
            f"partial_rotary_factor says {rope.rotary_dim}; take it out of the configuration for the model's own numbers"
        )
    if abs(module.scaling - module.head_dim**-0.5) > 1e-6:
        raise UnsupportedModel(f"{type(module).__name__} scales scores by {module.scaling}, not by 1/sqrt(head_dim)")
    holder = module.config if "Mistral" in type(module).__name__ else module  # Mistral's layers read it at each call
    width = getattr(holder, "sliding_window", None)
    return Attention(
        module.q_proj.in_features, module.q_proj.out_features // module.head_dim, head_dim=module.head_dim,
        kv_heads=module.k_proj.out_features // module.head_dim, encoding=rope, causal=True,
        window=None if width is None else (width - 1, None), dropout=module.attention_dropout, bias=module.q_proj.bias is not None,
        out_bias=module.o_proj.bias is not None,
    )  # fmt: skip


def _llama_pairs(attention: Any, module: Any, shared: Any) -> Pairs:
    return _linears(attention, module.q_proj, module.k_proj, module.v_proj, module.o_proj)


_FAMILIES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("T5Attention", "MT5Attention", "UMT5Attention"), (_t5, _t5_pairs)),
    **dict.fromkeys(("DebertaAttention", "DebertaV2Attention"), (_deberta, _deberta_pairs)),
    "XLNetRelativeAttention": (_xlnet, _xlnet_pairs),
    **dict.fromkeys(("LlamaAttention", "MistralAttention", "Qwen2Attention"), (_llama, _llama_pairs)),
}


def _family(module: nn.Module):
    try:
        return _FAMILIES[type(module).__name__]
    except KeyError:
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be converted; the layers that can are {', '.join(_FAMILIES)}"
        ) from None
