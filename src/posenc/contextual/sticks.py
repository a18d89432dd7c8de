"""Stick-breaking attention: each key takes a share of what the keys after it have left."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..core.torch_modes import apply_function
from . import launch
from .blocks import NEG_INF, check, document_ids, real_tokens, run_blocks


def stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, include_current: bool = False,
    key_mask: Tensor | None = None, documents: Tensor | None = None, block: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stick-breaking attention: no softmax, and no other positions.

        β_ij = sigmoid(scale q_i·k_j)             a_ij = β_ij Π_{t = j+1 .. i-1} (1 - β_it),     j < i

    include_current   a query attends to its own token too: t and j up to i
    key_mask          bool [B, Lk], True for real keys; padding takes nothing
    documents         int [B, Lk], an id for each token: other documents' keys take nothing
    block             queries at a time, by plain operations; None: 128, and on a GPU kernels of its own

    Returns the output and what is left of each query's stick, [B, H, Lq], 1 - Σ_j a_ij, which models give to the query's
    own value or to nothing.

    q [B, H, Lq, D], k, v [B, Hkv, Lk, D]. Raises ValueError for shapes that do not fit.

        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> [list(x.shape) for x in posenc.contextual.stick_breaking(q, k, v)]
        [[1, 2, 6, 8], [1, 2, 6]]
    """
    check(q, k, v, block)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    real = None if key_mask is None else real_tokens(key_mask, k)
    ids = None if documents is None else document_ids(documents, k)
    if block is None and launch.supports(q, k, v):
        out, left = apply_function(launch.Contextual, q, k, v, None, real, ids, scale, not include_current)
        return out, left.to(q.dtype)

    def run(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        z = scale * (q @ k.mT)
        rest = logsigmoid(-z).masked_fill(~visible, 0.0)
        total = rest.flip(-1).cumsum(-1).flip(-1)  # over t = j .. i
        weights = (logsigmoid(z) + total - rest).masked_fill(~visible, NEG_INF).exp()
        return torch.cat((weights @ v, total[..., :1].exp()), -1)

    both = run_blocks(run, q, k, v, [], real, ids, block, strict=not include_current).to(q.dtype)
    return both[..., :-1], both[..., -1]
