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

Before and after the table its first and last rows are repeated (SIDE times), so that a near tile needs no comparison. A term of the keys
(COLS) lies in a band in memory, of which the producer copies each consumer's tile beside the window; tiles beyond its span are gathered.
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

from ..triton.structs import UNSPECIALISED
from .bands import lies_within, load_by_columns
from .kernel import (
    CONSUMERS,
    ROWS,
    accumulator,
    begin_sums,
    by_eights,
    count_turns,
    far_tile,
    find_own_tiles,
    finish_block,
    is_touched,
    load_queries,
    load_slot,
    load_tiles,
    make_barriers,
    make_buffers,
    masks_of_row,
    near_tile,
    pass_turn,
    row_max,
    skip_slot,
    take_step,
    take_turn,
    wait_empty,
    wait_full,
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
def produce(load, bars, ring, sizes, NC: gl.constexpr, STAGES: gl.constexpr, WINDOWS: gl.constexpr, STATES: gl.constexpr, COPIED: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, x_desc, t_desc, cols_desc, tiles_ptr, table_heads, lo, hi, cols_size, cols_shift, q_smem, k_smem, v_smem, x_smem, t_smem, cols_smem = load  # fmt: skip
    t_full, t_empty = ring
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    BN: gl.constexpr = k_smem.shape[3]
    BM: gl.constexpr = NC * ROWS
    CHUNKS: gl.constexpr = BN // CHUNK + 3
    BYTES: gl.constexpr = t_desc.block_type.nbytes
    step = 0
    window = 0
    for turn in range(count_turns(sizes, BM)):
        b, h, bh, block = take_turn(turn, sizes, BM)
        own_table = gl.minimum(h, table_heads - 1)
        m0 = block * BM
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        n = last - first
        far = (left1 - left0) + (right1 - right0)
        load_queries(turn, b, h, m0, q_desc, q_smem, x_desc, x_smem, bars, NC, STATES)
        # the ends of the table
        at = window % WINDOWS
        wait_empty(t_empty, window, WINDOWS)
        mbarrier.expect(t_full.index(at), 2 * BYTES)
        tma.async_copy_global_to_shared(t_desc, [own_table, 0, 0], t_full.index(at), t_smem.index(CHUNKS * at))
        tma.async_copy_global_to_shared(
            t_desc, [own_table, hi - lo + SIDE, 0], t_full.index(at), t_smem.index(CHUNKS * at + 1)
        )
        window += 1
        before = -BN  # outside the tensor
        for t in range(n + 1):
            near = near_tile(t - far, first, left0, left1, right0, right1)
            n0 = gl.where(t < far, far_tile(t, left0, left1, right0), near) * BN
            if (t < n) & (t >= far):
                at = window % WINDOWS
                row = first_row(m0, n0, offset, lo, hi)
                wait_empty(t_empty, window, WINDOWS)
                mbarrier.expect(t_full.index(at), CHUNKS * BYTES + COPIED * NC * 2 * BN * ROWS)
                if COPIED:
                    for c in gl.static_range(NC):
                        place = [n0, bh * cols_size + m0 + c * ROWS + cols_shift]
                        tma.async_copy_global_to_shared(
                            cols_desc, place, t_full.index(at), cols_smem.index(NC * at + c)
                        )
                for i in gl.static_range(CHUNKS):
                    tma.async_copy_global_to_shared(
                        t_desc, [own_table, row + i * CHUNK, 0], t_full.index(at), t_smem.index(CHUNKS * at + i)
                    )
                window += 1
            load_slot(step, b, h // group, n0, before, t < n, k_desc, v_desc, k_smem, v_smem, bars, STAGES)
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
    x, t_smem, base, bias, row, t_full, t_empty, at, phase, cols, cols_smem, cols_slot, bh, n0, dist, k_length, BN: gl.constexpr, S_L: gl.constexpr,
    C_L: gl.constexpr, DTYPE: gl.constexpr, BIAS: gl.constexpr, COLS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The content terms of a tile [64, BN]; base: the consumer's first chunk in shared memory, row: in the table; dist: from the first key to
    the first query."""
    mbarrier.wait(t_full.index(at), phase)
    before = multiply(x, t_smem, base, bias, row, DTYPE, C_L, BIAS)
    after = multiply(x, t_smem, base + 1, bias, row + CHUNK, DTYPE, C_L, BIAS)
    begin = skew(before, after)
    if BN == 2 * CHUNK:
        last = multiply(x, t_smem, base + 2, bias, row + 2 * CHUNK, DTYPE, C_L, BIAS)
        begin = gl.reshape(gl.permute(gl.join(begin, skew(after, last)), (0, 2, 1)), [ROWS, BN])
    begin = gl.convert_layout(begin, S_L).to(gl.float32)
    if COPIED and lies_within(cols, dist, BN, ROWS) & (n0 + BN <= k_length):
        begin += cols_smem.index(cols_slot).permute((1, 0)).load(S_L).to(gl.float32)
    elif COLS:
        begin += load_by_columns(cols, bh, n0, dist, k_length, ROWS, BN, S_L, not COPIED)
    mbarrier.arrive(t_empty.index(at))
    return begin


@gluon.jit
def consume(
    use, masks, bars, ring, sizes, scale, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, WINDOWS: gl.constexpr,
    STATES: gl.constexpr, BIAS: gl.constexpr, COLS: gl.constexpr, COPIED: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    o_desc, lse_ptr, tiles_ptr, bias_ptr, bias_row, lo, hi, cols, key_ends_ptr, key_ends_row, q_smem, o_smem, k_smem, v_smem, x_smem, t_smem, cols_smem = use  # fmt: skip
    q_full, q_empty, full, empty = bars
    t_full, t_empty = ring
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = NC * ROWS
    CHUNKS: gl.constexpr = BN // CHUNK + 3
    DTYPE: gl.constexpr = v_smem.dtype
    S_L: gl.constexpr = accumulator(BN)
    C_L: gl.constexpr = accumulator(CHUNK)
    O_L: gl.constexpr = accumulator(D)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    limits = (q_length, k_length, left, right)
    if CID == 0:
        pass_turn(0)
    step = 0
    window = 0
    for turn in range(count_turns(sizes, BM)):
        b, h, bh, block = take_turn(turn, sizes, BM)
        m0 = block * BM + CID * ROWS
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        own, inner0, inner1 = find_own_tiles(m0, first, last, limits, BN)
        of_block = (left1 - left0) + (right1 - right0)
        far = gl.minimum(of_block, own)
        bias = bias_ptr + h * bias_row
        of_row = masks_of_row(masks, b)
        q = q_smem.index(CID).reshape([ROWS, D])
        x = q
        if STATES:
            x = x_smem.index(CID).reshape([ROWS, x_smem.shape[4]])
        mbarrier.wait(q_full.index(CID), turn & 1)

        # the table's ends: all columns of each product are alike
        at = window % WINDOWS
        wait_full(t_full, window, WINDOWS)
        low = multiply(x, t_smem, CHUNKS * at, bias, 0, DTYPE, C_L, BIAS)
        high = multiply(x, t_smem, CHUNKS * at + 1, bias, hi - lo + SIDE, DTYPE, C_L, BIAS)
        mbarrier.arrive(t_empty.index(at))
        wait_full(full, step, STAGES)
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
                q, p, m, l, acc, begin, step, scale, shift, 0.0, n0 - m0 + offset, m0, n0, False, of_row, limits,
                k_smem, v_smem, bars, S_L, P_L, CID, NC, STAGES, True, False, COLS, False, WINDOW, PADDED, DOCS,
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
                x, t_smem, CHUNKS * at + (2 - CID), bias, row, t_full, t_empty, at, (window // WINDOWS) & 1, cols, cols_smem, NC * at + CID,
                bh, n0, m0 - n0 - offset, k_length, BN, S_L, C_L, DTYPE, BIAS, COLS, COPIED,
            )  # fmt: skip
            p, m, l, acc = take_step(
                q, p, m, l, acc, begin, step, scale, 0.0, 0.0, n0 - m0 + offset, m0, n0, is_masked, of_row, limits,
                k_smem, v_smem, bars, S_L, P_L, CID, NC, STAGES, True, True, True, False, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1
            window += 1

        finish_block(p, m, l, acc, step, (b, h, bh, m0), q_length, o_desc, lse_ptr, o_smem, v_smem, bars, S_L, CID, STAGES)  # fmt: skip
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


@gluon.jit(do_not_specialize=UNSPECIALISED)
def forward_content(
    q_desc, k_desc, v_desc, o_desc,  # [B, heads, L, D]
    x_desc,  # the states [B, H, Lq, E] (q, if there are no others)
    t_desc,  # the table [H or 1, SIDE + span + SIDE, E], constant before and after the span
    cols_desc,  # tiles of the keys' band (bands.describe_band), or unused
    lse_ptr,  # float32 [B, H, Lq rounded up to 64], base 2
    tiles_ptr,  # int32 [B or 1, blocks, NUMBERS] (kernel.load_tiles)
    bias_ptr,  # float32 [H, SIDE + span + SIDE] (prepare.pad_bias), or unused
    key_ends_ptr, cols_ptr, key_ends_row, cols_size, cols_pitch, cols_origin, cols_lo, cols_hi, cols_shift,  # triton/band_layout.Band of the keys, or unused
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in kernel.forward
    scale,  # base 2
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, table_heads, bias_row, bits_row, doc_q_row, doc_k_row,
    doc_keys_row, lo, hi,
    STAGES: gl.constexpr, WINDOWS: gl.constexpr, STATES: gl.constexpr, BIAS: gl.constexpr, COLS: gl.constexpr, COPIED: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse; arguments are as in kernel.forward. lo, hi: the table's span."""
    NC: gl.constexpr = CONSUMERS
    CHUNKS: gl.constexpr = k_desc.block_shape[2] // CHUNK + 3
    q_smem, o_smem, k_smem, v_smem = make_buffers(q_desc, k_desc, v_desc, o_desc, NC, STAGES)
    t_smem = gl.allocate_shared_memory(q_desc.dtype, [WINDOWS * CHUNKS] + t_desc.block_shape, t_desc.layout)
    x_smem = q_smem
    if STATES:
        x_smem = gl.allocate_shared_memory(q_desc.dtype, [NC] + x_desc.block_shape, x_desc.layout)
    cols_smem = q_smem
    if COPIED:
        cols_smem = gl.allocate_shared_memory(q_desc.dtype, [WINDOWS * NC] + cols_desc.block_shape, cols_desc.layout)
    bars = make_barriers(NC, 1) + make_barriers(STAGES, NC)
    ring = make_barriers(WINDOWS, NC)
    fence_async_shared()

    load = (q_desc, k_desc, v_desc, x_desc, t_desc, cols_desc, tiles_ptr, table_heads, lo, hi, cols_size, cols_shift, q_smem, k_smem, v_smem, x_smem, t_smem, cols_smem)  # fmt: skip
    cols = (cols_ptr, cols_ptr, cols_size, cols_pitch, cols_origin, cols_lo, cols_hi)
    use = (o_desc, lse_ptr, tiles_ptr, bias_ptr, bias_row, lo, hi, cols, key_ends_ptr, key_ends_row, q_smem, o_smem, k_smem, v_smem, x_smem, t_smem, cols_smem)  # fmt: skip
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    sizes = (q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row)
    # Constants are repeated in each call: in a tuple that has a name they would become tensors.
    gl.warp_specialize([
        (consume, (use, masks, bars, ring, sizes, scale, 0, NC, STAGES, WINDOWS, STATES, BIAS, COLS, COPIED, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, ring, sizes, scale, 1, NC, STAGES, WINDOWS, STATES, BIAS, COLS, COPIED, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, ring, sizes, scale, 2, NC, STAGES, WINDOWS, STATES, BIAS, COLS, COPIED, WINDOW, PADDED, DOCS)),
        (produce, (load, bars, ring, sizes, NC, STAGES, WINDOWS, STATES, COPIED)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
