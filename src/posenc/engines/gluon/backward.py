"""The backward kernel for Hopper, in Gluon: five products, for attention with a bias by distance, causal or not.

A program has five roles, joined by barriers in shared memory:

    producer    1 warp          copies keys and values of a block, then its queries' q, dO, lse and delta, by TMA
    consumers   2 warpgroups    64 keys each: scores, probabilities, ds; dK and dV stay in registers
    adder       1 warpgroup     dQ from both consumers' keys, added to float32 sums in memory
    summer      2 warps         the bias's gradient: sums of ds over the keys of a block, one for each distance

    step of a consumer (tiles are [keys, queries])             adder                  summer, once a block of keys
      s  = K Q^T     dp = V dO^T
      p  = exp2(s - lse)
      dV += p dO     ds = p (dp - delta)  ---- ds, bf16 --->   dQ^T = K^T ds
      dK += ds Q                                               add to memory
      in near tiles   ds, float32, by key and distance  ------------------------->    sum of columns

The tiles of a block of 128 keys, far ones first (`split_queries`): those on the right have every distance at or beyond the table's
last, those on the left at or before its first; the bias is one number there, which is part of the copy of lse that is loaded:

    queries   first         right1         left0          count
              |   far right  |    near      |   far left    |

Near tiles begin the product of keys and queries with the table's numbers, as in kernel.py. A block that ends after the last key has near
tiles only. The rows of ds that near tiles write are shifted so that one distance is one column (r - lo), for each key j:

    key 0      r(i=0)  r(i=-1) ..         a row of the band has all distances of the span;
    key 1      r(i=1)  r(i=0) ..          column sums are the gradient

dQ is added in whatever order blocks come: sums differ in their last bits from run to run. All else has a fixed order.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .kernel import PAD, by_eights, coordinates, count_blocks, load_tiles, near_tile

KEYS = gl.constexpr(128)  # of a block: 64 for each consumer
HALF = gl.constexpr(64)  # keys of a consumer
LEFT = gl.constexpr(0)  # copies of lse, by tile
RIGHT = gl.constexpr(1)
NEAR = gl.constexpr(2)
BUFFERS = gl.constexpr(2)  # of sums on their way to memory


# ---- which blocks and tiles -------------------------------------------------------------------------------------------
@gluon.jit
def find_keys(turn, program, programs, count, batch_heads, section):
    """The head of keys (of all batch rows) and the block that a program takes in its turn: `section` heads at a time, first those
    blocks that are visible to most queries; every other turn goes backwards through the programs."""
    index = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    first = index // (section * count) * section
    rest = index - first * count
    width = gl.minimum(section, batch_heads - first)
    return first + rest % width, rest // width


@gluon.jit
def far_query_tile(t, begin, end, block, blocks):
    """The t-th of the tiles begin .. end. Each block of keys begins at another one, so that blocks of one head, which run at the
    same time, do not all add to the same dQ."""
    t += block * (end - begin) // blocks
    return begin + t - gl.where(t >= end - begin, end - begin, 0)


@gluon.jit
def find_queries(t, first, right0, right1, left0, left1, block, blocks):
    """The t-th tile, and which copy of lse it needs."""
    right = right1 - right0
    far = right + left1 - left0
    near = near_tile(t - far, first, right0, right1, left0, left1)
    far_left = far_query_tile(t - right, left0, left1, block, blocks)
    tile = gl.where(t < right, far_query_tile(t, right0, right1, block, blocks), gl.where(t < far, far_left, near))
    return tile, gl.where(t < right, RIGHT, gl.where(t < far, LEFT, NEAR))


# ---- producer ---------------------------------------------------------------------------------------------------------
@gluon.jit
def produce(load, bars, sizes, STAGES: gl.constexpr):
    k_desc, v_desc, q_desc, do_desc, stats_desc, tiles_ptr, k_smem, v_smem, q_smem, do_smem, stats_smem = load
    kv_full, kv_empty, full, empty = bars
    q_length, k_length, heads, group, batch, section, tiles_row = sizes
    BM: gl.constexpr = q_desc.block_shape[2]
    BYTES: gl.constexpr = 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes
    kv_heads = heads // group
    blocks = (k_length + KEYS - 1) // KEYS
    q_tiles = (q_length + BM - 1) // BM
    program, programs = gl.program_id(0), gl.num_programs(0)
    step = 0
    for turn in range(count_blocks(batch * kv_heads * blocks, program, programs)):
        bh, block = find_keys(turn, program, programs, blocks, batch * kv_heads, section)
        b = bh // kv_heads
        h_kv = bh % kv_heads
        n0 = block * KEYS
        mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, h_kv, n0, 0], kv_full.index(0), k_smem.index(0))
        tma.async_copy_global_to_shared(v_desc, [b, h_kv, n0, 0], kv_full.index(0), v_smem.index(0))
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        for member in range(group):
            h = h_kv * group + member
            for t in range(last - first):
                tile, copy = find_queries(t, first, right0, right1, left0, left1, block, blocks)
                at = step % STAGES
                mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(at), BYTES)
                tma.async_copy_global_to_shared(q_desc, [b, h, tile * BM, 0], full.index(at), q_smem.index(at))
                tma.async_copy_global_to_shared(do_desc, [b, h, tile * BM, 0], full.index(at), do_smem.index(at))
                row_of_stats = ((copy * batch + b) * heads + h) * q_tiles + tile
                tma.async_copy_global_to_shared(stats_desc, [row_of_stats, 0], full.index(at), stats_smem.index(at))
                step += 1


# ---- consumers --------------------------------------------------------------------------------------------------------
@gluon.jit
def load_table(table, dist, lo, hi, BM: gl.constexpr, S_L: gl.constexpr):
    """The table's numbers for a tile [keys, queries], dist being the distance of its first key and first query."""
    row, eight, column = coordinates(by_eights(gl.zeros([HALF, BM], gl.float32, S_L)))
    first = gl.minimum(gl.maximum(dist, lo - HALF), hi + BM) - lo + PAD
    x = gl.load((table + first + (row - column)) + (-8) * eight)
    return gl.convert_layout(gl.reshape(x, [HALF, BM]), S_L)


