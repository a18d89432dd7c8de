"""attn_implementation="posenc": transformers' attention interface and mask interface.

    import posenc.hf
    AutoModel.from_pretrained(name, attn_implementation="posenc")
    model.set_attn_implementation("posenc")

`make_mask` (interface_mask.py) is what transformers calls once in a forward pass, `attention` in every layer. A call without
positional terms and with a mask that PyTorch's kernels take is transformers' own "sdpa" function. Terms come from the layers
that `accelerate` prepares (`posenc_layer`, see family.py), or dense as `position_bias`. A layer that passes an argument which
its own eager attention takes and nobody here has read runs that eager attention.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import output_capturing

from .. import Plan, Positions, attend
from ..core.precision import autocast_is_on
from ..core.torch_modes import is_exporting
from ..functional import scores
from . import construction, rules
from .interface_mask import ALL, Mask, add_bias, as_summand, is_eager_only, make_mask
from .layer import NO_ATTENTIONS, NO_CACHE, attend_together, log_once, own_class

NAME = "posenc"
COLLECTED = getattr(output_capturing, "_active_collector", None)
EAGER = "eager_attention_forward"
NO_TERMS: Any = object()
"""What `plan_of` returns for a call without terms, whatever its `position_bias` is."""
PRECISE = (torch.float32, torch.float64)
KNOWN = frozenset(
    (
        "position_ids", "sliding_window", "cache", "output_attentions", "s_aux", "sinks", "softcap", "indices", "block_indices",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "use_cache", "position_embeddings",
    )
)  # fmt: skip
"""Further arguments that are read here, or that change nothing."""
ALWAYS_WANTS = frozenset(("transformers.models.bridgetower.modeling_bridgetower",))
"""Files whose models return attention weights without a request, and do not pass one on."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, position_bias: Any = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[B, H, L, D] each -> (out [B, L, H, D], probabilities where output_attentions is True, else None)."""
    if autocast_is_on(query.device):  # rotated queries and keys may be float32 beside values of the lower precision
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    kind = own_class(type(module))
    file = kind.__module__
    others = tuple(name for name in kwargs if name not in KNOWN and kwargs[name] is not None)
    if others and _is_for_eager(file, kind.__name__, others):
        return _by_eager(module, query, key, value, attention_mask, scaling, dropout, position_bias, kwargs)
    own = module.__dict__
    layer, engine, context = own.get("posenc_layer"), own.get("posenc_engine", "auto"), own.get("posenc_context")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and attention_mask is None and is_causal is None and is_eager_only(file):
        causal = False
    if attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]:
        # the start of a text in an empty static cache, for which transformers makes no mask: the rest of its slots is empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        if isinstance(position_bias, Tensor) and position_bias.dim() == 4:
            position_bias = position_bias[..., : query.shape[2]]
    if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
        attention_mask = _selected(module, query, key, attention_mask, kwargs)
    wants = bool(kwargs.get("output_attentions")) or are_collected() or file in ALWAYS_WANTS
    make = None
    if layer is not None:
        make = layer.plan_of(module, position_bias, scaling, query, {**kwargs, "attention_mask": attention_mask})
        if make is NO_TERMS:
            make = position_bias = None
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    sinks = kwargs.get("sinks") if sinks is None else sinks  # [H], or each query's own, [B, H, Lq, 1]
    if sinks is not None and sinks.dim() == 1 and (make is not None or (query.is_cuda and context is None)):
        sinks = sinks.view(1, -1, 1, 1)  # beside a plan without sinks, whose calls a GPU recognises again
    if wants and sinks is not None and make is None and context is None and _eager_of(file) is not None:
        # what the weights are beside a sink is up to the model: Granite's leave it out
        return _by_eager(module, query, key, value, attention_mask, scaling, dropout, position_bias, kwargs)
    plain = make is None and not wants and engine == "auto" and context is None
    plain = plain and not is_exporting()  # `attend` chooses what can be exported for every length
    if plain and query.is_cpu and kwargs.get("cache") is None and not torch.compiler.is_compiling():
        if sinks is None:
            out = _on_cpu(query, key, value, attention_mask, position_bias, causal, scaling, dropout, softcap)
        else:
            extra = softcap is not None or dropout > 0.0
            out = None if extra else _beside_sink(query, key, value, attention_mask, position_bias, sinks, scaling)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    options = _options(attention_mask, query, key, causal, context is not None)
    if make is None and position_bias is not None:
        bias = position_bias if isinstance(position_bias, Tensor) else _dense(position_bias)[..., : key.shape[2]]
        if isinstance(attention_mask, Mask) and context is None and bias.shape[-1] == key.shape[2]:
            options = {"mask": attention_mask.with_bias(bias)}
        else:
            options["mask"] = add_bias(options.get("mask"), bias)
    plain = plain and softcap is None and sinks is None
    if plain and (kwargs.get("cache") is not None or _is_sdpa(options, query, key)):
        return _by_sdpa(module, query, key, value, options, scaling, dropout, kwargs)
    if make is None:
        make = partial(Plan, scale=scaling, sinks=sinks if sinks is None or sinks.dim() == 1 else None)
    if context is not None:
        if sinks is not None and sinks.dim() > 1:
            raise ValueError(
                f"{type(module).__name__} has a sink for each query, which context_parallel cannot share; leave it out"
            )
        if wants:
            raise ValueError(NO_ATTENTIONS)
        if query.shape[2] != key.shape[2] and options.get("causal"):
            raise ValueError(NO_CACHE)
        out = attend_together(query, key, value, make, context, engine, dropout, options)
        return out.transpose(1, 2).contiguous(), None
    plan = make(_positions(attention_mask, query, key))
    if wants or softcap is not None:
        out, weights = _by_scores(query, key, value, plan, options, dropout, softcap, sinks)
        return out, weights if wants else None
    options |= {"dropout": dropout, "engine": engine}
    if sinks is not None and sinks.dim() > 1:
        # softmax beside one more score: e^s / (Z + e^sink) = e^s / Z · sigmoid(log Z - sink)
        out, lse = attend(query, key, value, plan, return_lse=True, **options)
        out = (out * torch.sigmoid(lse[..., None] - sinks)).to(out.dtype)
    else:
        out = attend(query, key, value, plan, **options)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.assume_constant_result
