"""Attention whose positions depend on its own scores: contextual counts, stick-breaking, products along the path.

    cope             positions are counts of gates: "the third verb back" (Golovneva et al. 2024, arXiv:2405.18719)
    stick_breaking   the nearest key takes its share first, the next a share of the rest (Tan et al. 2024, arXiv:2410.17980)
    path             keys are reflected by every token between them and the query (Yang et al. 2025, arXiv:2505.16381)

A position that depends on all scores of a row is not a plan, so these are separate functions. All are causal; q
[B, H, Lq, D] are the last of the Lk tokens of k and v [B, Hkv, Lk, D], so that a decoding step is a call with one query.
They run over blocks of queries (path: of both), each recomputed in the backward pass: memory grows with block × length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from ..core.mask import as_bool_mask

NEG_INF = float("-inf")
ROWS = 128
"""Queries of a block, ..."""
NUMBERS = 1 << 25
"""... or on a GPU as many as give a block so many scores: a few large operations instead of many small ones."""


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
    block            queries at a time; None: 128, on a GPU as many as fill it

    q [B, H, Lq, D], k, v [B, Hkv, Lk, D]. Raises ValueError for shapes that do not fit.

        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> posenc.contextual.cope(q, k, v, torch.zeros(4, 8)).shape
        torch.Size([1, 2, 6, 8])
    """
    _check(q, k, v, block)
    heads, size = q.shape[1], q.shape[3]
    if table.shape[-1] != size or table.dim() not in (2, 3) or (table.dim() == 3 and table.shape[0] not in (1, heads)):
        raise ValueError(f"the table must be [n, {size}] or [{heads}, n, {size}], got {list(table.shape)}")
    scale = size**-0.5 if scale is None else scale
    rows = table if table.dim() == 3 else table[None]

    def run(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
        s = scale * (q @ k.mT)
        gates = s.sigmoid().masked_fill(~visible, 0.0)
        at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=rows.shape[1] - 1)
        by_count = (q @ rows.mT) * (scale if scale_positions else 1.0)  # [B, H, rows, n]
        low = at.detach().floor()
        share = at - low
        low, high = low.long(), at.detach().ceil().long()
        s = s + by_count.gather(-1, low) * (1.0 - share) + by_count.gather(-1, high) * share
        return _softmax(s, visible) @ v

    return _blocks(run, q, k, v, [rows], key_mask, documents, block, strict=False)


def stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, include_current: bool = False,
    key_mask: Tensor | None = None, documents: Tensor | None = None, block: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stick-breaking attention: no softmax, and no other positions.

        β_ij = sigmoid(scale q_i·k_j)             a_ij = β_ij Π_{t = j+1 .. i-1} (1 - β_it),     j < i

    include_current   a query attends to its own token too: t and j up to i
    key_mask          bool [B, Lk], True for real keys; padding takes nothing
    documents         int [B, Lk], an id for each token: other documents' keys take nothing
    block             queries at a time; None: 128, on a GPU as many as fill it

    Returns the output and what is left of each query's stick, [B, H, Lq], 1 - Σ_j a_ij, which models give to the query's
    own value or to nothing.

    q [B, H, Lq, D], k, v [B, Hkv, Lk, D]. Raises ValueError for shapes that do not fit.

        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> [list(x.shape) for x in posenc.contextual.stick_breaking(q, k, v)]
        [[1, 2, 6, 8], [1, 2, 6]]
    """
    _check(q, k, v, block)
    scale = q.shape[3] ** -0.5 if scale is None else scale

    def run(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        z = scale * (q @ k.mT)
        rest = logsigmoid(-z).masked_fill(~visible, 0.0)
        total = rest.flip(-1).cumsum(-1).flip(-1)  # over t = j .. i
        weights = (logsigmoid(z) + total - rest).masked_fill(~visible, NEG_INF).exp()
        return torch.cat((weights @ v, total[..., :1].exp()), -1)

    both = _blocks(run, q, k, v, [], key_mask, documents, block, strict=not include_current)
    return both[..., :-1], both[..., -1]


def path(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, *, gates: Tensor | None = None,
    scale: float | None = None, key_mask: Tensor | None = None, documents: Tensor | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """PaTH attention: keys are multiplied by one reflection-like matrix for each token between them and the query.

        s_ij = scale q_i^T (H_i H_{i-1} ... H_{j+1}) k_j,     H_t = I - β_t w_t w_t^T

    w          [B, Hkv, L, D], of length 1 (torch.nn.functional.normalize)
    beta       [B, Hkv, L], between 0 and 2; zeros leave attention without positions
    gates      log f [B, H, L]: PaTH-FoX, whose sums Σ_{t = j+1 .. i} log f_t are inside the scale, as in
               flash-linear-attention
    key_mask   bool [B, L], True for real tokens; padding has no matrix and is not seen
    documents  int [B, L], an id for each token, those of a document side by side: other documents are not seen

    Queries and keys are the same tokens; decode with `path_step`. Blocks of `block` tokens (None: 64, on a GPU 256): products inside a block by a
    triangular system, across blocks by carrying queries back through one D × D matrix a block.

    Raises ValueError for shapes that do not fit.

        >>> q, k, v, w = torch.randn(4, 1, 2, 6, 8).unbind()
        >>> w, beta = torch.nn.functional.normalize(w, dim=-1), torch.ones(1, 2, 6)
        >>> posenc.contextual.path(q, k, v, w, beta).shape  # [B, H, L, D]
        torch.Size([1, 2, 6, 8])
    """
    _check(q, k, v, block)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"path takes as many queries as keys, got {q.shape[2]} and {k.shape[2]}; decode with path_step"
        )
    if w.shape != k.shape or beta.shape != k.shape[:3]:
        raise ValueError(
            f"w must be {list(k.shape)} and beta {list(k.shape[:3])}, as k, got {list(w.shape)} and {list(beta.shape)}"
        )
    if block is None:
        block = 256 if q.is_cuda else 64
    scale = q.shape[3] ** -0.5 if scale is None else scale
    precision = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    inputs = [x.to(precision).repeat_interleave(group, 1) for x in (k, v, w)]
    beta = beta.to(precision).repeat_interleave(group, 1)
    real = None if key_mask is None else _real(key_mask, k)[:, None]
    ids = None if documents is None else _ids(documents, k)[:, None]
    if real is not None:
        beta = beta * real
        gates = None if gates is None else gates * real
    total = None if gates is None else gates.double().cumsum(-1)
    parts = [_path_block(*(x[:, :, i : i + block] for x in (*inputs, beta))) for i in range(0, k.shape[2], block)]
    outs = []
    for n, start in enumerate(range(0, q.shape[2], block)):
        rows = slice(start, min(start + block, q.shape[2]))
        arguments = (q[:, :, rows].to(precision), n, rows, parts, inputs[1], total, scale, real, ids)
        keep = torch.is_grad_enabled()
        outs.append(checkpoint(_path_rows, *arguments, use_reentrant=False) if keep else _path_rows(*arguments))
    return torch.cat(outs, 2).to(q.dtype)


def path_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of PaTH attention: q [B, H, 1, D]; k, v, w [B, Hkv, 1, D], beta [B, Hkv, 1] of the new token.

    keys, values   of the tokens before, [B, Hkv, L, D], as the last step returned them; keys [.., 0, D] at the start

    The new token's matrix is applied to every cached key, once: keys change with each step. Returns the output and the
    keys and values for the next step.

    Shapes that do not fit raise RuntimeError.

        >>> q, k, v, w = torch.randn(4, 1, 2, 1, 8).unbind()
        >>> past = torch.zeros(1, 2, 0, 8)
        >>> out, keys, values = posenc.contextual.path_step(q, k, v, w, torch.ones(1, 2, 1), keys=past, values=past)
        >>> keys.shape  # [B, Hkv, L + 1, D]
        torch.Size([1, 2, 1, 8])
    """
    moved = keys - beta[..., None] * (keys @ w.mT) * w
    keys, values = torch.cat((moved, k), 2), torch.cat((values, v), 2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    s = scale * (q @ keys.repeat_interleave(group, 1).mT)
    return s.softmax(-1) @ values.repeat_interleave(group, 1), keys, values


# ---- parts ------------------------------------------------------------------------------------------------------------
def _check(q: Tensor, k: Tensor, v: Tensor, block: int | None) -> None:
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


def _real(key_mask: Tensor, k: Tensor) -> Tensor:
    """bool [B or 1, Lk]"""
    return _of_tokens("key_mask", as_bool_mask(key_mask, "key_mask"), k)


def _ids(documents: Tensor, k: Tensor) -> Tensor:
    """int [B or 1, Lk]"""
    if not isinstance(documents, Tensor) or documents.is_floating_point() or documents.dtype == torch.bool:
        raise ValueError(f"documents must be integer ids [B, Lk], got {getattr(documents, 'dtype', type(documents))}")
    return _of_tokens("documents", documents, k)


def _of_tokens(name: str, x: Tensor, k: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[0] not in (1, k.shape[0]) or x.shape[1] != k.shape[2]:
        raise ValueError(f"{name} must be [{k.shape[0]}, {k.shape[2]}], one for each key, got {list(x.shape)}")
    return x.to(k.device)


def _blocks(
    run: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    more: list[Tensor],
    key_mask: Tensor | None,
    documents: Tensor | None,
    block: int | None,
    strict: bool,
) -> Tensor:
    """run(q, k, v, *more, visible) over blocks of queries, in float32 or better; strict: a query does not attend to itself."""
    precision = torch.promote_types(q.dtype, torch.float32)
    heads, keys = q.shape[1], k.shape[2]
    if block is None:
        block = max(ROWS, NUMBERS // max(1, q.shape[0] * heads * keys)) if q.is_cuda else ROWS
    k, v = (x.to(precision).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    tables = [x.to(precision) for x in more]
    real = None if key_mask is None else _real(key_mask, k)[:, None, None]
    ids = None if documents is None else _ids(documents, k)[:, None]
    slots = torch.arange(keys, device=q.device)
    first, parts = keys - q.shape[2], []
    for start in range(0, q.shape[2], block):
        stop = min(start + block, q.shape[2])
        last = first + stop  # keys from here on are visible to no query of this block
        visible = slots[:last] < slots[first + start : last, None] + int(not strict)
        visible = visible if real is None else visible & real[..., :last]
        if ids is not None:
            visible = visible & (ids[:, :, first + start : last, None] == ids[:, :, None, :last])
        arguments = (q[:, :, start:stop].to(precision), k[:, :, :last], v[:, :, :last], *tables, visible)
        keep = torch.is_grad_enabled()
        parts.append(checkpoint(run, *arguments, use_reentrant=False) if keep else run(*arguments))
    return torch.cat(parts, 2).to(q.dtype)


def _softmax(s: Tensor, visible: Tensor) -> Tensor:
    """Probabilities; zeros for a fully masked query."""
    s = s.masked_fill(~visible, NEG_INF)
    top = s.detach().amax(-1, keepdim=True)
    weights = (s - top.masked_fill(top == NEG_INF, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0.0, 1.0)


def _path_block(k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Of one block of tokens 0 .. n - 1, with T = (I + tril(β w·w, -1))^-1, the products of its matrices:

    H_{n-1} .. H_{j+1} k_j  =  k_j - Wᵀ T β (w·k_j)_{rows > j}       keys, moved to the block's end
    q_i^T H_i .. H_0        =  q_i - (q_i·w)_{columns <= i} T β W    queries, moved to the block's start
    """
    size = k.shape[2]
    overlap = (beta[..., None] * (w @ w.mT)).tril(-1)
    eye = torch.eye(size, dtype=k.dtype, device=k.device)
    inverse = torch.linalg.solve_triangular(overlap + eye, eye.expand_as(overlap), upper=False, unitriangular=True)
    scaled = inverse * beta[..., None, :]  # T β
    inner = scaled @ (w @ k.mT).tril(-1)  # column j: T β (w·k_j) over the tokens after j
    moved = k - (w.mT @ inner).mT
    return k, w, scaled, inner, moved, (w.mT @ scaled @ w)  # the last: I - H_{n-1} .. H_0


def _path_rows(
    q: Tensor, n: int, rows: slice, parts: list, v: Tensor, total: Tensor | None, scale: float, real: Tensor | None,
    ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """The output of one block of queries."""
    k, w, scaled, inner, _, _ = parts[n]
    dots = (q @ w.mT).tril()
    scores = [((q @ k.mT).tril() - dots @ inner)]
    carried = q - dots @ scaled @ w  # q_i^T H_i .. H_first
    for before in range(n - 1, -1, -1):
        _, _, _, _, moved, whole = parts[before]
        scores.insert(0, carried @ moved.mT)
        carried = carried - carried @ whole
    s = torch.cat(scores, -1)
    if total is not None:
        s = s + (total[..., rows, None] - total[..., None, : rows.stop]).to(s.dtype)
    visible = torch.arange(rows.stop, device=q.device) <= torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    if real is not None:
        visible = visible & real[..., None, : rows.stop]
    if ids is not None:
        visible = visible & (ids[..., rows, None] == ids[..., None, : rows.stop])
    return _softmax(s * scale, visible) @ v[:, :, : rows.stop]
