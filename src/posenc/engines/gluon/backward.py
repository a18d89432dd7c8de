"""The backward kernel for Hopper, in Gluon: five products, for attention with a bias by distance, slopes, causality, windows, padding,
documents and grouped heads.

A program has five roles, joined by barriers in shared memory:

    producer    1 warp          copies keys and values of a block, then its queries' q, dO, lse and delta, by TMA
    consumers   2 warpgroups    64 keys each: scores, probabilities, ds; dK and dV stay in registers
    adder       1 warpgroup     dQ from all consumers' keys, added to float32 sums in memory (backward_sums.py)
    summer      2 warps         the bias's gradient: sums of ds over the keys of a block, one for each distance (backward_sums.py)

Tiles are [keys, queries]. While a consumer computes exponentials, products of the others run:

    step of a consumer                                                   adder                  summer, once a block of keys and head
      s  = K Q^T     dp = V dO^T
      p  = exp2(s - lse)
      dV += p dO                (LATE: with the next tile's products)
      ds = p (dp - delta) ------ ds, bf16, shared memory ----------->    dQ^T = K^T ds
      dK += ds Q                (LATE: with the next tile's products)    add to memory
      near tiles: sums of ds by distance (backward_diagonals.py), memory ------------------->   sum of columns

The tiles of a block of 128 keys stand in `tiles` (backward_prepare.split_keys, by triton/masking.py's rules); far ones come first:

    queries   first      right0      right1      left0      left1      last
               |   near    | far right |    near   | far left |   near   |

    far       every query sees all keys, and every distance lies at or beyond the table's last (right) or first (left): the bias is
              one number, which is part of the copy of lse that is loaded; a slope's |r| is r or -r
    near      all others: s begins with the table's numbers, as in kernel.py, and pairs that are not visible become -inf

With grouped heads a block's tiles come again for each head of queries. What near tiles write is a band: one column for each distance within the
span, one row for each warp's even tiles and one for its odd ones, as neighbouring tiles share distances; all else is zero:

    distances           lo + 1                                        hi - 1
    warp w, even        |  tile 4 .....  |  tile 2 .....  |  tile 0 .....  |      column sums are
    warp w, odd              |  tile 3 .....  |  tile 1 .....  |                  the gradient

dQ is added in whatever order blocks come: sums differ in their last bits from run to run. All else has a fixed order.
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
from .backward_diagonals import sum_diagonals
from .backward_sums import BUFFERS, ROWS, add_dq, sum_distances
from .backward_tiles import KEY_CONSUMERS, KEYS, NEAR, OWN, count_turns, far_query_tile, find_keys, find_queries
from .bands import copy_tiles
from .kernel import PAD, by_eights, coordinates, load_tiles, make_barriers, masks_of_row, near_tile


# ---- producer ---------------------------------------------------------------------------------------------------------
@gluon.jit
def produce(
    load, bars, sizes, work, copies, STAGES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, MASS: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """ROWS, COLS, MASS: and tiles of bands (bands.copy_tiles) of near tiles."""
    k_desc, v_desc, q_desc, do_desc, stats_desc, k_smem, v_smem, q_smem, do_smem, stats_smem = load
    kv_full, kv_empty, full, empty = bars
    q_length, k_length, heads, group, batch, spread = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    BM: gl.constexpr = q_desc.block_shape[2]
    PARTS: gl.constexpr = k_smem.shape[0]
    PART: gl.constexpr = k_desc.block_shape[2]
    BYTES: gl.constexpr = 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes
    kv_heads = heads // group
    blocks = (k_length + PARTS * PART - 1) // (PARTS * PART)
    q_tiles = (q_length + BM - 1) // BM
    step = 0
    copied = 0
    for turn in range(count_turns(order_ptr, order_row)):
        bh, block = find_keys(order_ptr, order_row, turn, blocks)
        b = bh // kv_heads
        h_kv = bh % kv_heads
        mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * PARTS * k_desc.block_type.nbytes)
        for i in gl.static_range(PARTS):
            place = [b, h_kv, (block * PARTS + i) * PART, 0]
            tma.async_copy_global_to_shared(k_desc, place, kv_full.index(0), k_smem.index(i))
            tma.async_copy_global_to_shared(v_desc, place, kv_full.index(0), v_smem.index(i))
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        for member in range(group):
            h = h_kv * group + member
            for t in range(last - first):
                tile, copy = find_queries(t, first, right0, right1, left0, left1, block * spread, blocks)
                at = step % STAGES
                mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(at), BYTES)
                tma.async_copy_global_to_shared(q_desc, [b, h, tile * BM, 0], full.index(at), q_smem.index(at))
                tma.async_copy_global_to_shared(do_desc, [b, h, tile * BM, 0], full.index(at), do_smem.index(at))
                row_of_stats = ((copy * batch + b) * heads + h) * q_tiles + tile
                tma.async_copy_global_to_shared(stats_desc, [row_of_stats, 0], full.index(at), stats_smem.index(at))
                if ROWS or COLS:
                    if copy == NEAR:
                        n0 = block * PARTS * PART
                        copy_tiles(copies, copied, b * heads + h, tile * BM, n0, BM, ROWS, COLS, MASS, ENDS)
                        copied += 1
                step += 1


# ---- consumers --------------------------------------------------------------------------------------------------------
@gluon.jit
def load_table(table, dist, lo, hi, BM: gl.constexpr, S_L: gl.constexpr):
    """The table's numbers for a tile [keys, queries], dist being the distance of its first key and first query."""
    row, eight, column = coordinates(by_eights(gl.zeros([OWN, BM], gl.float32, S_L)))
    first = gl.minimum(gl.maximum(dist, lo - OWN), hi + BM) - lo + PAD
    x = gl.load((table + first + (row - column)) + (-8) * eight)
    return gl.convert_layout(gl.reshape(x, [OWN, BM]), S_L)


