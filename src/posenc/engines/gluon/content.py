"""The forward kernel for Hopper with a content term of the queries, in Gluon: scores scale (q_i . k_j + rows[i, r]).

Roles, slots and tiles are those of kernel.py. The term is a band in memory (triton/band_layout.py): a number for each query and each
distance of the span, and two ends for the distances beyond it. A tile of it is a matrix with aligned rows:

    far tile      one of the two ends, a number for each query: it goes into the row's maximum
    near tile     the product of queries and keys begins with the band's numbers instead of zero

    near tile of 64 queries, the span's ends lo and hi as diagonals

        lo lo lo  b  b  b  b hi hi hi        lo, hi: the query's ends
        lo lo lo lo  b  b  b  b hi hi        b: the band, at i pitch + j + const
        lo lo lo lo lo  b  b  b  b hi
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .kernel import (
    CONSUMERS,
    ROWS,
    along_rows,
    by_eights,
    coordinates,
    count_blocks,
    far_tile,
    find_block,
    hide,
    load_tiles,
    near_tile,
    pass_turn,
    produce,
    softmax,
    wait_turn,
)


@gluon.jit
def begin_rows(band, low, high, dist, rows, pitch, origin, lo, hi, BN: gl.constexpr, S_L: gl.constexpr):
    """The band's numbers for a tile, dist being the distance of its first key and first query; band: the address of that query's row;
    rows: how many queries there are; low, high: the ends."""
    row, eight, column = coordinates(by_eights(gl.zeros([ROWS, BN], gl.float32, S_L)))
    # beyond the span all numbers are ends: such tiles read what lies beside the band
    first = gl.minimum(gl.maximum(dist - origin, -BN), hi - origin + (ROWS + 16))
    first = (first + 4096) // 16 * 16 - 4096
    at = gl.minimum(row, rows - 1) * pitch + column
    x = gl.load((band + first) + at + 8 * eight).to(gl.float32)
    if dist - (ROWS - 1) <= lo:
        x = gl.where(8 * eight <= (lo - dist) + row - column, along_rows(low, x), x)
    if dist + (BN - 1) >= hi:
        x = gl.where(
            (8 * eight >= (hi - dist) + row - column) & (8 * eight > (lo - dist) + row - column), along_rows(high, x), x
        )
    return gl.convert_layout(gl.reshape(x, [ROWS, BN]), S_L)


@gluon.jit
def take_step(
    q, p, m, l, acc, step, scale, shift, dist, m0, n0, is_masked, masks, limits, band, low, high, bounds, k_smem, v_smem, full, empty,
    S_L: gl.constexpr, P_L: gl.constexpr, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr,
    WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """kernel.take_step; shift and the band's ends are numbers for each query."""
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    at = step % STAGES
    k_tile = k_smem.index(at).reshape([BN, D]).permute((1, 0))
    v_tile = v_smem.index(at).reshape([BN, D])
    if NEAR:
        pitch, origin, lo, hi = bounds
        begin = begin_rows(band, low, high, dist, limits[0] - m0, pitch, origin, lo, hi, BN, S_L)
        wait_turn(CID)
        s_new = warpgroup_mma(q, k_tile, begin, is_async=True)
    else:
        wait_turn(CID)
        zero = gl.zeros([ROWS, BN], gl.float32, S_L)
        s_new = warpgroup_mma(q, k_tile, zero, use_acc=False, is_async=True)
    acc_new = warpgroup_mma(p, v_tile, acc, is_async=True)
    pass_turn((CID + 1) % NC)
    s = warpgroup_mma_wait(1, deps=(s_new,))
    if NEAR:
        if is_masked:
            s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    p_new, alpha, m = softmax(s, m, scale, shift, 0.0, dist, S_L, NEAR, False)
    l = l * along_rows(alpha, l) + gl.sum(p_new, 1)
    mbarrier.wait(full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)  # here for ptxas, see kernel.py
    acc = warpgroup_mma_wait(0, deps=(acc_new,))
    mbarrier.arrive(empty.index(at))
    p = gl.convert_layout(gl.reshape(p_new.to(v_smem.dtype), [ROWS, BN]), P_L)
    return p, m, l, acc * along_rows(alpha, acc)


