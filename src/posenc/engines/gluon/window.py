"""The forward kernel for Hopper with a content term of the queries, in Gluon: scores scale (q_i . k_j + x_i . table[j - i]).

Nothing of the term is in memory: consumers multiply their 64 queries (or other states x of theirs) with the rows of the table that
a tile needs. Roles, slots and tiles are those of kernel.py:

    far tile      every distance at or beyond one end of the table: one number for each query, which goes into the row's maximum
    near tile     x table' for the distances of the tile, 64 at a time; skewed to queries and keys in registers (skew.py), it is what the
                  product of queries and keys begins with

The producer copies a window of the table for each near tile, which all consumers share, and before a block's first tile one of the
table's ends. Consumer c has the queries m0 + 64 c .. m0 + 64 c + 63, and a tile of 128 keys from n0 on takes three of five chunks:

    distances   n0 - m0 - 192      - 128        - 64           0          + 64        + 128
                     |   chunk 0    |  chunk 1   |   chunk 2   |  chunk 3  |  chunk 4   |
    consumer 0                                   -----------------------------------------
    consumer 1                      ------------------------------------------
    consumer 2       -------------------------------------------

Before and after the table its first and last rows are repeated (SIDE times), so that a near tile needs no comparison.
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

from .bands import load_by_columns
from .kernel import (
    CONSUMERS,
    ROWS,
    along_rows,
    begin_sums,
    by_eights,
    count_blocks,
    far_tile,
    find_block,
    find_own_tiles,
    finish_block,
    hide,
    is_touched,
    load_tiles,
    masks_of_row,
    near_tile,
    pass_turn,
    row_max,
    skip_slot,
    softmax,
    wait_turn,
)
from .skew import skew

CHUNK = gl.constexpr(64)  # distances
SIDE = gl.constexpr(320)  # rows before and after the table: of the widest window


@gluon.jit
def first_row(m0, n0, offset, lo, hi):
    """Where the window of a tile begins in the table: m0 is the block's first query. Windows beyond the table are all alike."""
    return gl.minimum(gl.maximum(n0 - m0 - 3 * CHUNK + offset - lo + SIDE, 0), hi - lo + SIDE)


