"""Roles of the Gluon backward kernel beside the consumers: dQ is added to memory, the bias's gradient is summed by distance."""

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

from .backward_tiles import KEY_CONSUMERS, KEYS, OWN, count_turns, find_keys, find_queries
from .kernel import by_eights, coordinates, load_tiles

BUFFERS = gl.constexpr(2)  # of sums on their way to memory
ROWS = gl.constexpr(
    8
)  # of the band, for each consumer: of a warp's even tiles and of its odd ones, as neighbours overlap


# ---- adder ------------------------------------------------------------------------------------------------------------
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
def add_dq(use, bars, sizes, work, SLOTS: gl.constexpr, ADD: gl.constexpr):
    """ADD: 2: by the threads themselves, 3: by the copy engine."""
    dq_ptr, k_smem, ds_smem, dq_smem = use
    kv_full, kv_empty, ds_full, ds_empty = bars
    q_length, k_length, heads, group, batch, spread = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    D: gl.constexpr = k_smem.shape[4]
    BM: gl.constexpr = ds_smem.shape[2]
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
        for member in range(group):
            head = bh * group + member  # of queries, of all batch rows
            for t in range(last - first):
                tile, _ = find_queries(t, first, right0, right1, left0, left1, block * spread, blocks)
                slot = step % SLOTS
                mbarrier.wait(ds_full.index(slot), (step // SLOTS) & 1)
                if ADD == 3:
                    tma.store_wait(BUFFERS - 1)
                    gl.thread_barrier()
                for c in gl.static_range(D // 64):  # channels
                    dq = gl.zeros([64, BM], gl.float32, L)
                    for i in gl.static_range(KEY_CONSUMERS):
                        k = k_smem.index(i).reshape([OWN, D]).permute((1, 0)).slice(64 * c, 64, 0)
                        ds = ds_smem.index(slot * KEY_CONSUMERS + i)
                        dq = warpgroup_mma(k, ds, dq, use_acc=i > 0, is_async=True)
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    if c == D // 64 - 1:
                        mbarrier.arrive(ds_empty.index(slot))
                    if ADD == 2:
                        add_tile(dq_ptr + (head * q_tiles + tile).to(gl.int64) * (BM * D) + c * 64 * BM, dq)
                    if ADD == 3:
                        dq_smem.index(step % BUFFERS).slice(64 * c, 64, 0).store(dq)
                if ADD == 3:
                    fence_async_shared()
                    async_add(dq_ptr, [(head * q_tiles + tile) * D, 0], dq_smem.index(step % BUFFERS))
                step += 1
        mbarrier.arrive(kv_empty.index(0))
    tma.store_wait(0)


# ---- summer -----------------------------------------------------------------------------------------------------------
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
def clear_band(band, span, pitch):
    pair = 2 * gl.arange(0, 64, gl.BlockedLayout([1], [32], [2], [0]))
    for c in range(0, span, 128):
        for j in range(KEY_CONSUMERS * ROWS):
            gl.store(band + j * pitch + c + pair, gl.zeros_like(pair).to(gl.float32))
            gl.store(band + j * pitch + c + pair + 1, gl.zeros_like(pair).to(gl.float32))


@gluon.jit
def sum_columns(band, parts, span, pitch):
    """The band's column sums, of all but the ends of the span."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    pair = 2 * gl.arange(0, 64, PAIRS)
    row_bytes = gl.zeros([64], gl.int64, PAIRS) + pitch * 4
    for c in range(0, span, 128):
        x = gl.zeros([64], gl.float32, PAIRS)
        y = gl.zeros([64], gl.float32, PAIRS)
        for i in gl.static_range(KEY_CONSUMERS):
            more_x, more_y = sum_eight_rows((band + i * ROWS * pitch + c + pair).to(gl.int64, bitcast=True), row_bytes)
            x += more_x
            y += more_y
        column = c + pair
        gl.store(parts + column, x, mask=(column > 0) & (column < span - 1))
        gl.store(parts + column + 1, y, mask=column + 1 < span - 1)


@gluon.jit
def sum_distances(use, bars, sizes, work, spans, GRAD: gl.constexpr):
    parts_ptr, band_ptr, ends_ptr = use
    band_full, band_empty = bars
    q_length, k_length, heads, group, batch, spread = sizes
    tiles_ptr, tiles_row, order_ptr, order_row = work
    row, lo, hi, bias_lo, bias_hi, pitch = spans
    if GRAD:
        blocks = (k_length + KEYS - 1) // KEYS
        program = gl.program_id(0)
        band = band_ptr + program * (KEY_CONSUMERS * ROWS) * pitch
        ends = ends_ptr + program * (2 * KEY_CONSUMERS)
        span = bias_hi - bias_lo + 1
        for turn in range(count_turns(order_ptr, order_row)):
            bh, block = find_keys(order_ptr, order_row, turn, blocks)
            for member in range(group):
                clear_band(band, span, pitch)
                gl.thread_barrier()
                mbarrier.arrive(band_empty.index(0))
                mbarrier.wait(band_full.index(0), (turn * group + member) & 1)
                parts = parts_ptr + ((bh * group + member) * blocks + block).to(gl.int64) * span
                sum_columns(band, parts, span, pitch)
                at_left = gl.load(ends)
                at_right = gl.load(ends + 1)
                for i in gl.static_range(1, KEY_CONSUMERS):
                    at_left += gl.load(ends + 2 * i)
                    at_right += gl.load(ends + 2 * i + 1)
                gl.store(parts, at_left + gl.where(span == 1, at_right, 0.0))
                gl.store(parts + (span - 1), at_right, mask=span > 1)
                gl.thread_barrier()
