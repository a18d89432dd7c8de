"""The backward pass on Hopper with a content term over every distance, in Gluon: dQ, and the gradients of the table and the bias.

As in rolling.py nothing of the term is in memory: a program takes blocks of 128 queries and goes along the keys, and makes only the 64
distances that a tile of 64 keys adds. rolling_backward_keys.py makes dK and dV in the same way. Nothing is added in an order that may change.

    producer    1 warp          keys, values and chunks of the table, by TMA
    consumers   2 warpgroups    64 queries each: scores, ds; dQ stays in registers
    adder       1 warpgroup     the table's gradient, chunk by chunk

    keys            t = 0           1           2                    of the first consumer
    distances   -64 .. -1      0 .. 63     64 .. 127   ..            (64 less for the second one, whose queries are 64 further)
    chunk            1           2           3

    step t      s  = skew(chunks t + 1, t + 2) + q k_t      dp = dO v_t      (skew.py; for the second consumer one chunk less)
                dQ += ds(t-1) k(t-1) + band(t-1) chunk t     beside the exponentials
                p  = exp2(s - lse)
                chunk t + 3 = q table + ones bias            beside what follows
                ds = p (dp - delta)
                band(t) = unskew(ds(t-1), ds(t))             all of ds at the distances of chunk t + 1 -> adder

    adder       of both consumers' bands of a chunk          band^T q, its columns' sums (by a product with ones) -> sums in memory

Each program has one head and sums of its own in memory, [distances, channels] in float32, to which it adds one block after the other; sum_tables
(rolling_prepare.py) adds the programs of a head. So every sum has a fixed order, and memory grows with the length alone.
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
from .backward_sums import add_tile
from .backward_tiles import grid
from .kernel import (
    ROWS,
    along_rows,
    count_blocks,
    find_block,
    find_own_tiles,
    hide,
    is_touched,
    load_tiles,
    make_barriers,
    masks_of_row,
    pass_turn,
    wait_turn,
)
from .rolling import KEYS, load_chunk, make_ring, multiply
from .skew import skew, unskew

PAIR = gl.constexpr(2)  # consumers
BLOCK = gl.constexpr(128)  # queries of both
BAND_SLOTS = gl.constexpr(3)  # of each consumer, on their way to the adder


@gluon.jit
def find_own_block(turn, sizes):
    """The batch row and the block of queries that a program takes in its turn. Programs are of one head each, `programs` of them."""
    q_length, k_length, heads, group, batch, section, programs, tiles_row, chunks, lo = sizes
    count = (q_length + BLOCK - 1) // BLOCK
    return find_block(turn, gl.program_id(0) % programs, programs, count, batch, section)


@gluon.jit
def count_own_blocks(sizes):
    q_length, k_length, heads, group, batch, section, programs, tiles_row, chunks, lo = sizes
    count = (q_length + BLOCK - 1) // BLOCK
    return count_blocks(batch * count, gl.program_id(0) % programs, programs)


# ---- producer ---------------------------------------------------------------------------------------------------------
@gluon.jit
def produce(load, bars, sizes, STAGES: gl.constexpr, RING: gl.constexpr, BIAS: gl.constexpr):
    q_desc, do_desc, k_desc, v_desc, t_desc, b_desc, tiles_ptr, q_smem, do_smem, k_smem, v_smem, table = load
    q_full, q_empty, full, empty, t_full, t_empty = bars
    q_length, k_length, heads, group, batch, section, programs, tiles_row, chunks, lo = sizes
    h = gl.program_id(0) // programs
    step = 0
    chunk = 0
    for turn in range(count_own_blocks(sizes)):
        b, block = find_own_block(turn, sizes)
        m0 = block * BLOCK
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        row = first * KEYS - m0 + offset - lo - PAIR * KEYS  # of the table: where the block's first chunk begins
        for c in gl.static_range(PAIR):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, h, m0 + c * ROWS, 0], q_full.index(c), q_smem.index(c))
            tma.async_copy_global_to_shared(do_desc, [b, h, m0 + c * ROWS, 0], q_full.index(c), do_smem.index(c))
        for t in range(-PAIR - 1, last - first):
            load_chunk(chunk, h, row, heads, t_desc, b_desc, table, t_full, t_empty, RING, BIAS)
            row += KEYS
            chunk += 1
            if t >= 0:
                at = step % STAGES
                mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(at), 2 * k_desc.block_type.nbytes)
                place = [b, h // group, (first + t) * KEYS, 0]
                tma.async_copy_global_to_shared(k_desc, place, full.index(at), k_smem.index(at))
                tma.async_copy_global_to_shared(v_desc, place, full.index(at), v_smem.index(at))
                step += 1


# ---- consumers --------------------------------------------------------------------------------------------------------
@gluon.jit
def load_row(ptr, bh, m0, q_length, other, S_L: gl.constexpr):
    """64 queries' numbers of [B, H, Lq rounded up to 64]."""
    rows = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, S_L))
    padded = (q_length + 63) // 64 * 64
    return gl.load(ptr + bh.to(gl.int64) * padded + rows, mask=rows < q_length, other=other)


