"""Tables with a row for each distance, made from tables of buckets by one launch, and their gradients by another.

    expand       [X, n, ..] -> [X, span, ..]       the row of each distance
    add_shift, fold_shift, unfold_shift            a plan's shifts of queries and of tables, and their gradients
    sum_parts    partial sums of programs, batch rows and distances -> [X, n, ..], in a fixed order, without atomics

core/tables.py does the same with PyTorch's operations, a dozen of them, where autograd or torch.compile must see them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.constants import constant
from ...core.index import Index
from ...core.tables import rows_of
from .device import launch_on
from .launcher import Launch, describe_variant, launch_known
from .schedule import cdiv, next_power_of_2

BLOCK = 1024
UNFOLDED = 1024  # rows of a table that one program takes: with the 8,191 of 4,096 tokens it took longer than the table's products


@triton.jit(do_not_specialize=["table_x", "table_n", "table_e", "rows_count", "size"])
def expand_kernel(table, table_x, table_n, table_e, rows, out, rows_count, size, BLOCK: tl.constexpr):
    """out[x, s, e] = table[x, rows[s], e]; one program for each block of (s, e)."""
    blocks = tl.cdiv(rows_count * size, BLOCK)
    pid = tl.program_id(0)
    x = (pid // blocks).to(tl.int64)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    valid = at < rows_count * size
    step, e = at // size, at % size
    row = step
    if rows is not None:
        row = tl.load(rows + step, mask=valid, other=0)
    y = tl.load(table + x * table_x + row * table_n + e * table_e, mask=valid, other=0.0)
    tl.store(out + x * rows_count * size + at, y.to(out.dtype.element_ty), mask=valid)


def expand(
    launch: Launch, table: Tensor, index: Index, lo: int, hi: int, dtype: torch.dtype, flip: bool = False
) -> Tensor:
    """[X, n] -> [X, hi - lo + 1], contiguous; [X, n, E] -> [X, hi - lo + 1, E] with rows of channels; flip: from hi down to lo."""
    whole = index.rows is None and (lo, hi) == (index.lo, index.hi) and not flip
    if whole and table.dtype == dtype and (table.is_contiguous() or _has_aligned_rows(table)):
        return table
    count, size = hi - lo + 1, 1 if table.dim() == 2 else table.shape[2]
    out = table.new_empty(table.shape[0], count, *table.shape[2:], dtype=dtype)
    if out.numel():
        rows = None if whole else _device_rows(index, lo, hi, flip, table.device)
        programs = table.shape[0] * cdiv(count * size, BLOCK)
        launch(
            expand_kernel, programs, table, *table.stride()[:2], 1 if table.dim() == 2 else table.stride(2), rows, out,
            count, size, BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _has_aligned_rows(table: Tensor) -> bool:
    """Whether kernels read the rows of a table [X, n, E] as fast as those of a contiguous one: projections put heads side by side."""
    return (
        table.dim() == 3
        and table.stride(2) == 1
        and not (table.stride(0) | table.stride(1)) & 15
        and not table.data_ptr() & 15
    )


def gather(table: Tensor, rows: Tensor) -> Tensor:
    """table [X, n] at rows [m], int32: [X, m]. What index_select does, at the speed of memory instead of 16 numbers a nanosecond."""
    out = table.new_empty(table.shape[0], rows.shape[0])
    if out.numel():
        arguments = (table, *table.stride(), 1, rows, out, rows.shape[0], 1, BLOCK)
        key = "gather", table.device, table.dtype, rows.dtype, describe_variant((), (table, rows, out))
        with launch_on(table):
            programs = table.shape[0] * cdiv(rows.shape[0], BLOCK)
            launch_known(key, expand_kernel, programs, table.device, arguments, num_warps=4)
    return out


@triton.jit(do_not_specialize=["shift_x", "shift_e", "n", "scale"])
def fold_kernel(
    table, table_x, table_n, shift, shift_x, shift_e, out, n, scale, STEP: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[x, row] = scale Σ_e table[x, row, e] shift[x, e]; one program for each block of rows."""
    blocks = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    x = (pid // blocks).to(tl.int64)
    row, e = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E)
    valid = (row < n)[:, None] & (e < E)[None, :]
    rows = tl.load(table + x * table_x + row[:, None] * table_n + e[None, :] * STEP, mask=valid, other=0.0)
    beside = tl.load(shift + x * shift_x + e * shift_e, mask=e < E, other=0.0)
    total = tl.sum(rows.to(tl.float32) * beside.to(tl.float32)[None, :], 1)
    tl.store(out + x * n + row, total * scale, mask=row < n)


