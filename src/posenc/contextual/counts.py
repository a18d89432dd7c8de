"""Contextual position encoding: a key's position is a count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.torch_modes import apply_function
from . import launch
from .blocks import check, document_ids, real_tokens, run_blocks, softmax


def cope(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float | None = None, scale_positions: bool = False,
    key_mask: Tensor | None = None, documents: Tensor | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """Contextual position encoding: a key's position is the sum of the gates from it to the query.

        g_ij = sigmoid(scale q_i·k_j)                          p_ij = min(Σ_{t = j .. i} g_it, n - 1)
        s_ij = scale q_i·k_j + q_i·e[p_ij]                     e between two rows of the table is interpolated

    table            e: [n, D] or [H, n, D], zeros at the start
    scale            default 1/sqrt(D)
    scale_positions  multiply q·e by the scale too: the authors' code does, their listing and x-transformers do not
    key_mask         bool [B, Lk], True for real keys; padding opens no gate
    documents        int [B, Lk], an id for each token: only keys of the query's document are visible, and counted
    block            queries at a time, by plain operations; None: 128, and on a GPU kernels of its own

    q [B, H, Lq, D], k, v [B, Hkv, Lk, D]. Raises ValueError for shapes that do not fit.

        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> posenc.contextual.cope(q, k, v, torch.zeros(4, 8)).shape
        torch.Size([1, 2, 6, 8])
    """
    check(q, k, v, block)
    heads, size = q.shape[1], q.shape[3]
    if table.shape[-1] != size or table.dim() not in (2, 3) or (table.dim() == 3 and table.shape[0] not in (1, heads)):
        raise ValueError(f"the table must be [n, {size}] or [{heads}, n, {size}], got {list(table.shape)}")
    scale = size**-0.5 if scale is None else scale
    rows = table if table.dim() == 3 else table[None]
    real = None if key_mask is None else real_tokens(key_mask, k)
    ids = None if documents is None else document_ids(documents, k)

    position_scale = scale if scale_positions else 1.0
    if block is None and launch.supports(q, k, v):
        by_count = ((q.float() @ rows.float().mT) * position_scale).contiguous()
        return apply_function(launch.Contextual, q, k, v, by_count, real, ids, scale, False)[0].to(q.dtype)

    def run(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
        s = scale * (q @ k.mT)
        gates = s.sigmoid().masked_fill(~visible, 0.0)
        at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=rows.shape[1] - 1)
        by_count = (q @ rows.mT) * position_scale  # [B, H, rows, n]
        low = at.detach().long()
        share = at - low
        high = torch.where(share > 0, low + 1, low).clamp(max=rows.shape[1] - 1)
        s = s + by_count.gather(-1, low) * (1.0 - share) + by_count.gather(-1, high) * share
        return softmax(s, visible)[0] @ v

    return run_blocks(run, q, k, v, [rows], real, ids, block, strict=False).to(q.dtype)
