"""Padding without a dense mask.

transformers turns a padding mask [B, L] into [B, 1, Lq, Lk] before any attention layer sees it, but hands a mask that
has four sizes already through as it is. So a hook in front of a stack gives it the padding as [B, 1, 1, Lk], and the
attention layers read that back. The dtype tells it from every mask that transformers or its users make (those are
boolean or floating point): uint8, 1 for a real key.

    [1, 1, 1, 1] uint8           nothing is padded
    [B, 1, 1, Lk] uint8          padding; a causal layer adds causality itself
    anything else                a mask as transformers understands it: dense, causality included
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .layer import say

COMPACT = torch.uint8


def padding(mask: Tensor | None, keys: int, device: torch.device) -> Tensor | None:
    """A padding mask [B, keys] (None: no padding) in the compact form; every other mask as it is."""
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != keys):
        return mask
    if mask is None or nothing_padded(mask):
        return torch.ones(1, 1, 1, 1, dtype=COMPACT, device=device)
    return (mask != 0).to(device=device, dtype=COMPACT)[:, None, None, :]


def is_compact(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == COMPACT and mask.dim() == 4


def seen(mask: Tensor | None, q_length: int, *, causal: bool) -> dict[str, Any]:
    """`attend`'s mask arguments for what an attention layer was given."""
    if mask is None:
        return {"causal": causal and q_length > 1}
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError(
            f"a mask of four sizes is needed, as 'eager' and 'sdpa' make it, got {type(mask).__name__}; "
            "call model.set_attn_implementation('sdpa')"
        )
    if is_compact(mask):
        key_mask = None if mask.shape[-1] == 1 else mask[:, 0, 0] != 0
        return {"causal": causal and q_length > 1, "key_mask": key_mask}
    if mask.shape[-2] == 1 and mask.dtype == torch.bool and mask.shape[1] == 1:
        return {"key_mask": mask[:, 0, 0]}
    return {"mask": mask}


def before_all_keys(seen: dict[str, Any], q_length: int) -> Tensor | None:
    """[B, Lq]: causal queries before the first real key, as left padding has them."""
    key_mask = seen.get("key_mask")
    if key_mask is None or not seen.get("causal"):
        return None
    return key_mask.cumsum(-1)[:, -q_length:] == 0


def wants_attentions(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether this call asks for the attention weights, which only the original layers keep."""
    asked = kwargs.get("output_attentions")
    wanted = bool(getattr(module.config, "output_attentions", False) if asked is None else asked)
    if wanted:
        say_dense()
    return wanted


def say_dense() -> None:
    say("output_attentions=True: this call runs the original attention, with its dense scores")


def by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments of a forward as keyword arguments."""
    if not args:
        return kwargs
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return {**dict(zip(names, args)), **kwargs}


def grows(cache: Any) -> bool:
    """Whether a cache (or None) holds exactly the tokens seen so far: not a preallocated or a sliding one."""
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None:
        return True
    return not getattr(cache, "is_compileable", False) and not any(getattr(cache, "is_sliding", ()))


def past(cache: Any) -> int:
    return 0 if cache is None else cache.get_seq_length()


def nothing_padded(mask: Tensor) -> bool:
    """Whether that is known: looked at on a CPU only, where the answer costs no synchronisation."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool((mask != 0).all())
