"""Triton kernels of PaTH attention; products.py has the formulas. Blocks of 64 tokens are the leaves of a binary tree:

    within_blocks     scores [64, 64] of a block; queries multiplied to its start, keys to its end; whole: I - the product of its matrices
    join_blocks       whole of twice as many tokens, a launch for each level of the tree
    move_to_cuts      queries and keys at the cuts of every level: queries of right siblings, keys of left ones
    attend            the softmax over all cuts of a block of queries. Bit l of its number: whether it lies in a right sibling of level l

        block 5 = 101₂    keys of block 4 by level 0, of blocks 0 .. 3 by level 2, its own by within_blocks

    attend_backward_q, attend_backward_k, join_backward, within_backward_q, within_backward_k         the same, backward

Tensors between kernels are contiguous, of whole blocks (blocks × 64 tokens) and BLOCK_D channels, zeros where there is no token or
channel: a token without w has the identity as its matrix. `wholes` [B·Hkv, nodes, BLOCK_D, BLOCK_D]: level by level; node n of level l
holds the blocks n 2^l .. (n + 1) 2^l - 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..engines.triton.tiles import load_tile
from .kernel_parts import LOG2E, NEG_INF, accumulate, store_rows, visible_keys


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32, of factors rounded to PRECISION."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def inverted(overlap, i, j):
    """(I + overlap)^-1, overlap strictly lower triangular: with D the inverse of the diagonal blocks of a size and C what lies between two
    of them, D - D C D is that of twice the size."""
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), overlap, 0.0)
    for step in range(1, 6):
        between = ((i >> (step + 1)) == (j >> (step + 1))) & ((i >> step) != (j >> step))
        inverse -= product(product(inverse, tl.where(between, overlap, 0.0), "tf32x3"), inverse, "tf32x3")
    return inverse


@triton.jit
def own_block(sizes, BLOCK_D: tl.constexpr, N: tl.constexpr):
    """This program's row of [B · Hkv], batch row, key head and block; its first token, tokens within it [N, 1] and [1, N], channels."""
    pid = tl.program_id(0)
    bh = (pid // sizes.blocks).to(tl.int64)
    kv_heads = sizes.heads // sizes.group
    block = pid % sizes.blocks
    t = tl.arange(0, N)
    return bh, bh // kv_heads, bh % kv_heads, block, block * N, t[:, None], t[None, :], tl.arange(0, BLOCK_D)


@triton.jit
def load_block(x, b, h, start, length, d, D: tl.constexpr, N: tl.constexpr):
    """float32 [N, d] of a View."""
    return load_tile(x.ptr + b * x.b + h * x.h, x.l, start, length, d, D, N, True).to(tl.float32)


@triton.jit
def at_block(x, row, block, sizes, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to a block of contiguous memory [rows, blocks · N, BLOCK_D]."""
    first = (row * sizes.blocks + block) * N
    return x + (first + tl.arange(0, N)[:, None]) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_square(x, number, rows, columns, SIZE: tl.constexpr):
    """Matrix `number` of contiguous float32 [.., SIZE, SIZE]."""
    return tl.load(x + number * SIZE * SIZE + rows * SIZE + columns)


@triton.jit
def within_blocks(
    q, k, w, beta, scores, q_moved, k_moved, wholes, inverses, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of one key head and its query heads. beta [B, Hkv, L], scores [B, H, blocks, N, N], q_moved, k_moved, inverses
    [B, Hkv, blocks, N, N]: float32."""
    bh, b, h, block, start, i, j, d = own_block(sizes, BLOCK_D, N)
    k_tile, w_tile, overlap, scaled, inner, reach, inverse = solve_block(
        k, w, beta, None, bh, b, h, start, block, i, j, d, sizes, D, N, PRECISION
    )
    tl.store(at_block(inverses, bh, block, sizes, N, N), inverse)
    tl.store(at_block(k_moved, bh, block, sizes, N, BLOCK_D), k_tile - product(tl.trans(inner), w_tile, PRECISION))
    square = tl.arange(0, BLOCK_D)[:, None] * BLOCK_D + d[None, :]
    tl.store(
        wholes + (bh * sizes.nodes + block) * BLOCK_D * BLOCK_D + square, product(tl.trans(w_tile), reach, PRECISION)
    )
    for g in tl.range(0, sizes.group, num_stages=1):
        q_tile = load_block(q, b, h * sizes.group + g, start, sizes.length, d, D, N)
        dots = tl.where(i >= j, product(q_tile, tl.trans(w_tile), PRECISION), 0.0)
        s = product(q_tile, tl.trans(k_tile), PRECISION) - product(dots, inner, PRECISION)
        row = bh * sizes.group + g
        tl.store(at_block(scores, row, block, sizes, N, N), s)
        tl.store(at_block(q_moved, row, block, sizes, N, BLOCK_D), q_tile - product(dots, reach, PRECISION))


@triton.jit
def solve_block(
    k, w, beta, inverses, bh, b, h, start, block, i, j, d, sizes, D: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Keys and w of the block; w·w below the diagonal; T β; T β (w·k)_{rows > j}; T β W; T, loaded where `inverses` has it."""
    k_tile = load_block(k, b, h, start, sizes.length, d, D, N)
    w_tile = load_block(w, b, h, start, sizes.length, d, D, N)
    t = tl.arange(0, N)
    beta_t = tl.load(beta + bh * sizes.length + start + t, mask=start + t < sizes.length, other=0.0)
    overlap = tl.where(i > j, product(w_tile, tl.trans(w_tile), PRECISION), 0.0)
    if inverses is None:
        inverse = inverted(overlap * beta_t[:, None], i, j)
    else:
        inverse = load_square(inverses, bh * sizes.blocks + block, i, j, N)
    scaled = inverse * beta_t[None, :]
    inner = product(scaled, tl.where(i > j, product(w_tile, tl.trans(k_tile), PRECISION), 0.0), PRECISION)
    return k_tile, w_tile, overlap, scaled, inner, product(scaled, w_tile, PRECISION), inverse


@triton.jit
def first_node(level, blocks):
    first = 0
    for lower in range(level):
        first += blocks >> lower
    return first


@triton.jit(do_not_specialize=["level", "blocks", "nodes"])
def join_blocks(wholes, level, blocks, nodes, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """One node of a level from the two below it: (I - right)(I - left) = I - (left + right - right left)."""
    count = blocks >> level
    pid = tl.program_id(0)
    n = pid % count
    d = tl.arange(0, BLOCK_D)
    rows, columns = d[:, None], d[None, :]
    below = (pid // count).to(tl.int64) * nodes + first_node(level - 1, blocks)
    left = load_square(wholes, below + 2 * n, rows, columns, BLOCK_D)
    right = load_square(wholes, below + 2 * n + 1, rows, columns, BLOCK_D)
    to = wholes + (below + (blocks >> (level - 1)) + n) * BLOCK_D * BLOCK_D + rows * BLOCK_D + columns
    tl.store(to, left + right - product(right, left, PRECISION))


@triton.jit
def move_to_cuts(
    q_moved, k_moved, wholes, q_cuts, k_cuts, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of one key head and its query heads. q_cuts [levels, B, H, blocks · N, BLOCK_D] and k_cuts [levels, B, Hkv, ..] in the
    queries' dtype; the rows of left siblings of the first and of right
    ones of the second stay unwritten."""
    bh, _b, _h, block, _start, _i, _j, d = own_block(sizes, BLOCK_D, N)
    rows, columns = tl.arange(0, BLOCK_D)[:, None], d[None, :]
    tile, first = tl.load(at_block(k_moved, bh, block, sizes, N, BLOCK_D)), 0
    for level in range(sizes.levels):
        n, count = block >> level, sizes.blocks >> level
        if n % 2 == 0:
            to = at_block(k_cuts, level * sizes.rows_k + bh, block, sizes, N, BLOCK_D)
            tl.store(to, tile.to(k_cuts.dtype.element_ty))
            if (n + 1 < count) & (level < sizes.levels - 1):
                whole = load_square(wholes, bh * sizes.nodes + first + n + 1, rows, columns, BLOCK_D)
                tile -= product(tile, tl.trans(whole), PRECISION)
        first += count
    for g in tl.range(0, sizes.group, num_stages=1):
        row = bh * sizes.group + g
        tile, first = tl.load(at_block(q_moved, row, block, sizes, N, BLOCK_D)), 0
        for level in range(sizes.levels):
            n = block >> level
            if n % 2 == 1:
                to = at_block(q_cuts, level * sizes.rows_q + row, block, sizes, N, BLOCK_D)
                tl.store(to, tile.to(q_cuts.dtype.element_ty))
                if level < sizes.levels - 1:
                    whole = load_square(wholes, bh * sizes.nodes + first + n - 1, rows, columns, BLOCK_D)
                    tile -= product(tile, whole, PRECISION)
            first += sizes.blocks >> level


@triton.jit
def cut_scores(s, tokens, total, bh, b, i, j, length, scale, OWN: tl.constexpr):
    """Scaled scores [queries i, keys j], -inf where a key is invisible. total: float64 sums of log gates, [B, H, L], subtracted before they
    are rounded. OWN: queries and keys are of one block."""
    if total is not None:
        of_q = tl.load(total + bh * length + i, mask=i < length, other=0.0)
        of_k = tl.load(total + bh * length + j, mask=j < length, other=0.0)
        s += (of_q[:, None] - of_k[None, :]).to(tl.float32)
    s *= scale
    if OWN or tokens.real is not None or tokens.ids is not None:
        s = tl.where(visible_keys(tokens, b, i, j, length, 0), s, NEG_INF)
    return s


@triton.jit
def own_queries(sizes, N: tl.constexpr):
    """This program's row of [B · H], batch row, head, row of [B · Hkv] and block of queries, the longest rows first; the first of them, all of
    them, and their numbers in [B, H, L]."""
    pid = tl.program_id(0)
    bh, block = (pid // sizes.blocks).to(tl.int64), sizes.blocks - 1 - pid % sizes.blocks
    i = block * N + tl.arange(0, N)
    return (
        bh, bh // sizes.heads, bh % sizes.heads, bh // sizes.group, block, block * N, i, bh * sizes.length + tl.minimum(i, sizes.length - 1)
    )  # fmt: skip


@triton.jit
def attend(
    scores, q_cuts, k_cuts, v, tokens, total, out, lse, scale, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. out [B, H, L, DV], lse [B, H, L] float32."""
    bh, b, h, kv, block, start, i, at = own_queries(sizes, N)
    dv = tl.arange(0, BLOCK_DV)
    v_ptr = v.ptr + b * v.b + h // sizes.group * v.h
    m_i, l_i = tl.full([N], NEG_INF, tl.float32), tl.zeros([N], tl.float32)
    acc = tl.zeros([N, BLOCK_DV], tl.float32)
    s = tl.load(at_block(scores, bh, block, sizes, N, N))
    s = cut_scores(s, tokens, total, bh, b, i, i, sizes.length, scale, True)
    v_tile = load_tile(v_ptr, v.l, start, sizes.length, dv, DV, N, True)
    m_i, l_i, acc = accumulate(s, v_tile, m_i, l_i, acc, PRECISION)
    for level in range(sizes.levels):
        n = block >> level
        if n % 2 == 1:
            q_tile = tl.load(at_block(q_cuts, level * sizes.rows_q + bh, block, sizes, N, BLOCK_D))
            left = (n - 1) << level
            for step_k in range((n << level) - left):
                block_k = left + step_k
                j = block_k * N + tl.arange(0, N)
                k_tile = tl.load(at_block(k_cuts, level * sizes.rows_k + kv, block_k, sizes, N, BLOCK_D))
                v_tile = load_tile(v_ptr, v.l, block_k * N, sizes.length, dv, DV, N, False)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s = cut_scores(s, tokens, total, bh, b, i, j, sizes.length, scale, False)
                m_i, l_i, acc = accumulate(s, v_tile, m_i, l_i, acc, PRECISION)
    empty = l_i == 0.0
    sum_i = tl.where(empty, 1.0, l_i)
    store_rows(out, at, i < sizes.length, dv, DV, acc / sum_i[:, None])
    # +inf for a fully masked query: its probabilities are zero in the backward pass
    tl.store(lse + at, tl.where(empty, float("inf"), m_i + tl.log(sum_i)), mask=i < sizes.length)


@triton.jit
def attend_backward_q(
    scores, q_cuts, k_cuts, v, d_out, out, tokens, total, lse, delta, wholes, d_wholes, dq_moved, d_scores, scale, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head, from the last cut to the block itself: d_scores, dq_moved, delta stored, d_wholes added to."""
    bh, b, h, kv, block, start, i, at = own_queries(sizes, N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    v_ptr = v.ptr + b * v.b + h // sizes.group * v.h
    do_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, start, sizes.length, dv, DV, N, True)
    out_tile = tl.load(
        out + at[:, None] * DV + dv[None, :], mask=(i < sizes.length)[:, None] & (dv < DV)[None, :], other=0.0
    )
    delta_i = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + at, delta_i, mask=i < sizes.length)
    lse_i = tl.load(lse + at, mask=i < sizes.length, other=float("inf"))
    square = tl.arange(0, BLOCK_D)[:, None] * BLOCK_D + d[None, :]
    dq = tl.zeros([N, BLOCK_D], tl.float32)
    first = first_node(sizes.levels, sizes.blocks)
    for step in range(sizes.levels):
        level = sizes.levels - 1 - step
        first -= sizes.blocks >> level
        n = block >> level
        if n % 2 == 1:
            q_tile = tl.load(at_block(q_cuts, level * sizes.rows_q + bh, block, sizes, N, BLOCK_D))
            if step > 0:
                node = (kv * sizes.nodes + first + n - 1) * BLOCK_D * BLOCK_D
                tl.atomic_add(d_wholes + node + square, -product(tl.trans(q_tile), dq, PRECISION), sem="relaxed")
                dq -= product(dq, tl.trans(tl.load(wholes + node + square)), PRECISION)
            left = (n - 1) << level
            for step_k in range((n << level) - left):
                block_k = left + step_k
                j = block_k * N + tl.arange(0, N)
                k_tile = tl.load(at_block(k_cuts, level * sizes.rows_k + kv, block_k, sizes, N, BLOCK_D))
                v_tile = load_tile(v_ptr, v.l, block_k * N, sizes.length, dv, DV, N, False)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s = cut_scores(s, tokens, total, bh, b, i, j, sizes.length, scale, False)
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                ds = tl.exp2((s - lse_i[:, None]) * LOG2E) * (dp - delta_i[:, None]) * scale
                dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    tl.store(at_block(dq_moved, bh, block, sizes, N, BLOCK_D), dq)
    s = tl.load(at_block(scores, bh, block, sizes, N, N))
    s = cut_scores(s, tokens, total, bh, b, i, i, sizes.length, scale, True)
    v_tile = load_tile(v_ptr, v.l, start, sizes.length, dv, DV, N, True)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
    ds = tl.exp2((s - lse_i[:, None]) * LOG2E) * (dp - delta_i[:, None]) * scale
    tl.store(at_block(d_scores, bh, block, sizes, N, N), ds)


@triton.jit
def attend_backward_k(
    scores, q_cuts, k_cuts, v, d_out, tokens, total, lse, delta, wholes, d_wholes, dk_moved, dv_, d_total, scale, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: dk_moved and dv_ [B, Hkv, L, DV] stored, d_wholes and d_total [B, H, L] added to. The gradients of a
    query's scores sum to 0, so that total has none as a query's."""
    pid = tl.program_id(0)
    kv, block = (pid // sizes.blocks).to(tl.int64), pid % sizes.blocks
    kv_heads = sizes.heads // sizes.group
    b, h = kv // kv_heads, kv % kv_heads * sizes.group
    t, d, dv = tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    start = block * N
    j = start + t
    v_tile = load_tile(v.ptr + b * v.b + h // sizes.group * v.h, v.l, start, sizes.length, dv, DV, N, True)
    square = tl.arange(0, BLOCK_D)[:, None] * BLOCK_D + d[None, :]
    dk, dv_tile = tl.zeros([N, BLOCK_D], tl.float32), tl.zeros([N, BLOCK_DV], tl.float32)
    first = first_node(sizes.levels, sizes.blocks)
    for step in range(sizes.levels):
        level = sizes.levels - 1 - step
        first -= sizes.blocks >> level
        n = block >> level
        if n % 2 == 0:
            k_tile = tl.load(at_block(k_cuts, level * sizes.rows_k + kv, block, sizes, N, BLOCK_D))
            if (step > 0) & (n + 1 < (sizes.blocks >> level)):
                node = (kv * sizes.nodes + first + n + 1) * BLOCK_D * BLOCK_D
                tl.atomic_add(d_wholes + node + square, -product(tl.trans(dk), k_tile, PRECISION), sem="relaxed")
                dk -= product(dk, tl.load(wholes + node + square), PRECISION)
            for g in tl.range(0, sizes.group, num_stages=1):
                bh = kv * sizes.group + g
                sums = tl.zeros([N], tl.float32)
                right = (n + 1) << level
                for step_q in range(tl.minimum((n + 2) << level, sizes.blocks) - right):
                    block_q = right + step_q
                    i = block_q * N + t
                    q_tile = tl.load(at_block(q_cuts, level * sizes.rows_q + bh, block_q, sizes, N, BLOCK_D))
                    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    s = cut_scores(s, tokens, total, bh, b, i, j, sizes.length, scale, False)
                    ds, dv_tile = key_gradients(
                        s, v_tile, d_out, lse, delta, dv_tile, bh, b, h + g, block_q * N, sizes.length, scale, dv, DV, N, PRECISION
                    )  # fmt: skip
                    dk = tl.dot(tl.trans(ds).to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
                    sums += tl.sum(ds, 0)
                if d_total is not None:
                    tl.atomic_add(d_total + bh * sizes.length + j, -sums, mask=j < sizes.length, sem="relaxed")
    tl.store(at_block(dk_moved, kv, block, sizes, N, BLOCK_D), dk)
    for g in tl.range(0, sizes.group, num_stages=1):
        bh = kv * sizes.group + g
        s = tl.load(at_block(scores, bh, block, sizes, N, N))
        s = cut_scores(s, tokens, total, bh, b, j, j, sizes.length, scale, True)
        ds, dv_tile = key_gradients(
            s, v_tile, d_out, lse, delta, dv_tile, bh, b, h + g, start, sizes.length, scale, dv, DV, N, PRECISION
        )
        if d_total is not None:
            tl.atomic_add(d_total + bh * sizes.length + j, -tl.sum(ds, 0), mask=j < sizes.length, sem="relaxed")
    store_rows(dv_, kv * sizes.length + tl.minimum(j, sizes.length - 1), j < sizes.length, dv, DV, dv_tile)


@triton.jit
def key_gradients(
    s, v_tile, d_out, lse, delta, dv_tile, bh, b, h, start, length, scale, dv, DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """d_scores [queries from `start` on, keys], and dv_tile with what they add to it."""
    i = start + tl.arange(0, N)
    do_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, start, length, dv, DV, N, True)
    lse_i = tl.load(lse + bh * length + i, mask=i < length, other=float("inf"))
    delta_i = tl.load(delta + bh * length + i, mask=i < length, other=0.0)
    weights = tl.exp2((s - lse_i[:, None]) * LOG2E)
    dv_tile = tl.dot(tl.trans(weights).to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
    return weights * (dp - delta_i[:, None]) * scale, dv_tile


@triton.jit(do_not_specialize=["level", "blocks", "nodes"])
def join_backward(
    wholes, d_wholes, level, blocks, nodes, BLOCK_D: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr
):
    """What the gradient of a node of `level` adds to those of the two below it: PART columns of the left one's, or rows of the right one's."""
    parts: tl.constexpr = BLOCK_D // PART
    count = blocks >> level
    pid = tl.program_id(0)
    part = pid % parts * PART + tl.arange(0, PART)
    is_right = pid // parts % 2
    number = pid // (2 * parts)
    below = (number // count).to(tl.int64) * nodes + first_node(level - 1, blocks)
    n = number % count
    left, given = below + 2 * n, below + (blocks >> (level - 1)) + n
    d = tl.arange(0, BLOCK_D)
    if is_right:
        some_rows = load_square(d_wholes, given, part[:, None], d[None, :], BLOCK_D)
        added = some_rows - product(some_rows, load_square(wholes, left, d[None, :], d[:, None], BLOCK_D), PRECISION)
        to = d_wholes + (left + 1) * BLOCK_D * BLOCK_D + part[:, None] * BLOCK_D + d[None, :]
        tl.store(to, tl.load(to) + added)
    else:
        columns = load_square(d_wholes, given, d[:, None], part[None, :], BLOCK_D)
        right = load_square(wholes, left + 1, d[None, :], d[:, None], BLOCK_D)  # transposed
        at = d_wholes + left * BLOCK_D * BLOCK_D + d[:, None] * BLOCK_D + part[None, :]
        tl.store(at, tl.load(at) + columns - product(right, columns, PRECISION))


@triton.jit
def within_backward_q(
    q, k, w, beta, inverses, d_scores, dq_moved, d_inners, d_reaches, dk_own, dw_own, dq, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of one key head, what its query heads have: dq [B, H, L, D], and for within_backward_k the gradients of inner, reach, keys
    and w, [B, Hkv, blocks · N, ..] float32."""
    bh, b, h, block, start, i, j, d = own_block(sizes, BLOCK_D, N)
    k_tile, w_tile, _, _, inner, reach, _ = solve_block(
        k, w, beta, inverses, bh, b, h, start, block, i, j, d, sizes, D, N, PRECISION
    )
    t = start + tl.arange(0, N)
    d_inner = tl.zeros([N, N], tl.float32)
    d_reach = tl.zeros([N, BLOCK_D], tl.float32)
    dk_tile, dw_tile = tl.zeros([N, BLOCK_D], tl.float32), tl.zeros([N, BLOCK_D], tl.float32)
    for g in tl.range(0, sizes.group, num_stages=1):
        row = bh * sizes.group + g
        q_tile = load_block(q, b, h * sizes.group + g, start, sizes.length, d, D, N)
        ds = tl.load(at_block(d_scores, row, block, sizes, N, N))
        dq_tile = tl.load(at_block(dq_moved, row, block, sizes, N, BLOCK_D))
        dots = tl.where(i >= j, product(q_tile, tl.trans(w_tile), PRECISION), 0.0)
        d_dots = product(ds, tl.trans(inner), PRECISION) + product(dq_tile, tl.trans(reach), PRECISION)
        d_dots = tl.where(i >= j, -d_dots, 0.0)
        d_inner -= product(tl.trans(dots), ds, PRECISION)
        d_reach -= product(tl.trans(dots), dq_tile, PRECISION)
        dk_tile += product(tl.trans(ds), q_tile, PRECISION)
        dw_tile += product(tl.trans(d_dots), q_tile, PRECISION)
        dq_tile += product(ds, k_tile, PRECISION) + product(d_dots, w_tile, PRECISION)
        store_rows(dq, row * sizes.length + t, t < sizes.length, d, D, dq_tile)
    tl.store(at_block(d_inners, bh, block, sizes, N, N), d_inner)
    tl.store(at_block(d_reaches, bh, block, sizes, N, BLOCK_D), d_reach)
    tl.store(at_block(dk_own, bh, block, sizes, N, BLOCK_D), dk_tile)
    tl.store(at_block(dw_own, bh, block, sizes, N, BLOCK_D), dw_tile)


@triton.jit
def within_backward_k(
    k, w, beta, inverses, d_inners, d_reaches, dk_own, dw_own, dk_moved, d_wholes, dk, dw, d_beta, sizes,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of one key head: dk, dw [B, Hkv, L, D] and d_beta [B, Hkv, L], contiguous."""
    bh, b, h, block, start, i, j, d = own_block(sizes, BLOCK_D, N)
    k_tile, w_tile, overlap, scaled, inner, reach, inverse = solve_block(
        k, w, beta, inverses, bh, b, h, start, block, i, j, d, sizes, D, N, PRECISION
    )
    dk_tile = tl.load(at_block(dk_moved, bh, block, sizes, N, BLOCK_D))
    d_inner = tl.load(at_block(d_inners, bh, block, sizes, N, N)) - product(w_tile, tl.trans(dk_tile), PRECISION)
    dw_tile = tl.load(at_block(dw_own, bh, block, sizes, N, BLOCK_D)) - product(inner, dk_tile, PRECISION)
    d_whole = load_square(d_wholes, bh * sizes.nodes + block, tl.arange(0, BLOCK_D)[:, None], d[None, :], BLOCK_D)
    d_reach = tl.load(at_block(d_reaches, bh, block, sizes, N, BLOCK_D)) + product(w_tile, d_whole, PRECISION)
    dw_tile += product(reach, tl.trans(d_whole), PRECISION) + product(tl.trans(scaled), d_reach, PRECISION)
    dots = tl.where(i > j, product(w_tile, tl.trans(k_tile), PRECISION), 0.0)
    d_scaled = product(d_inner, tl.trans(dots), PRECISION) + product(d_reach, tl.trans(w_tile), PRECISION)
    d_dots = tl.where(i > j, product(tl.trans(scaled), d_inner, PRECISION), 0.0)
    dw_tile += product(d_dots, k_tile, PRECISION)
    dk_tile += tl.load(at_block(dk_own, bh, block, sizes, N, BLOCK_D)) + product(tl.trans(d_dots), w_tile, PRECISION)
    t = start + tl.arange(0, N)
    store_rows(dk, bh * sizes.length + t, t < sizes.length, d, D, dk_tile)
    beta_t = tl.load(beta + bh * sizes.length + t, mask=t < sizes.length, other=0.0)
    solved = product(tl.trans(inverse), d_scaled * beta_t[None, :], PRECISION)
    d_overlap = tl.where(i > j, -product(solved, tl.trans(inverse), PRECISION), 0.0)
    d_beta_t = tl.sum(d_scaled * inverse, 0) + tl.sum(d_overlap * overlap, 1)
    d_overlap *= beta_t[:, None]
    dw_tile += product(d_overlap + tl.trans(d_overlap), w_tile, PRECISION)
    store_rows(dw, bh * sizes.length + t, t < sizes.length, d, D, dw_tile)
    tl.store(d_beta + bh * sizes.length + t, d_beta_t, mask=t < sizes.length)
