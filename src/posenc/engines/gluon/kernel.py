"""The forward kernel for Hopper, in Gluon: attention with a bias by distance, slopes, causality, windows, padding, documents.

A program is one producer warp, which copies tiles by TMA, and three consumer warpgroups of 64 queries each (two, where the third would
have none). Keys and values pass
through a ring of STAGES slots in shared memory. Slot t of a block holds keys t and values t - 1, which is what step t multiplies:

    step            0              1                2                    n
    slot         k0  -          k1  v0           k2  v1              -   v(n-1)
    consumer     s0 = q k0      s1 = q k1        s2 = q k2           acc += p v(n-1), store
                 p0 = softmax   acc += p0 v0     acc += p1 v1
                                p1 = softmax     p2 = softmax

`tiles` has the tiles that a block visits (prepare.py, by the rules of triton/masking.py); all of its consumers visit them in this order:

    keys     first      left0      left1      right0      right1      last
              |   near   |   far    |   near    |   far     |   near   |
    order         3rd        1st        4th         2nd         5th

    far       visible to all queries of the block, and every distance at or beyond one end of the table: the bias is one number,
              which goes into the row's maximum; the products with values run beside the softmax
    near      all others: the product of queries and keys begins with the table's numbers, divided by the scale, instead of zero;
              where a mask may touch a consumer's tile, its scores are then replaced by -inf (not added: a key may hold NaN)

A consumer skips the last tiles where only later queries of the block see them. With documents it also skips the first ones where only
earlier queries do, if none are far: blocks that two texts share.

Programs stay on their multiprocessor and take several blocks (`take_turn`). log-sum-exps are in base 2, +inf where fully masked.
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

CONSUMERS = gl.constexpr(3)
ROWS = gl.constexpr(64)  # queries of a consumer
NUMBERS = gl.constexpr(9)  # of a block, see load_tiles
OWN_NUMBERS = gl.constexpr(23)  # of a block with documents, see prepare.order_block
PAD = gl.constexpr(192)  # entries before and after a head's bias in the padded table: queries and keys of a tile
TURN = gl.constexpr(8)  # the first named barrier by which consumers take turns


UNSPECIALISED = [
    "q_length", "k_length", "heads", "group", "batch_heads", "section", "left", "right", "tiles_row", "table_heads", "bias_row", "bits_row",
    "doc_q_row", "doc_k_row", "doc_keys_row", "lo", "hi", "scale",
]  # fmt: skip
"""Arguments that change from call to call: the compiler gains nothing from knowing that one is divisible by 16."""


# ---- which blocks and tiles -------------------------------------------------------------------------------------------
@gluon.jit
def count_blocks(blocks, program, programs):
    """How many blocks a program takes."""
    whole = blocks // programs
    last = whole * programs + gl.where(whole % 2 == 0, program, programs - 1 - program)
    return whole + gl.where(last < blocks, 1, 0)


@gluon.jit
def find_index(turn, program, programs):
    """Which of all blocks a program takes in its turn: every other turn backwards."""
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def find_block(turn, program, programs, count, batch_heads, section):
    """The head (of all batch rows) and the block of queries that a program takes in its turn.

    `section` heads at a time, and of these the blocks with the most keys first. Every other turn goes
    backwards through the programs, so that no program gets the longer block each time.
    """
    index = find_index(turn, program, programs)
    first = index // (section * count) * section
    rest = index - first * count
    width = gl.minimum(section, batch_heads - first)
    return first + rest % width, count - 1 - rest // width


@gluon.jit
def count_turns(sizes, BM: gl.constexpr):
    """How many blocks of BM queries this program takes."""
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    return count_blocks(batch_heads * ((q_length + BM - 1) // BM), gl.program_id(0), gl.num_programs(0))


@gluon.jit
def take_turn(turn, sizes, BM: gl.constexpr):
    """The batch row, the head, the head of all batch rows and the block of queries that this program takes in its turn."""
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    count = (q_length + BM - 1) // BM
    bh, block = find_block(turn, gl.program_id(0), gl.num_programs(0), count, batch_heads, section)
    return bh // heads, bh % heads, bh, block


@gluon.jit
def take_block(turn, tiles_ptr, sizes, BM: gl.constexpr, DOCS: gl.constexpr):
    """What take_turn gives, and where the block's tiles stand. DOCS: blocks of all heads in the order of prepare.rank_block."""
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    if DOCS:
        index = find_index(turn, gl.program_id(0), gl.num_programs(0))
        at = tiles_ptr + index // heads * OWN_NUMBERS
        b = gl.load(at + 9)
        h = index % heads
        return b, h, b * heads + h, gl.load(at + 10), at
    else:
        b, h, bh, block = take_turn(turn, sizes, BM)
        return b, h, bh, block, tiles_ptr + b * tiles_row + block * NUMBERS


