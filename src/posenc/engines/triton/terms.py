"""What a score is made of, inside a kernel: the plan's formula and the mask, once, for every kernel.

    x = scale [ q.k + rows[i, r] + cols[j, r] ] + bias[r] - slope |r| + c_q[i] - c_k[j]       r = p_k - p_q

Scores are in base 2 (times log2 e). Mostly the queries i and the keys j come as index tensors that broadcast against
each other, [BM, 1] and [1, BN] or [1, BM] and [BN, 1], so the same lines serve a tile and its transpose.

Every index is constant outside its span, so a tile far from the diagonal needs no look-up: what is left is a number
for each query (`row_end`) and, for some slots, a number for each key (`far_columns`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class View(NamedTuple):
    """A tensor [B, heads, L, D] whose last stride is 1."""

    ptr: Any
    b: Any
    h: Any
    l: Any


class Table(NamedTuple):
    """One number per head and distance, [H, hi - lo + 1], float32."""

    ptr: Any
    h: Any
    lo: Any
    hi: Any


class Band(NamedTuple):
    """One number per token and distance other - own (r over queries, -r over keys): a content term, or a gradient.

    Rows are pitch + 1 apart, pitch a multiple of 16. So the distance r = other - own + offset of a token lies at

        own (pitch + 1) + r - origin  =  own pitch + other + shift        shift = offset - origin, a multiple of 16

    and a tile of pairs is an ordinary matrix with aligned rows, loaded and stored like a dense bias. Numbers outside
    lo < r < hi are not the token's own: there the ends are chosen. Loads may run past a token's row by one tile.
    """

    ptr: Any
    b: Any
    h: Any
    pitch: Any
    shift: Any
    first: Any  # the first token that has a row
    origin: Any
    lo: Any
    hi: Any
    ends: Any  # float32 [B, H, 2, rows]: the numbers at lo and at hi
    rows: Any
    thirds: Any  # bfloat16 [B, H, 2, rows, 16]: three ones, 3 columns on both ends in three parts (hi, lo; then lo, hi)
    unit: Any  # float32 [1] where the numbers are int64, so many to one: sums of integers have no order


class Slots(NamedTuple):
    """The plan's slots; None where it has none. The last four are contiguous float32."""

    bias: Any  # Table
    rows: Any  # Band over queries
    cols: Any  # Band over keys
    mass: Any  # Band over queries: attention per distance, or its gradient
    slopes: Any  # [H]
    scale: Any  # [B, H, Lq]
    decay_q: Any  # [B, H, Lq]
    decay_k: Any  # [B, H, Lk]
    unit: Any  # [257] in q's dtype: a one at 128, zeros around it
    three: Any  # bfloat16 [67]: ones at 32, 33 and 34, zeros around them


class Places(NamedTuple):
    """Where tokens are: r = j - i + offset for runs (starts: one more offset per row), else token positions."""

    starts: Any  # int32 [B]
    q: Any  # int32 [B or 1, Lq]
    k: Any  # int32 [B or 1, Lk]
    q_row: Any  # stride over B
    k_row: Any


class Masks(NamedTuple):
    """Masks beyond causality and windows; None where there are none."""

    keys: Any  # uint8 [B or 1, Lk]
    keys_row: Any
    spans: Any  # int32 [B, 3]: first real key, last + 1, whether all between are real
    doc_q: Any  # int32 [B or 1, Lq]
    doc_k: Any
    doc_q_row: Any
    doc_k_row: Any
    doc_q_sees: (
        Any  # int32 [B or 1, Lq, 2]: the first key of the query's document and the last + 1; -1 first: not known
    )
    doc_k_sees: Any  # int32 [B or 1, Lk, 2]: the same of queries, for keys
    doc_q_sees_row: Any
    doc_k_sees_row: Any
    extra: Any  # uint8 (seen) or float (added), any strides
    extra_b: Any
    extra_h: Any
    extra_q: Any
    extra_k: Any
    seed: Any  # int64 [1], for dropout
    extra_is_seen: Any  # constexpr


@triton.jit
def padded(length):
    """The stride of per-query float32 vectors: a multiple of 64, so that their loads are wide."""
    return tl.cdiv(length, 64) * 64