def fold_shift(launch: Launch, table: Tensor, shift: Tensor, scale: float) -> Tensor:
    """scale · table [H, n, E] · shift [H, E] -> [H, n], float32: the bias that a shift of the queries makes."""
    heads, n, size = table.shape
    out = table.new_empty(heads, n, dtype=torch.float32)
    block = max(16, next_power_of_2(size))
    block_n = max(1, 4096 // block)
    if out.numel():
        launch(
            fold_kernel, heads * cdiv(n, block_n), table, *table.stride()[:2], shift, *shift.stride(), out, n, scale, table.stride(2), size,
            block, block_n, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n", "heads", "rows"])
def unfold_kernel(
    grad, fold, table, table_x, table_n, shift, shift_x, shift_e, out, out_x, out_n, d_shift, n, heads, rows, STEP: tl.constexpr,
    OUT_STEP: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradients of fold_shift, whose own gradient times scale is fold [X, n]: out[x, row, e] = grad[x, row, e] + fold[x, row]
    shift[x, e], and d_shift[part, x, e] = Σ_row fold[x, row] table[x, row, e]. One program for each part of so many rows, x and block of channels."""
    blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    x = (pid // blocks % heads).to(tl.int64)
    part = pid // blocks // heads
    e = pid % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    beside = tl.load(shift + x * shift_x + e * shift_e, mask=e < E, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    end = tl.minimum(part * rows + rows, n)
    for n0 in range(part * rows, end, BLOCK_N):
        row = n0 + tl.arange(0, BLOCK_N)
        valid = (row < end)[:, None] & (e < E)[None, :]
        factor = tl.load(fold + x * n + row, mask=row < end, other=0.0)[:, None]
        if out is not None:
            y = (
                tl.load(grad + (x * n + row[:, None]) * E + e[None, :], mask=valid, other=0.0)
                + factor * beside[None, :]
            )
            at = out + x * out_x + row[:, None] * out_n + e[None, :] * OUT_STEP
            tl.store(at, y.to(out.dtype.element_ty), mask=valid)
        if d_shift is not None:
            source = table + x * table_x + row[:, None] * table_n + e[None, :] * STEP
            total += factor * tl.load(source, mask=valid, other=0.0).to(tl.float32)
    if d_shift is not None:
        tl.store(d_shift + (part * heads + x) * E + e, tl.sum(total, 0).to(d_shift.dtype.element_ty), mask=e < E)


def unfold_shift(
    launch: Launch, grad: Tensor | None, fold: Tensor, table: Tensor, shift: Tensor, out: Tensor | None, wants_shift: bool
) -> Tensor | None:  # fmt: skip
    """Into out [H, n, E], where it is given; the gradient of the shift [H, E], if it is wanted. grad: of the table otherwise, float32, contiguous."""
    heads, n, size = table.shape
    block = min(32, max(16, next_power_of_2(size)))
    strides = (0, 0, 1) if out is None else out.stride()
    if not table.numel():
        return torch.zeros_like(shift) if wants_shift else None
    rows = n if n <= UNFOLDED else UNFOLDED // 4
    parts = cdiv(n, rows)
    d_shift = None
    if wants_shift:
        shape, dtype = ((heads, size), None) if parts == 1 else ((parts, heads, size), torch.float32)
        d_shift = shift.new_empty(shape, dtype=dtype)
    launch(
        unfold_kernel, parts * heads * cdiv(size, block), grad, fold, table, *table.stride()[:2], shift, *shift.stride(), out, *strides[:2], d_shift, n,
        heads, rows, table.stride(2), strides[2], size, 64, block, num_warps=4,
    )  # fmt: skip
    return d_shift if d_shift is None or parts == 1 else d_shift.sum(0, dtype=shift.dtype)


@triton.jit(do_not_specialize=["shift_h", "shift_d", "heads", "length"])
def add_shift_kernel(
    q, q_b, q_h, q_l, shift, shift_h, shift_d, out, out_b, out_h, out_l, heads, length, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(length, BLOCK_L)
    pid = tl.program_id(0)
    b, h = (pid // blocks // heads).to(tl.int64), (pid // blocks % heads).to(tl.int64)
    i, d = (pid % blocks * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64), tl.arange(0, BLOCK_D)
    valid = (i < length)[:, None] & (d < D)[None, :]
    x = tl.load(q + b * q_b + h * q_h + i[:, None] * q_l + d[None, :], mask=valid, other=0.0)
    y = tl.load(shift + h * shift_h + d * shift_d, mask=d < D, other=0.0).to(x.dtype).to(tl.float32)
    at = out + b * out_b + h * out_h + i[:, None] * out_l + d[None, :]
    tl.store(at, (x.to(tl.float32) + y[None, :]).to(x.dtype), mask=valid)


def add_shift(launch: Launch, q: Tensor, shift: Tensor) -> Tensor:
    """q [B, H, L, D] + shift [H, D], rounded to q's dtype first; strides as q's, where they are dense."""
    batch, heads, length, size = q.shape
    q = q if q.stride(3) == 1 else q.contiguous()  # a stride that the kernel does not know makes it load single numbers
    out = torch.empty_like(q)
    block = max(16, next_power_of_2(size))
    block_l = max(1, 4096 // block)
    if out.numel():
        launch(
            add_shift_kernel, batch * heads * cdiv(length, block_l), q, *q.stride()[:3], shift, *shift.stride(), out, *out.stride()[:3], heads,
            length, size, block, block_l, num_warps=4,
        )  # fmt: skip
    return out


class Parts(NamedTuple):
    """The gradient of a table with a row for each distance, before it is summed up."""

    tensor: Tensor  # [B, H, P, span] (axis 1) or [H, P, span, E] (axis 0), float32: to be summed over B and P
    axis: int  # of the heads
    first: int = 0  # the step of the span's first distance
    factor: float = 1.0  # of the sum

    def strides(self) -> tuple[int, int, int, int, int, int]:
        """Number of the outer parts and their stride, of the inner ones, and the strides of x and of distances."""
        shape, strides = self.tensor.shape, self.tensor.stride()
        if self.axis == 1:
            return shape[0], strides[0], shape[2], strides[2], strides[1], strides[3]
        return 1, 0, shape[1], strides[1], strides[0], strides[2]


SUMMED = 64
"""Parts of a row of channels that are read at once: with 16, the table that SpeechT5's heads share took 0.64 ms a layer, a third of its
step's time on an H200, waiting for memory."""


@triton.jit(do_not_specialize=["first", "count", "n", "factor"])
def place_kernel(
    source, source_x, out, out_x, out_n, first, count, n, factor, SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[x, row, e] = factor source[x, row - first, e], and zeros in other rows; one program for each block of (row, e)."""
    blocks = tl.cdiv(n * SIZE, BLOCK)
    pid = tl.program_id(0)
    x = (pid // blocks).to(tl.int64)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    row, e = at // SIZE, at % SIZE
    inside = (row >= first) & (row < first + count)
    y = tl.load(source + x * source_x + (at - first * SIZE), mask=inside, other=0.0) * factor
    tl.store(out + x * out_x + row * out_n + e * STEP, y.to(out.dtype.element_ty), mask=row < n)


LARGE = 1 << 15
"""Numbers of a part from which on parts are added before rows are looked up: row by row, DeBERTa's two tables took 0.42 of 6.2 ms."""


@triton.jit(do_not_specialize=["outer_stride", "inner", "inner_stride", "heads", "head_stride", "parts", "steps_stride", "first", "out_x",
                               "out_n", "out_e", "n", "size", "factor"])  # fmt: skip
def sum_parts_kernel(
    parts_of, outer_stride, inner, inner_stride, heads, head_stride, parts, steps_stride, order, begins, first, out, out_x, out_n, out_e, n, size,
    factor, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program for each head, row and block of channels: the sum over the row's distances and all parts (of all heads, where
    they share the table). order: the distances by row; begins [n + 1]: where each row's begin; None: one distance for each."""
    blocks = tl.cdiv(size, BLOCK_E)
    pid = tl.program_id(0)
    e = pid % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    row = pid // blocks % n
    x = (pid // blocks // n).to(tl.int64)
    begin, end = row, row + 1
    if begins is not None:
        begin, end = tl.load(begins + row), tl.load(begins + row + 1)
    count = end - begin
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for t0 in range(0, parts * heads * count, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        valid = t < parts * heads * count
        step = begin + t % tl.maximum(count, 1)
        part = t // tl.maximum(count, 1)
        head, part = part // parts, part % parts
        if order is not None:
            step = tl.load(order + step, mask=valid, other=0)
        at = (part // inner).to(tl.int64) * outer_stride + (part % inner).to(tl.int64) * inner_stride
        at += (x + head) * head_stride + (first + step) * steps_stride
        total += tl.load(
            parts_of + (at[:, None] + e[None, :]), mask=valid[:, None] & (e < size)[None, :], other=0.0
        ).to(tl.float32)
    y = tl.sum(total, 0) * factor
    tl.store(out + x * out_x + row * out_n + e * out_e, y.to(out.dtype.element_ty), mask=e < size)


def sum_parts(
    launch: Launch, parts: Parts, out: Tensor, index: Index | None = None, lo: int = 0, hi: int = 0, flip: bool = False
) -> Tensor:
    """Into out, the gradient of a table [X, n] or [X, n, E] of which `expand(.., index, lo, hi, flip)` was used; None: of the
    expanded table itself. X is the number of heads, or 1."""
    outer, outer_stride, inner, inner_stride, head_stride, steps_stride = parts.strides()
    if not out.numel():
        return out
    heads = parts.tensor.shape[parts.axis] // out.shape[0]
    n, size = out.shape[1], 1 if out.dim() == 2 else out.shape[2]
    if parts.axis == 0 and inner * heads > 2 and parts.tensor.shape[2] * size >= LARGE:
        total = parts.tensor.sum((0, 1) if heads > 1 and out.shape[0] == 1 else 1, keepdim=True)
        return sum_parts(launch, parts._replace(tensor=total), out, index, lo, hi, flip)
    out_strides = (*out.stride()[:2], 1 if out.dim() == 2 else out.stride(2))
    order = begins = None
    in_order = index is None or (index.rows is None and index.lo <= lo and hi <= index.hi and not flip)
    if in_order and outer * inner * heads == 1 and steps_stride == size:
        first, count = (0, n) if index is None else (lo - index.lo, hi - lo + 1)
        source = parts.tensor.narrow(-1 if parts.axis else -2, parts.first, count)
        programs = out.shape[0] * cdiv(n * size, BLOCK)
        launch(
            place_kernel, programs, source, head_stride, out, *out_strides[:2], first, count, n, parts.factor, size, out_strides[2], BLOCK, num_warps=4
        )  # fmt: skip
        return out
    if index is None or (in_order and (lo, hi) == (index.lo, index.hi)):
        if size == 1 and steps_stride == 1:  # neighbouring distances are read together, as channels are
            n, size, out_strides = 1, n, (out_strides[0], 0, out_strides[1])
    else:
        order, begins = _device_readers(index, lo, hi, flip, n, out.device)
    block_e = min(128, max(16, next_power_of_2(size))) if size > 1 else 1
    block_t = 32 if begins is None else 256 if size == 1 else SUMMED if outer * inner * heads > 1 else 16
    launch(
        sum_parts_kernel, out.shape[0] * n * cdiv(size, block_e), parts.tensor, outer_stride, inner, inner_stride, heads, head_stride,
        outer * inner, steps_stride, order, begins, parts.first, out, *out_strides, n, size, parts.factor, block_t, block_e, num_warps=4,
    )  # fmt: skip
    return out


@lru_cache(maxsize=256)
def _device_rows(index: Index, lo: int, hi: int, flip: bool, device: torch.device) -> Tensor:
    rows = rows_of(index, lo, hi)
    return constant(rows[::-1] if flip else rows, device, torch.int32)


@lru_cache(maxsize=256)
def _device_readers(index: Index, lo: int, hi: int, flip: bool, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Distances by the row that they read, and where each row's begin."""
    rows = rows_of(index, lo, hi)
    rows = rows[::-1] if flip else rows
    order = sorted(range(len(rows)), key=rows.__getitem__)
    begins = [0] * (n + 1)
    for row in rows:
        begins[row + 1] += 1
    for row in range(n):
        begins[row + 1] += begins[row]
    return constant(tuple(order), device, torch.int32), constant(tuple(begins), device, torch.int32)