@gluon.jit
def load_own_tiles(at, first, far, CID: gl.constexpr):
    """Of a block with documents: how many tiles a consumer skips at first, before which tile (in their order) its own ones end, and
    between which tiles no mask touches its queries."""
    at += 11 + 4 * CID
    begin = gl.load(at)
    own = gl.load(at + 1) - first
    return gl.where(far == 0, begin - first, 0), own, gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def load_tiles(tiles_ptr, tiles_row, b, block):
    """first, left0, left1, right0, right1, last, clear0, clear1, and the offset of the batch row."""
    at = tiles_ptr + b * tiles_row + block * NUMBERS
    return (
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5), gl.load(at + 6),
        gl.load(at + 7), gl.load(at + 8),
    )  # fmt: skip


@gluon.jit
def far_tile(t, left0, left1, right0):
    return gl.where(t < left1 - left0, left0 + t, right0 + t - (left1 - left0))


@gluon.jit
def near_tile(t, first, left0, left1, right0, right1):
    tile = first + t
    tile += gl.where(tile >= left0, left1 - left0, 0)
    return tile + gl.where(tile >= right0, right1 - right0, 0)


# ---- shared memory and barriers ---------------------------------------------------------------------------------------
@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product with 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def make_buffers(q_desc, k_desc, v_desc, o_desc, NC: gl.constexpr, STAGES: gl.constexpr):
    """Queries and outputs of each consumer, and the slots of keys and values."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [NC] + q_desc.block_shape, q_desc.layout)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [NC] + o_desc.block_shape, o_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)
    return q_smem, o_smem, k_smem, v_smem


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """For each slot of a ring: it is full (of what the producer copies), and ARRIVALS consumers do not need it any more."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ARRIVALS)
    return full, empty


@gluon.jit
def wait_full(full, step, SLOTS: gl.constexpr):
    mbarrier.wait(full.index(step % SLOTS), (step // SLOTS) & 1)


@gluon.jit
def wait_empty(empty, step, SLOTS: gl.constexpr):
    mbarrier.wait(empty.index(step % SLOTS), ((step // SLOTS) & 1) ^ 1)


@gluon.jit
def load_queries(turn, b, h, m0, q_desc, q_smem, x_desc, x_smem, bars, NC: gl.constexpr, STATES: gl.constexpr):
    """Copies the block's queries from m0 on, and with STATES their x."""
    q_full, q_empty, full, empty = bars
    for c in gl.static_range(NC):
        mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
        if STATES:
            mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes + x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [b, h, m0 + c * ROWS, 0], q_full.index(c), x_smem.index(c))
        else:
            mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, h, m0 + c * ROWS, 0], q_full.index(c), q_smem.index(c))


@gluon.jit
def load_slot(step, b, h, n0, before, has_keys, k_desc, v_desc, k_smem, v_smem, bars, STAGES: gl.constexpr):
    """Copies keys from n0 on and values from `before` on; outside their tensor both are zeros."""
    q_full, q_empty, full, empty = bars
    at = step % STAGES
    wait_empty(empty, step, STAGES)
    mbarrier.expect(full.index(at), k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=has_keys)
    mbarrier.expect(full.index(at), v_desc.block_type.nbytes, pred=has_keys == 0)
    tma.async_copy_global_to_shared(k_desc, [b, h, n0, 0], full.index(at), k_smem.index(at), pred=has_keys)
    tma.async_copy_global_to_shared(v_desc, [b, h, before, 0], full.index(at), v_smem.index(at))


# ---- pieces of a step -------------------------------------------------------------------------------------------------
@gluon.jit
def wait_turn(CID: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [TURN + CID], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(CID: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [TURN + CID], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def by_eights(x):
    """[rows, columns] -> [rows, columns // 8, 8]. A thread has all elements along the middle axis, so that what depends on it is a
    constant of the compiled code: an offset of a load, a number to compare with."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def coordinates(x):
    """Row, column // 8 and column % 8 of what by_eights gave."""
    L: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L)))
    eight = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, L)))
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    row = gl.expand_dims(gl.expand_dims(row, 1), 2)
    return row, gl.expand_dims(gl.expand_dims(eight, 0), 2), gl.expand_dims(gl.expand_dims(column, 0), 1)


