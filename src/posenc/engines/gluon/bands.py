"""Tiles of a band in memory (triton/band_layout.py): a number for each token t and each distance r of a span, at t (pitch + 1) + r - origin.

A tile of pairs has the band's own tokens as columns or as rows, and those of the other side along its other axis; `dist` is the distance
from its first own token to its first other one. Within the span a tile is a matrix with rows pitch apart:

    own tokens as columns     own 0  own 1  own 2           as rows       other 0    1      2
    other 0                     0      p     2 p            own 0            0       1      2
    other 1                     1    p + 1  2 p + 1         own 1            p     p + 1  p + 2

Beyond the span the numbers of its ends hold. Divisions by 16 tell the compiler what band_layout.py promises, so that it loads two at a time.

Such a matrix is also what the copy engine (TMA) reads and writes, with rows that overlap in memory (describe_band): for tiles within the span it
takes no register and waits for nobody. Beyond the span a tile that is read so has other tokens' numbers, in whose place the ends are selected.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.band_layout import Band
from .kernel import by_eights, coordinates

COPY = gl.constexpr(64)  # keys of a tile that is copied
BANDS = gl.constexpr(2)  # tiles of bands that the producer may be ahead


# ---- tiles that are copied --------------------------------------------------------------------------------------------
def describe_band(band: Band, own: int, other: int, block: list[int]) -> TensorDescriptor:
    """[own, heads * size + other]: element (t, head * size + s + band.shift) is the pair of the tokens t and s."""
    heads = band.ptr.numel() // band.h
    layout = gl.NVMMASharedLayout(2 * block[1], 16, 2)
    return TensorDescriptor(band.ptr, [own, heads * band.h + other], [band.pitch, 1], block, layout)


def describe_ends(band: Band, own: int, block: int) -> TensorDescriptor:
    """[2 heads, own]: rows are longer, and what they hold behind the last token is copied as zeros."""
    shape = [band.ends.numel() // band.rows, own]
    return TensorDescriptor(band.ends, shape, [band.rows, 1], [1, block], gl.NVMMASharedLayout(0, 32, 2))


def can_copy(band: Band, other: int) -> bool:
    """Whether the copy engine's coordinates, of 32 bits, reach every pair."""
    return band.ptr.numel() + other < 1 << 31


