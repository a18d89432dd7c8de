"""Longer contexts without training: Self-Extend, ReRoPE and dual chunk attention rotate far keys by other positions.

Each maps the distance D = i - j of a RoPE model to a distance that occurs in training:

    Self-Extend    D < window: D      else  i // group - j // group + window - window / group
    ReRoPE         D < window: D      else  window,   leaky: window + (D - window) / leak
    dual chunk     D within a chunk   else  at most chunk_size, by chunks

Two or three rotations in one softmax are not a plan, so these are separate functions. All are causal and take
unrotated queries and keys, k and v in full (as cached), q their last rows. They run over blocks of queries, so that
memory grows with block × length; with gradients each block is recomputed in the backward pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...core.mask import check_key_mask
from ...core.options import require_int
from ...core.phases import compute_phases, split_frequencies
from ...core.plan_checks import check_tensors
from ...core.rotation import apply_rotary
from .rope import RoPE, digits_on_device


@dataclass(frozen=True)
class Piece:
    """One rotation of some queries against one run of keys; `band` = (least, most) distance that it serves."""

    q: Tensor  # [B, H, rows, D]
    k: Tensor  # [B, Hkv, columns, D]
    v: Tensor
    start: int  # the first column's key
    band: tuple[int, float]


def self_extend(
    q: Tensor, k: Tensor, v: Tensor, *, rope: RoPE, group: int, window: int, log_scale: int | None = None,
    scale: float | None = None, key_mask: Tensor | None = None, block: int = 128,
) -> Tensor:  # fmt: skip
    """Self-Extend (Jin et al. 2024, arXiv:2401.01325): exact distances to near keys, distances by groups of `group` positions to far ones.

        n = 12, group 2, window 4, last row:   7 7 6 6 5 5 4 4 3 2 1 0

    q [B, H, Lq, D], k, v [B, Hkv, Lk, D], unrotated; the queries are the last Lq of the Lk tokens.
    window     must be a multiple of group
    log_scale  the training length n: queries at position i are multiplied by max(1, ln(i + 1) / ln(n))
    scale      of the scores; default 1/sqrt(D) times the score factor of rope's scaling
    key_mask   bool [B, Lk], True for real keys
    block      queries at a time

    Raises ValueError for shapes and windows that do not fit and for a RoPE that follows the length.

        >>> q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
        >>> posenc.rope.self_extend(q, k, v, rope=posenc.RoPE(head_dim=8), group=2, window=4).shape
        torch.Size([1, 2, 12, 8])
    """
    for name, size in (("group", group), ("window", window), ("block", block)):
        require_int(name, size, least=1)
    if window % group:
        raise ValueError(f"window={window} must be a positive multiple of group={group}")
    rotator = _Rotator(q, k, v, rope)
    q = rotator.scaled(q, log_scale)
    far_q = rotator(q, rotator.at_q // group + (window - window // group))
    far_k = rotator(k, rotator.at_k // group)
    return _near_and_far(q, k, v, rotator, window, far_q, far_k, scale, key_mask, block)


def rerope(
    q: Tensor, k: Tensor, v: Tensor, *, rope: RoPE, window: int, leak: float | None = None,
    log_scale: int | None = None, scale: float | None = None, key_mask: Tensor | None = None, block: int = 128,
) -> Tensor:  # fmt: skip
    """ReRoPE (Su 2023): distances from `window` on are all `window`; leaky: they keep growing, `leak` times slower.

        window 4, last row of 12:   4 4 4 4 4 4 4 4 3 2 1 0

    The arguments are those of `self_extend`.

    Raises what `self_extend` raises.

        >>> q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()  # [B, H, L, D]
        >>> posenc.rope.rerope(q, k, v, rope=posenc.RoPE(head_dim=8), window=4).shape
        torch.Size([1, 2, 12, 8])
    """
    require_int("window", window, least=1)
    require_int("block", block, least=1)
    if leak is not None and (isinstance(leak, bool) or not isinstance(leak, (int, float)) or not 1 <= leak < math.inf):
        raise ValueError(f"leak={leak!r} must be None (ReRoPE) or a number, at least 1")
    rotator = _Rotator(q, k, v, rope)
    q = rotator.scaled(q, log_scale)
    here = torch.full_like(rotator.at_q, window)
    if leak is None:
        far_q, far_k = rotator(q, here), rotator(k, torch.zeros_like(rotator.at_k))
    else:  # window + (D - window) / leak: whole steps at 1/leak of the frequency, and window whole ones
        slow = [w / leak for w in rotator.frequencies]
        far_q = rotator(rotator(q, rotator.at_q - window, slow), here, magnitude=1.0)
        far_k = rotator(k, rotator.at_k, slow)
    return _near_and_far(q, k, v, rotator, window, far_q, far_k, scale, key_mask, block)


def dual_chunk(
    q: Tensor, k: Tensor, v: Tensor, *, rope: RoPE, chunk_size: int, local: int, log_scale: int | None = None,
    scale: float | None = None, key_mask: Tensor | None = None, block: int = 128,
) -> Tensor:  # fmt: skip
    """Dual chunk attention (An et al. 2024, arXiv:2402.17463): no distance exceeds `chunk_size`.

        chunks of n = chunk_size - local tokens; keys are rotated by j mod n, queries
            to their own chunk      by  i mod n
            to the one before       by  min(i mod n + n, chunk_size)
            to older ones           by  min(2n - 1, chunk_size)

    The authors use 3/4 of the training length for chunk_size and 1/8 for local. The other arguments are those of
    `self_extend`.

    Raises ValueError where `local` does not fit into a chunk.

        >>> q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()  # [B, H, L, D]
        >>> posenc.rope.dual_chunk(q, k, v, rope=posenc.RoPE(head_dim=8), chunk_size=8, local=2).shape
        torch.Size([1, 2, 12, 8])
    """
    require_int("chunk_size", chunk_size, least=1)
    require_int("block", block, least=1)
    if isinstance(local, bool) or not isinstance(local, int) or not 0 <= local < chunk_size:
        raise ValueError(f"local={local} must be at least 0 and less than chunk_size={chunk_size}")
    n = chunk_size - local
    rotator = _Rotator(q, k, v, rope)
    q = rotator.scaled(q, log_scale)
    inside = rotator.at_q % n
    keys = rotator(k, rotator.at_k % n)
    own, before = rotator(q, inside), rotator(q, (inside + n).clamp(max=chunk_size))
    older = rotator(q, torch.full_like(inside, min(2 * n - 1, chunk_size)))

    def pieces(first: int, last: int) -> Iterator[Piece]:
        at = rotator.offset + first
        chunk = at // n * n
        rows = slice(first, last)
        spans = (older, 0, chunk - n), (before, max(chunk - n, 0), chunk), (own, chunk, at + last - first)
        for queries, start, end in spans:
            if end > start:
                yield Piece(queries[:, :, rows], keys[:, :, start:end], v[:, :, start:end], start, (0, math.inf))

    borders = range(-(rotator.offset % n), q.shape[2], n)  # a block of queries lies within one chunk
    blocks = [
        (first, min(first + block, start + n, q.shape[2]))
        for start in borders
        for first in range(max(start, 0), min(start + n, q.shape[2]), block)
    ]
    return _run(blocks, pieces, rotator, scale, key_mask, q)


class _Rotator:
    """Rotates to any positions with the frequencies of one RoPE; at_q, at_k: the positions of queries and keys."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rope: RoPE):
        if not isinstance(rope, RoPE) or rope.length_dependent:
            raise ValueError("long-context attention needs a RoPE whose frequencies do not depend on the length")
        check_tensors(q, k, v)
        if q.shape[2] > k.shape[2]:
            raise ValueError(
                f"q must be [B, H, Lq, D] and k [B, Hkv, Lk, D] with Lq <= Lk, got {list(q.shape)} and {list(k.shape)}"
            )
        self.rope, self.frequencies = rope, rope.frequencies()
        self.offset = k.shape[2] - q.shape[2]
        self.at_q = torch.arange(self.offset, k.shape[2], device=q.device)
        self.at_k = torch.arange(k.shape[2], device=q.device)

    def __call__(self, x: Tensor, positions: Tensor, frequencies=None, magnitude: float | None = None) -> Tensor:
        digits = digits_on_device(split_frequencies(tuple(frequencies or self.frequencies)), x.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = compute_phases(positions[None, :, None], digits, dtype)
        factor = self.rope.attention_factor if magnitude is None else magnitude
        return apply_rotary(x, cos * factor, sin * factor, self.rope.layout)

    def scaled(self, q: Tensor, log_scale: int | None) -> Tensor:
        """Queries with log-n tempering."""
        if log_scale is None:
            return q
        require_int("log_scale (the training length)", log_scale, least=2)
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = ((self.at_q + 1).to(wide).log() / math.log(log_scale)).clamp(min=1.0)
        return (q * factor[:, None]).to(q.dtype)


def _near_and_far(
    q: Tensor, k: Tensor, v: Tensor, rotator: _Rotator, window: int, far_q: Tensor, far_k: Tensor, scale, key_mask, block: int
) -> Tensor:  # fmt: skip
    near_q, near_k = rotator(q, rotator.at_q), rotator(k, rotator.at_k)

    def pieces(first: int, last: int) -> Iterator[Piece]:
        rows, at, end = slice(first, last), rotator.offset + first, rotator.offset + last
        if end > window:
            columns = slice(0, end - window)
            yield Piece(far_q[:, :, rows], far_k[:, :, columns], v[:, :, columns], 0, (window, math.inf))
        start = max(at - window + 1, 0)
        yield Piece(near_q[:, :, rows], near_k[:, :, start:end], v[:, :, start:end], start, (0, window - 1))

    blocks = [(first, min(first + block, q.shape[2])) for first in range(0, q.shape[2], block)]
    return _run(blocks, pieces, rotator, scale, key_mask, q)


def _run(
    blocks: list[tuple[int, int]], pieces: Callable[[int, int], Iterator[Piece]], rotator: _Rotator, scale, key_mask, q: Tensor
) -> Tensor:  # fmt: skip
    """One softmax over the pieces of each block of queries."""
    if key_mask is not None:
        key_mask = check_key_mask(key_mask, q.shape[0], rotator.offset + q.shape[2])
    factor = 1.0 if rotator.rope.scaling is None else rotator.rope.scaling.score_factor
    scale = factor * q.shape[3] ** -0.5 if scale is None else scale
    outs = []
    for first, last in blocks:
        parts = list(pieces(first, last))
        tensors = [x for part in parts for x in (part.q, part.k, part.v)]
        spans = [(part.start, part.band) for part in parts]
        arguments = (rotator.offset + first, scale, key_mask, spans, *tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            outs.append(checkpoint(_block, *arguments, use_reentrant=False))
        else:
            outs.append(_block(*arguments))
    return torch.cat(outs, dim=2) if outs else q.new_zeros(q.shape)


def _block(at: int, scale: float, key_mask: Tensor | None, spans: list, *tensors: Tensor) -> Tensor:
    """softmax over all pieces' scores, in float32 or better -> [B, H, rows, Dv]."""
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    kv_heads = tensors[1].shape[1]
    rows = torch.arange(at, at + tensors[0].shape[2], device=tensors[0].device)
    scores = []
    with torch.autocast(tensors[0].device.type, enabled=False):
        for (start, (least, most)), q, k in zip(spans, tensors[0::3], tensors[1::3], strict=True):
            grouped = q.to(wide).unflatten(1, (kv_heads, -1)) * scale
            s = grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2)  # [B, Hkv, H/Hkv, rows, columns]
            distance = rows[:, None] - torch.arange(start, start + k.shape[2], device=q.device)
            allowed = (distance >= least) & (distance <= most)
            if key_mask is not None:
                allowed = allowed & key_mask[:, None, None, None, start : start + k.shape[2]]
            scores.append(s.masked_fill(~allowed, -math.inf))
        joined = torch.cat(scores, dim=-1)
        top = joined.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
        weights = (joined - top).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
        parts = zip(weights.split([s.shape[-1] for s in scores], dim=-1), tensors[2::3], strict=True)
        out = reduce(operator.add, (part @ v.to(wide).unsqueeze(2) for part, v in parts))
    return out.flatten(1, 2).to(dtype)
