"""Decoding with PaTH attention: cached keys are multiplied by the matrix of every new token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.precision import no_autocast
from .blocks import check, document_ids, real_tokens, softmax

BLOCK = 64


def path_keys(k: Tensor, w: Tensor, beta: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """The keys that `path_step` continues with after a prompt: each one multiplied by the matrices of all tokens after it.

        out = path(q, k, v, w, beta)                              the prompt
        keys, values = path_keys(k, w, beta), v                   then path_step(..., keys=keys, values=values)

    k, w       [B, Hkv, L, D], beta [B, Hkv, L], as `path` takes them
    key_mask   bool [B, L], True for real tokens

    Returns [B, Hkv, L, D] in float32 or better: every step rounds the keys again, and half precision would add up.

    Raises ValueError for shapes that do not fit.

        >>> k, w = torch.randn(2, 1, 2, 6, 8).unbind()
        >>> posenc.contextual.path_keys(k, torch.nn.functional.normalize(w, dim=-1), torch.ones(1, 2, 6)).shape
        torch.Size([1, 2, 6, 8])
    """
    check(k, k, k, None)
    _check_matrices(k, w, beta)
    if key_mask is not None:
        beta = beta * real_tokens(key_mask, k)[:, None]
    precision = torch.promote_types(k.dtype, torch.float32)
    k, w, beta = k.to(precision), w.to(precision), beta.to(precision)[..., None]
    parts: list[Tensor] = []
    later = None  # I - the product of the matrices of all tokens after the block
    with no_autocast(k.device):
        for keys, units, betas in zip(*(reversed(x.split(BLOCK, 2)) for x in (k, w, beta))):
            overlap = (betas * (units @ units.mT)).tril(-1)
            eye = torch.eye(overlap.shape[-1], dtype=precision, device=k.device)
            right = torch.cat(((units @ keys.mT).tril(-1), units), -1)
            solved = torch.linalg.solve_triangular(overlap + eye, betas * right, upper=False, unitriangular=True)
            inner, reach = solved.split((keys.shape[2], keys.shape[3]), -1)  # products.py has the formulas
            moved, whole = keys - inner.mT @ units, units.mT @ reach
            parts.append(moved if later is None else moved - moved @ later.mT)
            later = whole if later is None else later + whole - later @ whole
    return torch.cat(parts[::-1], 2) if parts else k


def path_step(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, *, keys: Tensor, values: Tensor, gates: Tensor | None = None,
    scale: float | None = None, key_mask: Tensor | None = None, documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token of PaTH attention: q [B, H, 1, D]; k, v, w [B, Hkv, 1, D], beta [B, Hkv, 1] of the new token.

    keys, values   of the tokens before, [B, Hkv, L, D], as the last step returned them; keys [.., 0, D] at the start,
                   after a prompt those of `path_keys`. In float32 they keep their digits over many steps
    gates          PaTH-FoX: log f of all tokens, the new one last, [B, H, L + 1]
    key_mask       bool [B, L + 1], True for real tokens, the new one last
    documents      int [B, L + 1], the ids of all tokens, the new one last

    The new token's matrix is applied to every cached key, once: keys change with each step. Returns the output and the
    keys and values for the next step.

    Raises ValueError for shapes that do not fit.

        >>> q, k, v, w = torch.randn(4, 1, 2, 1, 8).unbind()
        >>> past = torch.zeros(1, 2, 0, 8)
        >>> out, keys, values = posenc.contextual.path_step(q, k, v, w, torch.ones(1, 2, 1), keys=past, values=past)
        >>> keys.shape  # [B, Hkv, L + 1, D]
        torch.Size([1, 2, 1, 8])
    """
    check(q, k, v, None)
    if (q.shape[2], k.shape[2]) != (1, 1):
        raise ValueError(
            f"path_step takes one token, got {q.shape[2]} queries and {k.shape[2]} keys; give a prompt to path and path_keys"
        )
    _check_matrices(k, w, beta)
    for name, past, now in (("keys", keys, k), ("values", values, v)):
        if past.dim() != 4 or (*past.shape[:2], past.shape[3]) != (*now.shape[:2], now.shape[3]):
            raise ValueError(
                f"{name} must be [{now.shape[0]}, {now.shape[1]}, L, {now.shape[3]}], got {list(past.shape)}"
            )
    if keys.shape[2] != values.shape[2]:
        raise ValueError(f"keys and values must have the same length, got {keys.shape[2]} and {values.shape[2]}")
    precision = torch.promote_types(torch.promote_types(q.dtype, keys.dtype), torch.float32)
    with no_autocast(q.device):
        beta, unit = beta.to(precision)[..., None], w.to(precision)
        whole = torch.cat((keys, k.to(keys.dtype)), 2)
        real = None if key_mask is None else real_tokens(key_mask, whole)
        ids = None if documents is None else document_ids(documents, whole)
        if real is not None:
            beta = beta * real[:, None, -1:, None]
        past = keys.to(precision)
        moved = torch.cat((past - beta * (past @ unit.mT) * unit, k.to(precision)), 2)
        grouped = q.to(precision).unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, Hkv, group, D]
        s = (grouped @ moved.mT).flatten(1, 2)  # [B, H, L + 1]
        if gates is not None:
            if gates.shape != s.shape:
                raise ValueError(
                    f"gates must be {list(s.shape)}, of all tokens, the new one last, got {list(gates.shape)}"
                )
            total = (gates if real is None else gates * real[:, None]).double().cumsum(-1)
            s = s + (total[..., -1:] - total).to(precision)
        visible = s.new_ones(1, 1, s.shape[2], dtype=torch.bool)
        if real is not None:
            visible = visible & real[:, None]
        if ids is not None:
            visible = visible & (ids == ids[:, -1:])[:, None]
        scale = q.shape[3] ** -0.5 if scale is None else scale
        weights, _ = softmax(s * scale, visible, all_see=real is None)
        values = torch.cat((values, v.to(values.dtype)), 2)
        out = weights.unflatten(1, (k.shape[1], -1)) @ values.to(precision)
    return out.flatten(1, 2)[:, :, None].to(q.dtype), moved.to(keys.dtype), values


def _check_matrices(k: Tensor, w: Tensor, beta: Tensor) -> None:
    if w.shape != k.shape or beta.shape != k.shape[:3]:
        raise ValueError(
            f"w must be {list(k.shape)} and beta {list(k.shape[:3])}, as k, got {list(w.shape)} and {list(beta.shape)}"
        )
