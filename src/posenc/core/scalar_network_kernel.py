# mypy: ignore-errors
"""Kernels of core/scalar_network.py: a program makes the hidden numbers of a block of x in registers.

    _forward     out[h, i] = Σ_j last[h, j] relu(first[j] x_i + bias[j]) + last_bias[h]      a program for each block
    _gradients   d_x[i], and of each program's blocks  Σ_i d_hidden[j, i] (x_i, 1),  Σ_i grad[h, i] (hidden[j, i], 1)

Programs of `_gradients` take every n-th block and add up in registers; PyTorch adds their sums, so that the order is always the same. Matrix
products are tf32x3: three of TF32, whose error is that of float32.
"""

import torch
import triton
import triton.language as tl

from . import launches

TOTALS = 8192
"""Numbers of a program's totals, forward: of all its heads."""
SUMMED = 32
"""Numbers of a block, backward."""
PROGRAMS = 1056
"""Backward, at most: 8 for each of an H200's 132 processors."""
WIDEST_HIDDEN, MOST_HEADS = 64, 64
WARPS = {"_forward": 4, "_gradients": 2}


@triton.jit(do_not_specialize=["n"])
def _forward(
    x, first, bias, last, last_bias, out, n, heads, HIDDEN: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """HEADS: of a program; their groups are the second part of the programs."""
    groups = tl.cdiv(heads, HEADS)
    program = tl.program_id(0)
    at = (program // groups).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = program % groups * HEADS + tl.arange(0, HEADS)
    is_head, inside = head < heads, at < n
    values = tl.load(x + at, mask=inside, other=0.0)
    total = tl.zeros([HEADS, BLOCK], tl.float32) + tl.load(last_bias + head, mask=is_head, other=0.0)[:, None]
    for j in range(HIDDEN):
        hidden = tl.maximum(values * tl.load(first + j) + tl.load(bias + j), 0.0)
        total += tl.load(last + head * HIDDEN + j, mask=is_head, other=0.0)[:, None] * hidden[None, :]
    tl.store(out + head.to(tl.int64)[:, None] * n + at[None, :], total, mask=is_head[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["n", "blocks"])
def _gradients(
    x, grad, first, bias, last, d_x, of_hidden, of_heads, of_last, n, blocks, heads, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """WIDTH, HEADS: padded to powers of two. of_hidden [programs, WIDTH, 16], of_heads [programs, HEADS, 16], whose first two columns
    count, and of_last [programs, HEADS, WIDTH]."""
    program = tl.program_id(0)
    j, h, two = tl.arange(0, WIDTH), tl.arange(0, HEADS), tl.arange(0, 16)
    w = tl.load(first + j, mask=j < HIDDEN, other=0.0)
    b = tl.load(bias + j, mask=j < HIDDEN, other=0.0)
    transposed = tl.load(
        last + h[None, :] * HIDDEN + j[:, None], mask=(h < heads)[None, :] & (j < HIDDEN)[:, None], other=0.0
    )
    sums = tl.zeros([WIDTH, 16], tl.float32)
    head_sums = tl.zeros([HEADS, 16], tl.float32)
    last_sums = tl.zeros([HEADS, WIDTH], tl.float32)
    for block in range(program, blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        values = tl.load(x + at, mask=inside, other=0.0)
        ones = tl.where(two[None, :] == 0, values[:, None], tl.where(two[None, :] == 1, 1.0, 0.0))
        where = grad + h.to(tl.int64)[:, None] * n + at[None, :]
        g = tl.load(where, mask=(h < heads)[:, None] & inside[None, :], other=0.0)
        hidden = tl.maximum(w[:, None] * values[None, :] + b[:, None], 0.0)
        d_hidden = tl.dot(transposed, g, input_precision=PRODUCTS)
        d_hidden = tl.where(hidden > 0.0, d_hidden, 0.0)
        tl.store(d_x + at, tl.sum(d_hidden * w[:, None], 0), mask=inside)
        sums = tl.dot(d_hidden, ones, sums, input_precision=PRODUCTS)
        head_sums = tl.dot(g, ones, head_sums, input_precision=PRODUCTS)
        last_sums = tl.dot(g, tl.trans(hidden), last_sums, input_precision=PRODUCTS)
    row = program.to(tl.int64)
    tl.store(of_hidden + (row * WIDTH + j[:, None]) * 16 + two[None, :], sums)
    tl.store(of_heads + (row * HEADS + h[:, None]) * 16 + two[None, :], head_sums)
    tl.store(of_last + (row * HEADS + h[:, None]) * WIDTH + j[None, :], last_sums)


def supports(x, weights) -> bool:
    """Whether the kernels run these, without regard to the device's kind."""
    first, _, last, _ = weights
    return (
        all(one.dtype is torch.float32 and one.device == x.device and one.is_contiguous() for one in (x, *weights))
        and first.shape[0] <= WIDEST_HIDDEN
        and last.shape[0] <= MOST_HEADS
    )


def forward(x, first, bias, last, last_bias):
    """[H, n] of x [n]."""
    heads, hidden = last.shape
    out = x.new_empty(heads, x.shape[0])
    own = min(16, triton.next_power_of_2(heads))
    block = min(1024, TOTALS // own)
    programs = -(-x.shape[0] // block) * -(-heads // own)
    _launch(_forward, programs, (x, first, bias, last, last_bias, out), (x.shape[0],), (heads, hidden, own, block))
    return out


def gradients(x, grad, first, bias, last, last_bias):
    """Of x and of each weight, from grad [H, n]."""
    (heads, hidden), grad = last.shape, grad.contiguous()
    width, padded = (max(16, triton.next_power_of_2(size)) for size in (hidden, heads))
    blocks = -(-x.shape[0] // SUMMED)
    programs = min(blocks, PROGRAMS)
    d_x, of_hidden = torch.empty_like(x), x.new_empty(programs, width, 16)
    of_heads, of_last = x.new_empty(programs, padded, 16), x.new_empty(programs, padded, width)
    args = x, grad, first, bias, last, d_x, of_hidden, of_heads, of_last
    _launch(_gradients, programs, args, (x.shape[0], blocks), (heads, hidden, width, padded, SUMMED, "tf32x3"))
    d_first, d_bias = of_hidden.sum(0)[:hidden, :2].unbind(1)
    return d_x, d_first, d_bias, of_last.sum(0)[:heads, :hidden], of_heads.sum(0)[:heads, 1]


def _launch(kernel, programs: int, tensors: tuple, counts: tuple, constants: tuple) -> None:
    """constants: what the variant depends on, beside the tensors' addresses."""
    args, options = (*tensors, *counts, *constants), {"num_warps": WARPS[kernel.__name__]}
    if launches.INTERPRETED:
        kernel[(programs,)](*args, **options)
        return
    device, is_wide = tensors[0].device, counts[0] >> 31
    key = (kernel.__name__, device, is_wide, constants, launches.describe_variant((), tensors))
    with launches.on_device(device):
        launches.launch_known(key, lambda: launches.compile_kernel(kernel, args, options), programs, device, args)