@triton.jit
def distance(places, b, i, j, offset, q_length, k_length):
    """r = p_k - p_q of every pair; i and j broadcast against each other."""
    if places.q is not None:
        p_q = tl.load(places.q + b * places.q_row + i, mask=i < q_length, other=0)
        p_k = tl.load(places.k + b * places.k_row + j, mask=j < k_length, other=0)
        return p_k - p_q
    else:
        return j - i + offset


@triton.jit
def band_end(band, bh, own, ok, HIGH):
    """The numbers of the tokens `own` at lo (HIGH=0) or at hi (HIGH=1)."""
    return tl.load(band.ends + (bh * 2 + HIGH) * band.rows + (own - band.first), mask=ok, other=0.0)


@triton.jit
def edges(lo, hi, r_lo, r_hi, places):
    """Whether a tile of distances r_lo .. r_hi needs the ends of a band."""
    if places.q is None:
        return (r_lo <= lo) | (r_hi >= hi)
    else:
        return True


@triton.jit
def tile_of(band, places, b, h, own0, own, other, OWN_IS_KEY: tl.constexpr):
    """Addresses of the pairs [own, other], for runs of positions. Within the tile, which begins at token own0, offsets
    are 32 bits wide: wider ones take registers."""
    shift = band.shift
    if places.starts is not None:
        if OWN_IS_KEY:
            shift -= tl.load(places.starts + b)
        else:
            shift += tl.load(places.starts + b)
    base = band.ptr + b * band.b + h * band.h + (own0 - band.first).to(tl.int64) * band.pitch
    return base + (((own - own0) * band.pitch)[:, None] + (other + shift)[None, :])


@triton.jit
def token(band, b, h, own0):
    """Where the numbers of token own0 begin; the rows after it are pitch + 1 apart."""
    return band.ptr + b * band.b + h * band.h + (own0 - band.first).to(tl.int64) * (band.pitch + 1)


@triton.jit
def look(
    band, places, b, h, bh, own0, own, other, length, r, r_lo, r_hi, TURN: tl.constexpr, OWN_IS_KEY: tl.constexpr
):  # fmt: skip
    """A band's numbers for a tile [own, other], or turned; r, in that orientation, counts from own to other.

    For runs of positions the tile is loaded along the tokens' rows and then turned. Its distances are r_lo .. r_hi.
    """
    ok = own < length
    if places.q is None:
        reached = own < tl.where((r_hi > band.lo) & (r_lo < band.hi), length, 0)
        x = tl.load(tile_of(band, places, b, h, own0, own, other, OWN_IS_KEY), mask=reached[:, None], other=0.0)
        if TURN:
            x = tl.trans(x)
    else:
        row = (own - own0) * (band.pitch + 1) - band.origin
        base = token(band, b, h, own0)
        within = (r > band.lo) & (r < band.hi)
        if TURN:
            x = tl.load(base + (row[None, :] + r), mask=ok[None, :] & within, other=0.0)
        else:
            x = tl.load(base + (row[:, None] + r), mask=ok[:, None] & within, other=0.0)
    return x.to(tl.float32)


@triton.jit
def added(x, same, band, places, b, h, own0, own, other, length, TURN: tl.constexpr, OWN_IS_KEY: tl.constexpr):
    """x and the band's numbers for a tile that lies within its span, or turned: as a product with the unit matrix, so
    that they go from memory to the tensor cores and are turned on the way, past the registers."""
    y = tl.load(tile_of(band, places, b, h, own0, own, other, OWN_IS_KEY), mask=(own < length)[:, None], other=0.0)
    if TURN:
        y = tl.trans(y)
    return tl.dot(same, y, x)


@triton.jit
def unit_matrix(slots, SIZE: tl.constexpr):
    """Loaded rather than computed, so that it lies in shared memory: tensor cores wait for registers."""
    step = tl.arange(0, SIZE)
    return tl.load(slots.unit + 128 + step[:, None] - step[None, :])


