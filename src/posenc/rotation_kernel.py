# mypy: ignore-errors
"""rotate on CUDA in one pass: every number of x is read once and written once, phases are shared by a few heads."""

import torch
import triton
import triton.language as tl

HEADS = 4  # heads that share the phases of one program
TILE = 2048  # pairs that one program turns
WARPS = 8  # these three were the best of a sweep on an H200


@triton.jit
def _turn(
    x, out, cos, sin, x_batch, x_head, x_row, out_batch, out_head, out_row, phase_batch, phase_row, heads, length, size,
    PAIRS: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of GROUP heads of one batch row, as [GROUP, ROWS, WIDE]. WIDE >= PAIRS, powers of two."""
    batch = tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None]
    pair = tl.arange(0, WIDE)[None, None, :]
    timed = (row < length) & (pair < PAIRS)
    at = batch * phase_batch + row.to(tl.int64) * phase_row + pair
    c = tl.load(cos + at, mask=timed, other=0.0).to(PRECISION)
    s = tl.load(sin + at, mask=timed, other=0.0).to(PRECISION)
    source = x + batch * x_batch + head.to(tl.int64) * x_head + row.to(tl.int64) * x_row
    target = out + batch * out_batch + head.to(tl.int64) * out_head + row.to(tl.int64) * out_row
    inside = (head < heads) & (row < length)
    if HALF:
        known = inside & (pair < PAIRS)
        a = tl.load(source + pair, mask=known, eviction_policy="evict_first").to(PRECISION)
        b = tl.load(source + PAIRS + pair, mask=known, eviction_policy="evict_first").to(PRECISION)
        tl.store(target + pair, (a * c - b * s).to(out.dtype.element_ty), mask=known)
        tl.store(target + PAIRS + pair, (a * s + b * c).to(out.dtype.element_ty), mask=known)
    else:
        channel = tl.arange(0, 2 * WIDE)[None, None, :]
        known = inside & (channel < 2 * PAIRS)
        both = tl.load(source + channel, mask=known, eviction_policy="evict_first").to(PRECISION)
        a, b = tl.split(tl.reshape(both, (GROUP, ROWS, WIDE, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (GROUP, ROWS, 2 * WIDE))
        tl.store(target + channel, turned.to(out.dtype.element_ty), mask=known)
    if REST > 0:
        channel = 2 * PAIRS + tl.arange(0, REST)[None, None, :]
        known = inside & (channel < size)
        tl.store(target + channel, tl.load(source + channel, mask=known), mask=known)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """x [B, H, L, D] turned by cos, sin [B or 1, L, pairs]; contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, length, size = x.shape
    pairs = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    wide = triton.next_power_of_2(max(pairs, 1))
    rest = triton.next_power_of_2(size - 2 * pairs) if size > 2 * pairs else 0
    group = min(triton.next_power_of_2(heads), HEADS)
    rows = max(1, TILE // (group * wide))
    double = x.dtype == torch.float64 or cos.dtype == torch.float64
    grid = (triton.cdiv(length, rows), triton.cdiv(heads, group), batch)
    _turn[grid](
        x, out, cos, sin, *x.stride()[:3], *out.stride()[:3], 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1),
        heads, length, size, PAIRS=pairs, WIDE=wide, REST=rest, ROWS=rows, GROUP=group, HALF=layout == "half",
        PRECISION=tl.float64 if double else tl.float32, num_warps=WARPS,
    )  # fmt: skip
    return out