@gluon.jit
def slope_of_pairs(slope, BM: gl.constexpr, S_L: gl.constexpr):
    """slope * (j - i) for a tile [keys, queries]."""
    row, eight, column = coordinates(by_eights(gl.zeros([OWN, BM], gl.float32, S_L)))
    x = slope * (row - column).to(gl.float32) - slope * (8 * eight).to(gl.float32)
    return gl.convert_layout(gl.reshape(x, [OWN, BM]), S_L)


@gluon.jit
def add_slopes(s, slope, dist, S_L: gl.constexpr):
    """s - slope |r|"""
    x = by_eights(s)
    row, eight, column = coordinates(x)
    x = x - slope * gl.abs((row - column + dist).to(gl.float32) - (8 * eight).to(gl.float32))
    return gl.convert_layout(gl.reshape(x, [s.shape[0], s.shape[1]]), S_L)


@gluon.jit
def sum_by_distance(ds, dist, IS_NEAR: gl.constexpr):
    """Each thread's sums of ds |r| in a near tile, of ds r in a far one, where |r| is r or -r throughout."""
    x = by_eights(ds)
    row, eight, column = coordinates(x)
    if IS_NEAR:
        return gl.sum(x * gl.abs((row - column + dist).to(gl.float32) - (8 * eight).to(gl.float32)), 1)
    else:
        return gl.sum(x * ((row - column + dist).to(gl.float32) - (8 * eight).to(gl.float32)), 1)


@gluon.jit
def hide(s, m0, n0, masks, limits, S_L: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr):
    """-inf for pairs that are not visible, of the keys from n0 on (rows) and the queries from m0 on."""
    real, doc_q, doc_k, doc_queries = masks
    q_length, k_length, left, right = limits
    x = by_eights(s)
    row, eight, column = coordinates(x)
    step = n0 - m0 - (k_length - q_length)
    j = gl.minimum(n0 + row, k_length - 1)
    is_real = n0 + row < k_length
    begin = row + (step - right)  # the first query that sees the key
    if PADDED:
        is_real = is_real & (gl.load(real + j) != 0)
    if DOCS:
        at = doc_queries + 2 * j
        begin = gl.maximum(begin, gl.load(at) - m0)  # -1 and q_length where the ids of queries are in no order
        end = gl.load(at + 1) - m0
    is_visible = 8 * eight >= gl.where(is_real, begin, s.shape[1]) - column
    if WINDOW:
        is_visible = is_visible & (8 * eight <= row + (step + left) - column)
    if DOCS:
        is_visible = is_visible & (8 * eight < end - column)
    x = gl.where(is_visible, x, float("-inf"))
    if DOCS:
        if gl.load(doc_queries) < 0:
            own = gl.load(doc_k + j)
            i = gl.minimum(8 * eight + column + m0, q_length - 1)
            x = gl.where(gl.load(doc_q + i) == own, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, [s.shape[0], s.shape[1]]), S_L)