@gluon.jit
def row_max(x, S_L: gl.constexpr):
    """Maxima of rows, first over each thread's own columns."""
    return gl.convert_layout(gl.max(gl.max(x, 1), 1), gl.SliceLayout(1, S_L))


@gluon.jit
def along_rows(factor, x):
    """[rows] in a shape that broadcasts against x, which has two or three axes."""
    L: gl.constexpr = x.type.layout
    if len(x.shape) == 2:
        return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, L)), 1)
    else:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, gl.SliceLayout(2, L)))
        return gl.expand_dims(gl.expand_dims(factor, 1), 2)


@gluon.jit
def begin_near(table, dist, lo, hi, BN: gl.constexpr, S_L: gl.constexpr):
    """What the scores of a near tile begin with: the table's numbers, dist being the distance of the first key and the first query."""
    row, eight, column = coordinates(by_eights(gl.zeros([ROWS, BN], gl.float32, S_L)))
    # beyond the span, any tile reads the same numbers: the table need not be longer
    first = gl.minimum(gl.maximum(dist, lo - BN), hi + ROWS) - lo + PAD
    x = gl.load((table + first + (column - row)) + 8 * eight)
    return gl.convert_layout(gl.reshape(x, [ROWS, BN]), S_L)


@gluon.jit
def hide(s, m0, n0, masks, limits, S_L: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr):
    """-inf for pairs that are not visible, of the queries from m0 on and the keys from n0 on."""
    bits, doc_q, doc_k, doc_keys = masks
    q_length, k_length, left, right = limits
    x = by_eights(s)
    row, eight, column = coordinates(x)
    step = m0 - n0 + (k_length - q_length)
    is_visible = 8 * eight < gl.minimum(row + (step + right + 1), k_length - n0) - column
    if WINDOW:
        is_visible = is_visible & (8 * eight >= row + (step - left) - column)
    if PADDED:
        word = gl.load(bits + gl.minimum(n0, k_length - 1) // s.shape[1] * 8 + column)
        is_visible = is_visible & ((word & (1 << eight)) != 0)
    if DOCS:
        at = doc_keys + 2 * gl.minimum(m0 + row, q_length - 1)
        begin, end = gl.load(at) - n0, gl.load(at + 1) - n0  # -1 and k_length where the ids of keys are in no order
        is_visible = is_visible & (8 * eight >= begin - column) & (8 * eight < end - column)
    x = gl.where(is_visible, x, float("-inf"))
    if DOCS:
        if gl.load(doc_keys) < 0:
            own = gl.load(doc_q + gl.minimum(m0 + row, q_length - 1))
            j = gl.minimum(8 * eight + column + n0, k_length - 1)
            x = gl.where(gl.load(doc_k + j) == own, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, [s.shape[0], s.shape[1]]), S_L)


