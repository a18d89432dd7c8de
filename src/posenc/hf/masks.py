"""Padding without a dense mask.

transformers expands a padding mask [B, L] to [B, 1, Lq, Lk] before the attention layers, but passes a mask with four
dimensions through unchanged. So a hook before a stack replaces the padding mask by [B, 1, 1, Lk], which the attention layers
read. Its dtype, uint8 with 1 for a real key, distinguishes it from the masks of transformers and its users (boolean or
floating point).

    [1, 1, 1, 1] uint8           no padding
    [B, 1, 1, Lk] uint8          padding; a causal layer adds causality itself
    anything else                a mask as transformers defines it: dense, causality included
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .interface import prefers_original
from .interface_mask import Mask, nothing_padded
from .layer import NO_ATTENTIONS, log_once

COMPACT = torch.uint8


def padding(mask: Tensor | None, keys: int, device: torch.device, module: nn.Module | None = None) -> Tensor | None:
    """A padding mask [B, keys] (None: no padding) in the compact form; every other mask unchanged. `module` is the one that
    may be a rank's part of a model: ranks with and without padding then have the same form."""
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != keys):
        return mask
    shares = getattr(module, "posenc_context", None) is not None
    if mask is None or (not shares and nothing_padded(mask != 0)):
        return torch.ones(1, 1, 1, 1, dtype=COMPACT, device=device)
    return (mask != 0).to(device=device, dtype=COMPACT)[:, None, None, :]


def is_compact(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == COMPACT and mask.dim() == 4


def mask_options(mask: Any, q_length: int, *, causal: bool) -> dict[str, Any]:
    """`attend`'s mask arguments for the mask of an attention layer."""
    if mask is None:
        return {"causal": causal and q_length > 1}
    if isinstance(mask, Mask):
        return mask.options()
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError(
            f"attention_mask must have four dimensions, as 'posenc', 'eager' and 'sdpa' make it, got {type(mask).__name__}; "
            "call model.set_attn_implementation('sdpa')"
        )
    if is_compact(mask):
        key_mask = None if mask.shape[-1] == 1 else mask[:, 0, 0] != 0
        return {"causal": causal and q_length > 1, "key_mask": key_mask}
    if mask.shape[-2] == 1 and mask.dtype == torch.bool and mask.shape[1] == 1:
        return {"key_mask": mask[:, 0, 0]}
    return {"mask": mask}


def before_all_keys(options: dict[str, Any], q_length: int) -> Tensor | None:
    """[B, Lq]: causal queries before the first real key, which left padding causes."""
    key_mask = options.get("key_mask")
    if key_mask is None or not options.get("causal"):
        return None
    return key_mask.cumsum(-1)[:, -q_length:] == 0


def wants_attentions(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether this call requests the attention weights, which only the original layers compute."""
    argument = kwargs.get("output_attentions")
    wanted = bool(getattr(module.config, "output_attentions", False) if argument is None else argument)
    if wanted:
        if getattr(module, "posenc_context", None) is not None:
            raise ValueError(NO_ATTENTIONS)
        log_dense()
    return wanted


def pass_attentions(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """A pre-hook: the layers learn from their arguments that the configuration requests the weights."""
    return args, {**kwargs, "output_attentions": wants_attentions(module, kwargs)}


def log_dense() -> None:
    log_once("output_attentions=True: this call runs the original attention, with its dense scores")


def tokens_of(kwargs: dict[str, Any]) -> Tensor | None:
    """inputs_embeds [B, L, d] or input_ids [B, L] of a model's call."""
    return kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]


def by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments of a forward as keyword arguments."""
    if not args:
        return kwargs
    parameters = inspect.signature(getattr(module, "original", type(module)).forward).parameters
    return {**dict(zip([name for name in parameters if name != "self"], args)), **kwargs}


def is_short(module: nn.Module, tokens: Tensor, **facts: Any) -> bool:
    """Whether these tokens [B, L, ...] attend to themselves faster in the original; `facts` are those of `prefers_original`."""
    return prefers_original(module, tokens.shape[1], tokens.shape[1], tokens.device, **facts)


def grows(cache: Any) -> bool:
    """Whether a cache (or None) holds exactly the tokens so far: neither preallocated nor sliding."""
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None:
        return True
    return not getattr(cache, "is_compileable", False) and not any(getattr(cache, "is_sliding", ()))


def past(cache: Any) -> int:
    """Tokens in the cache."""
    return 0 if cache is None else cache.get_seq_length()