def _is_for_eager(file: str, layer: str, names: tuple[str, ...]) -> bool:
    """Whether the eager attention of this layer's file takes one of these arguments."""
    eager = _eager_of(file)
    taken = [] if eager is None else [name for name in inspect.signature(eager).parameters if name in names]
    if taken:
        log_once(f"{layer} passes {', '.join(taken)}, which posenc does not know: its own eager attention runs")
    return bool(taken)


def _eager_of(file: str) -> Any:
    """The eager attention of a layer's file, or None."""
    return getattr(sys.modules.get(file), EAGER, None)


def _by_eager(module, query, key, value, mask, scaling, dropout, position_bias, kwargs):
    if isinstance(mask, Mask):
        mask = mask.whole()
    if mask is not None and mask.dtype == torch.bool:
        mask = as_summand(mask, query.dtype, torch.finfo(query.dtype).min)
    if position_bias is not None:
        kwargs = {**kwargs, "position_bias": _dense(position_bias)}
    return _eager_of(own_class(type(module)).__module__)(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )


def _dense(bias: Any) -> Tensor:
    """A position bias, which may stand for a dense one."""
    return bias if isinstance(bias, Tensor) else bias.dense()


def are_collected() -> bool:
    """Whether transformers collects probabilities by hooks in this forward pass: not every model passes output_attentions on."""
    if COLLECTED is None:
        return False
    if torch.compiler.is_compiling():  # a graph cannot read a context variable; transformers keeps a plain one for it
        collected = getattr(COLLECTED, "global_var", None)
    else:
        collected = COLLECTED.get()
    return collected is not None and any("attentions" in name for name in collected)


def _selected(module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """The mask of the keys that an indexer has selected for each query, which models add to the mask themselves for "eager"
    and "sdpa" alone."""
    mask = mask.whole() if isinstance(mask, Mask) else mask
    if kwargs.get("indices") is None:
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)[None]
        return module.indexer.build_block_mask(  # type: ignore[union-attr, operator]
            kwargs["block_indices"], mask, key.shape[2], query.dtype, query.device, positions.expand(query.shape[0], -1)
        )
    indices = kwargs["indices"].long()
    chosen = indices.new_zeros((*indices.shape[:2], key.shape[2]), dtype=torch.bool).scatter(-1, indices, True)[:, None]
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _options(mask: Any, query: Tensor, key: Tensor, causal: bool, shares: bool) -> dict[str, Any]:
    """`attend`'s mask arguments."""
    if isinstance(mask, Mask):
        whole = mask.documents is None and mask.window is None and not mask.causal  # padding is checked by `attend`
        if not (shares or whole) and (mask.queries[1], mask.keys[1]) != (query.shape[2], key.shape[2]):
            if mask.keys[1] == 1:  # a step of a model whose first layer is recurrent: one mask for all keys
                return {"mask": mask.whole().expand(-1, -1, -1, key.shape[2])}
            raise ValueError(
                f"attention_mask is for {mask.queries[1]} queries and {mask.keys[1]} keys, and this layer has "
                f"{query.shape[2]} and {key.shape[2]}; call model.set_attn_implementation('eager')"
            )
        return mask.options(shares=shares)
    if mask is None:
        return {"causal": causal and query.shape[2] > 1}
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be a tensor [B, 1 or H, Lq, Lk] here, got {shape}; give the model [B, L]"
        )
    return {"mask": mask}