@gluon.jit
def sum_bias(ds, left, right, band, dist, tile, lo, hi, pitch):
    """Adds a near tile's ds at and beyond the ends to left and right, and stores the sums of all other distances in the band."""
    sums, distance, is_any = sum_diagonals(ds)
    row = gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(1, sums.type.layout)), 1)
    r = distance + dist
    left += gl.where(r <= lo, sums, 0.0)
    right += gl.where((r >= hi) & (r > lo), sums, 0.0)
    gl.store(band + (row // 16 * 2 + tile % 2) * pitch + (r - lo), sums, mask=is_any & (r > lo) & (r < hi))
    return left, right


@gluon.jit
def take_step(
    k, v, dk, dv, p_a, left, right, turns, step, before, done, scale, slope, m0, n0, offset, is_masked, masks, limits, table, band, spans, smem, bars,
    S_L: gl.constexpr, A_L: gl.constexpr, CID: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr, IS_NEAR: gl.constexpr,
    TABLE: gl.constexpr, SLOPES: gl.constexpr, GRAD: gl.constexpr, SLOPES_GRAD: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """dk and dv with one tile of queries; LATE: with the tile before, in slot `before`, while p and ds of this one are made. The first
    tile of a block (done: how many there were) has none before: the second overwrites what it adds. slope: of |r|, base 2; in far tiles of -r.
    left, right, turns: sums for the gradients of the bias's ends and of the slope."""
    q_smem, do_smem, stats_smem, ds_smem = smem
    full, empty, ds_full, ds_empty = bars
    row, lo, hi, bias_lo, bias_hi, pitch = spans
    BM: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    at = step % STAGES
    slot = step % SLOTS
    q = q_smem.index(at).reshape([BM, D])
    do = do_smem.index(at).reshape([BM, D])
    stats = stats_smem.index(at)
    zero = gl.zeros([OWN, BM], gl.float32, S_L)
    mbarrier.wait(full.index(at), (step // STAGES) & 1)
    dist = n0 - m0 + offset
    if IS_NEAR and TABLE:
        begin = load_table(table, dist, lo, hi, BM, S_L)
        s = warpgroup_mma(k, q.permute((1, 0)), begin, is_async=True)
    elif SLOPES and not IS_NEAR:
        begin = slope_of_pairs(-slope / scale, BM, S_L)
        s = warpgroup_mma(k, q.permute((1, 0)), begin, is_async=True)
    else:
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if LATE:
        dv = warpgroup_mma(p_a, do_smem.index(before).reshape([BM, D]), dv, use_acc=done > 1, is_async=True)
        ds_before = ds_smem.index((step + SLOTS - 1) % SLOTS * KEY_CONSUMERS + CID)
        dk = warpgroup_mma(ds_before, q_smem.index(before).reshape([BM, D]), dk, use_acc=done > 1, is_async=True)
    READ_LATE: gl.constexpr = (
        D == 128
    )  # when they are needed, which takes fewer registers: t5 3.31 ms instead of 3.35, alibi 6.33 instead of 6.44
    if not READ_LATE:
        lse = stats.slice(0, BM, 1).load(S_L)
    BESIDE: gl.constexpr = 2 if LATE else 0  # products that go on
    s = warpgroup_mma_wait(BESIDE + 1, deps=(s,))
    if READ_LATE:
        lse = stats.slice(0, BM, 1).load(S_L)
    if IS_NEAR:
        if is_masked:
            s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    if SLOPES and IS_NEAR:
        p = gl.exp2(add_slopes(s * scale, slope, dist, S_L) - lse)
    elif SLOPES:
        p = gl.exp2(s * scale - (lse + slope * dist.to(gl.float32)))
    else:
        p = gl.exp2(s * scale - lse)
    p_low = p.to(q_smem.dtype)
    if not READ_LATE:
        delta = stats.slice(BM, BM, 1).load(S_L)
    # stands here for ptxas, which would otherwise wait for both products before the exponentials
    mbarrier.wait(ds_empty.index(slot), ((step // SLOTS) & 1) ^ 1)
    dp = warpgroup_mma_wait(BESIDE, deps=(dp,))
    if READ_LATE:
        delta = stats.slice(BM, BM, 1).load(S_L)
    p_a = gl.convert_layout(p_low, A_L)
    if not LATE:
        dv = warpgroup_mma(p_a, do, dv, is_async=True)
    ds = p * (dp - delta)
    ds_low = ds.to(q_smem.dtype)
    ds_smem.index(slot * KEY_CONSUMERS + CID).store(ds_low)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ds_full.index(slot))
    if not LATE:
        dk = warpgroup_mma(ds_smem.index(slot * KEY_CONSUMERS + CID), q, dk, is_async=True)
    if GRAD:
        if IS_NEAR:
            left, right = sum_bias(ds, left, right, band, dist, m0 // BM, bias_lo, bias_hi, pitch)
        else:
            left += gl.sum(by_eights(ds), 1)
    if SLOPES_GRAD:
        turns += sum_by_distance(ds, dist, IS_NEAR)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    if LATE:
        mbarrier.arrive(empty.index(before), pred=done > 0)
    else:
        mbarrier.arrive(empty.index(at))
    return dk, dv, p_a, left, right, turns


@gluon.jit
def pass_step(step, smem, bars, S_L: gl.constexpr, CID: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr):
    """A tile of a consumer whose keys lie behind the last one: ds is zero."""
    q_smem, do_smem, stats_smem, ds_smem = smem
    full, empty, ds_full, ds_empty = bars
    BM: gl.constexpr = q_smem.shape[3]
    slot = step % SLOTS
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    mbarrier.wait(ds_empty.index(slot), ((step // SLOTS) & 1) ^ 1)
    ds_smem.index(slot * KEY_CONSUMERS + CID).store(gl.zeros([OWN, BM], q_smem.dtype, S_L))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ds_full.index(slot))
    mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def store_gradients(dk, dv, dk_desc, dv_desc, o_smem, b, bh, kv_heads, n0, scale, CID: gl.constexpr):
    """A consumer's dk and dv to memory, by way of its two places in shared memory; bh: the head of keys, of all batch rows."""
    tma.store_wait(0)
    gl.thread_barrier()
    o_smem.index(2 * CID).reshape([OWN, o_smem.shape[4]]).store((dk * (scale * 0.6931471805599453)).to(o_smem.dtype))
    o_smem.index(2 * CID + 1).reshape([OWN, o_smem.shape[4]]).store(dv.to(o_smem.dtype))
    fence_async_shared()
    place = [b, bh % kv_heads, n0, 0]
    tma.async_copy_shared_to_global(dk_desc, place, o_smem.index(2 * CID))
    tma.async_copy_shared_to_global(dv_desc, place, o_smem.index(2 * CID + 1))


@gluon.jit
def consume(
    use, smem, mask_rows, bars, sizes, work, limits, spans, scale, CID: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr,
    TABLE: gl.constexpr, SLOPES: gl.constexpr, GRAD: gl.constexpr, SLOPES_GRAD: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, table_ptr, slopes_ptr, d_slopes_ptr, band_ptr, ends_ptr, k_smem, v_smem, o_smem = use
    q_smem, do_smem, stats_smem, ds_smem = smem
    row, lo, hi, bias_lo, bias_hi, pitch = spans
    kv_full, kv_empty, full, empty, ds_full, ds_empty, band_full, band_empty = bars
    q_length, k_length, heads, group, batch, spread = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    BM: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    kv_heads = heads // group
    blocks = (k_length + KEYS - 1) // KEYS
    program = gl.program_id(0)
    band = band_ptr + (program * KEY_CONSUMERS + CID) * ROWS * pitch
    ends = ends_ptr + (program * KEY_CONSUMERS + CID) * 2
    tile_bars = (full, empty, ds_full, ds_empty)
    step = 0
    for turn in range(count_turns(order_ptr, order_row)):
        bh, block = find_keys(order_ptr, order_row, turn, blocks)
        b = bh // kv_heads
        n0 = (block * KEY_CONSUMERS + CID) * OWN
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        is_there = n0 < k_length
        passed = gl.where(is_there, 0, last - first)
        right_tiles = gl.where(is_there, right1 - right0, 0)
        left_tiles = gl.where(is_there, left1 - left0, 0)
        near_tiles = last - first - passed - right_tiles - left_tiles
        masks = masks_of_row(mask_rows, b)
        mbarrier.wait(kv_full.index(0), turn & 1)
        k = k_smem.index(CID).reshape([OWN, D])
        v = v_smem.index(CID).reshape([OWN, D])
        dk = gl.zeros([OWN, D], gl.float32, O_L)
        dv = gl.zeros([OWN, D], gl.float32, O_L)
        nothing = gl.sum(by_eights(gl.zeros([OWN, BM], gl.float32, S_L)), 1)
        p_a = gl.convert_layout(gl.zeros([OWN, BM], q_smem.dtype, S_L), A_L)
        before = step % STAGES
        done = 0
        for member in range(group):
            table = table_ptr
            if TABLE:
                table = table_ptr + (bh % kv_heads * group + member) * row
            head = bh * group + member  # of queries, of all batch rows
            slope = 0.0
            if SLOPES:
                slope = gl.load(slopes_ptr + head % heads) * 1.4426950408889634
            for _t in range(passed):
                pass_step(step, smem, tile_bars, S_L, CID, STAGES, SLOTS)
                step += 1
            for side in gl.static_range(2):  # the far tiles: on the right, then on the left
                begin, end, tiles = (right0, right1, right_tiles) if side == 0 else (left0, left1, left_tiles)
                sums = nothing
                turns = nothing
                for t in range(tiles):
                    m0 = far_query_tile(t, begin, end, block * spread, blocks) * BM
                    dk, dv, p_a, sums, _, turns = take_step(
                        k, v, dk, dv, p_a, sums, sums, turns, step, before, done, scale, slope if side == 0 else -slope, m0, n0, offset, False, masks, limits, table, band, spans,
                        smem, tile_bars, S_L, A_L, CID, STAGES, SLOTS, LATE, False, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS,
                    )  # fmt: skip
                    before = step % STAGES
                    step += 1
                    done += 1
                if GRAD and side == 0:
                    far_right = gl.sum(gl.sum(sums, 1), 0)
                if GRAD and side == 1:
                    far_left = gl.sum(gl.sum(sums, 1), 0)
                    mbarrier.wait(band_empty.index(0), (turn * group + member) & 1)
                if SLOPES_GRAD and side == 0:
                    turned_right = gl.sum(gl.sum(turns, 1), 0)
                if SLOPES_GRAD and side == 1:
                    turned_left = gl.sum(gl.sum(turns, 1), 0)
            left = nothing
            right = nothing
            turns = nothing
            for t in range(near_tiles):
                tile = near_tile(t, first, right0, right1, left0, left1)
                is_masked = (tile < clear0) | (tile >= clear1)
                dk, dv, p_a, left, right, turns = take_step(
                    k, v, dk, dv, p_a, left, right, turns, step, before, done, scale, slope, tile * BM, n0, offset, is_masked, masks, limits,
                    table, band, spans, smem, tile_bars, S_L, A_L, CID, STAGES, SLOTS, LATE, True, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW,
                    PADDED, DOCS,
                )  # fmt: skip
                before = step % STAGES
                step += 1
                done += 1
            if SLOPES_GRAD:
                total = turned_left - turned_right - gl.sum(gl.sum(turns, 1), 0)
                gl.store(d_slopes_ptr + (head * blocks + block) * KEY_CONSUMERS + CID, total)
            if GRAD:
                gl.store(ends, far_left + gl.sum(gl.sum(left, 1), 0))
                gl.store(ends + 1, far_right + gl.sum(gl.sum(right, 1), 0))
                gl.thread_barrier()
                mbarrier.arrive(band_full.index(0))

        mbarrier.arrive(kv_empty.index(0))
        if LATE:
            dv = warpgroup_mma(p_a, do_smem.index(before).reshape([BM, D]), dv, use_acc=done > 1, is_async=True)
            ds = ds_smem.index((step + SLOTS - 1) % SLOTS * KEY_CONSUMERS + CID)
            dk = warpgroup_mma(ds, q_smem.index(before).reshape([BM, D]), dk, use_acc=done > 1, is_async=True)
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(empty.index(before), pred=done > 0)
        store_gradients(dk, dv, dk_desc, dv_desc, o_smem, b, bh, kv_heads, n0, scale, CID)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def backward(
    k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc,  # [B, heads, L, D]
    stats_desc,  # float32 [3 B H tiles, 2 BM]: lse (base 2) and delta of BM queries, for left, right and near tiles
    dq_ptr,  # float32 [B, H, tiles, D BM], zeros; in the order of add_tile, or a descriptor of blocks [D, BM]
    tiles_ptr,  # int32 [B or 1, blocks of keys, NUMBERS] (backward_prepare.split_keys)
    order_ptr,  # int32 [programs, 1 + ..]: how many blocks each takes, and which (backward_launch.order_blocks)
    table_ptr,  # float32 [H, PAD + span + PAD], constant before and after the span; or unused
    slopes_ptr,  # float32 [H], or unused
    real_ptr,  # uint8 [B or 1, Lk]: which keys are no padding, or unused
    doc_q_ptr, doc_k_ptr, doc_queries_ptr,  # as in triton/structs.py, or unused
    band_ptr,  # float32 [programs, consumers * ROWS, pitch]
    ends_ptr,  # float32 [programs, consumers, 2]
    parts_ptr,  # float32 [B, H, blocks, span]
    d_slopes_ptr,  # float32 [B, H, blocks, consumers]
    scale,  # base 2
    q_length, k_length, heads, group, batch, spread, left, right, tiles_row, order_row, row, real_row, doc_q_row, doc_k_row, doc_queries_row,
    lo, hi, bias_lo, bias_hi, pitch,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr, ADD: gl.constexpr, TABLE: gl.constexpr, SLOPES: gl.constexpr, GRAD: gl.constexpr,
    SLOPES_GRAD: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv, the sums of dq / scale, and the bias's gradient by block of keys. r = j - i + offset, the offset of a batch row being
    in tiles; lo, hi: the table's span; limits and rows as in kernel.forward."""
    DTYPE: gl.constexpr = q_desc.dtype
    BM: gl.constexpr = q_desc.block_shape[2]
    D: gl.constexpr = q_desc.block_shape[3]
    k_smem = gl.allocate_shared_memory(DTYPE, [KEY_CONSUMERS, 1, 1, OWN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [KEY_CONSUMERS, 1, 1, OWN, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [2 * KEY_CONSUMERS, 1, 1, OWN, D], dk_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * BM], stats_desc.layout)
    DS_L: gl.constexpr = gl.NVMMASharedLayout(2 * BM, 16, 2)
    ds_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * KEY_CONSUMERS, OWN, BM], DS_L)
    dq_smem = ds_smem
    if ADD == 3:
        dq_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, D, BM], dq_ptr.layout)
    kv_full, kv_empty = make_barriers(1, KEY_CONSUMERS + 1)
    band_empty, band_full = make_barriers(1, KEY_CONSUMERS)
    full, empty = make_barriers(STAGES, KEY_CONSUMERS)
    ds_empty, ds_full = make_barriers(SLOTS, KEY_CONSUMERS)  # what consumers fill, one role empties
    fence_async_shared()

    load = (k_desc, v_desc, q_desc, do_desc, stats_desc, k_smem, v_smem, q_smem, do_smem, stats_smem)
    use = (dk_desc, dv_desc, table_ptr, slopes_ptr, d_slopes_ptr, band_ptr, ends_ptr, k_smem, v_smem, o_smem)
    smem = (q_smem, do_smem, stats_smem, ds_smem)
    masks = (real_ptr, doc_q_ptr, doc_k_ptr, doc_queries_ptr, real_row, doc_q_row, doc_k_row, doc_queries_row)
    bars = (kv_full, kv_empty, full, empty, ds_full, ds_empty, band_full, band_empty)
    sizes = (q_length, k_length, heads, group, batch, spread)
    work = (tiles_ptr, tiles_row, order_ptr, order_row)
    limits = (q_length, k_length, left, right)
    spans = (row, lo, hi, bias_lo, bias_hi, pitch)
    # Constants are written in the calls: in a tuple with a name they would become tensors.
    gl.warp_specialize([
        (consume, (use, smem, masks, bars, sizes, work, limits, spans, scale, 0, STAGES, SLOTS, LATE, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS)),
        (consume, (use, smem, masks, bars, sizes, work, limits, spans, scale, 1, STAGES, SLOTS, LATE, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS)),
        (add_dq, ((dq_ptr, k_smem, ds_smem, dq_smem), (kv_full, kv_empty, ds_full, ds_empty), sizes, work, SLOTS, ADD)),
        (sum_distances, ((parts_ptr, band_ptr, ends_ptr), (band_full, band_empty), sizes, work, spans, GRAD)),
        (produce, (load, (kv_full, kv_empty, full, empty), sizes, work, sizes, STAGES, 0, 0, 0, 0)),
    ], [4, 4, 2, 1], [CONSUMER_REGISTERS, ADDER_REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