@gluon.jit
def copy_tiles(
    copies, count, head, m0, n0, BM: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, MASS: gl.constexpr, ENDS: gl.constexpr
):  # fmt: skip
    """The producer's part: the numbers of BM queries and of each consumer's 64 keys. ENDS: and those of the queries' ends."""
    band_full, band_empty, rows, cols, mass, d_rows_desc, d_cols_desc = copies
    at = count % BANDS
    mbarrier.wait(band_empty.index(at), ((count // BANDS) & 1) ^ 1)
    full = band_full.index(at)
    BYTES: gl.constexpr = 2 * (ROWS + COLS + MASS) * 2 * COPY * BM + ENDS * (ROWS + MASS) * 2 * 4 * BM
    mbarrier.expect(full, BYTES)
    if ROWS:
        copy_by_query(rows, full, at, head, m0, n0, ENDS)
    if MASS:
        copy_by_query(mass, full, at, head, m0, n0, ENDS)
    if COLS:
        desc, ends_desc, smem, ends_smem, size, shift = cols
        for i in gl.static_range(2):
            place = [n0 + i * COPY, head * size + m0 + shift]
            tma.async_copy_global_to_shared(desc, place, full, smem.index(2 * at + i))


@gluon.jit
def copy_by_query(band, full, at, head, m0, n0, ENDS: gl.constexpr):
    desc, ends_desc, smem, ends_smem, size, shift = band
    for i in gl.static_range(2):
        place = [m0, head * size + n0 + i * COPY + shift]
        tma.async_copy_global_to_shared(desc, place, full, smem.index(2 * at + i))
        if ENDS:
            tma.async_copy_global_to_shared(ends_desc, [2 * head + i, m0], full, ends_smem.index(2 * at + i))


@gluon.jit
def load_copied(copies, count, CID: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, S_L: gl.constexpr):
    """float32 [keys, queries]: the sum of both terms."""
    band_full, band_empty, rows, cols, mass, d_rows_desc, d_cols_desc = copies
    at = count % BANDS
    mbarrier.wait(band_full.index(at), (count // BANDS) & 1)
    if ROWS:
        x = rows[2].index(2 * at + CID).permute((1, 0)).load(S_L).to(gl.float32)
        if COLS:
            x += cols[2].index(2 * at + CID).load(S_L).to(gl.float32)
    else:
        x = cols[2].index(2 * at + CID).load(S_L).to(gl.float32)
    return x


@gluon.jit
def load_with_ends(band, copies, count, dist, lo, hi, CID: gl.constexpr, S_L: gl.constexpr):
    """float32 [keys, queries]: a term of the queries, in a tile that may lie anywhere."""
    desc, ends_desc, smem, ends_smem, size, shift = band
    at = count % BANDS
    mbarrier.wait(copies[0].index(at), (count // BANDS) & 1)
    x = smem.index(2 * at + CID).permute((1, 0)).load(S_L).to(gl.float32)
    row, eight, column = coordinates(by_eights(x))
    first = gl.convert_layout(gl.reshape(8 * eight > row - column + (dist - lo), [x.shape[0], x.shape[1]]), S_L)
    last = gl.convert_layout(gl.reshape(8 * eight < row - column + (dist - hi), [x.shape[0], x.shape[1]]), S_L)
    x = gl.where(first, ends_smem.index(2 * at).load(S_L), x)
    return gl.where(last, ends_smem.index(2 * at + 1).load(S_L), x)


# ---- tiles that are gathered ------------------------------------------------------------------------------------------


@gluon.jit
def lies_within(band, dist, OWN: gl.constexpr, OTHER: gl.constexpr):
    """Whether all distances of a tile of OWN and OTHER tokens have numbers of their own."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    return (dist - (OWN - 1) >= lo) & (dist + (OTHER - 1) <= hi)


@gluon.jit
def begin_tile(band, head, first):
    """Where distance 0 of token `first` would be; head: of all batch rows."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    return head.to(gl.int64) * (size // 16 * 16) + first.to(gl.int64) * (pitch + 1) - origin


@gluon.jit
def begin_aligned(band, head, first, dist):
    """Where the pair of a tile's first tokens is: a multiple of 16 for tiles that begin at one."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    return (head.to(gl.int64) * size + first.to(gl.int64) * (pitch + 1) + (dist - origin)) // 16 * 16


@gluon.jit
def load_by_columns(
    band, head, first, dist, length, OTHER: gl.constexpr, OWN: gl.constexpr, L: gl.constexpr, WITHIN: gl.constexpr = 1
):  # fmt: skip
    """float32 [OTHER, OWN]: own tokens from `first` on, of which there are `length`, as columns. WITHIN: a tile may lie within the span."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    row, eight, column = coordinates(by_eights(gl.zeros([OTHER, OWN], gl.float32, L)))
    begin = begin_tile(band, head, first)
    if WITHIN and lies_within(band, dist, OWN, OTHER) & (first + OWN <= length):
        x = gl.load((ptr + (begin + dist)) + (row + column * pitch) + 8 * pitch * eight)
    else:
        own = gl.minimum(column + 8 * eight, length - 1 - first)
        r = gl.minimum(gl.maximum((row - column + dist) - 8 * eight, lo), hi)
        x = gl.load((ptr + begin) + (own * (pitch + 1) + r))
    return gl.convert_layout(gl.reshape(x.to(gl.float32), [OTHER, OWN]), L)


@gluon.jit
def load_by_rows(band, head, first, dist, length, OWN: gl.constexpr, OTHER: gl.constexpr, L: gl.constexpr):
    """float32 [OWN, OTHER]: own tokens as rows. `first` may lie after the last token."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    row, eight, column = coordinates(by_eights(gl.zeros([OWN, OTHER], gl.float32, L)))
    if lies_within(band, dist, OWN, OTHER) & (first + OWN <= length):
        begin = begin_aligned(band, head, first, dist)
        x = gl.load((ptr + begin) + (row * (pitch // 16 * 16) + column) + 8 * eight)
    else:
        own = gl.minimum(row, length - 1 - first)
        r = gl.minimum(gl.maximum((column - row + dist) + 8 * eight, lo), hi)
        x = gl.load((ptr + begin_tile(band, head, first)) + (own * (pitch + 1) + r))
    return gl.convert_layout(gl.reshape(x.to(gl.float32), [OWN, OTHER]), L)


@gluon.jit
def store_by_columns(band, outer, x, head, first, dist, length):
    """x [OTHER, OWN] within the span into the gradient's band; sums of x over other tokens beyond the span are added to outer
    [own tokens] by two programs at most: the same bits in either order."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    OTHER: gl.constexpr = x.shape[0]
    OWN: gl.constexpr = x.shape[1]
    x = by_eights(x)
    row, eight, column = coordinates(x)
    low = x.to(d_ptr.dtype.element_ty)
    begin = begin_tile(band, head, first)
    if lies_within(band, dist, OWN, OTHER) & (first + OWN <= length):
        gl.store((d_ptr + (begin + dist)) + (row + column * pitch) + 8 * pitch * eight, low)
    else:
        own = column + 8 * eight
        r = (row - column + dist) - 8 * eight
        is_inside = (r >= lo) & (r <= hi) & (own < length - first)
        gl.store((d_ptr + begin) + (own * (pitch + 1) + r), low, mask=is_inside)
        beyond = gl.sum(gl.where((r < lo) | (r > hi), x, 0.0), 0)
        at = gl.expand_dims(gl.arange(0, OWN // 8, gl.SliceLayout(1, beyond.type.layout)), 1) * 8
        at += gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, beyond.type.layout)), 0)
        gl.atomic_add(outer + first + at, beyond, sem="relaxed")


@gluon.jit
def store_by_query(band, outer, buffer, x, head, first, dist, length):
    """store_by_columns by way of shared memory, [own, other]: 16 bytes of one token at a time. Up to 7 zeros beside the span are stored too, in
    the room between tokens' rows."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    OTHER: gl.constexpr = x.shape[0]
    OWN: gl.constexpr = x.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buffer.permute((1, 0)).store(x)
    gl.thread_barrier()
    low = buffer.load(L)
    own = gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(1, L)), 1)
    other = gl.expand_dims(gl.arange(0, OTHER, gl.SliceLayout(0, L)), 0)
    r = other - own + dist
    is_inside = (r >= lo) & (r <= hi)
    eight = other // 8 * 8 - own + dist  # the first of eight distances: one mask for all of them
    is_stored = (eight + 7 >= lo) & (eight <= hi) & (own < length - first)
    place = (d_ptr + begin_aligned(band, head, first, dist)) + (own * (pitch // 16 * 16) + other)
    gl.store(place, gl.where(is_inside, low, 0.0).to(d_ptr.dtype.element_ty), mask=is_stored)
    beyond = gl.sum(gl.where(is_inside, 0.0, low.to(gl.float32)), 1)
    gl.atomic_add(outer + first + gl.arange(0, OWN, beyond.type.layout), beyond, sem="relaxed")


@gluon.jit
def store_by_rows(band, x, below, above, head, first, dist, length):
    """x [OWN, OTHER] between the ends of the span into the gradient's band; and each thread's sums of x at and beyond the ends."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    OWN: gl.constexpr = x.shape[0]
    OTHER: gl.constexpr = x.shape[1]
    x = by_eights(x)
    row, eight, column = coordinates(x)
    low = x.to(d_ptr.dtype.element_ty)
    # more than lies_within: the ends are sums
    if (dist - (OWN - 1) > lo) & (dist + (OTHER - 1) < hi) & (first + OWN <= length):
        begin = begin_aligned(band, head, first, dist)
        gl.store((d_ptr + begin) + (row * (pitch // 16 * 16) + column) + 8 * eight, low)
    else:
        r = (column - row + dist) + 8 * eight
        is_inside = (r > lo) & (r < hi) & (row < length - first)
        gl.store((d_ptr + begin_tile(band, head, first)) + (row * (pitch + 1) + r), low, mask=is_inside)
        below += gl.sum(gl.where(r <= lo, x, 0.0), 1)
        above += gl.sum(gl.where((r >= hi) & (r > lo), x, 0.0), 1)
    return below, above


@gluon.jit
def store_row_ends(band, below, above, head, first, length):
    """The sums that store_by_rows returned, at the ends of the span."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    below, above = gl.sum(below, 1), gl.sum(above, 1)
    own = gl.arange(0, below.shape[0], below.type.layout)
    place = (d_ptr + begin_tile(band, head, first)) + own * (pitch + 1)
    below += gl.where(hi > lo, 0.0, above)  # a span of one distance: it is both ends
    gl.store(place + lo, below.to(d_ptr.dtype.element_ty), mask=own < length - first)
    gl.store(place + hi, above.to(d_ptr.dtype.element_ty), mask=(own < length - first) & (hi > lo))