def _positions(mask: Any, query: Tensor, key: Tensor) -> Positions:
    if isinstance(mask, Mask) and (mask.queries[1], mask.keys[1]) == (query.shape[2], key.shape[2]):
        return mask.positions
    return Positions((key.shape[2] - query.shape[2], query.shape[2]), key.shape[2])


def prefers_original(
    module: nn.Module, queries: Any, keys: Any, device: Any, few: int | None = None, *, kind: str = "bias",
    dropout: float = 0.0, padded: bool = False,
) -> bool:  # fmt: skip
    """Whether the original is faster with its dense bias than an engine: on a CPU up to `few` pairs, or by the rules for this
    kind of term; on a GPU by its own rule."""
    if is_free(module, device, "cuda") and rules.keeps_original_on_gpu(kind, queries * keys):
        return True
    if not is_free(module, device):
        return False
    if few is not None:
        return queries > 1 and queries * keys <= few
    drops = module.training and dropout > 0.0
    return rules.keeps_original(kind, queries, keys, torch.is_grad_enabled(), drops, padded)


def prefers_dense(module: nn.Module, pairs: Any, device: Any, kind: str) -> bool:
    """Whether this is a GPU, on which PyTorch's attention with a dense bias is faster than an engine."""
    return is_free(module, device, "cuda") and rules.is_dense_on_gpu(kind, pairs)


def is_free(module: nn.Module, device: Any, where: str = "cpu") -> bool:
    """Whether the rules for this kind of device may choose: nothing is compiled, no engine is named, no ranks share the sequence."""
    own = module.__dict__
    return (
        not torch.compiler.is_compiling() and device is not None and device.type == where and not rules.are_suspended()
        and own.get("posenc_engine", "auto") == "auto" and "posenc_context" not in own
    )  # fmt: skip


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, causal: bool, scale: float | None, dropout: float,
    softcap: float | None,
) -> Tensor | None:  # fmt: skip
    """[B, H, L, D] by PyTorch's attention or the plain formula, with a dense bias if any; None: an engine is faster."""
    compact = type(mask) is Mask
    if compact and (mask.queries[1], mask.keys[1]) != (q.shape[2], k.shape[2]):
        return None
    if not compact and mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        return None
    if mask is None and causal and q.shape[2] > 1 and (bias is not None or softcap is not None):
        return None
    if bias is None and softcap is None:
        found = mask.for_kernel(q.dtype) if compact else (mask, mask is None and causal and q.shape[2] > 1)
        return None if found is None else _by_kernel(q, k, v, found[0], found[1], scale, dropout)
    if bias is not None:
        bias = _dense(bias)
        if bias.shape[-1] != k.shape[2]:
            return None
    learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    is_precise = q.dtype in PRECISE and (bias is None or bias.dtype == q.dtype)
    if softcap is None and not (is_precise and (learns or dropout)):
        return _by_kernel(q, k, v, mask.with_bias(bias) if compact else add_bias(mask, bias), False, scale, dropout)
    if compact:
        # the gradient of a part of the bias would be as large as the whole
        blocks, added = [(ALL, ALL)] if learns else mask.blocks(), mask.for_formula(q.dtype)
    else:
        is_bool = mask is not None and mask.dtype == torch.bool
        blocks, added = [(ALL, ALL)], as_summand(mask, q.dtype, torch.finfo(q.dtype).min) if is_bool else mask
    done = [
        _by_formula(q[:, :, rows], k[:, :, keys], v[:, :, keys], _cut(bias, rows, keys), _cut(added, rows, keys), scale, softcap, dropout)
        for rows, keys in blocks
    ]  # fmt: skip
    return done[0] if len(done) == 1 else torch.cat(done, 2)