@triton.jit
def amidst(qk, same, slots, places, b, h, m0, n0, i, j, q_length, k_length, KEYS_FIRST: tl.constexpr):
    """`inside` for a tile within the span of every band that no mask touches."""
    x = qk
    if slots.rows is not None:
        x = added(x, same, slots.rows, places, b, h, m0, i, j, q_length, KEYS_FIRST, False)
    if slots.cols is not None:
        x = added(x, same, slots.cols, places, b, h, n0, j, i, k_length, not KEYS_FIRST, True)
    return x


@triton.jit
def ended(x, band, bh, own, length, r, TURN: tl.constexpr):
    """What `look` found, with the ends outside the span."""
    ok = own < length
    low, high = band_end(band, bh, own, ok, 0), band_end(band, bh, own, ok, 1)
    if TURN:
        low, high = low[None, :], high[None, :]
    else:
        low, high = low[:, None], high[:, None]
    return tl.where(r <= band.lo, low, tl.where(r >= band.hi, high, x))


@triton.jit
def visible(masks, b, h, i, j, q_length, k_length, left, right):
    """Which pairs may see each other; False outside the tensors."""
    seen = (i < q_length) & (j < k_length)
    slot = j - i - (k_length - q_length)
    if left is not None:
        seen = seen & (slot >= -left)
    if right is not None:
        seen = seen & (slot <= right)
    if masks.keys is not None:
        seen = seen & (tl.load(masks.keys + b * masks.keys_row + j, mask=j < k_length, other=0) != 0)
    if masks.doc_q is not None:
        ours = tl.load(masks.doc_q + b * masks.doc_q_row + i, mask=i < q_length, other=0)
        theirs = tl.load(masks.doc_k + b * masks.doc_k_row + j, mask=j < k_length, other=0)
        seen = seen & (ours == theirs)
    if masks.extra is not None:
        if masks.extra_is_seen:
            at = masks.extra + b * masks.extra_b + h * masks.extra_h
            at += i.to(tl.int64) * masks.extra_q + j.to(tl.int64) * masks.extra_k
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def inside(
    qk, slots, places, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi, q_length, k_length, left, right, some,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """q.k with the terms that the scale multiplies; i and j are vectors, the tile [i, j] or (KEYS_FIRST) [j, i].

    `some`: whether a mask touches the tile. With content terms (and a scale that is a positive number) it is applied
    here, in one branch with the ends: few tiles take it.
    """
    x = qk
    if (slots.rows is not None) or (slots.cols is not None):
        hard = some
        if slots.rows is not None:
            rows = look(slots.rows, places, b, h, bh, m0, i, j, q_length, r, r_lo, r_hi, KEYS_FIRST, False)
            hard = hard | edges(slots.rows.lo, slots.rows.hi, r_lo, r_hi, places)
        if slots.cols is not None:
            cols = look(slots.cols, places, b, h, bh, n0, j, i, k_length, -r, -r_hi, -r_lo, not KEYS_FIRST, True)
            hard = hard | edges(slots.cols.lo, slots.cols.hi, -r_hi, -r_lo, places)
        if hard:
            if slots.rows is not None:
                rows = ended(rows, slots.rows, bh, i, q_length, r, KEYS_FIRST)
            if slots.cols is not None:
                cols = ended(cols, slots.cols, bh, j, k_length, -r, not KEYS_FIRST)
            if slots.scale is None:
                if KEYS_FIRST:
                    seen = visible(masks, b, h, i[None, :], j[:, None], q_length, k_length, left, right)
                else:
                    seen = visible(masks, b, h, i[:, None], j[None, :], q_length, k_length, left, right)
                if slots.rows is not None:
                    rows = tl.where(seen, rows, float("-inf"))
                else:
                    cols = tl.where(seen, cols, float("-inf"))
        if slots.rows is not None:
            x += rows
        if slots.cols is not None:
            x += cols
    return x


@triton.jit
def outside(x, slots, masks, b, h, bh, i, j, r, q_length, k_length):
    """x (already scaled) with the terms that come after the scale."""
    if slots.bias is not None:
        step = tl.minimum(tl.maximum(r, slots.bias.lo), slots.bias.hi) - slots.bias.lo
        x += LOG2E * tl.load(slots.bias.ptr + h * slots.bias.h + step)
    if slots.slopes is not None:
        x -= (LOG2E * tl.load(slots.slopes + h)) * tl.abs(r).to(tl.float32)
    if slots.decay_q is not None:
        c_q = tl.load(slots.decay_q + bh * q_length + i, mask=i < q_length, other=0.0)
        c_k = tl.load(slots.decay_k + bh * k_length + j, mask=j < k_length, other=0.0)
        x += LOG2E * (c_q - c_k)
    if masks.extra is not None:
        if not masks.extra_is_seen:
            at = masks.extra + b * masks.extra_b + h * masks.extra_h
            at += i.to(tl.int64) * masks.extra_q + j.to(tl.int64) * masks.extra_k
            x += LOG2E * tl.load(at, mask=(i < q_length) & (j < k_length), other=0.0).to(tl.float32)
    return x


@triton.jit
def shown(x, slots, masks, b, h, i, j, q_length, k_length, left, right, some):
    """x, and -inf where a pair may not see each other, unless `inside` did that already."""
    if (slots.scale is not None) or ((slots.rows is None) and (slots.cols is None)):
        if some:
            x = tl.where(visible(masks, b, h, i, j, q_length, k_length, left, right), x, float("-inf"))
    return x


@triton.jit
def row_scale(slots, bh, i, q_length, scale):
    """The scale of each query in base 2: a number, or a vector like i."""
    if slots.scale is not None:
        return LOG2E * tl.load(slots.scale + bh * q_length + i, mask=i < q_length, other=0.0)
    else:
        return LOG2E * scale


@triton.jit
def tiled(scale_row, slots, KEYS_FIRST: tl.constexpr):
    """What row_scale gave, to multiply a tile with."""
    if slots.scale is None:
        return scale_row
    elif KEYS_FIRST:
        return scale_row[None, :]
    else:
        return scale_row[:, None]


@triton.jit
def row_end(slots, bh, i, ok, RIGHT: tl.constexpr):
    """What every far key on one side adds to query i inside the scale: the last row of the index. Like i."""
    if slots.rows is not None:
        return band_end(slots.rows, bh, i, ok, RIGHT)
    else:
        return tl.zeros(i.shape, tl.float32)


@triton.jit
def bias_end(slots, h, RIGHT: tl.constexpr):
    """The bias of every far key on one side. Base 2."""
    if slots.bias is not None:
        at = slots.bias.ptr + h * slots.bias.h
        if RIGHT:
            at += slots.bias.hi - slots.bias.lo
        return LOG2E * tl.load(at)
    else:
        return 0.0


@triton.jit
def far_row(slots, h, bh, i, q0, on_left, q_length):
    """The part of a far score that depends on the query through its place, counted from query q0. Base 2."""
    x = tl.zeros(i.shape, tl.float32)
    if slots.slopes is not None:
        slope = LOG2E * tl.load(slots.slopes + h)
        slope = tl.where(on_left, -slope, slope)
        x += slope * (i - q0).to(tl.float32)
    if slots.decay_q is not None:
        c_q = tl.load(slots.decay_q + bh * q_length + i, mask=i < q_length, other=0.0)
        x += LOG2E * (c_q - tl.load(slots.decay_q + bh * q_length + q0))
    return x


@triton.jit
def thirds(tile, columns, at, x):
    """The tile [rows, columns] with x [rows] at three columns from `at` on, as a sum of bfloat16 numbers: all its bits.

    A number for each column of a tile of scores would be loaded by every thread for each column it holds. As a product,
    of a matrix that picks them with these, it comes from the tensor cores.
    """
    for part in tl.static_range(3):
        piece = x.to(tl.bfloat16).to(tl.float32)
        tile = tl.where(columns == at + part, piece[:, None], tile)
        x = x - piece
    return tile


@triton.jit
def picks(slots, at, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH]: ones at the three columns of a number."""
    return tl.load(slots.three + (32 - at + tl.arange(0, WIDTH))[None, :] + tl.zeros([ROWS, 1], tl.int32))


@triton.jit
def lifted(x, picked, sums):
    """x [rows, columns] and what `picked` takes from the thirds of each column, [columns, WIDTH]."""
    return tl.dot(picked, tl.trans(sums), x)


@triton.jit
def far_inside(x, slots, bh, j, on_left, picked):
    """q.k of a far tile [queries, keys] with what its keys add inside the scale. `picked`: its three columns."""
    if slots.cols is not None:
        row = (bh * 2 + tl.where(on_left, 0, 1)) * slots.cols.rows + j
        x = lifted(x, picked, tl.load(slots.cols.thirds + row[:, None] * 16 + tl.arange(0, 16)[None, :]))
    return x


@triton.jit
def far_outside(slots, h, bh, j, q0, on_left, offset, q_length, k_length):
    """What a far key adds after the scale, the query counted from q0. Base 2."""
    x = tl.zeros(j.shape, tl.float32)
    if slots.slopes is not None:
        slope = LOG2E * tl.load(slots.slopes + h)
        slope = tl.where(on_left, slope, -slope)
        x += slope * (j + offset - q0).to(tl.float32)
    if slots.decay_q is not None:
        c_k = tl.load(slots.decay_k + bh * k_length + j, mask=j < k_length, other=0.0)
        x += LOG2E * (tl.load(slots.decay_q + bh * q_length + q0) - c_k)
    return x


@triton.jit
def far(x, scale, slots, h, bh, j, q0, on_left, offset, q_length, k_length):
    """A far tile's scores without their row constants. Left unscaled where nothing is added per key (`RAW`)."""
    if (slots.slopes is not None) or (slots.decay_q is not None):
        x = x * scale + far_outside(slots, h, bh, j, q0, on_left, offset, q_length, k_length)
    elif slots.scale is not None:
        x = x * scale
    return x


@triton.jit
def mixed(x):
    """A 32-bit number whose every bit depends on every bit of x."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep(masks, bh, i, j, dropout):
    """1 / (1 - dropout) for the weights that stay, 0 for the others: a function of seed, head, query and key.

    Most of the mixing is done for queries and for keys, so that a pair costs two products: a cryptographic generator
    for each pair would take longer than the attention itself.
    """
    seed = tl.load(masks.seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    row = mixed(i.to(tl.uint32) + mixed(bh.to(tl.uint32) + low))
    again = mixed(row + high)
    column = mixed(j.to(tl.uint32) + high)
    x = (column ^ row) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + again) * 0x846CA68B
    return tl.where((x >> 8).to(tl.float32) >= dropout * 16777216.0, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def segments(
    own,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    own_length,
    other_length,
    offset,
    left,
    right,
    lo,
    hi,
    begin,
    end,
    clear,
):
    """Tiles of the other side for the block own .. own + OWN: which may be seen, and which of them are far.

        begin       a0      l0     l1        r0     r1      a1        end
        | unseen    | general | far  | general | far  | general | unseen |

    With r = other - own + offset a tile is far where r <= lo or r >= hi for all its pairs and none is masked.
    `left` and `right` bound other - own aligned at the ends, `begin` and `end` the other side's real tokens;
    `clear` says that nothing else is masked; the last two results are the first and one past the last tile that no
    mask touches. Called with the sides swapped (and signs turned) for key blocks.
    """
    diff = other_length - own_length
    first, last = begin, end
    clear_0 = tl.cdiv(begin, OTHER)
    clear_1 = end // OTHER
    if left is not None:
        first = tl.maximum(first, own + diff - left)
        clear_0 = tl.maximum(clear_0, tl.cdiv(tl.maximum(own + OWN - 1 + diff - left, 0), OTHER))
    if right is not None:
        last = tl.minimum(last, own + OWN + diff + right)
        clear_1 = tl.minimum(clear_1, tl.maximum(own + diff + right + 1, 0) // OTHER)
    a0 = tl.maximum(first, 0) // OTHER
    a1 = tl.maximum(tl.cdiv(tl.maximum(last, 0), OTHER), a0)
    clear_1 = tl.where(clear, clear_1, 0)
    l0 = tl.minimum(tl.maximum(clear_0, a0), a1)
    l1 = tl.maximum(tl.minimum(tl.maximum(lo + own - offset + 1, 0) // OTHER, tl.minimum(clear_1, a1)), l0)
    r0 = tl.cdiv(tl.maximum(hi + own + OWN - 1 - offset, 0), OTHER)
    r0 = tl.minimum(tl.maximum(tl.maximum(r0, clear_0), l1), a1)
    r1 = tl.maximum(tl.minimum(clear_1, a1), r0)
    # Empty far stretches move to the ends, so that the general tiles in the middle are one run.
    none_left, none_right = l0 == l1, r0 == r1
    l0 = tl.where(none_left, a0, l0)
    l1 = tl.where(none_left, a0, l1)
    r0 = tl.where(none_right, a1, r0)
    r1 = tl.where(none_right, a1, r1)
    return a0, l0, l1, r0, r1, a1, clear_0, clear_1


@triton.jit
def of_documents(sees, row, b, own, length):
    """Where the documents of a block of tokens begin and end on the other side, and whether they are one, and known.

    Both bounds are compared: a document without a token on the other side is an empty range that begins where the next
    document does.
    """
    at = sees + b * row + tl.minimum(own, length - 1) * 2
    first, last = tl.load(at), tl.load(at + 1)
    begin, end = tl.min(first, 0), tl.max(last, 0)
    return begin, end, (begin == tl.max(first, 0)) & (end == tl.min(last, 0)) & (begin >= 0)


@triton.jit
def middle(slots, own, OWN: tl.constexpr, OTHER: tl.constexpr, offset, l1, r0, c0, c1, KEYS: tl.constexpr):
    """First and one past the last tile of the other side that lies within the span of every band and under no mask."""
    s0, s1 = tl.maximum(l1, c0), tl.minimum(r0, c1)
    s0, s1 = within(slots.rows, s0, s1, own, OWN, OTHER, offset, KEYS)
    s0, s1 = within(slots.cols, s0, s1, own, OWN, OTHER, offset, not KEYS)
    s0, s1 = within(slots.mass, s0, s1, own, OWN, OTHER, offset, KEYS)
    s0 = tl.minimum(s0, r0)
    return s0, tl.maximum(s0, s1)


@triton.jit
def within(band, s0, s1, own, OWN: tl.constexpr, OTHER: tl.constexpr, offset, TURN: tl.constexpr):
    if band is not None:
        if TURN:
            lo, hi = -band.hi, -band.lo
        else:
            lo, hi = band.lo, band.hi
        s0 = tl.maximum(s0, tl.cdiv(tl.maximum(lo + own + OWN - offset, 0), OTHER))
        s1 = tl.minimum(s1, tl.maximum(hi + own - offset, 0) // OTHER)
    return s0, s1


@triton.jit
def general_tile(t, a0, l0, l1, r0, r1, a1, s0, s1):
    """The t-th tile with general pairs: those before the left far stretch, those after the right one, then the middle,
    without s0 .. s1."""
    before = l0 - a0
    after = a1 - r1
    inner = l1 + t - before - after
    inner += tl.where(inner >= s0, s1 - s0, 0)
    return tl.where(t < before, a0 + t, tl.where(t < before + after, r1 + t - before, inner))


@triton.jit
def hidden(tile, clear_0, clear_1, CLEAR: tl.constexpr):
    """Whether a mask touches this tile."""
    if CLEAR:
        return (tile < clear_0) | (tile >= clear_1)
    else:
        return True


@triton.jit
def far_tile(t, l0, l1, r0):
    """The t-th far tile: the left stretch, then the right."""
    return tl.where(t < l1 - l0, l0 + t, r0 + t - (l1 - l0))


@triton.jit
def load_tile(ptr, stride, start, length, d, D: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """Rows start .. start + BLOCK of a [L, D] matrix, zeros outside; CHECK=False trusts the rows."""
    rows = tl.arange(0, BLOCK)
    at = ptr + start.to(tl.int64) * stride + rows[:, None] * stride + d[None, :]
    EVEN: tl.constexpr = d.shape[0] == D
    if CHECK:
        if EVEN:
            return tl.load(at, mask=(start + rows)[:, None] < length, other=0.0)
        else:
            return tl.load(at, mask=((start + rows)[:, None] < length) & (d[None, :] < D), other=0.0)
    else:
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=d[None, :] < D, other=0.0)