@gluon.jit
def slope_of_pairs(slope, BN: gl.constexpr, S_L: gl.constexpr):
    """slope * (j - i) for a tile."""
    row, eight, column = coordinates(by_eights(gl.zeros([ROWS, BN], gl.float32, S_L)))
    x = slope * (column - row).to(gl.float32) + slope * (8 * eight).to(gl.float32)
    return gl.convert_layout(gl.reshape(x, [ROWS, BN]), S_L)


@gluon.jit
def softmax(s, m, scale, shift, slope, dist, S_L: gl.constexpr, NEAR: gl.constexpr, SLOPES: gl.constexpr):
    """Probabilities (by_eights), the factor of earlier sums, and the new maxima of the tile of scores s * scale + shift - slope |r|,
    r = dist + j - i. In a far tile slope has the sign of -r, and s begins with slope * (j - i)."""
    x = by_eights(s)
    row, eight, column = coordinates(x)
    if NEAR and SLOPES:
        x = x * scale - slope * gl.abs((column - row + dist).to(gl.float32) + (8 * eight).to(gl.float32))
        m_new = gl.maximum(m, row_max(x, S_L))
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(x - along_rows(base, x))
    else:
        if SLOPES:
            shift = shift + slope * dist.to(gl.float32)
        m_new = gl.maximum(m, row_max(x, S_L) * scale + shift)
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(x * scale - along_rows(base - shift, x))
    return p, gl.exp2(m - base), m_new


# ---- a consumer's block, as in every forward kernel ----------------------------------------------------------------------
@gluon.jit
def find_own_tiles(m0, first, last, limits, BN: gl.constexpr):
    """How many of the block's tiles a consumer's queries from m0 on see, and the keys between which no limit hides any from them."""
    q_length, k_length, left, right = limits
    end = gl.minimum(m0 + ROWS, q_length) + (k_length - q_length) + right  # of the keys that these queries see
    own = gl.minimum((gl.maximum(end, 0) + BN - 1) // BN, last)
    own = gl.where(m0 < q_length, gl.maximum(own - first, 1), 0)
    inner0 = gl.minimum(m0 + ROWS, q_length) - 1 + (k_length - q_length) - left
    inner1 = gl.minimum(m0 + (k_length - q_length) + right + 1, k_length)
    return own, inner0, inner1


@gluon.jit
def masks_of_row(masks, b):
    """The masks of a batch row, for hide."""
    bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row = masks
    return (
        bits_ptr + b * bits_row,
        doc_q_ptr + b * doc_q_row,
        doc_k_ptr + b * doc_k_row,
        doc_keys_ptr + b * doc_keys_row,
    )


@gluon.jit
def is_touched(tile, n0, inner0, inner1, clear0, clear1, BN: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr):
    """Whether a mask may touch the tile."""
    is_masked = (n0 < inner0) | (n0 + BN > inner1)
    if PADDED or DOCS:
        is_masked = is_masked | (tile < clear0) | (tile >= clear1)
    return is_masked


@gluon.jit
def begin_sums(
    DTYPE: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr, P_L: gl.constexpr
):
    """Before the first tile: probabilities, maxima, sums and output."""
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_L))
    nothing = gl.zeros([ROWS, BN], gl.float32, S_L)
    l = gl.sum(by_eights(nothing), 1)
    p = gl.convert_layout(nothing.to(DTYPE), P_L)
    return p, m, l, gl.zeros([ROWS, D], gl.float32, O_L)


