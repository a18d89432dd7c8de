# mypy: ignore-errors
"""apply_rotary on CUDA in one pass: every number is read once and written once, queries and keys in one launch.

The pairs of a head are numbered through, L * pairs of them, and cut into tiles of BLOCK, so that no thread idles whatever
the head size. A program loads the phases of its tile once and rotates that tile of GROUP heads:

    pair number    0 1 2 | 3 4 5 | 6 7 8 | ..        3 pairs per position
    tile           0 0 0   0 1 1   1 1 2 ..          BLOCK = 4
    channels that are not rotated (REST per position) are copied alongside, REST_TILE of them by each tile
"""

import torch
import triton
import triton.language as tl

WHOLE = (512, 2, 2)
PARTIAL = (128, 2, 1)
"""(pairs of a tile; heads that share one load of the phases, at most; warps), where all channels are rotated and where some
are not: the best of `python -m posenc.bench.rotate --sweep` on an H200."""


@triton.jit
def _rotate_tile(
    x, out, batch, tile, group, c, s, x_batch, x_head, x_row, out_batch, out_head, out_row, length,
    PAIRS: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, REST_WIDE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate one tile of GROUP heads of x by the phases c, s [BLOCK] into out."""
    for step in tl.static_range(GROUP):
        head = group * GROUP + step
        source = x + batch * x_batch + head * x_head
        target = out + batch * out_batch + head * out_head
        if REST > 0:  # channels that are not rotated; of the same positions, where a tile has whole positions
            lane = tl.arange(0, REST_WIDE)
            at = tile * REST_TILE + lane
            rest_row, rest_channel = at // REST, 2 * PAIRS + at % REST
            rest_valid = (rest_row < length) & (lane < REST_TILE)
            rest = tl.load(source + rest_row * x_row + rest_channel, mask=rest_valid)
        if HALF:
            flat = tile * BLOCK + tl.arange(0, BLOCK)
            row, pair = flat // PAIRS, flat % PAIRS
            valid = row < length
            a = tl.load(source + row * x_row + pair, mask=valid, other=0.0).to(c.dtype)
            b = tl.load(source + row * x_row + pair + PAIRS, mask=valid, other=0.0).to(c.dtype)
            tl.store(target + row * out_row + pair, (a * c - b * s).to(out.dtype.element_ty), mask=valid)
            tl.store(target + row * out_row + pair + PAIRS, (a * s + b * c).to(out.dtype.element_ty), mask=valid)
        else:
            flat = tile * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
            row, channel = flat // (2 * PAIRS), flat % (2 * PAIRS)
            valid = row < length
            both = tl.load(source + row * x_row + channel, mask=valid, other=0.0).to(c.dtype)
            a, b = tl.split(tl.reshape(both, (BLOCK, 2)))
            rotated = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (2 * BLOCK,))
            tl.store(target + row * out_row + channel, rotated.to(out.dtype.element_ty), mask=valid)
        if REST > 0:
            tl.store(target + rest_row * out_row + rest_channel, rest, mask=rest_valid)


@triton.jit
def _rotate_kernel(
    q, q_out, q_batch, q_head, q_row, q_out_batch, q_out_head, q_out_row,
    k, k_out, k_batch, k_head, k_row, k_out_batch, k_out_head, k_out_row,
    cos, sin, phase_batch, length, tiles, q_groups, groups,
    PAIRS: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, REST_WIDE: tl.constexpr, BLOCK: tl.constexpr,
    Q_GROUP: tl.constexpr, K_GROUP: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each tile, group of heads (q's before k's) and batch row; ROWS_FIRST: neighbouring programs take
    neighbouring tiles, else neighbouring heads."""
    program = tl.program_id(0)
    if ROWS_FIRST:
        tile, group, batch = program % tiles, program // tiles % groups, program // tiles // groups
    else:
        tile, group, batch = program // groups % tiles, program % groups, program // groups // tiles
    tile, group, batch = tile.to(tl.int64), group.to(tl.int64), batch.to(tl.int64)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    valid = at // PAIRS < length
    c = tl.load(cos + batch * phase_batch + at, mask=valid, other=0.0).to(PRECISION)
    s = tl.load(sin + batch * phase_batch + at, mask=valid, other=0.0).to(PRECISION)
    if INVERSE:
        s = -s
    if group < q_groups:  # always, if there is one tensor
        _rotate_tile(q, q_out, batch, tile, group, c, s, q_batch, q_head, q_row, q_out_batch, q_out_head, q_out_row, length,
              PAIRS, REST, REST_TILE, REST_WIDE, BLOCK, Q_GROUP, HALF)  # fmt: skip
    else:
        _rotate_tile(k, k_out, batch, tile, group - q_groups, c, s, k_batch, k_head, k_row, k_out_batch, k_out_head, k_out_row,
              length, PAIRS, REST, REST_TILE, REST_WIDE, BLOCK, K_GROUP, HALF)  # fmt: skip


def rotate_tensors(
    tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, layout: str, inverse: bool = False
):
    """One or two tensors [B, H, L, D] of one length and head size, rotated by cos, sin [B or 1, L, pairs]; each result has the
    strides of its input. inverse: rotated by the negative angles.
    """
    tensors = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    batch, _, length, size = tensors[0].shape
    pairs = cos.shape[-1]
    if pairs == 0:
        return tuple(x.clone() for x in tensors)
    outs = tuple(torch.empty_like(x) for x in tensors)
    outs = tuple(
        out if out.stride(-1) == 1 else out.contiguous() for out in outs
    )  # empty_like keeps the strides of an expanded x
    if not all(x.numel() for x in tensors):
        return outs
    cos, sin = cos.contiguous(), sin.contiguous()
    rest = size - 2 * pairs
    block, max_group, warps = PARTIAL if rest else WHOLE
    rest_tile = triton.cdiv(triton.cdiv(block * rest, pairs), 16) * 16
    groups = [_largest_divisor(x.shape[1], max_group) for x in tensors]
    programs = [x.shape[1] // group for x, group in zip(tensors, groups)]
    q, k = tensors[0], tensors[-1]
    q_out, k_out = outs[0], outs[-1]
    # neighbouring programs should touch neighbouring memory: [B, L, H, D] has the heads of a position side by side
    rows_first, tiles = q.stride(1) >= q.stride(2), triton.cdiv(length * pairs, block)
    double = torch.float64 in (q.dtype, cos.dtype)
    _rotate_kernel[(tiles * sum(programs) * batch,)](
        q, q_out, *q.stride()[:3], *q_out.stride()[:3], k, k_out, *k.stride()[:3], *k_out.stride()[:3],
        cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), length, tiles, programs[0], sum(programs),
        PAIRS=pairs, REST=rest, REST_TILE=rest_tile, REST_WIDE=triton.next_power_of_2(max(rest_tile, 1)), BLOCK=block,
        Q_GROUP=groups[0], K_GROUP=groups[-1],
        HALF=layout == "half", INVERSE=inverse, ROWS_FIRST=rows_first, PRECISION=tl.float64 if double else tl.float32,
        num_warps=warps,
    )  # fmt: skip
    return outs


def _largest_divisor(heads: int, most: int) -> int:
    """The largest divisor of `heads` up to `most`: programs with that many heads need no mask."""
    return max(group for group in range(1, most + 1) if heads % group == 0)
