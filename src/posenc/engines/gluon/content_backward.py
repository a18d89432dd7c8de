"""The backward kernel for Hopper with content terms, in Gluon: five products, as in backward.py, whose producer it shares.

Content terms lie in bands in memory (triton/band_layout.py), one number for each token and distance of the span:

    rows [i, r]    states_i . table[r], part of a score          d_rows [i, r]    its gradient, ds (less the factor scale)
    cols [j, -r]   k_j . key_table[r], part of a score           d_cols [j, -r]   its gradient, ds
    mass [i, r]    dO_i . value[r], part of dp

Only near tiles read and write them; those within the span of wide bands (COPIED) by the copy engine: the producer loads them ahead, and ds
goes back from shared memory, transposed for d_rows. Where queries alone have terms, over narrow spans, it loads every near tile (LOADED), and
ds is stored by the consumers. In a far tile every distance lies at or beyond an end of the span, so that a term is one number for each
query or key, and its gradient a sum over keys or queries:

    rows, mass     are part of the copies of lse and delta that are loaded (backward_prepare.py)
    cols           is what the product of keys and queries begins with
    d_rows         a query's sum over the keys of a block: a product of ones with ds, which the adder has in shared memory -> outer
    d_cols         a key's sum over queries stays in registers until its block ends

    outer [block of keys, query], float32: the sum of ds over the block's keys beyond the span; backward_prepare.finish_rows adds the blocks
    in a fixed order and takes a block as beyond the left end or the right one, never both (content_launch.is_one_sided)

dQ, and nothing else, is added in whatever order blocks come.
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
from .backward import hide, produce
from .backward_sums import BUFFERS, add_tile, async_add
from .backward_tiles import KEYS, NEAR, OWN, count_turns, far_query_tile, find_keys, find_queries, grid
from .bands import (
    BANDS,
    COPY,
    load_by_columns,
    load_by_rows,
    load_copied,
    load_with_ends,
    store_by_columns,
    store_by_query,
    store_by_rows,
    store_row_ends,
)
from .kernel import along_rows, by_eights, load_tiles, make_barriers, masks_of_row, near_tile


# ---- adder --------------------------------------------------------------------------------------------------------------
@gluon.jit
def sum_keys(ds, ones_smem, BESIDE: gl.constexpr):
    """Starts the sums of ds [keys, queries] over keys, as a product with ones, all of whose columns (BESIDE) or rows are alike. BESIDE: the
    queries are rows, which needs four registers beside another product, and 64 queries."""
    BM: gl.constexpr = ds.shape[1]
    if BESIDE:
        L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
        zero = gl.zeros([BM, 8], gl.float32, L)
        return warpgroup_mma(ds.permute((1, 0)), ones_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        T_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
        ones = gl.full([64, KEYS], 1.0, ds.dtype, gl.DotOperandLayout(0, T_L, 2))
        return warpgroup_mma(ones, ds, gl.zeros([64, BM], gl.float32, T_L), use_acc=False, is_async=True)


@gluon.jit
def store_sums(outer, sums, BESIDE: gl.constexpr):
    row, column = grid(sums)
    if BESIDE:
        gl.store(outer + row + 0 * column, sums, mask=column + 0 * row == 0)
    else:
        gl.store(outer + column + 0 * row, sums, mask=row + 0 * column == 0)


@gluon.jit
def add_dq_and_outer(use, bars, sizes, work, SLOTS: gl.constexpr, ADD: gl.constexpr, OUTER: gl.constexpr):
    """backward_sums.add_dq, and the sums of far tiles over keys."""
    dq_ptr, outer_ptr, k_smem, ds_smem, dq_smem, ones_smem = use
    kv_full, kv_empty, ds_full, ds_empty = bars
    q_length, k_length, heads, group, batch, spread = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = ds_smem.shape[2]
    BESIDE: gl.constexpr = BM == 64 and D == 64
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    kv_heads = heads // group
    blocks = (k_length + KEYS - 1) // KEYS
    q_tiles = (q_length + BM - 1) // BM
    step = 0
    for turn in range(count_turns(order_ptr, order_row)):
        bh, block = find_keys(order_ptr, order_row, turn, blocks)
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(
            tiles_ptr, tiles_row, bh // kv_heads, block
        )
        mbarrier.wait(kv_full.index(0), turn & 1)
        k = k_smem.index(0).reshape([KEYS, D]).permute((1, 0))
        for member in range(group):
            head = bh * group + member
            outer = outer_ptr + (head * blocks + block).to(gl.int64) * (q_tiles * BM)
            for t in range(last - first):
                tile, copy = find_queries(t, first, right0, right1, left0, left1, block * spread, blocks)
                slot = step % SLOTS
                mbarrier.wait(ds_full.index(slot), (step // SLOTS) & 1)
                zero = gl.zeros([64, BM], gl.float32, L)
                if OUTER and not BESIDE:
                    if copy != NEAR:
                        sums = sum_keys(ds_smem.index(slot), ones_smem, BESIDE)
                        store_sums(outer + tile * BM, warpgroup_mma_wait(0, deps=(sums,)), BESIDE)
                if ADD == 3:
                    tma.store_wait(BUFFERS - 1)
                    gl.thread_barrier()
                for c in gl.static_range(D // 64):
                    dq = warpgroup_mma(k.slice(64 * c, 64, 0), ds_smem.index(slot), zero, use_acc=False, is_async=True)
                    if OUTER and BESIDE:  # of near tiles too: a branch between the products would cost more
                        sums = sum_keys(ds_smem.index(slot), ones_smem, BESIDE)
                        dq, sums = warpgroup_mma_wait(0, deps=(dq, sums))
                    else:
                        dq = warpgroup_mma_wait(0, deps=(dq,))
                    if c == D // 64 - 1:
                        mbarrier.arrive(ds_empty.index(slot))
                    if ADD == 2:
                        add_tile(dq_ptr + (head * q_tiles + tile).to(gl.int64) * (BM * D) + c * 64 * BM, dq)
                    if ADD == 3:
                        dq_smem.index(step % BUFFERS).slice(64 * c, 64, 0).store(dq)
                if OUTER and BESIDE:
                    if copy != NEAR:
                        store_sums(outer + tile * BM, sums, BESIDE)
                if ADD == 3:
                    fence_async_shared()
                    async_add(dq_ptr, [(head * q_tiles + tile) * D, 0], dq_smem.index(step % BUFFERS))
                step += 1
        mbarrier.arrive(kv_empty.index(0))
    tma.store_wait(0)


# ---- consumers ----------------------------------------------------------------------------------------------------------
@gluon.jit
def content_step(
    k, v, dk, dv, p_a, below, above, far_keys, step, before, done, head, outer, scale, m0, n0, offset, is_masked, masks, limits, bands, smem, bars,
    copies, copied, queries_smem, S_L: gl.constexpr, A_L: gl.constexpr, CID: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, IS_NEAR: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, MASS: gl.constexpr, D_ROWS: gl.constexpr, D_COLS: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr, COPIED: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """backward.take_step with content terms. far_keys: the keys' numbers of this side; below, above: sums for the ends of d_cols, in far
    tiles below alone. copied: tiles of bands so far."""
    q_smem, do_smem, stats_smem, ds_smem = smem
    full, empty, ds_full, ds_empty = bars
    q_length, k_length, left, right = limits
    rows, cols, mass = bands
    BM: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    at = step % STAGES
    slot = step % SLOTS
    q = q_smem.index(at).reshape([BM, D])
    do = do_smem.index(at).reshape([BM, D])
    stats = stats_smem.index(at)
    zero = gl.zeros([OWN, BM], gl.float32, S_L)
    dist = n0 - m0 + offset
    begin = zero
    if IS_NEAR and LOADED:
        begin = load_with_ends(copies[2], copies, copied, dist, rows[5], rows[6], CID, S_L)
    elif IS_NEAR and COPIED:
        begin = load_copied(copies, copied, CID, ROWS, COLS, S_L)
    else:
        if IS_NEAR and ROWS:
            begin = load_by_columns(rows, head, m0, dist, q_length, OWN, BM, S_L)
        if IS_NEAR and COLS:
            begin += load_by_rows(cols, head, n0, -dist, k_length, OWN, BM, S_L)
    if COLS and not IS_NEAR:
        begin += along_rows(far_keys, zero)
    begin_dp = zero
    if IS_NEAR and LOADED and MASS:
        begin_dp = load_with_ends(copies[4], copies, copied, dist, mass[5], mass[6], CID, S_L)
    elif IS_NEAR and MASS:
        begin_dp = load_by_columns(mass, head, m0, dist, q_length, OWN, BM, S_L)
    mbarrier.wait(full.index(at), (step // STAGES) & 1)
    if (IS_NEAR and ROWS) or COLS:
        s = warpgroup_mma(k, q.permute((1, 0)), begin, is_async=True)
    else:
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if IS_NEAR and MASS:
        dp = warpgroup_mma(v, do.permute((1, 0)), begin_dp, is_async=True)
    else:
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(p_a, do_smem.index(before).reshape([BM, D]), dv, use_acc=done > 1, is_async=True)
    ds_before = ds_smem.index((step + SLOTS - 1) % SLOTS).slice(CID * OWN, OWN, 0)
    dk = warpgroup_mma(ds_before, q_smem.index(before).reshape([BM, D]), dk, use_acc=done > 1, is_async=True)
    lse = stats.slice(0, BM, 1).load(S_L)
    s = warpgroup_mma_wait(3, deps=(s,))
    if IS_NEAR or COPIED:
        if is_masked:
            s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    p = gl.exp2(s * scale - lse)
    p_low = p.to(q_smem.dtype)
    delta = stats.slice(BM, BM, 1).load(S_L)
    # stands here for ptxas, as in backward.py
    mbarrier.wait(ds_empty.index(slot), ((step // SLOTS) & 1) ^ 1)
    dp = warpgroup_mma_wait(2, deps=(dp,))
    ds = p * (dp - delta)
    low = ds.to(q_smem.dtype)
    own_ds = ds_smem.index(slot).slice(CID * OWN, OWN, 0)
    own_ds.store(low)
    by_query = queries_smem
    if COPIED and D_ROWS:
        by_query = queries_smem.index(FIRST + step % 2).reshape([BM, COPY])
        if IS_NEAR:
            by_query.permute((1, 0)).store(low)
    if COPIED or LOADED:
        tma.store_wait(0)  # the copy engine has read the tiles of the step before
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ds_full.index(slot))
    if IS_NEAR and (COPIED or LOADED):
        mbarrier.arrive(copies[1].index(copied % BANDS))
    if IS_NEAR and COPIED:
        if D_ROWS:
            tma.async_copy_shared_to_global(copies[5], [m0, head * rows[2] + n0 + copies[2][5]], by_query)
        if D_COLS:
            tma.async_copy_shared_to_global(copies[6], [n0, head * cols[2] + m0 + copies[3][5]], own_ds)
    else:
        if IS_NEAR and D_ROWS and LOADED:
            buffer = queries_smem.index(FIRST).reshape([BM, COPY])
            store_by_query(rows, outer, buffer, low, head, m0, dist, q_length)
        elif IS_NEAR and D_ROWS:
            store_by_columns(rows, outer, ds, head, m0, dist, q_length)
        if D_COLS:
            if IS_NEAR:
                below, above = store_by_rows(cols, ds, below, above, head, n0, -dist, k_length)
            else:
                below += gl.sum(by_eights(ds), 1)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(empty.index(before), pred=done > 0)
    return dk, dv, gl.convert_layout(p_low, A_L), below, above


@gluon.jit
def consume_content(
    use, smem, mask_rows, bars, sizes, work, limits, bands, copies, scale, CID: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, MASS: gl.constexpr, D_ROWS: gl.constexpr, D_COLS: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr, COPIED: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, key_ends_ptr, key_ends_row, outer_ptr, k_smem, v_smem, o_smem, band_smem = use
    q_smem, do_smem, stats_smem, ds_smem = smem
    rows, cols, mass = bands
    kv_full, kv_empty, full, empty, ds_full, ds_empty = bars
    q_length, k_length, heads, group, batch, spread = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    BM: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    OUTS: gl.constexpr = o_smem.shape[0] // 2  # of dk and dv: one place for each, or one for both
    queries_smem = band_smem
    if OUTS == 2:  # tiles of d_rows leave through the same memory as dk and dv
        queries_smem = o_smem
    FIRST: gl.constexpr = 2 * CID
    kv_heads = heads // group
    blocks = (k_length + KEYS - 1) // KEYS
    q_tiles = (q_length + BM - 1) // BM
    natural = scale * 0.6931471805599453
    tile_bars = (full, empty, ds_full, ds_empty)
    step = 0
    copied = 0
    for turn in range(count_turns(order_ptr, order_row)):
        bh, block = find_keys(order_ptr, order_row, turn, blocks)
        b = bh // kv_heads
        n0 = block * KEYS + CID * OWN
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        far_tiles = (right1 - right0) + (left1 - left0)
        masks = masks_of_row(mask_rows, b)
        if COPIED:  # dk and dv of the block before have left their memory, where near tiles write
            tma.store_wait(0)
            gl.thread_barrier()
        mbarrier.wait(kv_full.index(0), turn & 1)
        k = k_smem.index(0).reshape([KEYS, D]).slice(CID * OWN, OWN, 0)
        v = v_smem.index(0).reshape([KEYS, D]).slice(CID * OWN, OWN, 0)
        dk = gl.zeros([OWN, D], gl.float32, O_L)
        dv = gl.zeros([OWN, D], gl.float32, O_L)
        nothing = gl.sum(by_eights(gl.zeros([OWN, BM], gl.float32, S_L)), 1)
        p_a = gl.convert_layout(gl.zeros([OWN, BM], q_smem.dtype, S_L), A_L)
        before = step % STAGES
        done = 0
        for member in range(group):
            head = bh * group + member  # of queries, of all batch rows
            outer = outer_ptr + (head * blocks + block).to(gl.int64) * (q_tiles * BM)
            j = gl.minimum(n0 + gl.arange(0, OWN, gl.SliceLayout(1, S_L)), k_length - 1)
            far_keys = j.to(gl.float32)
            above = nothing
            for side in gl.static_range(2):  # the far tiles: on the right, at the lower end of -r, then on the left
                begin, end = (right0, right1) if side == 0 else (left0, left1)
                below = above
                above = nothing
                if COLS:
                    far_keys = gl.load(key_ends_ptr + (head.to(gl.int64) * 2 + side) * key_ends_row + j)
                for t in range(end - begin):
                    tile = far_query_tile(t, begin, end, block * spread, blocks)
                    is_masked = (tile < clear0) | (tile >= clear1)
                    dk, dv, p_a, above, _ = content_step(
                        k, v, dk, dv, p_a, above, above, far_keys, step, before, done, head, outer, scale, tile * BM, n0, offset, is_masked, masks, limits, bands,
                        smem, tile_bars, copies, copied, queries_smem, S_L, A_L, CID, FIRST, STAGES, SLOTS, False, ROWS, COLS, MASS, D_ROWS, D_COLS, WINDOW, PADDED,
                        DOCS, COPIED, LOADED,
                    )  # fmt: skip
                    before = step % STAGES
                    step += 1
                    done += 1
            for t in range(last - first - far_tiles):
                tile = near_tile(t, first, right0, right1, left0, left1)
                is_masked = (tile < clear0) | (tile >= clear1)
                dk, dv, p_a, below, above = content_step(
                    k, v, dk, dv, p_a, below, above, far_keys, step, before, done, head, outer, scale, tile * BM, n0, offset, is_masked, masks, limits, bands,
                    smem, tile_bars, copies, copied, queries_smem, S_L, A_L, CID, FIRST, STAGES, SLOTS, True, ROWS, COLS, MASS, D_ROWS, D_COLS, WINDOW,
                    PADDED, DOCS, COPIED, LOADED,
                )  # fmt: skip
                before = step % STAGES
                step += 1
                done += 1
                copied += 1
            if D_COLS:
                store_row_ends(cols, below, above, head, n0, k_length)

        mbarrier.arrive(kv_empty.index(0))
        dv = warpgroup_mma(p_a, do_smem.index(before).reshape([BM, D]), dv, use_acc=done > 1, is_async=True)
        ds = ds_smem.index((step + SLOTS - 1) % SLOTS).slice(CID * OWN, OWN, 0)
        dk = warpgroup_mma(ds, q_smem.index(before).reshape([BM, D]), dk, use_acc=done > 1, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        mbarrier.arrive(empty.index(before))
        tma.store_wait(0)
        gl.thread_barrier()
        place = [b, bh % kv_heads, n0, 0]
        o_smem.index(OUTS * CID).reshape([OWN, D]).store((dk * natural).to(q_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, place, o_smem.index(OUTS * CID))
        if OUTS == 1:
            tma.store_wait(0)
            gl.thread_barrier()
        o_smem.index(OUTS * CID + OUTS - 1).reshape([OWN, D]).store(dv.to(q_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, place, o_smem.index(OUTS * CID + OUTS - 1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def backward_content(
    k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc,  # [B, heads, L, D]
    stats_desc,  # as in backward.backward
    rows_desc, cols_desc, mass_desc, d_rows_desc, d_cols_desc, row_ends_desc, mass_ends_desc,  # tiles of bands (bands.py), or unused
    dq_ptr, tiles_ptr, order_ptr,  # as there
    real_ptr, doc_q_ptr, doc_k_ptr, doc_queries_ptr,  # as there
    key_ends_ptr,  # float32 [B, H, 2, key_ends_row]: the ends of cols, or unused
    outer_ptr,  # float32 [B, H, blocks of keys, tiles of queries * BM], zeros, or unused
    scale,  # base 2
    key_ends_row, q_length, k_length, heads, group, batch, spread, left, right, tiles_row, order_row, real_row, doc_q_row, doc_k_row, doc_queries_row,
    rows_ptr, d_rows_ptr, rows_size, rows_pitch, rows_origin, rows_lo, rows_hi,  # bands, or unused; size: elements of a head
    cols_ptr, d_cols_ptr, cols_size, cols_pitch, cols_origin, cols_lo, cols_hi,
    mass_ptr, mass_size, mass_pitch, mass_origin, mass_lo, mass_hi,
    rows_shift, cols_shift, mass_shift,  # of tiles that are copied: band_layout.Band.shift
    STAGES: gl.constexpr, SLOTS: gl.constexpr, ADD: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, MASS: gl.constexpr,
    D_ROWS: gl.constexpr, D_COLS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr, COPIED: gl.constexpr, LOADED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv, the sums of dq / scale, and the bands' gradients. r = j - i + offset, the offset of a batch row being in tiles."""
    DTYPE: gl.constexpr = q_desc.dtype
    BM: gl.constexpr = q_desc.block_shape[2]
    D: gl.constexpr = q_desc.block_shape[3]
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, KEYS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_desc.layout)
    OUTS: gl.constexpr = 1 if D == 128 and (COPIED or LOADED) else 2
    o_smem = gl.allocate_shared_memory(DTYPE, [2 * OUTS, 1, 1, OWN, D], dk_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * BM], stats_desc.layout)
    DS_L: gl.constexpr = gl.NVMMASharedLayout(2 * BM, 16, 2)
    ds_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, KEYS, BM], DS_L)
    dq_smem = ds_smem
    if ADD == 3:
        dq_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, D, BM], dq_ptr.layout)
    ones_smem = ds_smem
    if D_ROWS and BM == 64:
        ones_smem = gl.allocate_shared_memory(DTYPE, [8, KEYS], gl.NVMMASharedLayout(128, 16, 2))
        ones_smem.store(gl.full([8, KEYS], 1.0, DTYPE, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    COPY_ROWS: gl.constexpr = ROWS and (COPIED or LOADED)
    COPY_COLS: gl.constexpr = COLS and COPIED
    COPY_MASS: gl.constexpr = MASS and LOADED
    rows_smem = ds_smem
    cols_smem = ds_smem
    mass_smem = ds_smem
    band_smem = ds_smem
    row_ends_smem = stats_smem
    mass_ends_smem = stats_smem
    if COPY_ROWS:
        rows_smem = gl.allocate_shared_memory(DTYPE, [2 * BANDS, BM, COPY], rows_desc.layout)
    if COPY_COLS:
        cols_smem = gl.allocate_shared_memory(DTYPE, [2 * BANDS, COPY, BM], cols_desc.layout)
    if COPY_MASS:
        mass_smem = gl.allocate_shared_memory(DTYPE, [2 * BANDS, BM, COPY], mass_desc.layout)
        mass_ends_smem = gl.allocate_shared_memory(gl.float32, [2 * BANDS, 1, BM], mass_ends_desc.layout)
    if LOADED:
        row_ends_smem = gl.allocate_shared_memory(gl.float32, [2 * BANDS, 1, BM], row_ends_desc.layout)
    if OUTS == 1:
        band_smem = gl.allocate_shared_memory(DTYPE, [4, BM, COPY], rows_desc.layout)
    kv_full, kv_empty = make_barriers(1, 3)
    full, empty = make_barriers(STAGES, 2)
    ds_empty, ds_full = make_barriers(SLOTS, 2)  # what consumers fill, one role empties
    band_full, band_empty = make_barriers(BANDS, 2)
    fence_async_shared()

    load = (k_desc, v_desc, q_desc, do_desc, stats_desc, k_smem, v_smem, q_smem, do_smem, stats_smem)
    use = (dk_desc, dv_desc, key_ends_ptr, key_ends_row, outer_ptr, k_smem, v_smem, o_smem, band_smem)
    smem = (q_smem, do_smem, stats_smem, ds_smem)
    masks = (real_ptr, doc_q_ptr, doc_k_ptr, doc_queries_ptr, real_row, doc_q_row, doc_k_row, doc_queries_row)
    bars = (kv_full, kv_empty, full, empty, ds_full, ds_empty)
    sizes = (q_length, k_length, heads, group, batch, spread)
    work = (tiles_ptr, tiles_row, order_ptr, order_row)
    limits = (q_length, k_length, left, right)
    bands = (
        (rows_ptr, d_rows_ptr, rows_size, rows_pitch, rows_origin, rows_lo, rows_hi),
        (cols_ptr, d_cols_ptr, cols_size, cols_pitch, cols_origin, cols_lo, cols_hi),
        (mass_ptr, mass_ptr, mass_size, mass_pitch, mass_origin, mass_lo, mass_hi),
    )
    copies = (
        band_full, band_empty, (rows_desc, row_ends_desc, rows_smem, row_ends_smem, rows_size, rows_shift),
        (cols_desc, cols_desc, cols_smem, cols_smem, cols_size, cols_shift),
        (mass_desc, mass_ends_desc, mass_smem, mass_ends_smem, mass_size, mass_shift), d_rows_desc, d_cols_desc,
    )  # fmt: skip
    # Constants are written in the calls: in a tuple with a name they would become tensors.
    gl.warp_specialize([
        (consume_content, (use, smem, masks, bars, sizes, work, limits, bands, copies, scale, 0, STAGES, SLOTS, ROWS, COLS, MASS, D_ROWS, D_COLS, WINDOW, PADDED, DOCS, COPIED, LOADED)),
        (consume_content, (use, smem, masks, bars, sizes, work, limits, bands, copies, scale, 1, STAGES, SLOTS, ROWS, COLS, MASS, D_ROWS, D_COLS, WINDOW, PADDED, DOCS, COPIED, LOADED)),
        (add_dq_and_outer, ((dq_ptr, outer_ptr, k_smem, ds_smem, dq_smem, ones_smem), (kv_full, kv_empty, ds_full, ds_empty), sizes, work, SLOTS, ADD, D_ROWS)),
        (produce, (load, (kv_full, kv_empty, full, empty), sizes, work, copies, STAGES, COPY_ROWS, COPY_COLS, COPY_MASS, LOADED)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, ADDER_REGISTERS, REGISTERS])  # fmt: skip
