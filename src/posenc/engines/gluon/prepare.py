"""What the Gluon kernel reads beside the tensors, made by one launch: which tiles each block visits, the
padded table, padding as bits.

Documents are known on the device only, and so is what a block costs. Blocks are then ranked here (`rank_block`): in sections of
some blocks of all heads, whose tensors fit in the L2 cache together, and by their cost within a section, up and down in turns:

    cost     8 7 5 3 2 | 1 2 4 6 9 | 9 6 6 3 1        programs take blocks in this order, every other round backwards
             section 0 | section 1 | section 2        (kernel.find_index), so that all have about the same to do
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.masking import add_start, key_tiles


@triton.jit(
    do_not_specialize=[
        "blocks", "count", "bias_row", "bias_lo", "bias_hi", "heads", "first", "width", "scale", "q_length", "k_length", "offset", "left",
        "right", "lo", "hi", "section",
    ]
)  # fmt: skip
def prepare(
    tiles, blocks, count, positions, masks, q_length, k_length, offset, left, right, lo, hi,
    bias, bias_row, bias_lo, bias_hi, table, heads, first, width, scale, bits, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr = False,
):  # fmt: skip
    """The first `blocks` programs each split a block of queries, the next `heads` each pad a row of the bias, the others each pack
    the padding of a tile of keys. ORDERED: blocks stand in `tiles` in the order in which they are taken, `section` of them at a time."""
    pid = tl.program_id(0)
    if pid < blocks:
        if ORDERED:
            order_block(
                pid, tiles, positions, masks, blocks, section, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N
            )  # fmt: skip
        else:
            split_block(
                pid, tiles + pid * 9, positions, masks, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N
            )  # fmt: skip
    elif pid < blocks + heads:
        if bias is not None:
            pad_bias(pid - blocks, bias, bias_row, bias_lo, bias_hi, table, first, width, scale, BLOCK)
    elif bits is not None:
        pack_padding(pid - blocks - heads, masks, bits, k_length, BLOCK_N)


@triton.jit
def split_block(
    at, to, positions, masks, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Stores the nine numbers of kernel.load_tiles, and returns the first tile and the last + 1. A block that sees no key visits the first
    tile, in which all pairs are masked."""
    b, m0 = at // count, at % count * BLOCK_M
    offset = add_start(positions, offset, b)
    first, left0, left1, right0, right1, last, clear0, clear1 = key_tiles(
        m0, b, masks, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N, True
    )
    some = tl.where(last > first, 1, 0)
    first = first * some
    last = tl.maximum(last * some, 1)
    tl.store(to, first)
    tl.store(to + 1, left0 * some)
    tl.store(to + 2, left1 * some)
    tl.store(to + 3, right0 * some)
    tl.store(to + 4, right1 * some)
    tl.store(to + 5, last)
    tl.store(to + 6, clear0)
    tl.store(to + 7, clear1 * some)
    tl.store(to + 8, offset)
    return first, last