# ---- producer ---------------------------------------------------------------------------------------------------------
@gluon.jit
def produce(load, bars, sizes, NC: gl.constexpr, STAGES: gl.constexpr, WINDOWS: gl.constexpr, STATES: gl.constexpr):
    q_desc, k_desc, v_desc, x_desc, t_desc, tiles_ptr, q_smem, k_smem, v_smem, x_smem, t_smem = load
    q_full, q_empty, full, empty, t_full, t_empty = bars
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, table_heads, bias_row, lo, hi = (
        sizes
    )
    BN: gl.constexpr = k_smem.shape[3]
    BM: gl.constexpr = NC * ROWS
    CHUNKS: gl.constexpr = BN // CHUNK + 3
    BYTES: gl.constexpr = t_desc.block_type.nbytes
    count = (q_length + BM - 1) // BM
    program, programs = gl.program_id(0), gl.num_programs(0)
    step = 0
    window = 0
    for turn in range(count_blocks(batch_heads * count, program, programs)):
        bh, block = find_block(turn, program, programs, count, batch_heads, section)
        b = bh // heads
        h = bh % heads
        own_table = gl.minimum(h, table_heads - 1)
        m0 = block * BM
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        n = last - first
        far = (left1 - left0) + (right1 - right0)
        for c in gl.static_range(NC):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            if STATES:
                mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes + x_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(x_desc, [b, h, m0 + c * ROWS, 0], q_full.index(c), x_smem.index(c))
            else:
                mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, h, m0 + c * ROWS, 0], q_full.index(c), q_smem.index(c))
        # the ends of the table
        at = window % WINDOWS
        mbarrier.wait(t_empty.index(at), ((window // WINDOWS) & 1) ^ 1)
        mbarrier.expect(t_full.index(at), 2 * BYTES)
        tma.async_copy_global_to_shared(t_desc, [own_table, 0, 0], t_full.index(at), t_smem.index(CHUNKS * at))
        tma.async_copy_global_to_shared(
            t_desc, [own_table, hi - lo + SIDE, 0], t_full.index(at), t_smem.index(CHUNKS * at + 1)
        )
        window += 1
        before = -BN  # outside the tensor: zeros
        for t in range(n + 1):
            near = near_tile(t - far, first, left0, left1, right0, right1)
            n0 = gl.where(t < far, far_tile(t, left0, left1, right0), near) * BN
            has_keys = t < n
            if has_keys & (t >= far):
                at = window % WINDOWS
                row = first_row(m0, n0, offset, lo, hi)
                mbarrier.wait(t_empty.index(at), ((window // WINDOWS) & 1) ^ 1)
                mbarrier.expect(t_full.index(at), CHUNKS * BYTES)
                for i in gl.static_range(CHUNKS):
                    tma.async_copy_global_to_shared(
                        t_desc, [own_table, row + i * CHUNK, 0], t_full.index(at), t_smem.index(CHUNKS * at + i)
                    )
                window += 1
            at = step % STAGES
            mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(at), k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=has_keys)
            mbarrier.expect(full.index(at), v_desc.block_type.nbytes, pred=has_keys == 0)
            tma.async_copy_global_to_shared(
                k_desc, [b, h // group, n0, 0], full.index(at), k_smem.index(at), pred=has_keys
            )
            tma.async_copy_global_to_shared(v_desc, [b, h // group, before, 0], full.index(at), v_smem.index(at))
            before = n0
            step += 1


# ---- consumers --------------------------------------------------------------------------------------------------------
@gluon.jit
def multiply(x, t_smem, chunk, bias, row, DTYPE: gl.constexpr, C_L: gl.constexpr, BIAS: gl.constexpr):
    """The product of the states with a chunk of the table (and with the bias, row being the chunk's first), rounded. One at a time: two
    accumulators leave too few registers, and other consumers use the tensor cores meanwhile."""
    rows = t_smem.index(chunk).reshape([CHUNK, t_smem.shape[3]]).permute((1, 0))
    y = warpgroup_mma(x, rows, gl.zeros([ROWS, CHUNK], gl.float32, C_L), use_acc=False, is_async=True)
    y = warpgroup_mma_wait(0, deps=(y,))
    if BIAS:
        y += gl.expand_dims(gl.load(bias + row + gl.arange(0, CHUNK, gl.SliceLayout(0, C_L))), 0)
    return y.to(DTYPE)


@gluon.jit
def begin_near(
    x, t_smem, base, bias, row, t_full, t_empty, at, phase, BN: gl.constexpr, S_L: gl.constexpr, C_L: gl.constexpr,
    DTYPE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """The content term of a tile [64, BN]; base: the consumer's first chunk in shared memory, row: in the table."""
    mbarrier.wait(t_full.index(at), phase)
    before = multiply(x, t_smem, base, bias, row, DTYPE, C_L, BIAS)
    after = multiply(x, t_smem, base + 1, bias, row + CHUNK, DTYPE, C_L, BIAS)
    begin = skew(before, after)
    if BN == 2 * CHUNK:
        last = multiply(x, t_smem, base + 2, bias, row + 2 * CHUNK, DTYPE, C_L, BIAS)
        begin = gl.reshape(gl.permute(gl.join(begin, skew(after, last)), (0, 2, 1)), [ROWS, BN])
    mbarrier.arrive(t_empty.index(at))
    return gl.convert_layout(begin, S_L).to(gl.float32)


@gluon.jit
def take_step(
    q, p, m, l, acc, begin, step, scale, shift, dist, m0, n0, is_masked, masks, limits, k_smem, v_smem, full, empty,
    S_L: gl.constexpr, P_L: gl.constexpr, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr,
    COLS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """kernel.take_step; shift: a number for each query."""
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    at = step % STAGES
    k_tile = k_smem.index(at).reshape([BN, D]).permute((1, 0))
    v_tile = v_smem.index(at).reshape([BN, D])
    wait_turn(CID)
    s_new = warpgroup_mma(q, k_tile, begin, use_acc=NEAR or COLS, is_async=True)
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
    use, masks, bars, sizes, scale, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, WINDOWS: gl.constexpr,
    STATES: gl.constexpr, BIAS: gl.constexpr, COLS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    (
        o_desc,
        lse_ptr,
        tiles_ptr,
        bias_ptr,
        cols,
        key_ends_ptr,
        key_ends_row,
        q_smem,
        o_smem,
        k_smem,
        v_smem,
        x_smem,
        t_smem,
    ) = use
    q_full, q_empty, full, empty, t_full, t_empty = bars
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, table_heads, bias_row, lo, hi = (
        sizes
    )
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = NC * ROWS
    CHUNKS: gl.constexpr = BN // CHUNK + 3
    DTYPE: gl.constexpr = v_smem.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    C_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    count = (q_length + BM - 1) // BM
    limits = (q_length, k_length, left, right)
    program, programs = gl.program_id(0), gl.num_programs(0)
    if CID == 0:
        pass_turn(0)
    step = 0
    window = 0
    for turn in range(count_blocks(batch_heads * count, program, programs)):
        bh, block = find_block(turn, program, programs, count, batch_heads, section)
        m0 = block * BM + CID * ROWS
        b = bh // heads
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        own, inner0, inner1 = find_own_tiles(m0, first, last, limits, BN)
        of_block = (left1 - left0) + (right1 - right0)
        far = gl.minimum(of_block, own)
        bias = bias_ptr + (bh % heads) * bias_row
        of_row = masks_of_row(masks, b)
        q = q_smem.index(CID).reshape([ROWS, D])
        x = q
        if STATES:
            x = x_smem.index(CID).reshape([ROWS, x_smem.shape[4]])
        mbarrier.wait(q_full.index(CID), turn & 1)

        # the table's ends: all columns of each product are alike
        at = window % WINDOWS
        mbarrier.wait(t_full.index(at), (window // WINDOWS) & 1)
        low = multiply(x, t_smem, CHUNKS * at, bias, 0, DTYPE, C_L, BIAS)
        high = multiply(x, t_smem, CHUNKS * at + 1, bias, hi - lo + SIDE, DTYPE, C_L, BIAS)
        mbarrier.arrive(t_empty.index(at))
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        window += 1
        low = row_max(by_eights(low.to(gl.float32)), S_L)
        high = row_max(by_eights(high.to(gl.float32)), S_L)

        p, m, l, acc = begin_sums(DTYPE, BN, D, S_L, O_L, P_L)
        for t in range(far):
            n0 = far_tile(t, left0, left1, right0) * BN
            shift = gl.where(t < left1 - left0, low, high) * scale
            begin = gl.zeros([ROWS, BN], gl.float32, S_L)
            if COLS:  # a key's end by -r
                ends = key_ends_ptr + (bh.to(gl.int64) * 2 + gl.where(t < left1 - left0, 1, 0)) * key_ends_row + n0
                begin += gl.expand_dims(gl.load(ends + gl.arange(0, BN, gl.SliceLayout(0, S_L))), 0)
            p, m, l, acc = take_step(
                q, p, m, l, acc, begin, step, scale, shift, n0 - m0 + offset, m0, n0, False, of_row, limits,
                k_smem, v_smem, full, empty, S_L, P_L, CID, NC, STAGES, False, COLS, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1
        for t in range(own - far):
            tile = near_tile(t, first, left0, left1, right0, right1)
            n0 = tile * BN
            is_masked = is_touched(tile, n0, inner0, inner1, clear0, clear1, BN, PADDED, DOCS)
            row = first_row(block * BM, n0, offset, lo, hi) + (2 - CID) * CHUNK
            # plus a zero that ptxas cannot see: otherwise it keeps the addresses of all chunks of a window in registers
            at = window % WINDOWS + window // (1 << 30)
            begin = begin_near(
                x, t_smem, CHUNKS * at + (2 - CID), bias, row, t_full, t_empty, at, (window // WINDOWS) & 1, BN, S_L, C_L, DTYPE, BIAS
            )  # fmt: skip
            if COLS:
                begin += load_by_columns(cols, bh, n0, m0 - n0 - offset, k_length, ROWS, BN, S_L)
            p, m, l, acc = take_step(
                q, p, m, l, acc, begin, step, scale, 0.0, n0 - m0 + offset, m0, n0, is_masked, of_row, limits,
                k_smem, v_smem, full, empty, S_L, P_L, CID, NC, STAGES, True, COLS, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1
            window += 1

        place = (b, bh % heads, bh, m0)
        finish_block(
            p, m, l, acc, step, place, q_length, o_desc, lse_ptr, o_smem, v_smem, q_empty, empty, S_L, CID, STAGES
        )
        step += 1
        for t in range(own, last - first):
            if t >= of_block:  # the slot before was loaded after this window: no wait is needed
                mbarrier.arrive(t_empty.index(window % WINDOWS))
                window += 1
            skip_slot(step, full, empty, CID, NC, STAGES, True)
            step += 1
    if CID == 0:
        wait_turn(0)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "batch_heads", "section", "left", "right", "tiles_row", "table_heads", "bias_row", "bits_row",
        "doc_q_row", "doc_k_row", "doc_keys_row", "lo", "hi", "scale", "key_ends_row", "cols_size", "cols_pitch", "cols_origin", "cols_lo", "cols_hi",
    ]
)  # fmt: skip
def forward_content(
    q_desc, k_desc, v_desc, o_desc,  # [B, heads, L, D]
    x_desc,  # the states [B, H, Lq, E] (q, if there are no others)
    t_desc,  # the table [H or 1, SIDE + span + SIDE, E], constant before and after the span
    lse_ptr,  # float32 [B, H, Lq rounded up to 64], base 2
    tiles_ptr,  # int32 [B or 1, blocks, NUMBERS] (kernel.load_tiles)
    bias_ptr,  # float32 [H, SIDE + span + SIDE] (prepare.pad_bias), or unused
    key_ends_ptr, cols_ptr, key_ends_row, cols_size, cols_pitch, cols_origin, cols_lo, cols_hi,  # triton/band_layout.Band of the keys, or unused
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in kernel.forward
    scale,  # base 2
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, table_heads, bias_row, bits_row, doc_q_row, doc_k_row,
    doc_keys_row, lo, hi,
    STAGES: gl.constexpr, WINDOWS: gl.constexpr, STATES: gl.constexpr, BIAS: gl.constexpr, COLS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr,
    DOCS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse; arguments are as in kernel.forward. lo, hi: the table's span."""
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    E: gl.constexpr = x_desc.block_shape[3]
    BN: gl.constexpr = k_desc.block_shape[2]
    NC: gl.constexpr = CONSUMERS
    CHUNKS: gl.constexpr = BN // CHUNK + 3
    q_smem = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, ROWS, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, ROWS, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_desc.layout)
    t_smem = gl.allocate_shared_memory(DTYPE, [WINDOWS * CHUNKS, 1, CHUNK, E], t_desc.layout)
    x_smem = q_smem
    if STATES:
        x_smem = gl.allocate_shared_memory(DTYPE, [NC, 1, 1, ROWS, E], x_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    t_full = gl.allocate_shared_memory(gl.int64, [WINDOWS, 1], BARRIER)
    t_empty = gl.allocate_shared_memory(gl.int64, [WINDOWS, 1], BARRIER)
    for i in gl.static_range(NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    for i in gl.static_range(WINDOWS):
        mbarrier.init(t_full.index(i), count=1)
        mbarrier.init(t_empty.index(i), count=NC)
    fence_async_shared()

    load = (q_desc, k_desc, v_desc, x_desc, t_desc, tiles_ptr, q_smem, k_smem, v_smem, x_smem, t_smem)
    bars = (q_full, q_empty, full, empty, t_full, t_empty)
    cols = (cols_ptr, cols_ptr, cols_size, cols_pitch, cols_origin, cols_lo, cols_hi)
    use = (
        o_desc,
        lse_ptr,
        tiles_ptr,
        bias_ptr,
        cols,
        key_ends_ptr,
        key_ends_row,
        q_smem,
        o_smem,
        k_smem,
        v_smem,
        x_smem,
        t_smem,
    )
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    sizes = (
        q_length,
        k_length,
        heads,
        group,
        batch_heads,
        section,
        left,
        right,
        tiles_row,
        table_heads,
        bias_row,
        lo,
        hi,
    )
    # Constants are repeated in each call: in a tuple that has a name they would become tensors.
    gl.warp_specialize([
        (consume, (use, masks, bars, sizes, scale, 0, NC, STAGES, WINDOWS, STATES, BIAS, COLS, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, sizes, scale, 1, NC, STAGES, WINDOWS, STATES, BIAS, COLS, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, sizes, scale, 2, NC, STAGES, WINDOWS, STATES, BIAS, COLS, WINDOW, PADDED, DOCS)),
        (produce, (load, bars, sizes, NC, STAGES, WINDOWS, STATES)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
