# mypy: ignore-errors
"""rotate on CUDA in one pass: every number is read once and written once, queries and keys in one launch.

The positions and pairs of a head are one line of L · pairs numbers, cut into tiles of BLOCK, so that no lane idles
whatever the head size. A program loads the phases of its tile once and turns that tile of GROUP heads.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # pairs that one program turns in each of its heads
HEADS = 2  # heads that share the phases it has loaded, at most
WARPS = 4


@triton.jit
def _tile(
    x, out, batch, group, c, s, x_batch, x_head, x_row, out_batch, out_head, out_row, length,
    PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Turn one tile of GROUP heads of x by the phases c, s [BLOCK] into out."""
    tile = tl.program_id(TILE).to(tl.int64)
    for step in tl.static_range(GROUP):
        head = (group * GROUP + step).to(tl.int64)
        source = x + batch * x_batch + head * x_head
        target = out + batch * out_batch + head * out_head
        if HALF:
            flat = tile * BLOCK + tl.arange(0, BLOCK)
            row, pair = flat // PAIRS, flat % PAIRS
            known = row < length
            a = tl.load(source + row * x_row + pair, mask=known, other=0.0).to(c.dtype)
            b = tl.load(source + row * x_row + pair + PAIRS, mask=known, other=0.0).to(c.dtype)
            tl.store(target + row * out_row + pair, (a * c - b * s).to(out.dtype.element_ty), mask=known)
            tl.store(target + row * out_row + pair + PAIRS, (a * s + b * c).to(out.dtype.element_ty), mask=known)
        else:
            flat = tile * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
            row, channel = flat // (2 * PAIRS), flat % (2 * PAIRS)
            known = row < length
            both = tl.load(source + row * x_row + channel, mask=known, other=0.0).to(c.dtype)
            a, b = tl.split(tl.reshape(both, (BLOCK, 2)))
            turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (2 * BLOCK,))
            tl.store(target + row * out_row + channel, turned.to(out.dtype.element_ty), mask=known)
        if REST > 0:  # channels that do not turn: the same tiles share them out
            for part in tl.static_range((REST + PAIRS - 1) // PAIRS):
                flat = (tile * ((REST + PAIRS - 1) // PAIRS) + part) * BLOCK + tl.arange(0, BLOCK)
                row, channel = flat // REST, 2 * PAIRS + flat % REST
                known = row < length
                rest = tl.load(source + row * x_row + channel, mask=known)
                tl.store(target + row * out_row + channel, rest, mask=known)


@triton.jit
def _turn(
    q, q_out, q_batch, q_head, q_row, q_out_batch, q_out_head, q_out_row,
    k, k_out, k_batch, k_head, k_row, k_out_batch, k_out_head, k_out_row,
    cos, sin, phase_batch, length, q_groups,
    PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, Q_GROUP: tl.constexpr, K_GROUP: tl.constexpr,
    HALF: tl.constexpr, BACK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, group of heads, batch row), groups of q's heads before k's. TILE: which grid axis has the tiles."""
    batch = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1 - TILE)
    at = tl.program_id(TILE).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at // PAIRS < length
    c = tl.load(cos + batch * phase_batch + at, mask=known, other=0.0).to(PRECISION)
    s = tl.load(sin + batch * phase_batch + at, mask=known, other=0.0).to(PRECISION)
    if BACK:
        s = -s
    if group < q_groups:  # always, where there is one tensor alone
        _tile(q, q_out, batch, group, c, s, q_batch, q_head, q_row, q_out_batch, q_out_head, q_out_row, length,
              PAIRS, REST, BLOCK, Q_GROUP, HALF, TILE)  # fmt: skip
    else:
        _tile(k, k_out, batch, group - q_groups, c, s, k_batch, k_head, k_row, k_out_batch, k_out_head, k_out_row,
              length, PAIRS, REST, BLOCK, K_GROUP, HALF, TILE)  # fmt: skip


def turn(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, layout: str, back: bool = False):
    """One or two tensors [B, H, L, D] of one length and head size, turned (`back`: the other way) by cos, sin
    [B or 1, L, pairs], each with the strides of its own kind.
    """
    tensors = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    batch, _, length, size = tensors[0].shape
    pairs = cos.shape[-1]
    if pairs == 0:
        return tuple(x.clone() for x in tensors)
    outs = tuple(torch.empty_like(x) for x in tensors)
    if length == 0 or batch == 0 or any(x.shape[1] == 0 for x in tensors) or size == 0:
        return outs if len(tensors) == 1 else tuple(turn((x,), cos, sin, layout, back)[0] for x in tensors if x.numel())
    cos, sin = cos.contiguous(), sin.contiguous()
    groups = [_group(x.shape[1]) for x in tensors]
    programs = [x.shape[1] // group for x, group in zip(tensors, groups)]
    q, k = tensors[0], tensors[-1]
    q_out, k_out = outs[0], outs[-1]
    # neighbours in the grid should be neighbours in memory: [B, L, H, D] has the heads of a row side by side
    tiles, rows_first = triton.cdiv(length * pairs, BLOCK), q.stride(1) >= q.stride(2)
    grid = (tiles, sum(programs), batch) if rows_first else (sum(programs), tiles, batch)
    double = torch.float64 in (q.dtype, cos.dtype)
    _turn[grid](
        q, q_out, *q.stride()[:3], *q_out.stride()[:3], k, k_out, *k.stride()[:3], *k_out.stride()[:3],
        cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), length, programs[0],
        PAIRS=pairs, REST=size - 2 * pairs, BLOCK=BLOCK, Q_GROUP=groups[0], K_GROUP=groups[-1],
        HALF=layout == "half", BACK=back, TILE=0 if rows_first else 1, PRECISION=tl.float64 if double else tl.float32,
        num_warps=WARPS,
    )  # fmt: skip
    return outs


def _group(heads: int) -> int:
    """The most heads, up to HEADS, that divide the number of heads: no program needs a mask for them."""
    return max(group for group in range(1, HEADS + 1) if heads % group == 0)