def _beside_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Tensor, scale: float | None
) -> Tensor | None:
    """[B, H, L, D] with the sink as one more key, whose value is zero: the queries have a channel more, sink / scale, which is 1 in
    that key and 0 in the others. So masks stay the same for all heads and layers, and the sinks learn through the queries."""
    if type(mask) is not Mask or (mask.queries[1], mask.keys[1]) != (q.shape[2], k.shape[2]) or q.dtype not in PRECISE:
        return None
    found = mask.for_kernel(q.dtype, has_sink=True)
    if found is None:
        return None
    if bias is not None:
        bias = _dense(bias)
        if bias.shape[-1] != k.shape[2]:
            return None
        found = nn.functional.pad(mask.with_bias(bias), (0, 1)), False
    scale = q.shape[3] ** -0.5 if scale is None else scale
    sinks = sinks if sinks.dim() > 1 else sinks.view(1, -1, 1, 1)
    channel = (sinks.to(q.dtype) / scale).expand(*q.shape[:3], 1)
    corner = nn.functional.pad(k.new_ones(1, 1, 1, 1), (k.shape[3], 0)).expand(*k.shape[:2], 1, -1)
    key = torch.cat((nn.functional.pad(k, (0, 1)), corner), 2)
    value = nn.functional.pad(v, (0, 1, 0, 1))
    return _by_kernel(torch.cat((q, channel), 3), key, value, found[0], found[1], scale, 0.0)[..., : v.shape[3]]


def _by_kernel(q, k, v, mask, causal, scale, dropout) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def _by_formula(q, k, v, bias, added, scale, softcap, dropout) -> Tensor:
    """PyTorch's attention without its copies: where a bias learns, and for dropout, its kernel takes neither on a CPU. Heads that
    share keys are rows of one matrix."""
    batch, heads, length, size = q.shape
    scale = size**-0.5 if scale is None else scale
    scale = scale if softcap is None else scale / softcap
    q = q if scale == 1.0 else q * scale
    s = (q.reshape(batch, k.shape[1], -1, size) @ k.transpose(2, 3)).view(batch, heads, length, -1)
    if softcap is not None:
        s = s.tanh_()
        s = s * softcap if added is None else torch.add(added, s, alpha=softcap)
        added = None
    for one in (bias, added):
        if one is not None:
            s += one
    p = s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype)
    p = nn.functional.dropout(p, dropout) if dropout else p
    return (p.view(batch, k.shape[1], -1, p.shape[3]) @ v).view(batch, heads, length, -1)


def _cut(x: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    if x is None or rows is ALL:
        return x
    return x[:, :, rows if x.shape[2] > 1 else ALL, keys]


def _is_sdpa(options: dict[str, Any], query: Tensor, key: Tensor) -> bool:
    """Whether PyTorch's kernels take these masks without a dense one."""
    others = [name for name in options if name != "causal" and options[name] is not None]
    if not others:
        return not options.get("causal") or query.shape[2] == key.shape[2]
    return not options.get("causal") and others in (["key_mask"], ["mask"])


def _by_sdpa(module, query, key, value, options, scaling, dropout, kwargs):
    mask = options.get("mask")
    if mask is None and options.get("key_mask") is not None:
        mask = options["key_mask"][:, None, None, :]
    passed = kwargs if kwargs.get("cache") is not None else {}  # continuous batching: the function writes to it
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=options.get("causal", False), **passed
    )  # fmt: skip


def _by_scores(q, k, v, plan, options, dropout, softcap, sinks) -> tuple[Tensor, Tensor]:
    """The output and the probabilities, out of dense scores, which may be capped before the mask is added."""
    log_once("output_attentions or softcap: these calls compute dense scores")
    added = options.get("mask")
    added = None if added is None or added.dtype == torch.bool or softcap is None else options.pop("mask")
    dense = scores(q, k, plan, **options)
    if softcap is not None:
        dense = torch.where(dense == float("-inf"), dense, (dense / softcap).tanh() * softcap)
        dense = dense if added is None else dense + added
    if sinks is None:
        weights = torch.nan_to_num(dense.softmax(-1)).to(q.dtype)
    else:
        sink = (sinks if sinks.dim() > 1 else sinks[:, None, None]).to(dense.dtype).expand(*dense.shape[:3], 1)
        weights = torch.cat((dense, sink), dim=-1).softmax(-1)[..., :-1].to(q.dtype)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = nn.functional.dropout(weights, dropout) @ v
    return out.transpose(1, 2).contiguous(), weights


construction.register(NAME)
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)