@gluon.jit
def slope_of_pairs(slope, BM: gl.constexpr, S_L: gl.constexpr):
    """slope * (j - i) for a tile [keys, queries]."""
    row, eight, column = coordinates(by_eights(gl.zeros([HALF, BM], gl.float32, S_L)))
    x = slope * (row - column).to(gl.float32) - slope * (8 * eight).to(gl.float32)
    return gl.convert_layout(gl.reshape(x, [HALF, BM]), S_L)


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
def sum_bias(ds, left, right, band, dist, lo, hi, pitch):
    """Adds a near tile's ds at and beyond the ends to left and right, and stores what is between them in the band."""
    x = by_eights(ds)
    row, eight, column = coordinates(x)
    place = (band + (dist - lo)) + (row * (pitch + 1) - column) + (-8) * eight
    if (dist - x.shape[1] * 8 >= lo) & (dist + HALF <= hi):
        gl.store(place, x)
    else:
        r = (row - column + dist) - 8 * eight
        left += gl.sum(gl.where(r <= lo, x, 0.0), 1)
        right += gl.sum(gl.where((r >= hi) & (r > lo), x, 0.0), 1)
        gl.store(place, x, mask=(r > lo) & (r < hi))
    return left, right


@gluon.jit
def take_step(
    k, v, dk, dv, p_a, left, right, turns, step, before, done, scale, slope, m0, n0, offset, is_masked, masks, limits, table, band, spans, smem, bars,
    S_L: gl.constexpr, A_L: gl.constexpr, CID: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, IS_NEAR: gl.constexpr,
    TABLE: gl.constexpr, SLOPES: gl.constexpr, GRAD: gl.constexpr, SLOPES_GRAD: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """p and ds of one tile of queries, while the products of the tile before, in slot `before`, are added to dk and dv. The first
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
    zero = gl.zeros([HALF, BM], gl.float32, S_L)
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
    dv = warpgroup_mma(p_a, do_smem.index(before).reshape([BM, D]), dv, use_acc=done > 1, is_async=True)
    ds_before = ds_smem.index((step + SLOTS - 1) % SLOTS).slice(CID * HALF, HALF, 0)
    dk = warpgroup_mma(ds_before, q_smem.index(before).reshape([BM, D]), dk, use_acc=done > 1, is_async=True)
    lse = stats.slice(0, BM, 1).load(S_L)
    s = warpgroup_mma_wait(3, deps=(s,))
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
    delta = stats.slice(BM, BM, 1).load(S_L)
    # stands here for ptxas, which would otherwise wait for both products before the exponentials
    mbarrier.wait(ds_empty.index(slot), ((step // SLOTS) & 1) ^ 1)
    dp = warpgroup_mma_wait(2, deps=(dp,))
    ds = p * (dp - delta)
    ds_low = ds.to(q_smem.dtype)
    ds_smem.index(slot).slice(CID * HALF, HALF, 0).store(ds_low)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ds_full.index(slot))
    if GRAD:
        if IS_NEAR:
            left, right = sum_bias(ds, left, right, band, dist, bias_lo, bias_hi, pitch)
        else:
            left += gl.sum(by_eights(ds), 1)
    if SLOPES_GRAD:
        turns += sum_by_distance(ds, dist, IS_NEAR)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(empty.index(before), pred=done > 0)
    return dk, dv, gl.convert_layout(p_low, A_L), left, right, turns


@gluon.jit
def consume(
    use, smem, mask_rows, bars, sizes, limits, spans, scale, CID: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    TABLE: gl.constexpr, SLOPES: gl.constexpr, GRAD: gl.constexpr, SLOPES_GRAD: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, tiles_ptr, table_ptr, slopes_ptr, d_slopes_ptr, band_ptr, ends_ptr, k_smem, v_smem, o_smem = use
    q_smem, do_smem, stats_smem, ds_smem = smem
    row, lo, hi, bias_lo, bias_hi, pitch = spans
    real_ptr, doc_q_ptr, doc_k_ptr, doc_queries_ptr, real_row, doc_q_row, doc_k_row, doc_queries_row = mask_rows
    kv_full, kv_empty, full, empty, ds_full, ds_empty, band_full, band_empty = bars
    q_length, k_length, heads, group, batch, section, tiles_row = sizes
    BM: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    kv_heads = heads // group
    blocks = (k_length + KEYS - 1) // KEYS
    program, programs = gl.program_id(0), gl.num_programs(0)
    band = band_ptr + (program * KEYS + CID * HALF) * pitch
    ends = ends_ptr + (program * 2 + CID) * 2
    tile_bars = (full, empty, ds_full, ds_empty)
    step = 0
    for turn in range(count_blocks(batch * kv_heads * blocks, program, programs)):
        bh, block = find_keys(turn, program, programs, blocks, batch * kv_heads, section)
        b = bh // kv_heads
        n0 = block * KEYS + CID * HALF
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        far_tiles = (right1 - right0) + (left1 - left0)
        masks = (
            real_ptr + b * real_row,
            doc_q_ptr + b * doc_q_row,
            doc_k_ptr + b * doc_k_row,
            doc_queries_ptr + b * doc_queries_row,
        )
        mbarrier.wait(kv_full.index(0), turn & 1)
        k = k_smem.index(0).reshape([KEYS, D]).slice(CID * HALF, HALF, 0)
        v = v_smem.index(0).reshape([KEYS, D]).slice(CID * HALF, HALF, 0)
        dk = gl.zeros([HALF, D], gl.float32, O_L)
        dv = gl.zeros([HALF, D], gl.float32, O_L)
        nothing = gl.sum(by_eights(gl.zeros([HALF, BM], gl.float32, S_L)), 1)
        p_a = gl.convert_layout(gl.zeros([HALF, BM], q_smem.dtype, S_L), A_L)
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
            far_right = 0.0
            far_left = 0.0
            turned_right = 0.0
            turned_left = 0.0
            sums = nothing
            turns = nothing
            for t in range(right1 - right0):
                m0 = far_query_tile(t, right0, right1, block, blocks) * BM
                dk, dv, p_a, sums, _, turns = take_step(
                    k, v, dk, dv, p_a, sums, sums, turns, step, before, done, scale, slope, m0, n0, offset, False, masks, limits, table, band, spans,
                    smem, tile_bars, S_L, A_L, CID, STAGES, SLOTS, False, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS,
                )  # fmt: skip
                before = step % STAGES
                step += 1
                done += 1
            if GRAD:
                far_right = gl.sum(gl.sum(sums, 1), 0)
            if SLOPES_GRAD:
                turned_right = gl.sum(gl.sum(turns, 1), 0)
            sums = nothing
            turns = nothing
            for t in range(left1 - left0):
                m0 = far_query_tile(t, left0, left1, block, blocks) * BM
                dk, dv, p_a, sums, _, turns = take_step(
                    k, v, dk, dv, p_a, sums, sums, turns, step, before, done, scale, -slope, m0, n0, offset, False, masks, limits, table, band, spans,
                    smem, tile_bars, S_L, A_L, CID, STAGES, SLOTS, False, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS,
                )  # fmt: skip
                before = step % STAGES
                step += 1
                done += 1
            if GRAD:
                far_left = gl.sum(gl.sum(sums, 1), 0)
                mbarrier.wait(band_empty.index(0), ((turn * group + member) & 1) ^ 1)
            if SLOPES_GRAD:
                turned_left = gl.sum(gl.sum(turns, 1), 0)
            left = nothing
            right = nothing
            turns = nothing
            for t in range(last - first - far_tiles):
                tile = near_tile(t, first, right0, right1, left0, left1)
                is_masked = (tile < clear0) | (tile >= clear1)
                dk, dv, p_a, left, right, turns = take_step(
                    k, v, dk, dv, p_a, left, right, turns, step, before, done, scale, slope, tile * BM, n0, offset, is_masked, masks, limits,
                    table, band, spans, smem, tile_bars, S_L, A_L, CID, STAGES, SLOTS, True, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW,
                    PADDED, DOCS,
                )  # fmt: skip
                before = step % STAGES
                step += 1
                done += 1
            if SLOPES_GRAD:
                total = turned_left - turned_right - gl.sum(gl.sum(turns, 1), 0)
                gl.store(d_slopes_ptr + (head * blocks + block) * 2 + CID, total)
            if GRAD:
                gl.store(ends, far_left + gl.sum(gl.sum(left, 1), 0))
                gl.store(ends + 1, far_right + gl.sum(gl.sum(right, 1), 0))
                gl.thread_barrier()
                mbarrier.arrive(band_full.index(0))

        mbarrier.arrive(kv_empty.index(0))
        dv = warpgroup_mma(p_a, do_smem.index(before).reshape([BM, D]), dv, use_acc=done > 1, is_async=True)
        ds = ds_smem.index((step + SLOTS - 1) % SLOTS).slice(CID * HALF, HALF, 0)
        dk = warpgroup_mma(ds, q_smem.index(before).reshape([BM, D]), dk, use_acc=done > 1, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        mbarrier.arrive(empty.index(before))
        tma.store_wait(0)
        gl.thread_barrier()
        o_smem.index(2 * CID).reshape([HALF, D]).store((dk * (scale * 0.6931471805599453)).to(q_smem.dtype))
        o_smem.index(2 * CID + 1).reshape([HALF, D]).store(dv.to(q_smem.dtype))
        fence_async_shared()
        place = [b, bh % kv_heads, n0, 0]
        tma.async_copy_shared_to_global(dk_desc, place, o_smem.index(2 * CID))
        tma.async_copy_shared_to_global(dv_desc, place, o_smem.index(2 * CID + 1))
    tma.store_wait(0)


# ---- adder and summer -------------------------------------------------------------------------------------------------
@builtin
def async_add(tensor_desc, coord, src, _semantic=None):
    """Adds what lies in shared memory to a block in memory: tma.async_atomic_add of later versions."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.jit
def add_tile(place, x):
    """Adds a tile of products to memory, in the order of the registers: a thread's four numbers of 8 columns are neighbours there.

    64 rows, 8 columns:   row = 16 warp + 8 half + g     column = 2 c + pair     address = 4 (32 warp + 4 g + c) + 2 half + pair
    """
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = by_eights(x)
    row, eight, column = coordinates(x)
    inside = (row // 64 * (EIGHTS * 512) + row // 16 % 4 * 128 + row % 8 * 16 + row // 8 % 2 * 2) + (
        column // 2 * 4 + column % 2
    )
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [(place + inside + 512 * eight).to(gl.int64, bitcast=True), x], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def add_dq(use, bars, sizes, SLOTS: gl.constexpr, ADD: gl.constexpr):
    """ADD: 0: no dq at all; 1: products without their sums in memory, to find out what those cost; 2: all; 3: all, by the copy engine."""
    dq_ptr, tiles_ptr, k_smem, ds_smem, dq_smem = use
    kv_full, kv_empty, ds_full, ds_empty = bars
    q_length, k_length, heads, group, batch, section, tiles_row = sizes
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = ds_smem.shape[2]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    kv_heads = heads // group
    blocks = (k_length + KEYS - 1) // KEYS
    q_tiles = (q_length + BM - 1) // BM
    program, programs = gl.program_id(0), gl.num_programs(0)
    step = 0
    for turn in range(count_blocks(batch * kv_heads * blocks, program, programs)):
        bh, block = find_keys(turn, program, programs, blocks, batch * kv_heads, section)
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(
            tiles_ptr, tiles_row, bh // kv_heads, block
        )
        mbarrier.wait(kv_full.index(0), turn & 1)
        k = k_smem.index(0).reshape([KEYS, D]).permute((1, 0))
        for member in range(group):
            head = bh * group + member  # of queries, of all batch rows
            for t in range(last - first):
                tile, _ = find_queries(t, first, right0, right1, left0, left1, block, blocks)
                slot = step % SLOTS
                mbarrier.wait(ds_full.index(slot), (step // SLOTS) & 1)
                if ADD == 3:
                    tma.store_wait(BUFFERS - 1)
                    gl.thread_barrier()
                if ADD:
                    zero = gl.zeros([64, BM], gl.float32, L)
                    for c in gl.static_range(D // 64):  # channels
                        dq = warpgroup_mma(
                            k.slice(64 * c, 64, 0), ds_smem.index(slot), zero, use_acc=False, is_async=True
                        )
                        dq = warpgroup_mma_wait(0, deps=(dq,))
                        if c == D // 64 - 1:
                            mbarrier.arrive(ds_empty.index(slot))
                        if ADD == 2:
                            add_tile(dq_ptr + (head * q_tiles + tile).to(gl.int64) * (BM * D) + c * 64 * BM, dq)
                        if ADD == 3:
                            dq_smem.index(step % BUFFERS).slice(64 * c, 64, 0).store(dq)
                else:
                    mbarrier.arrive(ds_empty.index(slot))
                if ADD == 3:
                    fence_async_shared()
                    async_add(dq_ptr, [(head * q_tiles + tile) * D, 0], dq_smem.index(step % BUFFERS))
                step += 1
        mbarrier.arrive(kv_empty.index(0))
    tma.store_wait(0)


@gluon.jit
def sum_eight_rows(place, row_bytes):
    """Sums of eight rows' two neighbouring numbers, all loaded before any is added: registers for 64-bit addresses would leave room for
    three loads at a time."""
    return gl.inline_asm_elementwise(
        """{
        .reg .u64 a; .reg .f32 x<8>, y<8>;
        ld.global.v2.f32 {x0, y0}, [$2]; add.u64 a, $2, $3;
        ld.global.v2.f32 {x1, y1}, [a]; add.u64 a, a, $3;
        ld.global.v2.f32 {x2, y2}, [a]; add.u64 a, a, $3;
        ld.global.v2.f32 {x3, y3}, [a]; add.u64 a, a, $3;
        ld.global.v2.f32 {x4, y4}, [a]; add.u64 a, a, $3;
        ld.global.v2.f32 {x5, y5}, [a]; add.u64 a, a, $3;
        ld.global.v2.f32 {x6, y6}, [a]; add.u64 a, a, $3;
        ld.global.v2.f32 {x7, y7}, [a];
        add.f32 x0, x0, x1; add.f32 y0, y0, y1; add.f32 x2, x2, x3; add.f32 y2, y2, y3;
        add.f32 x4, x4, x5; add.f32 y4, y4, y5; add.f32 x6, x6, x7; add.f32 y6, y6, y7;
        add.f32 x0, x0, x2; add.f32 y0, y0, y2; add.f32 x4, x4, x6; add.f32 y4, y4, y6;
        add.f32 $0, x0, x4; add.f32 $1, y0, y4;
        }""",
        "=f,=f,l,l",
        [place, row_bytes],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def sum_columns(band, parts, n0, begin, end, bias_lo, bias_hi, pitch):
    """The band's column sums, of all but the ends of the span. begin .. end: queries whose tiles wrote into it."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 2], [1, 0])
    span = bias_hi - bias_lo + 1
    # whether tiles have written every distance of every key
    if (n0 - bias_hi + 1 >= begin) & (n0 + KEYS - 2 - bias_lo < end):
        pair = 2 * gl.arange(0, 64, PAIRS)
        row_bytes = gl.zeros([64], gl.int64, PAIRS) + pitch * 4
        for c in range(0, span, 128):
            x = gl.zeros([64], gl.float32, PAIRS)
            y = gl.zeros([64], gl.float32, PAIRS)
            for j in range(0, KEYS, 8):
                place = (band + j * pitch + c + pair).to(gl.int64, bitcast=True)
                more_x, more_y = sum_eight_rows(place, row_bytes)
                x += more_x
                y += more_y
            column = c + pair
            gl.store(parts + column, x, mask=(column > 0) & (column < span - 1))
            gl.store(parts + column + 1, y, mask=column + 1 < span - 1)
    else:
        keys = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, L)), 1)
        steps = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
        for c in range(0, span, 64):
            total = gl.sum(gl.zeros([4, 64], gl.float32, L), 0)
            for j in range(0, KEYS, 4):
                i = (n0 + j - bias_lo - c) + (keys - steps)
                is_there = (i >= begin) & (i < end)
                total += gl.sum(gl.load(band + (j + keys) * pitch + (c + steps), mask=is_there, other=0.0), 0)
            column = c + gl.arange(0, 64, gl.SliceLayout(0, L))
            gl.store(parts + column, total, mask=(column > 0) & (column < span - 1))


@gluon.jit
def sum_distances(use, bars, sizes, spans, BM: gl.constexpr, GRAD: gl.constexpr):
    parts_ptr, tiles_ptr, band_ptr, ends_ptr = use
    band_full, band_empty = bars
    q_length, k_length, heads, group, batch, section, tiles_row = sizes
    row, lo, hi, bias_lo, bias_hi, pitch = spans
    if GRAD:
        kv_heads = heads // group
        blocks = (k_length + KEYS - 1) // KEYS
        program, programs = gl.program_id(0), gl.num_programs(0)
        band = band_ptr + program * KEYS * pitch
        ends = ends_ptr + program * 4
        span = bias_hi - bias_lo + 1
        for turn in range(count_blocks(batch * kv_heads * blocks, program, programs)):
            bh, block = find_keys(turn, program, programs, blocks, batch * kv_heads, section)
            first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(
                tiles_ptr, tiles_row, bh // kv_heads, block
            )
            for member in range(group):
                parts = parts_ptr + ((bh * group + member) * blocks + block).to(gl.int64) * span
                mbarrier.wait(band_full.index(0), (turn * group + member) & 1)
                sum_columns(band, parts, block * KEYS + offset, first * BM, last * BM, bias_lo, bias_hi, pitch)
                at_left = gl.load(ends) + gl.load(ends + 2)
                at_right = gl.load(ends + 1) + gl.load(ends + 3)
                gl.store(parts, at_left + gl.where(span == 1, at_right, 0.0))
                gl.store(parts + (span - 1), at_right, mask=span > 1)
                gl.thread_barrier()
                mbarrier.arrive(band_empty.index(0))


@gluon.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "batch", "section", "left", "right", "tiles_row", "row", "real_row", "doc_q_row",
        "doc_k_row", "doc_queries_row", "lo", "hi", "bias_lo", "bias_hi", "pitch", "scale",
    ]
)  # fmt: skip
def backward(
    k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc,  # [B, heads, L, D]
    stats_desc,  # float32 [3 B H tiles, 2 BM]: lse (base 2) and delta of BM queries, for left, right and near tiles
    dq_ptr,  # float32 [B, H, tiles, D BM], zeros; in the order of add_tile, or a descriptor of blocks [D, BM]
    tiles_ptr,  # int32 [B or 1, blocks of keys, NUMBERS] (backward_prepare.split_keys)
    table_ptr,  # float32 [H, PAD + span + PAD], constant before and after the span; or unused
    slopes_ptr,  # float32 [H], or unused
    real_ptr,  # uint8 [B or 1, Lk]: which keys are no padding, or unused
    doc_q_ptr, doc_k_ptr, doc_queries_ptr,  # as in triton/structs.py, or unused
    band_ptr,  # float32 [programs, 128, pitch]
    ends_ptr,  # float32 [programs, 2, 2]
    parts_ptr,  # float32 [B, H, blocks, span]
    d_slopes_ptr,  # float32 [B, H, blocks, 2]
    scale,  # base 2
    q_length, k_length, heads, group, batch, section, left, right, tiles_row, row, real_row, doc_q_row, doc_k_row, doc_queries_row,
    lo, hi, bias_lo, bias_hi, pitch,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, ADD: gl.constexpr, TABLE: gl.constexpr, SLOPES: gl.constexpr, GRAD: gl.constexpr,
    SLOPES_GRAD: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv, the sums of dq / scale, and the bias's gradient by block of keys. r = j - i + offset, the offset of a batch row being
    in tiles; lo, hi: the table's span; limits and rows as in kernel.forward."""
    DTYPE: gl.constexpr = q_desc.dtype
    BM: gl.constexpr = q_desc.block_shape[2]
    D: gl.constexpr = q_desc.block_shape[3]
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, KEYS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [4, 1, 1, HALF, D], dk_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * BM], stats_desc.layout)
    DS_L: gl.constexpr = gl.NVMMASharedLayout(2 * BM, 16, 2)
    ds_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, KEYS, BM], DS_L)
    dq_smem = ds_smem
    if ADD == 3:
        dq_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, D, BM], dq_ptr.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    band_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    band_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_empty.index(0), count=3)
    mbarrier.init(band_full.index(0), count=2)
    mbarrier.init(band_empty.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)
    fence_async_shared()

    load = (k_desc, v_desc, q_desc, do_desc, stats_desc, tiles_ptr, k_smem, v_smem, q_smem, do_smem, stats_smem)
    use = (dk_desc, dv_desc, tiles_ptr, table_ptr, slopes_ptr, d_slopes_ptr, band_ptr, ends_ptr, k_smem, v_smem, o_smem)
    smem = (q_smem, do_smem, stats_smem, ds_smem)
    masks = (real_ptr, doc_q_ptr, doc_k_ptr, doc_queries_ptr, real_row, doc_q_row, doc_k_row, doc_queries_row)
    bars = (kv_full, kv_empty, full, empty, ds_full, ds_empty, band_full, band_empty)
    sizes = (q_length, k_length, heads, group, batch, section, tiles_row)
    limits = (q_length, k_length, left, right)
    spans = (row, lo, hi, bias_lo, bias_hi, pitch)
    # Constants are written in the calls: in a tuple with a name they would become tensors.
    gl.warp_specialize([
        (consume, (use, smem, masks, bars, sizes, limits, spans, scale, 0, STAGES, SLOTS, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS)),
        (consume, (use, smem, masks, bars, sizes, limits, spans, scale, 1, STAGES, SLOTS, TABLE, SLOPES, GRAD, SLOPES_GRAD, WINDOW, PADDED, DOCS)),
        (add_dq, ((dq_ptr, tiles_ptr, k_smem, ds_smem, dq_smem), (kv_full, kv_empty, ds_full, ds_empty), sizes, SLOTS, ADD)),
        (sum_distances, ((parts_ptr, tiles_ptr, band_ptr, ends_ptr), (band_full, band_empty), sizes, spans, BM, GRAD)),
        (produce, (load, (kv_full, kv_empty, full, empty), sizes, STAGES)),
    ], [4, 4, 2, 1], [CONSUMER_REGISTERS, ADDER_REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
