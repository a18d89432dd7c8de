"""The forward kernel for Hopper with a content term over every distance, in Gluon: scores scale (q_i . k_j + q_i . table[j - i]).

Nothing of the term is in memory: consumers multiply their 64 queries with the table's rows as they go along the keys. Each tile of 64 keys
has 64 distances that the tile before it had not, so a step makes one more product, of the size of queries and keys:

    keys            t = 0           1           2                    of the first consumer
    distances   -64 .. -1      0 .. 63     64 .. 127   ..            (64 less for each later consumer, whose queries are 64 further)
    chunk of rows    0           1           2

    step t      begin = skew(chunk t, chunk t + 1)                   skew.py: by query and key, in registers
                s = begin + q k_t      acc += p v(t-1)      chunk t + 2 = q table + ones bias
                p = softmax s

A bias over the same distances is three more channels of the table (rolling_prepare.split_bias), which are multiplied with ones: loads and
additions for each number of a tile would take longer.

Roles, slots and masks are those of kernel.py. The table passes through a ring of its own, whose chunks serve one consumer after the other:
consumer c takes chunk k in its step k + c - 4. A step's product of distances runs beside the softmax of its scores.
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
from .kernel import (
    CONSUMERS,
    ROWS,
    accumulator,
    along_rows,
    begin_sums,
    count_turns,
    find_own_tiles,
    finish_block,
    hide,
    is_touched,
    load_queries,
    load_slot,
    load_tiles,
    make_barriers,
    make_buffers,
    masks_of_row,
    pass_turn,
    skip_slot,
    softmax,
    take_turn,
    wait_empty,
    wait_full,
    wait_turn,
)
from .skew import skew

KEYS = gl.constexpr(64)  # of a tile, and distances of a chunk
CHUNKS = gl.constexpr(4)  # that are loaded before the first step
SPLIT = gl.constexpr(16)  # channels of a bias, three of which are used: a product has no fewer


@gluon.jit
def load_chunk(
    chunk, h, row, table_heads, t_desc, b_desc, table, t_full, t_empty, RING: gl.constexpr, BIAS: gl.constexpr
):
    """Copies a chunk of the table, from a row on that may lie outside, and of the bias."""
    t_smem, b_smem, ones = table
    slot = chunk % RING
    wait_empty(t_empty, chunk, RING)
    if BIAS:
        mbarrier.expect(t_full.index(slot), t_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(b_desc, [h, row, 0], t_full.index(slot), b_smem.index(slot))
    else:
        mbarrier.expect(t_full.index(slot), t_desc.block_type.nbytes)
    place = [gl.minimum(h, table_heads - 1), row, 0]
    tma.async_copy_global_to_shared(t_desc, place, t_full.index(slot), t_smem.index(slot))


@gluon.jit
def produce(load, bars, ring, sizes, NC: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, BIAS: gl.constexpr):
    q_desc, k_desc, v_desc, t_desc, b_desc, tiles_ptr, table_heads, lo, q_smem, k_smem, v_smem, table = load
    t_full, t_empty = ring
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    BM: gl.constexpr = NC * ROWS
    step = 0
    chunk = 0
    for turn in range(count_turns(sizes, BM)):
        b, h, bh, block = take_turn(turn, sizes, BM)
        m0 = block * BM
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        n = last - first
        # of the table: where the block's first chunk begins
        row = first * KEYS - m0 + offset - lo - (CHUNKS - 1) * KEYS
        load_queries(turn, b, h, m0, q_desc, q_smem, q_desc, q_smem, bars, NC, False)
        for t in range(1 - CHUNKS, n + 1):
            load_chunk(chunk, h, row, table_heads, t_desc, b_desc, table, t_full, t_empty, RING, BIAS)
            row += KEYS
            chunk += 1
            if t >= 0:
                n0 = (first + t) * KEYS
                before = gl.where(t == 0, -KEYS, n0 - KEYS)  # outside the tensor at first
                load_slot(step, b, h // group, n0, before, t < n, k_desc, v_desc, k_smem, v_smem, bars, STAGES)
                step += 1


@gluon.jit
def make_ring(t_desc, b_desc, RING: gl.constexpr, BIAS: gl.constexpr):
    """Slots for chunks of the table and the bias, and ones."""
    DTYPE: gl.constexpr = t_desc.dtype
    t_smem = gl.allocate_shared_memory(DTYPE, [RING] + t_desc.block_shape, t_desc.layout)
    b_smem = t_smem
    ones = t_smem
    if BIAS:
        b_smem = gl.allocate_shared_memory(DTYPE, [RING] + b_desc.block_shape, b_desc.layout)
        ones = gl.allocate_shared_memory(DTYPE, [SPLIT, ROWS], gl.NVMMASharedLayout(128, 16, 2))
        ones.store(gl.full([SPLIT, ROWS], 1.0, DTYPE, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    return t_smem, b_smem, ones


@gluon.jit
def multiply(q, table, chunk, S_L: gl.constexpr, RING: gl.constexpr, BIAS: gl.constexpr):
    """Starts the product of the queries with a chunk of the table, and the bias: two products, of one without it."""
    t_smem, b_smem, ones = table
    rows = t_smem.index(chunk % RING).reshape([KEYS, t_smem.shape[3]]).permute((1, 0))
    x = gl.zeros([ROWS, KEYS], gl.float32, S_L)
    if BIAS:
        bias = b_smem.index(chunk % RING).reshape([KEYS, SPLIT]).permute((1, 0))
        x = warpgroup_mma(ones.permute((1, 0)), bias, x, use_acc=False, is_async=True)
    return warpgroup_mma(q, rows, x, use_acc=BIAS, is_async=True)


@gluon.jit
def take_step(
    q, before, after, p, m, l, acc, step, chunk, scale, m0, n0, is_masked, masks, limits, k_smem, v_smem, table,
    bars, ring, S_L: gl.constexpr, P_L: gl.constexpr, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr,
    RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """Scores of a tile and their softmax, while the values of the tile before it and the next distances are multiplied."""
    q_full, q_empty, full, empty = bars
    t_full, t_empty = ring
    D: gl.constexpr = k_smem.shape[4]
    at = step % STAGES
    k_tile = k_smem.index(at).reshape([KEYS, D]).permute((1, 0))
    v_tile = v_smem.index(at).reshape([KEYS, D])
    begin = skew(before, after).to(gl.float32)
    wait_full(t_full, chunk, RING)
    if TURNS:
        wait_turn(CID)
    s_new = warpgroup_mma(q, k_tile, begin, is_async=True)
    acc_new = warpgroup_mma(p, v_tile, acc, is_async=True)
    next_new = multiply(q, table, chunk, S_L, RING, BIAS)
    if TURNS:
        pass_turn((CID + 1) % NC)
    s = warpgroup_mma_wait(2 + BIAS, deps=(s_new,))
    if is_masked:
        s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    p_new, alpha, m = softmax(s, m, scale, 0.0, 0.0, 0, S_L, True, False)
    l = l * along_rows(alpha, l) + gl.sum(p_new, 1)
    wait_full(full, step + 1, STAGES)  # here for ptxas, see kernel.py
    acc, following = warpgroup_mma_wait(0, deps=(acc_new, next_new))
    mbarrier.arrive(empty.index(at))
    mbarrier.arrive(t_empty.index(chunk % RING))
    p = gl.convert_layout(gl.reshape(p_new.to(v_smem.dtype), [ROWS, KEYS]), P_L)
    return after, following.to(v_smem.dtype), p, m, l, acc * along_rows(alpha, acc)


@gluon.jit
def consume(
    use, masks, bars, ring, sizes, scale, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr,
    BIAS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    o_desc, lse_ptr, tiles_ptr, q_smem, o_smem, k_smem, v_smem, table = use
    q_full, q_empty, full, empty = bars
    t_full, t_empty = ring
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = NC * ROWS
    S_L: gl.constexpr = accumulator(KEYS)
    O_L: gl.constexpr = accumulator(D)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    limits = (q_length, k_length, left, right)
    if TURNS and CID == 0:
        pass_turn(0)
    step = 0
    for turn in range(count_turns(sizes, BM)):
        b, h, bh, block = take_turn(turn, sizes, BM)
        m0 = block * BM + CID * ROWS
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(tiles_ptr, tiles_row, b, block)
        own, inner0, inner1 = find_own_tiles(m0, first, last, limits, KEYS)
        of_row = masks_of_row(masks, b)
        q = q_smem.index(CID).reshape([ROWS, D])
        mbarrier.wait(q_full.index(CID), turn & 1)

        # the distances before the first tile, and those that begin with it
        begin = step + (CHUNKS - 1) * turn  # a block has that many more chunks than slots
        chunk = begin + (CHUNKS - 2 - CID)
        wait_full(t_full, chunk, RING)
        wait_full(t_full, chunk + 1, RING)
        wait_full(full, step, STAGES)
        before_new = multiply(q, table, chunk, S_L, RING, BIAS)
        after_new = multiply(q, table, chunk + 1, S_L, RING, BIAS)
        before, after = warpgroup_mma_wait(0, deps=(before_new, after_new))
        before, after = before.to(v_smem.dtype), after.to(v_smem.dtype)
        for i in gl.static_range(CHUNKS - CID):  # these two, and those before them that only later consumers need
            mbarrier.arrive(t_empty.index((begin + i) % RING))

        p, m, l, acc = begin_sums(v_smem.dtype, KEYS, D, S_L, O_L, P_L)
        for t in range(own):
            n0 = (first + t) * KEYS
            is_masked = is_touched(first + t, n0, inner0, inner1, clear0, clear1, KEYS, PADDED, DOCS)
            before, after, p, m, l, acc = take_step(
                q, before, after, p, m, l, acc, step, step + (CHUNKS - 1) * turn + (CHUNKS - CID), scale, m0, n0, is_masked, of_row, limits, k_smem, v_smem,
                table, bars, ring, S_L, P_L, CID, NC, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1

        finish_block(p, m, l, acc, step, (b, h, bh, m0), q_length, o_desc, lse_ptr, o_smem, v_smem, bars, S_L, CID, STAGES)  # fmt: skip
        step += 1
        for _ in range(own, last - first):
            skip_slot(step, full, empty, CID, NC, STAGES, TURNS)
            step += 1
            # The slot was loaded after the chunks up to this one: no wait is needed.
            mbarrier.arrive(t_empty.index((step + (CHUNKS - 1) * turn + (CHUNKS - 2 - CID)) % RING))
        for i in gl.static_range(CID):  # those that only earlier consumers need
            mbarrier.arrive(t_empty.index((step + (CHUNKS - 1) * turn + (CHUNKS - 1 - CID + i)) % RING))
    if TURNS and CID == 0:
        wait_turn(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def forward_rolling(
    q_desc, k_desc, v_desc, o_desc,  # [B, heads, L, D]
    t_desc,  # the table [H or 1, hi - lo + 1, D]
    b_desc,  # the bias [H, hi - lo + 1, SPLIT], or unused
    lse_ptr,  # float32 [B, H, Lq rounded up to 64], base 2
    tiles_ptr,  # int32 [B or 1, blocks, NUMBERS] (kernel.load_tiles), none of them far
    bias_ptr,  # unused
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in kernel.forward
    scale,  # base 2
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, table_heads, bias_row, bits_row, doc_q_row, doc_k_row,
    doc_keys_row, lo, hi,
    STAGES: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr, BIAS: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse; arguments are as in kernel.forward. lo, hi: the table's distances, among them all that are visible."""
    NC: gl.constexpr = CONSUMERS
    q_smem, o_smem, k_smem, v_smem = make_buffers(q_desc, k_desc, v_desc, o_desc, NC, STAGES)
    table = make_ring(t_desc, b_desc, RING, BIAS)
    bars = make_barriers(NC, 1) + make_barriers(STAGES, NC)
    ring = make_barriers(RING, NC)
    fence_async_shared()

    load = (q_desc, k_desc, v_desc, t_desc, b_desc, tiles_ptr, table_heads, lo, q_smem, k_smem, v_smem, table)
    use = (o_desc, lse_ptr, tiles_ptr, q_smem, o_smem, k_smem, v_smem, table)
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    sizes = (q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row)
    # Constants are repeated in each call: in a tuple that has a name they would become tensors.
    gl.warp_specialize([
        (consume, (use, masks, bars, ring, sizes, scale, 0, NC, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, ring, sizes, scale, 1, NC, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (consume, (use, masks, bars, ring, sizes, scale, 2, NC, STAGES, RING, TURNS, BIAS, WINDOW, PADDED, DOCS)),
        (produce, (load, bars, ring, sizes, NC, STAGES, RING, BIAS)),
    ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
