"""Kernels of core/projection.py: products of few rows, one launch for all tables of a plan, each way.

    project      out_t[n, o]  = Σ_i rows[n, i] W_t[o, i] + b_t[o]                   a program for each tile of each table
    gradients    dW_t[o, i]   = Σ_n d_t[n, o] rows[n, i],  db_t[o] = Σ_n d_t[n, o]  the same, and behind them
                 d_rows[n, i] = Σ_t Σ_o d_t[n, o] W_t[o, i]                         a program for each tile, zeros in the table's other rows

Matrices are [rows, channels] with channels side by side. Sums are made in float32, each by one program in one order.
"""

import torch
import triton
import triton.language as tl

from . import launches
from .launches import INTERPRETED

BLOCK, DEPTH = 64, 64


@triton.jit
def _load(ptr, row, column, stride, rows, columns):
    """A tile of a matrix [rows, columns], zeros outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _project_tile(rows, rows_s, w, w_s, b, out, tile, n, width, size, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    across = tl.cdiv(width, BLOCK)
    row, column = tile // across * BLOCK + tl.arange(0, BLOCK), tile % across * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i0 in range(0, size, DEPTH):
        i = i0 + tl.arange(0, DEPTH)
        acc = tl.dot(_load(rows, row, i, rows_s, n, size), tl.trans(_load(w, column, i, w_s, width, size)), acc)
    if b is not None:
        acc += tl.load(b + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < n)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["n"])
def project(
    rows, rows_s, w, w_s, b, out, other_w, other_w_s, other_b, other_out, n, width, size,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """other_*: of the second table, or None."""
    tiles = tl.cdiv(n, BLOCK) * tl.cdiv(width, BLOCK)
    tile = tl.program_id(0)
    if other_w is None:
        _project_tile(rows, rows_s, w, w_s, b, out, tile, n, width, size, BLOCK, DEPTH)
    else:
        if tile < tiles:
            _project_tile(rows, rows_s, w, w_s, b, out, tile, n, width, size, BLOCK, DEPTH)
        else:
            _project_tile(
                rows, rows_s, other_w, other_w_s, other_b, other_out, tile - tiles, n, width, size, BLOCK, DEPTH
            )


@triton.jit
def _weight_tile(rows, rows_s, d, dw, db, tile, n, width, size, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    across = tl.cdiv(size, BLOCK)
    row, column = tile // across * BLOCK + tl.arange(0, BLOCK), tile % across * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for n0 in range(0, n, DEPTH):
        step = n0 + tl.arange(0, DEPTH)
        d_tile = _load(d, step, row, width, n, width)
        acc = tl.dot(tl.trans(d_tile), _load(rows, step, column, rows_s, n, size), acc)
        if db is not None:
            total += tl.sum(d_tile.to(tl.float32), 0)
    if dw is not None:
        at = dw + row.to(tl.int64)[:, None] * size + column[None, :]
        tl.store(at, acc.to(dw.dtype.element_ty), mask=(row < width)[:, None] & (column < size)[None, :])
    if db is not None:
        if tile % across == 0:
            tl.store(db + row, total.to(db.dtype.element_ty), mask=row < width)


@triton.jit
def _load_rows(ptr, row, column, stride, rows, columns):
    """`_load` where rows may lie before the first one."""
    inside = ((row >= 0) & (row < rows))[:, None] & (column < columns)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _row_tile(
    d, w, w_s, other_d, other_w, other_w_s, out, tile, first, count, n, width, size, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """out: of the whole table, `count` rows, of which n from `first` on were projected."""
    across = tl.cdiv(size, BLOCK)
    row, column = tile // across * BLOCK + tl.arange(0, BLOCK), tile % across * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for o0 in range(0, width, DEPTH):
        o = o0 + tl.arange(0, DEPTH)
        acc = tl.dot(_load_rows(d, row - first, o, width, n, width), _load(w, o, column, w_s, width, size), acc)
    if other_d is not None:
        for o0 in range(0, width, DEPTH):
            o = o0 + tl.arange(0, DEPTH)
            d_tile = _load_rows(other_d, row - first, o, width, n, width)
            acc = tl.dot(d_tile, _load(other_w, o, column, other_w_s, width, size), acc)
    at = out + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < count)[:, None] & (column < size)[None, :])


@triton.jit(do_not_specialize=["each", "first", "count", "n"])
def gradients(
    rows, rows_s, d, w, w_s, dw, db, other_d, other_w, other_w_s, other_dw, other_db, d_rows, each, first, count, n, width, size,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """each: tiles of a weight, 0 where none has a gradient; other_*: of the second table; what has no gradient is None."""
    tile = tl.program_id(0)
    if tile < each:
        _weight_tile(rows, rows_s, d, dw, db, tile, n, width, size, BLOCK, DEPTH)
    else:
        tile -= each
        if other_d is None:
            if d_rows is not None:
                _row_tile(d, w, w_s, None, None, 0, d_rows, tile, first, count, n, width, size, BLOCK, DEPTH)
        else:
            if tile < each:
                _weight_tile(rows, rows_s, other_d, other_dw, other_db, tile, n, width, size, BLOCK, DEPTH)
            else:
                if d_rows is not None:
                    _row_tile(
                        d, w, w_s, other_d, other_w, other_w_s, d_rows, tile - each, first, count, n, width, size, BLOCK, DEPTH
                    )  # fmt: skip


OPTIONS = {"num_warps": 4, "num_stages": 3}
_known: dict[tuple, tuple] = {}


def launch(kernel, programs: int, variant: tuple, args: tuple) -> None:
    """args: None where a tensor is absent; the first one is a tensor on the device, the last three are n, width and size.
    variant: dtypes, the device and what is absent, where all strides are divisible by 16."""
    if INTERPRETED:
        kernel[(programs,)](*args, BLOCK, DEPTH, **OPTIONS)
        return
    addresses, odd = [], 0
    for x in args:
        if x is None or type(x) is int:
            addresses.append(x)
        else:
            at = x.data_ptr()
            addresses.append(at)
            odd |= at
    key = kernel.__name__, variant  # a kernel's own hash reads its source
    found = None if odd & 15 else _known.get(key)
    device = args[0].device
    with launches.on_device(device):
        if found is not None:
            run, between = found
            run(programs, 1, 1, torch._C._cuda_getCurrentRawStream(device.index), *between, *addresses, BLOCK, DEPTH)
            return
        whole, described = (*args, BLOCK, DEPTH), _describe(kernel, args)
        launches.launch_known(
            described, lambda: launches.compile_kernel(kernel, whole, OPTIONS), programs, device, whole
        )
    found = launches.find_known(described)
    if found is not None and not odd & 15:
        _known[key] = found


def _describe(kernel, args: tuple) -> tuple:
    """The key of a variant (core/launches.py): dtypes, what is absent, and whether strides and addresses are divisible by 16."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    present = tuple([x.dtype if isinstance(x, torch.Tensor) else x is None for x in args])
    strides = [x.stride(0) for x in tensors if x.dim() == 2]
    return kernel.__name__, args[0].device, present, launches.describe_variant((*strides, *args[-2:]), tensors)


def tiles(rows: int, columns: int) -> int:
    return -(-rows // BLOCK) * -(-columns // BLOCK)
