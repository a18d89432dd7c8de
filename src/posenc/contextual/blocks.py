"""What the functions share: validation, masks, and blocks of queries whose scores are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.mask import as_bool_mask
from ..core.precision import no_autocast
from ..core.torch_modes import transform_reason

NEG_INF = float("-inf")
ROWS = 128
"""Queries of a block, ..."""
NUMBERS = 1 << 25
"""... or on a GPU as many as give a block so many scores: a few large operations instead of many small ones."""


def check(q: Tensor, k: Tensor, v: Tensor, block: int | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(f"{name} must be a tensor [B, heads, L, D], got {list(getattr(x, 'shape', ()))}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[1]} query heads must be a multiple of {k.shape[1]} key heads, and {q.shape[2]} queries the last of "
            f"{k.shape[2]} keys"
        )
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise ValueError(f"block={block!r} must be an integer, 1 or more: queries at a time")


def real_tokens(key_mask: Tensor, k: Tensor) -> Tensor:
    """bool [B or 1, Lk]"""
    return _of_tokens("key_mask", as_bool_mask(key_mask, "key_mask"), k)


def document_ids(documents: Tensor, k: Tensor) -> Tensor:
    """int [B or 1, Lk]"""
    if not isinstance(documents, Tensor) or documents.is_floating_point() or documents.dtype == torch.bool:
        raise ValueError(f"documents must be integer ids [B, Lk], got {getattr(documents, 'dtype', type(documents))}")
    return _of_tokens("documents", documents, k)


def _of_tokens(name: str, x: Tensor, k: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[0] not in (1, k.shape[0]) or x.shape[1] != k.shape[2]:
        raise ValueError(f"{name} must be [{k.shape[0]}, {k.shape[2]}], one for each key, got {list(x.shape)}")
    return x.to(k.device)


def run_blocks(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], real: Tensor | None, ids: Tensor | None,
    block: int | None, *, strict: bool,
) -> Tensor:  # fmt: skip
    """run(q, k, v, *more, visible) over blocks of queries, in float32 or better; strict: a query does not attend to itself."""
    precision = torch.promote_types(q.dtype, torch.float32)
    heads, keys = q.shape[1], k.shape[2]
    if block is None:
        block = max(ROWS, NUMBERS // max(1, q.shape[0] * heads * keys)) if q.is_cuda else ROWS
    k, v = (x.to(precision).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    tables = [x.to(precision) for x in more]
    slots = torch.arange(keys, device=q.device)
    first, parts = keys - q.shape[2], []
    recompute = torch.is_grad_enabled() and transform_reason() is None  # torch.func has no saved tensors to recompute
    with no_autocast(q.device):
        for start in range(0, q.shape[2], block):
            stop = min(start + block, q.shape[2])
            last = first + stop  # keys from here on are visible to no query of this block
            visible = slots[:last] < slots[first + start : last, None] + int(not strict)
            if real is not None:
                visible = visible & real[:, None, None, :last]
            if ids is not None:
                visible = visible & (ids[:, None, first + start : last, None] == ids[:, None, None, :last])
            arguments = (q[:, :, start:stop].to(precision), k[:, :, :last], v[:, :, :last], *tables, visible)
            parts.append(checkpoint(run, *arguments, use_reentrant=False) if recompute else run(*arguments))
    return torch.cat(parts, 2)


def softmax(s: Tensor, visible: Tensor, *, all_see: bool = False) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp; zeros and -inf for a fully masked query. all_see: there is none."""
    s = s.masked_fill(~visible, NEG_INF)
    top = s.detach().amax(-1, keepdim=True)
    if all_see:
        weights = (s - top).exp()
        total = weights.sum(-1, keepdim=True)
        return weights / total, (total.log() + top).squeeze(-1)
    top = top.masked_fill(top == NEG_INF, 0.0)
    weights = (s - top).exp()
    total = weights.sum(-1, keepdim=True)
    is_masked = total == 0.0
    total = total.masked_fill(is_masked, 1.0)
    return weights / total, (total.log() + top).masked_fill(is_masked, NEG_INF).squeeze(-1)