@gluon.jit
def finish_block(
    p, m, l, acc, step, block, q_length, o_desc, lse_ptr, o_smem, v_smem, bars, S_L: gl.constexpr, CID: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Multiplies the values of the last tile, and stores the output and the log-sum-exp. block: batch row, head, head of all rows, first query."""
    b, h, bh, m0 = block
    q_full, q_empty, full, empty = bars
    BN: gl.constexpr = v_smem.shape[3]
    D: gl.constexpr = v_smem.shape[4]
    at = step % STAGES
    acc_new = warpgroup_mma(p, v_smem.index(at).reshape([BN, D]), acc, is_async=True)
    mbarrier.arrive(q_empty.index(CID))
    total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, S_L))
    is_empty = total == 0.0
    lse = gl.where(is_empty, float("inf"), m + gl.log2(total))
    inverse = 1.0 / gl.where(is_empty, 1.0, total)
    acc = warpgroup_mma_wait(0, deps=(acc_new,))
    mbarrier.arrive(empty.index(at))
    if m0 < q_length:
        rows = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, S_L))
        padded = (q_length + 63) // 64 * 64
        gl.store(lse_ptr + bh.to(gl.int64) * padded + rows, lse, mask=rows < q_length)
        tma.store_wait(0)
        gl.thread_barrier()
        o_smem.index(CID).reshape([ROWS, D]).store((acc * along_rows(inverse, acc)).to(v_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [b, h, m0, 0], o_smem.index(CID))


@gluon.jit
def skip_slot(step, full, empty, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """A slot of keys that only later queries see."""
    if TURNS:
        wait_turn(CID)
        pass_turn((CID + 1) % NC)
    wait_full(full, step, STAGES)
    mbarrier.arrive(empty.index(step % STAGES))


# ---- the roles --------------------------------------------------------------------------------------------------------
@gluon.jit
def produce(load, bars, sizes, NC: gl.constexpr, STAGES: gl.constexpr, DOCS: gl.constexpr):
    q_desc, k_desc, v_desc, tiles_ptr, q_smem, k_smem, v_smem = load
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    BN: gl.constexpr = k_smem.shape[3]
    BM: gl.constexpr = NC * ROWS
    step = 0
    for turn in range(count_turns(sizes, BM)):
        b, h, bh, block, place = take_block(turn, tiles_ptr, sizes, BM, DOCS)
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(place, 0, 0, 0)
        n = last - first
        far = (left1 - left0) + (right1 - right0)
        before = -BN  # outside the tensor
        for t in range(n + 1):
            near = near_tile(t - far, first, left0, left1, right0, right1)
            n0 = gl.where(t < far, far_tile(t, left0, left1, right0), near) * BN
            load_slot(step, b, h // group, n0, before, t < n, k_desc, v_desc, k_smem, v_smem, bars, STAGES)
            before = n0
            step += 1
            if t == 0:
                load_queries(turn, b, h, block * BM, q_desc, q_smem, q_desc, q_smem, bars, NC, False)


@gluon.jit
def take_step(
    q, p, m, l, acc, begin, step, scale, shift, slope, dist, m0, n0, is_masked, masks, limits, k_smem, v_smem, bars,
    S_L: gl.constexpr, P_L: gl.constexpr, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    NEAR: gl.constexpr, BEGIN: gl.constexpr, SLOPES: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """Scores of tile t, and their softmax while the products of tile t - 1 with the values run. BEGIN: the scores begin with `begin`,
    instead of zero."""
    q_full, q_empty, full, empty = bars
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    at = step % STAGES
    k_tile = k_smem.index(at).reshape([BN, D]).permute((1, 0))
    v_tile = v_smem.index(at).reshape([BN, D])
    if TURNS:
        wait_turn(CID)
    s_new = warpgroup_mma(q, k_tile, begin, use_acc=BEGIN, is_async=True)
    acc_new = warpgroup_mma(p, v_tile, acc, is_async=True)
    if TURNS:
        pass_turn((CID + 1) % NC)
    s = warpgroup_mma_wait(1, deps=(s_new,))
    if NEAR:
        if is_masked:
            s = hide(s, m0, n0, masks, limits, S_L, WINDOW, PADDED, DOCS)
    p_new, alpha, m = softmax(s, m, scale, shift, slope, dist, S_L, NEAR, SLOPES)
    l = l * along_rows(alpha, l) + gl.sum(p_new, 1)  # over each thread's own columns
    # The wait for the next slot is here because of ptxas: without a branch in between, ptxas moves the wait for the products
    # before the softmax, and nothing overlaps.
    wait_full(full, step + 1, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc_new,))
    mbarrier.arrive(empty.index(at))
    p = gl.convert_layout(gl.reshape(p_new.to(v_smem.dtype), [ROWS, BN]), P_L)
    return p, m, l, acc * along_rows(alpha, acc)


@gluon.jit
def consume(
    use, masks, bars, sizes, scale, CID: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    TABLE: gl.constexpr, SLOPES: gl.constexpr, WINDOW: gl.constexpr, PADDED: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    o_desc, lse_ptr, tiles_ptr, table_ptr, slopes_ptr, bias_row, lo, hi, q_smem, o_smem, k_smem, v_smem = use
    q_full, q_empty, full, empty = bars
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row = sizes
    BN: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = NC * ROWS
    S_L: gl.constexpr = accumulator(BN)
    O_L: gl.constexpr = accumulator(D)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    limits = (q_length, k_length, left, right)
    if TURNS and CID == 0:
        pass_turn(0)
    step = 0
    for turn in range(count_turns(sizes, BM)):
        b, h, bh, block, place = take_block(turn, tiles_ptr, sizes, BM, DOCS)
        m0 = block * BM + CID * ROWS
        first, left0, left1, right0, right1, last, clear0, clear1, offset = load_tiles(place, 0, 0, 0)
        own, inner0, inner1 = find_own_tiles(m0, first, last, limits, BN)
        far = (left1 - left0) + (right1 - right0)
        skipped = 0
        if DOCS:
            skipped, own, clear0, clear1 = load_own_tiles(place, first, far, CID)
        far = gl.minimum(far, own)
        table = table_ptr
        shift = 0.0
        shift_right = 0.0
        if TABLE:
            table = table_ptr + h * bias_row
            shift = gl.load(table) * scale
            shift_right = gl.load(table + (hi - lo + 2 * PAD)) * scale
        slope = 0.0
        if SLOPES:
            slope = gl.load(slopes_ptr + h) * 1.4426950408889634
        of_row = masks_of_row(masks, b)
        q = q_smem.index(CID).reshape([ROWS, D])
        if DOCS:
            for _ in range(skipped):
                skip_slot(step, full, empty, CID, NC, STAGES, TURNS)
                step += 1
        mbarrier.wait(q_full.index(CID), turn & 1)
        wait_full(full, step, STAGES)

        p, m, l, acc = begin_sums(v_smem.dtype, BN, D, S_L, O_L, P_L)
        for t in range(far):
            n0 = far_tile(t, left0, left1, right0) * BN
            is_left = t < left1 - left0
            own_slope = gl.where(is_left, slope, -slope)
            begin = gl.zeros([ROWS, BN], gl.float32, S_L)
            if SLOPES:
                begin = slope_of_pairs(own_slope / scale, BN, S_L)
            p, m, l, acc = take_step(
                q, p, m, l, acc, begin, step, scale, gl.where(is_left, shift, shift_right), own_slope, n0 - m0 + offset, m0, n0, False,
                of_row, limits, k_smem, v_smem, bars, S_L, P_L, CID, NC, STAGES, TURNS, False, SLOPES, SLOPES, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1
        for t in range(skipped, own - far):
            tile = near_tile(t, first, left0, left1, right0, right1)
            n0 = tile * BN
            dist = n0 - m0 + offset
            begin = gl.zeros([ROWS, BN], gl.float32, S_L)
            if TABLE:
                begin = begin_near(table, dist, lo, hi, BN, S_L)
            is_masked = True  # without terms, tiles are near because a mask touches them
            if DOCS:
                is_masked = (tile < clear0) | (tile >= clear1)
            elif TABLE or SLOPES:
                is_masked = is_touched(tile, n0, inner0, inner1, clear0, clear1, BN, PADDED, DOCS)
            p, m, l, acc = take_step(
                q, p, m, l, acc, begin, step, scale, 0.0, slope, dist, m0, n0, is_masked, of_row, limits, k_smem, v_smem, bars,
                S_L, P_L, CID, NC, STAGES, TURNS, True, TABLE, SLOPES, WINDOW, PADDED, DOCS,
            )  # fmt: skip
            step += 1

        finish_block(p, m, l, acc, step, (b, h, bh, m0), q_length, o_desc, lse_ptr, o_smem, v_smem, bars, S_L, CID, STAGES)  # fmt: skip
        step += 1
        for _ in range(own, last - first):
            skip_slot(step, full, empty, CID, NC, STAGES, TURNS)
            step += 1
    if TURNS and CID == 0:
        wait_turn(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def forward(
    q_desc, k_desc, v_desc, o_desc,  # [B, heads, L, D]
    lse_ptr,  # float32 [B, H, Lq rounded up to 64], base 2
    tiles_ptr,  # int32 [B or 1, blocks, NUMBERS] (load_tiles), or with documents [B blocks, OWN_NUMBERS] (prepare.order_block)
    table_ptr,  # float32 [H, PAD + span + PAD], constant before and after the span; or unused
    slopes_ptr,  # float32 [H], or unused
    bits_ptr,  # int32 [B or 1, tiles of keys, 8] (prepare.pack_padding), or unused
    doc_q_ptr, doc_k_ptr, doc_keys_ptr,  # as in triton/structs.py, or unused
    scale,  # base 2
    q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row, bias_row, bits_row, doc_q_row, doc_k_row,
    doc_keys_row, lo, hi,
    NC: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, TABLE: gl.constexpr, SLOPES: gl.constexpr, WINDOW: gl.constexpr,
    PADDED: gl.constexpr, DOCS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse, by NC consumers, three or two. Limits: -left <= j - i - (k_length - q_length) <= right, left only if WINDOW; lo, hi: the span of the table, or
    beyond every distance without one; *row: strides over heads or batch rows, 0 for one that all share."""
    q_smem, o_smem, k_smem, v_smem = make_buffers(q_desc, k_desc, v_desc, o_desc, NC, STAGES)
    bars = make_barriers(NC, 1) + make_barriers(STAGES, NC)
    fence_async_shared()

    load = (q_desc, k_desc, v_desc, tiles_ptr, q_smem, k_smem, v_smem)
    use = (o_desc, lse_ptr, tiles_ptr, table_ptr, slopes_ptr, bias_row, lo, hi, q_smem, o_smem, k_smem, v_smem)
    masks = (bits_ptr, doc_q_ptr, doc_k_ptr, doc_keys_ptr, bits_row, doc_q_row, doc_k_row, doc_keys_row)
    sizes = (q_length, k_length, heads, group, batch_heads, section, left, right, tiles_row)
    # Constants are repeated in each call: in a tuple that has a name they would become tensors.
    if NC == 2:
        gl.warp_specialize([
            (consume, (use, masks, bars, sizes, scale, 0, NC, STAGES, TURNS, TABLE, SLOPES, WINDOW, PADDED, DOCS)),
            (consume, (use, masks, bars, sizes, scale, 1, NC, STAGES, TURNS, TABLE, SLOPES, WINDOW, PADDED, DOCS)),
            (produce, (load, bars, sizes, NC, STAGES, DOCS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (use, masks, bars, sizes, scale, 0, NC, STAGES, TURNS, TABLE, SLOPES, WINDOW, PADDED, DOCS)),
            (consume, (use, masks, bars, sizes, scale, 1, NC, STAGES, TURNS, TABLE, SLOPES, WINDOW, PADDED, DOCS)),
            (consume, (use, masks, bars, sizes, scale, 2, NC, STAGES, TURNS, TABLE, SLOPES, WINDOW, PADDED, DOCS)),
            (produce, (load, bars, sizes, NC, STAGES, DOCS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