@triton.jit
def order_block(
    at, tiles, positions, masks, blocks, section, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """tiles [blocks, 23] in the order of rank_block: split_block's numbers, the batch row and the block, and for each consumer its own first
    tile, last + 1, and between which tiles no mask touches its queries."""
    rank = rank_block(
        at, blocks, section, masks.doc_q_keys, masks.doc_q_keys_row, count, q_length, k_length, left, right, BLOCK_M, BLOCK_N, 64
    )  # fmt: skip
    to = tiles + rank * 23
    first, last = split_block(
        at, to, positions, masks, count, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N
    )  # fmt: skip
    b, m0 = at // count, at % count * BLOCK_M
    tl.store(to + 9, b)
    tl.store(to + 10, at % count)
    for c in tl.static_range(BLOCK_M // 64):
        own = m0 + c * 64
        begin, _, _, _, _, end, clear0, clear1 = key_tiles(
            own, b, masks, q_length, k_length, 0, left, right, lo, hi, 64, BLOCK_N, True
        )
        begin = tl.where(own < q_length, tl.minimum(tl.maximum(begin, first), last), first)
        end = tl.where(own < q_length, tl.minimum(tl.maximum(end, begin), last), first)
        tl.store(to + (11 + 4 * c), begin)
        tl.store(to + (12 + 4 * c), end)
        tl.store(to + (13 + 4 * c), clear0)
        tl.store(to + (14 + 4 * c), clear1)


@triton.jit
def rank_block(
    at, blocks, section, bounds, bounds_row, count, own_length, other_length, left, right, OWN: tl.constexpr, OTHER: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Where block `at` of all batch rows stands in the order drawn above. bounds: of documents, on the other side; PART: tokens of a consumer, if it
    passes tiles that only others see, else of a block."""
    own_cost = cost_block(
        at, bounds, bounds_row, count, own_length, other_length, left, right, OWN, OTHER, PART
    )  # fmt: skip
    first = at // section * section
    size = tl.minimum(section, blocks - first)
    before = tl.zeros([128], tl.int32)
    for start in range(0, size, 128):
        other = start + tl.arange(0, 128)
        cost = cost_block(
            first + tl.minimum(other, size - 1), bounds, bounds_row, count, own_length, other_length, left, right, OWN, OTHER, PART
        )  # fmt: skip
        is_before = (cost > own_cost) | ((cost == own_cost) & (first + other < at))
        before += tl.where((other < size) & is_before, 1, 0)
    rank = tl.sum(before, 0)
    is_down = ((blocks - 1) // section - at // section) % 2 == 0  # the last section is
    return first + tl.where(is_down, rank, size - 1 - rank)


@triton.jit
def cost_block(
    at, bounds, row, count, own_length, other_length, left, right, OWN: tl.constexpr, OTHER: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Tiles that a block visits, and those of each of its parts, from the documents of the parts' first and last tokens: a step of one consumer
    costs about half of one of three."""
    bounds += at // count * row
    diff = other_length - own_length
    total = at * 0
    low, high = total + other_length, total
    for part in tl.static_range(OWN // PART):
        own = at % count * OWN + part * PART
        last = tl.minimum(own + PART, own_length) - 1
        begin = tl.maximum(tl.load(bounds + 2 * tl.minimum(own, last)), 0)
        end = tl.load(bounds + 2 * last + 1)
        if left is not None:
            begin = tl.maximum(begin, own + diff - left)
        if right is not None:
            end = tl.minimum(end, own + PART + diff + right)
        is_any = (own < own_length) & (begin < end)
        low = tl.where(is_any, tl.minimum(low, begin), low)
        high = tl.where(is_any, tl.maximum(high, end), high)
        total += tl.where(is_any, (end + OTHER - 1) // OTHER - begin // OTHER, 0)
    return total + tl.maximum((high + OTHER - 1) // OTHER - low // OTHER, 0)


@triton.jit
def store_turns(
    at, order, order_row, programs, blocks, section, bounds, bounds_row, heads, count, own_length, other_length, left, right,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """order int32 [programs, 1 + ..], as backward_launch.order_blocks makes it: which programs take block `at` of each head, and the first block how
    many each takes."""
    rank = rank_block(
        at, blocks, section, bounds, bounds_row, count, own_length, other_length, left, right, OWN, OTHER, OWN
    )  # fmt: skip
    for start in range(0, heads, 128):
        h = start + tl.arange(0, 128)
        index = rank * heads + h
        turn, program = index // programs, index % programs
        program = tl.where(turn % 2 == 0, program, programs - 1 - program)
        block = (at // count * heads + h) * count + at % count
        tl.store(order + program * order_row + 1 + turn, block, mask=h < heads)
    if at == 0:
        whole = blocks * heads // programs
        for start in range(0, programs, 128):
            program = start + tl.arange(0, 128)
            last = whole * programs + tl.where(whole % 2 == 0, program, programs - 1 - program)
            taken = whole + tl.where(last < blocks * heads, 1, 0)
            tl.store(order + program * order_row, taken, mask=program < programs)


@triton.jit
def pad_bias(h, bias, bias_row, bias_lo, bias_hi, table, first, width, scale, BLOCK: tl.constexpr):
    """table [heads, width]: by distance from `first` on, divided by the scale."""
    h = h.to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        r = tl.minimum(tl.maximum(first + at, bias_lo), bias_hi)
        tl.store(table + h * width + at, tl.load(bias + h * bias_row + (r - bias_lo)) / scale, mask=at < width)


@triton.jit
def pack_padding(at, masks, bits, k_length, BLOCK_N: tl.constexpr):
    """bits int32 [.., tiles of keys, 8]: bit e of number c is whether key 8 e + c of the tile is real."""
    count = tl.cdiv(k_length, BLOCK_N)
    e, c = tl.arange(0, BLOCK_N // 8)[:, None], tl.arange(0, 8)[None, :]
    j = at % count * BLOCK_N + 8 * e + c
    real = tl.load(masks.keys + (at // count).to(tl.int64) * masks.keys_row + j, mask=j < k_length, other=0) != 0
    tl.store(bits + at * 8 + tl.arange(0, 8), tl.sum(real.to(tl.int32) << e, 0))
