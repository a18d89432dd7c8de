"""The backward pass on Hopper with a content term over every distance, in Gluon: dK and dV (rolling_backward.py has all else).

A program takes blocks of 128 keys and goes along the queries; dK and dV of 64 keys stay in the registers of each consumer. A tile of 64 queries
and 64 keys has 127 distances, and the next tile has other queries: two products with chunks of 64 rows of the table for each tile, of which the
next tile, or the other consumer, needs one again. So one chunk is loaded for each tile of queries, from the greatest distances to the least:

    queries         t = 0            1             2                 of the second consumer
    chunks           0, 1           1, 2          2, 3               (one more for the first one, whose keys are 64 before)

    step t      s  = scores that begin with the distances' + q k     dp = dO v
                dV += p(t-1)^T dO(t-1)     dK += ds(t-1)^T q(t-1)    beside the exponentials
                p  = exp2(s - lse)
                both chunks of tile t + 1                            beside ds
                p, ds -> shared memory, from which the next step reads them transposed

After the last tile of queries there is one more in the ring, whose chunks are multiplied in vain.
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
from .backward import store_gradients
from .backward_tiles import KEYS as BOTH
from .backward_tiles import OWN, count_turns, find_keys
from .kernel import ROWS, along_rows, hide, load_tiles, make_barriers, masks_of_row, pass_turn, wait_turn
from .rolling import KEYS, load_chunk, make_ring, multiply
from .rolling_backward import PAIR, load_row
from .skew import skew


# ---- producer ---------------------------------------------------------------------------------------------------------
@gluon.jit
def produce_queries(load, bars, sizes, work, STAGES: gl.constexpr, RING: gl.constexpr, BIAS: gl.constexpr):
    k_desc, v_desc, q_desc, do_desc, t_desc, b_desc, k_smem, v_smem, q_smem, do_smem, table = load
    kv_full, kv_empty, full, empty, t_full, t_empty = bars
    q_length, k_length, heads, group, lo = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    kv_heads = heads // group
    blocks = (k_length + BOTH - 1) // BOTH
    step = 0
    chunk = 0
    for turn in range(count_turns(order_ptr, order_row)):
        bh, block = find_keys(order_ptr, order_row, turn, blocks)
        b = bh // kv_heads
        h_kv = bh % kv_heads
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * PAIR * k_desc.block_type.nbytes)
        for c in gl.static_range(PAIR):
            place = [b, h_kv, block * BOTH + c * OWN, 0]
            tma.async_copy_global_to_shared(k_desc, place, kv_full.index(0), k_smem.index(c))
            tma.async_copy_global_to_shared(v_desc, place, kv_full.index(0), v_smem.index(c))
        for member in range(group):
            h = h_kv * group + member
            # of the table: where the first chunk begins
            row = block * BOTH + (PAIR - 1) * OWN - first * ROWS + offset - lo
            for t in range(-PAIR, last - first + 1):
                load_chunk(chunk, h, row, heads, t_desc, b_desc, table, t_full, t_empty, RING, BIAS)
                row -= KEYS
                chunk += 1
                if t >= 0:
                    at = step % STAGES
                    mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(at), 2 * q_desc.block_type.nbytes)
                    place = [b, h, (first + t) * ROWS, 0]
                    tma.async_copy_global_to_shared(q_desc, place, full.index(at), q_smem.index(at))
                    tma.async_copy_global_to_shared(do_desc, place, full.index(at), do_smem.index(at))
                    step += 1


# ---- consumers --------------------------------------------------------------------------------------------------------
@gluon.jit
def multiply_both(q, chunk, table, t_full, S_L: gl.constexpr, RING: gl.constexpr, BIAS: gl.constexpr):
    """Starts the products of a tile's queries with the chunks before and after its first distance, once they are there."""
    mbarrier.wait(t_full.index(chunk % RING), (chunk // RING) & 1)
    mbarrier.wait(t_full.index((chunk + 1) % RING), ((chunk + 1) // RING) & 1)
    after = multiply(q, table, chunk, S_L, RING, BIAS)
    return multiply(q, table, chunk + 1, S_L, RING, BIAS), after


@gluon.jit
def take_query_step(
    k, v, dk, dv, begin, lse, delta, step, old, chunk, bh, scale, m0, n0, is_masked, masks, limits, stats, smem, bars,
    S_L: gl.constexpr, CID: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """p and ds of a tile of queries, dk and dv with those of the tile before, in slot `old`, and what the next tile's scores begin with.
    chunk: the first of the next tile's."""
    q_smem, do_smem, table, p_smem, ds_smem = smem
    full, empty, t_full, t_empty = bars
    lse_ptr, delta_ptr = stats
    q_length, k_length, left, right = limits
    D: gl.constexpr = q_smem.shape[4]
    at = step % STAGES
    zero = gl.zeros([ROWS, OWN], gl.float32, S_L)
    if TURNS:
        wait_turn(CID)
    s = warpgroup_mma(q_smem.index(at).reshape([ROWS, D]), k.permute((1, 0)), begin.to(gl.float32), is_async=True)
    dp = warpgroup_mma(do_smem.index(at).reshape([ROWS, D]), v.permute((1, 0)), zero, use_acc=False, is_async=True)
    # before the first tile p and ds are zeros, and any queries will do
    p_old = p_smem.index(CID).permute((1, 0))
    ds_old = ds_smem.index(CID).permute((1, 0))
    dv = warpgroup_mma(p_old, do_smem.index(old).reshape([ROWS, D]), dv, is_async=True)
    dk = warpgroup_mma(ds_old, q_smem.index(old).reshape([ROWS, D]), dk, is_async=True)
    if TURNS:
        pass_turn((CID + 1) % PAIR)
    lse_next = load_row(lse_ptr, bh, m0 + ROWS, q_length, float("inf"), S_L)
    delta_next = load_row(delta_ptr, bh, m0 + ROWS, q_length, 0.0, S_L)
    s = warpgroup_mma_wait(3, deps=(s,))
    if is_masked:
        s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    p = gl.exp2(s * scale - along_rows(lse, s))
    following = (step + 1) % STAGES
    mbarrier.wait(full.index(following), ((step + 1) // STAGES) & 1)
    before, after = multiply_both(q_smem.index(following).reshape([ROWS, D]), chunk, table, t_full, S_L, RING, BIAS)
    dp, dk, dv = warpgroup_mma_wait(2 + 2 * BIAS, deps=(dp, dk, dv))
    mbarrier.arrive(empty.index(old), pred=old != at)
    ds = p * (dp - along_rows(delta, dp))
    p_smem.index(CID).store(p.to(q_smem.dtype))
    ds_smem.index(CID).store(ds.to(q_smem.dtype))
    fence_async_shared()
    gl.thread_barrier()
    before, after = warpgroup_mma_wait(0, deps=(before, after))
    begin = skew(before.to(q_smem.dtype), after.to(q_smem.dtype))
    mbarrier.arrive(t_empty.index(chunk % RING))  # after what it could wait for: ptxas moves no load before it
    return dk, dv, begin, lse_next, delta_next


@gluon.jit
def consume_queries(
    use, smem, mask_rows, bars, sizes, work, limits, scale, CID: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr,
    WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, lse_ptr, delta_ptr, k_smem, v_smem, o_smem = use
    q_smem, do_smem, table, p_smem, ds_smem = smem
    kv_full, kv_empty, full, empty, t_full, t_empty = bars
    q_length, k_length, heads, group, lo = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    D: gl.constexpr = q_smem.shape[4]
    DTYPE: gl.constexpr = q_smem.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    kv_heads = heads // group
    blocks = (k_length + BOTH - 1) // BOTH
    tile_bars = (full, empty, t_full, t_empty)
    stats = (lse_ptr, delta_ptr)
    if TURNS and CID == 0:
        pass_turn(0)
    step = 0
    base = 0  # the first chunk of a block and head
    for turn in range(count_turns(order_ptr, order_row)):
        bh_kv, block = find_keys(order_ptr, order_row, turn, blocks)
        b = bh_kv // kv_heads
        n0 = block * BOTH + CID * OWN
        first, right0, right1, left0, left1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        n = last - first
        masks = masks_of_row(mask_rows, b)
        mbarrier.wait(kv_full.index(0), turn & 1)
        k = k_smem.index(CID).reshape([OWN, D])
        v = v_smem.index(CID).reshape([OWN, D])
        dk = gl.zeros([OWN, D], gl.float32, O_L)
        dv = gl.zeros([OWN, D], gl.float32, O_L)
        for member in range(group):
            bh = bh_kv * group + member  # of queries, of all batch rows
            nothing = gl.zeros([ROWS, OWN], DTYPE, S_L)
            p_smem.index(CID).store(nothing)
            ds_smem.index(CID).store(nothing)
            fence_async_shared()
            gl.thread_barrier()
            lse = load_row(lse_ptr, bh, first * ROWS, q_length, float("inf"), S_L)
            delta = load_row(delta_ptr, bh, first * ROWS, q_length, 0.0, S_L)
            old = step % STAGES
            chunk = base + (PAIR - 1 - CID)
            mbarrier.wait(full.index(old), (step // STAGES) & 1)
            before, after = multiply_both(q_smem.index(old).reshape([ROWS, D]), chunk, table, t_full, S_L, RING, BIAS)
            before, after = warpgroup_mma_wait(0, deps=(before, after))
            for i in gl.static_range(PAIR - CID):  # this one, and those before it that only the other consumer needs
                mbarrier.arrive(t_empty.index((base + i) % RING))
            begin = skew(before.to(DTYPE), after.to(DTYPE))
            for t in range(n):
                tile = first + t
                is_masked = (tile < clear0) | (tile >= clear1)
                dk, dv, begin, lse, delta = take_query_step(
                    k, v, dk, dv, begin, lse, delta, step, old, chunk + 1, bh, scale, tile * ROWS, n0, is_masked, masks, limits,
                    stats, smem, tile_bars, S_L, CID, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS,
                )  # fmt: skip
                old = step % STAGES
                chunk += 1
                step += 1
            # the last tile; its next one was loaded in vain
            dv = warpgroup_mma(
                p_smem.index(CID).permute((1, 0)), do_smem.index(old).reshape([ROWS, D]), dv, is_async=True
            )
            dk = warpgroup_mma(
                ds_smem.index(CID).permute((1, 0)), q_smem.index(old).reshape([ROWS, D]), dk, is_async=True
            )
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(empty.index(old))
            mbarrier.arrive(empty.index(step % STAGES))
            step += 1
            for _i in gl.static_range(1 + CID):
                chunk += 1
                mbarrier.wait(t_full.index(chunk % RING), (chunk // RING) & 1)
                mbarrier.arrive(t_empty.index(chunk % RING))
            base += n + PAIR + 1
        mbarrier.arrive(kv_empty.index(0))
        store_gradients(dk, dv, dk_desc, dv_desc, o_smem, b, bh_kv, kv_heads, n0, scale, CID)
    if TURNS and CID == 0:
        wait_turn(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def backward_rolling_keys(
    k_desc, v_desc, dk_desc, dv_desc, q_desc, do_desc,  # [B, heads, L, D]
    t_desc, b_desc,  # as in rolling_backward.backward_rolling
    lse_ptr, delta_ptr,  # float32 [B, H, Lq rounded up to 64], lse in base 2
    tiles_ptr, order_ptr,  # as in backward.backward
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in rolling.forward_rolling
    scale,  # base 2
    q_length, k_length, heads, group, left, right, tiles_row, order_row, bits_row, doc_q_row, doc_k_row, doc_keys_row, lo,
    STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    k_smem = gl.allocate_shared_memory(DTYPE, [PAIR, 1, 1, OWN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [PAIR, 1, 1, OWN, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [2 * PAIR, 1, 1, OWN, D], dk_desc.layout)
    table = make_ring(t_desc, b_desc, RING, BIAS)
    p_smem = gl.allocate_shared_memory(DTYPE, [PAIR, ROWS, OWN], gl.NVMMASharedLayout(128, 16, 2))
    ds_smem = gl.allocate_shared_memory(DTYPE, [PAIR, ROWS, OWN], gl.NVMMASharedLayout(128, 16, 2))
    kv_full, kv_empty = make_barriers(1, PAIR)
    full, empty = make_barriers(STAGES, PAIR)
    t_full, t_empty = make_barriers(RING, PAIR)
    fence_async_shared()

    load = (k_desc, v_desc, q_desc, do_desc, t_desc, b_desc, k_smem, v_smem, q_smem, do_smem, table)
    use = (dk_desc, dv_desc, lse_ptr, delta_ptr, k_smem, v_smem, o_smem)
    smem = (q_smem, do_smem, table, p_smem, ds_smem)
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    bars = (kv_full, kv_empty, full, empty, t_full, t_empty)
    sizes = (q_length, k_length, heads, group, lo)
    work = (tiles_ptr, tiles_row, order_ptr, order_row)
    limits = (q_length, k_length, left, right)
    gl.warp_specialize([
        (consume_queries, (use, smem, masks, bars, sizes, work, limits, scale, 0, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (consume_queries, (use, smem, masks, bars, sizes, work, limits, scale, 1, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (produce_queries, (load, bars, sizes, work, STAGES, RING, BIAS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