@gluon.jit
def add_products(dq, ds, band, at, chunk, k_smem, table, A_L: gl.constexpr, RING: gl.constexpr):
    """Starts dq + ds . keys + band . table."""
    D: gl.constexpr = k_smem.shape[4]
    dq = warpgroup_mma(gl.convert_layout(ds, A_L), k_smem.index(at).reshape([KEYS, D]), dq, is_async=True)
    rows = table[0].index(chunk % RING).reshape([KEYS, D])
    return warpgroup_mma(gl.convert_layout(band, A_L), rows, dq, is_async=True)


@gluon.jit
def give_band(band, made, band_smem, band_full, band_empty, CID: gl.constexpr):
    """To the adder."""
    slot = CID * BAND_SLOTS + made % BAND_SLOTS
    mbarrier.wait(band_empty.index(slot), ((made // BAND_SLOTS) & 1) ^ 1)
    band_smem.index(slot).store(band)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(band_full.index(slot))


@gluon.jit
def take_step(
    q, do, dq, ds, band, before, after, lse, delta, step, old, t, chunk, made, scale, m0, n0, is_masked, masks, limits, smem, bars,
    S_L: gl.constexpr, A_L: gl.constexpr, CID: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr,
    WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """ds of a tile, and dq with that of the tile before, in slot `old`. chunk: of the table, where the tile's own begin."""
    k_smem, v_smem, table, band_smem = smem
    full, empty, t_full, t_empty, band_full, band_empty = bars
    D: gl.constexpr = k_smem.shape[4]
    at = step % STAGES
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_L)
    begin = skew(before, after).to(gl.float32)
    mbarrier.wait(full.index(at), (step // STAGES) & 1)
    if TURNS:
        wait_turn(CID)
    s = warpgroup_mma(q, k_smem.index(at).reshape([KEYS, D]).permute((1, 0)), begin, is_async=True)
    dp = warpgroup_mma(do, v_smem.index(at).reshape([KEYS, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    # before the first tile ds and band are zeros, and any keys and rows will do
    dq = add_products(dq, ds, band, old, gl.where(t == 0, chunk, chunk - 1), k_smem, table, A_L, RING)
    if TURNS:
        pass_turn((CID + 1) % PAIR)
    s = warpgroup_mma_wait(3, deps=(s,))
    if is_masked:
        s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    p = gl.exp2(s * scale - along_rows(lse, s))
    ahead = chunk + 2
    mbarrier.wait(t_full.index(ahead % RING), (ahead // RING) & 1)
    following = multiply(q, table, ahead, S_L, RING, BIAS)
    dp, dq = warpgroup_mma_wait(1 + BIAS, deps=(dp, dq))
    mbarrier.arrive(empty.index(old), pred=t > 0)
    mbarrier.arrive(t_empty.index(gl.maximum(chunk - 1, 0) % RING), pred=(t > 0) | (CID == 0))
    ds_new = (p * (dp - along_rows(delta, dp))).to(k_smem.dtype)
    band = unskew(ds, ds_new)
    give_band(band, made, band_smem, band_full, band_empty, CID)
    following = warpgroup_mma_wait(0, deps=(following,))
    return dq, ds_new, band, after, following.to(k_smem.dtype)


@gluon.jit
def consume(
    use, smem, masks, bars, sizes, limits, scale, CID: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr,
    WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    dq_desc, lse_ptr, delta_ptr, tiles_ptr, q_smem, do_smem, o_smem = use
    k_smem, v_smem, table, band_smem = smem
    q_full, q_empty, full, empty, t_full, t_empty, band_full, band_empty = bars
    q_length, k_length, heads, group, batch, section, programs, tiles_row, chunks, lo = sizes
    D: gl.constexpr = k_smem.shape[4]
    DTYPE: gl.constexpr = k_smem.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    h = gl.program_id(0) // programs
    tile_bars = (full, empty, t_full, t_empty, band_full, band_empty)
    q = q_smem.index(CID).reshape([ROWS, D])
    do = do_smem.index(CID).reshape([ROWS, D])
    if TURNS and CID == 0:
        pass_turn(0)
    step = 0
    base = 0  # the block's first chunk
    made = 0
    for turn in range(count_own_blocks(sizes)):
        b, block = find_own_block(turn, sizes)
        m0 = block * BLOCK + CID * ROWS
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        _, inner0, inner1 = find_own_tiles(m0, first, last, limits, KEYS)
        of_row = masks_of_row(masks, b)
        n = last - first
        lse = load_row(lse_ptr, b * heads + h, m0, q_length, float("inf"), S_L)
        delta = load_row(delta_ptr, b * heads + h, m0, q_length, 0.0, S_L)
        mbarrier.wait(q_full.index(CID), turn & 1)

        # the distances before the first tile, and those that begin with it
        chunk = base + (PAIR - 1 - CID)
        mbarrier.wait(t_full.index(chunk % RING), (chunk // RING) & 1)
        mbarrier.wait(t_full.index((chunk + 1) % RING), ((chunk + 1) // RING) & 1)
        before_new = multiply(q, table, chunk, S_L, RING, BIAS)
        after_new = multiply(q, table, chunk + 1, S_L, RING, BIAS)
        before, after = warpgroup_mma_wait(0, deps=(before_new, after_new))
        before, after = before.to(DTYPE), after.to(DTYPE)

        dq = gl.zeros([ROWS, D], gl.float32, O_L)
        ds = gl.zeros([ROWS, KEYS], DTYPE, S_L)
        band = gl.zeros([ROWS, KEYS], DTYPE, S_L)
        old = step % STAGES
        for t in range(n):
            n0 = (first + t) * KEYS
            is_masked = is_touched(first + t, n0, inner0, inner1, clear0, clear1, KEYS, PADDED, DOCS)
            dq, ds, band, before, after = take_step(
                q, do, dq, ds, band, before, after, lse, delta, step, old, t, chunk, made, scale, m0, n0, is_masked, of_row, limits,
                smem, tile_bars, S_L, A_L, CID, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            old = step % STAGES
            chunk += 1
            made += 1
            step += 1

        # the last tile, and what of it lies at the distances of the last chunk
        dq = add_products(dq, ds, band, old, chunk - 1, k_smem, table, A_L, RING)
        band = unskew(ds, gl.zeros([ROWS, KEYS], DTYPE, S_L))
        rows = table[0].index(chunk % RING).reshape([KEYS, D])
        dq = warpgroup_mma(gl.convert_layout(band, A_L), rows, dq, is_async=True)
        give_band(band, made, band_smem, band_full, band_empty, CID)
        made += 1
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(q_empty.index(CID))
        mbarrier.arrive(empty.index(old))
        mbarrier.arrive(t_empty.index((chunk - 1) % RING))
        mbarrier.arrive(t_empty.index(chunk % RING))
        for _i in gl.static_range(CID + 1):  # those that only the other consumer needs, or none
            chunk += 1
            mbarrier.wait(t_full.index(chunk % RING), (chunk // RING) & 1)
            mbarrier.arrive(t_empty.index(chunk % RING))
        base += n + PAIR + 1
        tma.store_wait(0)
        gl.thread_barrier()
        o_smem.index(CID).reshape([ROWS, D]).store((dq * (scale * 0.6931471805599453)).to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [b, h, m0, 0], o_smem.index(CID))
    if TURNS and CID == 0:
        wait_turn(0)
    tma.store_wait(0)


# ---- adder ------------------------------------------------------------------------------------------------------------
@gluon.jit
def add_chunk(use, bars, made, at, FIRST: gl.constexpr, SECOND: gl.constexpr, BIAS: gl.constexpr):
    """Adds the bands of a chunk, from the first consumer, the second or both, to the sums. made: bands that each gave before this block's
    chunk; the first consumer's begin one chunk later."""
    sums_ptr, bias_sums_ptr, q_smem, band_smem, ones = use
    band_full, band_empty = bars
    D: gl.constexpr = q_smem.shape[4]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    B_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    acc = gl.zeros([KEYS, D], gl.float32, L)
    sums = gl.zeros([KEYS, 8], gl.float32, B_L)
    slot0 = gl.maximum(made - 1, 0) % BAND_SLOTS
    slot1 = BAND_SLOTS + made % BAND_SLOTS
    if FIRST:
        mbarrier.wait(band_full.index(slot0), ((gl.maximum(made - 1, 0) // BAND_SLOTS) & 1))
        band = band_smem.index(slot0).permute((1, 0))
        acc = warpgroup_mma(band, q_smem.index(0).reshape([ROWS, D]), acc, use_acc=False, is_async=True)
        if BIAS:
            sums = warpgroup_mma(band, ones.slice(0, 8, 0).permute((1, 0)), sums, use_acc=False, is_async=True)
    if SECOND:
        mbarrier.wait(band_full.index(slot1), ((made // BAND_SLOTS) & 1))
        band = band_smem.index(slot1).permute((1, 0))
        acc = warpgroup_mma(band, q_smem.index(1).reshape([ROWS, D]), acc, use_acc=FIRST, is_async=True)
        if BIAS:
            sums = warpgroup_mma(band, ones.slice(0, 8, 0).permute((1, 0)), sums, use_acc=FIRST, is_async=True)
    if BIAS:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if FIRST:
        mbarrier.arrive(band_empty.index(slot0))
    if SECOND:
        mbarrier.arrive(band_empty.index(slot1))
    # no other program adds to these sums, and a thread adds to the same ones in every block: their order is fixed
    add_tile(sums_ptr + at.to(gl.int64) * (KEYS * D), acc)
    if BIAS:
        row, column = grid(sums)
        gl.atomic_add(bias_sums_ptr + at * KEYS + row + 0 * column, sums, mask=column + 0 * row == 0, sem="relaxed")


@gluon.jit
def add_table(use, bars, tiles_ptr, sizes, BIAS: gl.constexpr):
    q_full, q_empty, band_full, band_empty = bars
    q_length, k_length, heads, group, batch, section, programs, tiles_row, chunks, lo = sizes
    band_bars = (band_full, band_empty)
    count = (q_length + BLOCK - 1) // BLOCK
    made = 0
    for turn in range(count_own_blocks(sizes)):
        b, block = find_own_block(turn, sizes)
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        n = last - first
        at = gl.program_id(0) * chunks + (first + PAIR * (count - 1 - block))
        for c in gl.static_range(PAIR):
            mbarrier.wait(q_full.index(c), turn & 1)
        add_chunk(use, band_bars, made, at, False, True, BIAS)
        for t in range(1, n + 1):
            add_chunk(use, band_bars, made + t, at + t, True, True, BIAS)
        add_chunk(use, band_bars, made + n + 1, at + n + 1, True, False, BIAS)
        made += n + 1
        for c in gl.static_range(PAIR):
            mbarrier.arrive(q_empty.index(c))


@gluon.jit(do_not_specialize=UNSPECIALISED)
def backward_rolling(
    q_desc, do_desc, dq_desc, k_desc, v_desc,  # [B, heads, L, D]
    t_desc, b_desc,  # as in rolling.forward_rolling, with a table for each head
    lse_ptr, delta_ptr,  # float32 [B, H, Lq rounded up to 64], lse in base 2
    tiles_ptr, bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in rolling.forward_rolling
    sums_ptr,  # float32 [H, programs, chunks, D * 64], zeros; a chunk in the order of backward_sums.add_tile
    bias_sums_ptr,  # float32 [H, programs, chunks, 64], zeros, or unused
    scale,  # base 2
    q_length, k_length, heads, group, batch, section, programs, left, right, tiles_row, chunks, bits_row, doc_q_row, doc_k_row,
    doc_keys_row, lo,
    STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq, and each program's sums for the table (without the scale) and the bias; chunk c begins with distance 64 (c - 2 blocks) + offset."""
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    q_smem = gl.allocate_shared_memory(DTYPE, [PAIR, 1, 1, ROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [PAIR, 1, 1, ROWS, D], do_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [PAIR, 1, 1, ROWS, D], dq_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    table = make_ring(t_desc, b_desc, RING, BIAS)
    band_smem = gl.allocate_shared_memory(DTYPE, [PAIR * BAND_SLOTS, ROWS, KEYS], gl.NVMMASharedLayout(128, 16, 2))
    q_full, q_empty = make_barriers(PAIR, 2)
    full, empty = make_barriers(STAGES, PAIR)
    t_full, t_empty = make_barriers(RING, PAIR)
    band_full, band_empty = make_barriers(PAIR * BAND_SLOTS, 1)
    fence_async_shared()

    load = (q_desc, do_desc, k_desc, v_desc, t_desc, b_desc, tiles_ptr, q_smem, do_smem, k_smem, v_smem, table)
    use = (dq_desc, lse_ptr, delta_ptr, tiles_ptr, q_smem, do_smem, o_smem)
    smem = (k_smem, v_smem, table, band_smem)
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    bars = (q_full, q_empty, full, empty, t_full, t_empty, band_full, band_empty)
    sizes = (q_length, k_length, heads, group, batch, section, programs, tiles_row, chunks, lo)
    limits = (q_length, k_length, left, right)
    add = (sums_ptr, bias_sums_ptr, q_smem, band_smem, table[2])
    # Constants are written in the calls: in a tuple with a name they would become tensors.
    gl.warp_specialize([
        (consume, (use, smem, masks, bars, sizes, limits, scale, 0, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (consume, (use, smem, masks, bars, sizes, limits, scale, 1, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (add_table, (add, (q_full, q_empty, band_full, band_empty), tiles_ptr, sizes, BIAS)),
        (produce, (load, (q_full, q_empty, full, empty, t_full, t_empty), sizes, STAGES, RING, BIAS)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, ADDER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
