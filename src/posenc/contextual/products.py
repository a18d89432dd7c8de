"""PaTH attention: keys are multiplied by the matrices of the tokens between them and the query.

The matrices H_t = I - β_t w_t w_t^T have no inverses, so that no product up to j can be taken out of a product up to i. But a product
from j to i can be cut anywhere between the two, and halves of the text give every pair of tokens one cut:

    block     ◣ │ ◣ ║ ◣ │ ◣        pairs of tokens within a block of 64: dense, all blocks at once
    64        ■ │   ║ ■ │          queries of a right block, keys of the left block beside it: one `attend` for all such pairs of blocks
    128       ██████║              the same for blocks of 128, and so on: log2(L / 64) calls
              ──────╨──────▶ keys

    s_ij = scale (q_i^T H_i .. H_c) (H_{c-1} .. H_{j+1} k_j)         c: the first token of the right block

Queries are held multiplied to the start of their block and keys to the end of theirs. The next level doubles the blocks: the queries of
right halves are multiplied by the whole product of the left half, the keys of left halves by that of the right half. So each cut is plain
attention without a mask, for the engines, whose outputs are merged by their log-sum-exp; memory grows as L log L. On a GPU
path_kernels.py does the same in one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.plan import Plan
from ..core.positions import Positions
from ..core.precision import no_autocast
from ..core.torch_modes import apply_function
from ..functional import attend, merge
from . import launch
from .blocks import NEG_INF, check, document_ids, real_tokens, softmax

BLOCK = 64
Attended = tuple[Tensor, Tensor]
"""out [B, H, L, Dv] and log-sum-exp [B, H, L]."""


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
    block      tokens of the blocks whose scores are dense, by plain operations; None: 64, and on a GPU kernels of its own

    Queries and keys are the same tokens; decode with `path_step` from `path_keys`. Inside a block the products come from a triangular system, beyond it
    from halves of the text, by `attend`.

    Raises ValueError for shapes that do not fit.

        >>> q, k, v, w = torch.randn(4, 1, 2, 6, 8).unbind()
        >>> w, beta = torch.nn.functional.normalize(w, dim=-1), torch.ones(1, 2, 6)
        >>> posenc.contextual.path(q, k, v, w, beta).shape  # [B, H, L, D]
        torch.Size([1, 2, 6, 8])
    """
    check(q, k, v, block)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"path takes as many queries as keys, got {q.shape[2]} and {k.shape[2]}; decode with path_step"
        )
    if w.shape != k.shape or beta.shape != k.shape[:3]:
        raise ValueError(
            f"w must be {list(k.shape)} and beta {list(k.shape[:3])}, as k, got {list(w.shape)} and {list(beta.shape)}"
        )
    if gates is not None and gates.shape != q.shape[:3]:
        raise ValueError(f"gates must be {list(q.shape[:3])}, one for each query and head, got {list(gates.shape)}")
    real = None if key_mask is None else real_tokens(key_mask, k).expand(k.shape[0], -1)
    ids = None if documents is None else document_ids(documents, k).expand(k.shape[0], -1)
    if real is not None:
        beta = beta * real[:, None]
        gates = None if gates is None else gates * real[:, None]
    total = None if gates is None else gates.double().cumsum(-1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if block is None and launch.supports_path(q, k, v):
        total = None if total is None else total.contiguous()
        return apply_function(launch.Path, q, k, v, w, beta.float().contiguous(), total, real, ids, scale)[0]
    with no_autocast(q.device):
        halves = Halves(q, k, v, total, real, ids, scale)
        return halves.run(w, beta, min(block or BLOCK, max(1, q.shape[2]))).to(q.dtype)


class Halves:
    """The tokens of a call, and attention between neighbouring blocks of them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, total: Tensor | None, real: Tensor | None, ids: Tensor | None, scale: float
    ):  # fmt: skip
        self.precision = torch.promote_types(q.dtype, torch.float32)
        self.dtype, self.scale, self.length = q.dtype, scale, q.shape[2]
        self.batch, self.kv_heads, self.group = k.shape[0], k.shape[1], q.shape[1] // k.shape[1]
        self.q, self.k, self.v = q, k, v
        self.total, self.real, self.ids = total, real, ids

    def run(self, w: Tensor, beta: Tensor, size: int) -> Tensor:
        near, q, k, whole = self.blocks(w.to(self.precision), beta.to(self.precision), size)
        parts = [near]
        while size < self.length:
            parts.append(self.attend_left(q, k, size))
            if 2 * size < self.length:
                q, k, whole = self.double(q, k, whole, size)
            size *= 2
        return merge(parts)[0] if len(parts) > 1 else near[0]

    def blocks(self, w: Tensor, beta: Tensor, size: int) -> tuple[Attended, Tensor, Tensor, Tensor]:
        """Attention within blocks of tokens 0 .. n - 1; queries [B, Hkv, group, L, D] at the start of their block, keys [B, Hkv, L, D]
        at its end; I - H_{n-1} .. H_0 of the whole blocks. With T = (I + tril(β w·w, -1))^-1:

        H_{n-1} .. H_{j+1} k_j  =  k_j - Wᵀ T β (w·k_j)_{rows > j}       keys, moved to the block's end
        q_i^T H_i .. H_0        =  q_i - (q_i·w)_{columns <= i} T β W    queries, moved to the block's start
        """
        q = _cut(self.q.to(self.precision).unflatten(1, (self.kv_heads, self.group)), size, -2)
        k, v, w = (_cut(x.to(self.precision), size, -2) for x in (self.k, self.v, w))  # [B, Hkv, N, n, D]
        beta = _cut(beta, size, -1)
        overlap = (beta[..., None] * (w @ w.mT)).tril(-1)
        eye = torch.eye(size, dtype=w.dtype, device=w.device)
        inverse = torch.linalg.solve_triangular(overlap + eye, eye.expand_as(overlap), upper=False, unitriangular=True)
        scaled = inverse * beta[..., None, :]  # T β
        inner = scaled @ (w @ k.mT).tril(-1)  # column j: T β (w·k_j) over the tokens after j
        moved = k - inner.mT @ w
        reach = scaled @ w
        whole = _part(w.mT @ reach, 2, 0, self.length // size)
        dots = (q @ w.mT[:, :, None]).tril()
        s = (q @ k.mT[:, :, None]).tril() - dots @ inner[:, :, None]
        carried = q - dots @ reach[:, :, None]  # q_i^T H_i .. H_first
        if self.total is not None:
            total = _cut(self.total, size, -1).unflatten(1, (self.kv_heads, self.group))
            total = (total - total[..., :1]).to(self.precision)
            s = s + (total[..., :, None] - total[..., None, :])
        visible = eye.new_ones(size, size, dtype=torch.bool).tril()
        if self.real is not None:
            visible = visible & _cut(self.real, size, -1)[:, None, None, :, None, :]
        if self.ids is not None:
            ids = _cut(self.ids, size, -1)[:, None, None]
            visible = visible & (ids[..., :, None] == ids[..., None, :])
        weights, lse = softmax(s * self.scale, visible, all_see=self.real is None)
        out = weights @ v[:, :, None]
        near = self._join(out).flatten(1, 2), self._join(lse[..., None]).flatten(1, 2)[..., 0]
        return near, self._join(carried), self._join(moved), whole

    def _join(self, x: Tensor) -> Tensor:
        """[.., N, n, D] -> [.., L, D]"""
        return _part(x.flatten(-3, -2), x.dim() - 3, 0, self.length)

    def attend_left(self, q: Tensor, k: Tensor, size: int) -> Attended:
        """The queries of every right block over the keys of the left one; for queries of left blocks zeros and -inf."""
        heads = self.kv_heads * self.group
        q = q.flatten(1, 2).to(self.dtype)
        k = k.to(self.dtype)
        outs, lses = [], []
        for pairs in self._pairs(size):
            out, lse = (_batched_back(x, pairs) for x in self._attend(q, k, pairs))
            nothing = out.new_zeros(self.batch, heads, pairs.number, size, out.shape[-1])
            outs.append(torch.cat((nothing, out), 3).flatten(2, 3))
            lses.append(torch.cat((lse.new_full(nothing.shape[:-1], NEG_INF), lse), 3).flatten(2, 3))
        alone = self.length - sum(lse.shape[2] for lse in lses)
        if alone:  # a left block without a right one
            outs.append(outs[0].new_zeros(self.batch, heads, alone, outs[0].shape[3]))
            lses.append(lses[0].new_full((self.batch, heads, alone), NEG_INF))
        return _joined(outs, 2), _joined(lses, 2)

    def _attend(self, q: Tensor, k: Tensor, pairs: Pairs) -> Attended:
        k, v = (_batched(x, pairs, 0) for x in (k, self.v))
        q, padding, sees = _batched(q, pairs, 1), None, None
        decay: tuple[Tensor, Tensor] | None = None
        if self.total is not None:  # relative to the last token of the left block
            before, after = (_batched(self.total, pairs, side) for side in (0, 1))
            anchor = before[..., -1:]
            after, before = ((self.scale * (x - anchor)).to(self.precision) for x in (after, before))
            decay = after, before
        if self.real is not None:
            padding = _batched(self.real[:, None], pairs, 0)[:, 0]
        if self.ids is not None:  # a document on both sides of the cut is that of the last token before it
            before, after = (_batched(self.ids[:, None], pairs, side)[:, 0] for side in (0, 1))
            own, sees = before == before[:, -1:], after == before[:, -1:]
            padding = own if padding is None else padding & own
        plan = Plan(Positions((k.shape[2], q.shape[2]), k.shape[2]), scale=self.scale, decay=decay)
        out, lse = attend(q, k, v, plan, key_mask=padding, return_lse=True)
        return out, lse if sees is None else lse.masked_fill(~sees[:, None], NEG_INF)

    def double(self, q: Tensor, k: Tensor, whole: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same for blocks of twice the size."""
        count = whole.shape[2] // 2
        of_left, of_right = _part(whole, 2, 0, 2 * count).unflatten(2, (count, 2)).unbind(3)
        queries, keys = [], []
        for pairs in self._pairs(size):
            is_last = pairs.first == count  # whose right block is not whole, and whose end no token lies behind
            before = whole[:, :, -1:] if is_last else of_left
            left, right = _split(q, 3, pairs)
            queries.append(torch.cat((left, right - right @ before[:, :, None]), 4).flatten(3, 4))
            left, right = _split(k, 2, pairs)
            left = left if is_last else left - left @ of_right.mT
            keys.append(torch.cat((left, right), 3).flatten(2, 3))
        last = sum(x.shape[2] for x in keys)
        if last < self.length:
            queries.append(q[:, :, :, last:])
            keys.append(k[:, :, last:])
        return _joined(queries, 3), _joined(keys, 2), of_left + of_right - of_right @ of_left  # (I - right)(I - left)

    def _pairs(self, size: int) -> Iterator[Pairs]:
        count, rest = divmod(self.length, 2 * size)
        if count:
            yield Pairs(0, count, size, size)
        if rest > size:
            yield Pairs(count, 1, size, rest - size)


class Pairs(NamedTuple):
    """Neighbouring blocks: the first pair's number, how many there are, the sizes of left and right blocks."""

    first: int
    number: int
    left: int
    right: int


def _split(x: Tensor, axis: int, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The left and the right blocks of tokens on an axis: [.., number, size, ..]"""
    width = pairs.left + pairs.right
    x = _part(x, axis, pairs.first * 2 * pairs.left, pairs.number * width).unflatten(axis, (pairs.number, width))
    left, right = x.split((pairs.left, pairs.right), axis + 1)
    return left, right


def _batched(x: Tensor, pairs: Pairs, side: int) -> Tensor:
    """[B, heads, L, ..] -> left (0) or right (1) blocks, [B × number, heads, size, ..]"""
    return _split(x, 2, pairs)[side].transpose(1, 2).flatten(0, 1)


def _batched_back(x: Tensor, pairs: Pairs) -> Tensor:
    """[B × number, heads, size, ..] -> [B, heads, number, size, ..]"""
    return x.unflatten(0, (-1, pairs.number)).transpose(1, 2)


def _part(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """x.narrow, and x itself where that is all of it: the gradient of a slice is two launches."""
    return x if length == x.shape[axis] else x.narrow(axis, start, length)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _cut(x: Tensor, size: int, axis: int) -> Tensor:
    """Blocks of tokens, zeros past the last one: [.., L, ..] -> [.., N, n, ..], axis negative."""
    more = -x.shape[axis] % size
    if more:
        x = pad(x, (0,) * (-2 * axis - 2) + (0, more))
    return x.unflatten(axis, (-1, size))