@gluon.jit
def consume(
    use, masks, bars, sizes, scale, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    (
        o_desc,
        lse_ptr,
        tiles_ptr,
        band_ptr,
        ends_ptr,
        band_head,
        pitch,
        origin,
        band_lo,
        band_hi,
        q_smem,
        o_smem,
        k_smem,
        v_smem,
    ) = use
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row = masks
    q_full, q_empty, full, empty = bars
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, row, lo, hi = sizes
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = NC * ROWS
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    count = (q_length + BM - 1) // BM
    padded = (q_length + 63) // 64 * 64
    bounds = (pitch, origin, band_lo, band_hi)
    limits = (q_length, k_length, left, right)
    program, programs = gl.program_id(0), gl.num_programs(0)
    if CID == 0:
        pass_turn(0)
    step = 0
    for turn in range(count_blocks(batch_heads * count, program, programs)):
        bh, block = find_block(turn, program, programs, count, batch_heads, section)
        m0 = block * BM + CID * ROWS
        b = bh // heads
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        n = last - first
        end = gl.minimum(m0 + ROWS, q_length) + (k_length - q_length) + right  # of the keys that these queries see
        own = gl.minimum((gl.maximum(end, 0) + BN - 1) // BN, last)
        own = gl.where(m0 < q_length, gl.maximum(own - first, 1), 0)
        far = gl.minimum((left1 - left0) + (right1 - right0), own)
        rows = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, S_L))
        ends = ends_ptr + bh.to(gl.int64) * 2 * padded + gl.minimum(rows, q_length - 1)
        low = gl.load(ends)
        high = gl.load(ends + padded)
        band = band_ptr + bh.to(gl.int64) * band_head + m0.to(gl.int64) * pitch + m0
        of_row = (
            bits_ptr + b * bits_row,
            doc_q_ptr + b * doc_q_row,
            doc_k_ptr + b * doc_k_row,
            doc_keys_ptr + b * doc_keys_row,
        )
        # keys that no limit hides from any of these queries
        inner0 = gl.minimum(m0 + ROWS, q_length) - 1 + (k_length - q_length) - left
        inner1 = gl.minimum(m0 + (k_length - q_length) + right + 1, k_length)
        q = q_smem.index(CID).reshape([ROWS, D])
        mbarrier.wait(q_full.index(CID), turn & 1)
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)

        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_L))
        nothing = gl.zeros([ROWS, BN], gl.float32, S_L)
        l = gl.sum(by_eights(nothing), 1)
        p = gl.convert_layout(nothing.to(v_smem.dtype), P_L)
        acc = gl.zeros([ROWS, D], gl.float32, O_L)
        for t in range(far):
            n0 = far_tile(t, left0, left1, right0) * BN
            shift = gl.where(t < left1 - left0, low, high) * scale
            p, m, l, acc = take_step(
                q, p, m, l, acc, step, scale, shift, n0 - m0 + offset, m0, n0, False, of_row, limits, band, low, high, bounds,
                k_smem, v_smem, full, empty, S_L, P_L, CID, NC, STAGES, False, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1
        for t in range(own - far):
            tile = near_tile(t, first, left0, left1, right0, right1)
            n0 = tile * BN
            is_masked = (n0 < inner0) | (n0 + BN > inner1)
            if PADDED or DOCS:
                is_masked = is_masked | (tile < clear0) | (tile >= clear1)
            p, m, l, acc = take_step(
                q, p, m, l, acc, step, scale, 0.0, n0 - m0 + offset, m0, n0, is_masked, of_row, limits, band, low, high, bounds,
                k_smem, v_smem, full, empty, S_L, P_L, CID, NC, STAGES, True, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1

        # the values of the last tile
        at = step % STAGES
        values = v_smem.index(at).reshape([BN, D])
        acc_new = warpgroup_mma(p, values, acc, is_async=True)
        mbarrier.arrive(q_empty.index(CID))
        total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, S_L))
        is_empty = total == 0.0
        lse = gl.where(is_empty, float("inf"), m + gl.log2(total))
        inverse = 1.0 / gl.where(is_empty, 1.0, total)
        acc = warpgroup_mma_wait(0, deps=(acc_new,))
        mbarrier.arrive(empty.index(at))
        step += 1
        if m0 < q_length:
            gl.store(lse_ptr + bh.to(gl.int64) * padded + rows, lse, mask=rows < q_length)
            tma.store_wait(0)
            gl.thread_barrier()
            o_smem.index(CID).reshape([ROWS, D]).store((acc * along_rows(inverse, acc)).to(v_smem.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [b, bh % heads, m0, 0], o_smem.index(CID))
        for _ in range(own, n):
            wait_turn(CID)
            pass_turn((CID + 1) % NC)
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES))
            step += 1
    if CID == 0:
        wait_turn(0)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "origin", "band_lo", "band_hi", "q_length", "k_length", "heads", "group", "batch_heads", "section", "left", "right", "tiles_row", "bits_row",
        "doc_q_row", "doc_k_row", "doc_keys_row", "lo", "hi", "scale",
    ]
)  # fmt: skip
def forward_content(
    q_desc, k_desc, v_desc, o_desc,  # [B, heads, L, D]
    lse_ptr,  # float32 [B, H, Lq rounded up to 64], base 2
    tiles_ptr,  # int32 [B or 1, blocks, NUMBERS] (kernel.load_tiles)
    band_ptr, ends_ptr, band_head, pitch, origin, band_lo, band_hi,  # triton/band_layout.Band
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in kernel.forward
    scale,  # base 2
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, bits_row, doc_q_row, doc_k_row,
    doc_keys_row, lo, hi,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse; the arguments are those of kernel.forward."""
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    BN: gl.constexpr = k_desc.block_shape[2]
    NC: gl.constexpr = CONSUMERS
    q_smem = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, ROWS, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, ROWS, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    fence_async_shared()

    load = (q_desc, k_desc, v_desc, tiles_ptr, q_smem, k_smem, v_smem)
    bars = (q_full, q_empty, full, empty)
    use = (
        o_desc,
        lse_ptr,
        tiles_ptr,
        band_ptr,
        ends_ptr,
        band_head,
        pitch,
        origin,
        band_lo,
        band_hi,
        q_smem,
        o_smem,
        k_smem,
        v_smem,
    )
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    sizes = (q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, 0, lo, hi)
    gl.warp_specialize([
        (consume, (use, masks, bars, sizes, scale, 0, NC, STAGES, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, sizes, scale, 1, NC, STAGES, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, sizes, scale, 2, NC, STAGES, WINDOW, PADDED, DOCS)),
        (produce, (load, bars, sizes, NC, STAGES)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
