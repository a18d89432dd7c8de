# mypy: ignore-errors
"""Vectors of positions that count the real tokens of a padded text, added to it in one launch on a GPU.

    key_mask     0 0 1 1 1 0        out_i = x_i + rows[number of real tokens up to i, less one; at least 0]
    position     0 0 0 1 2 2

PyTorch's operations (cumsum, sub, clamp, embedding, add) are five launches, which take a short text longer than its products do.
A program adds to BLOCK tokens of a text; it counts the tokens before them by itself.
"""

import torch
import triton
import triton.language as tl

from . import launches

BLOCK = 8
WIDEST = 512
"""Tokens of a program, and channels that it adds at a time."""
COUNTED = 1024
"""Tokens that it counts at a time."""
LONGEST = 1 << 13
"""Tokens of a text, the past included: of more, that each program counts those before its own takes longer than launches."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["past", "length", "width", "blocks"])
def _add_kernel(
    x, rows, real, out, x_batch, x_row, row_step, real_batch, real_step, out_batch, out_row, past, length, width, blocks,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """real [B, past + length], uint8; x [B, length, width]."""
    program = tl.program_id(0)
    batch, first = (program // blocks).to(tl.int64), program % blocks * BLOCK
    real += batch * real_batch
    before = 0
    for start in range(0, past + first, COUNTED):
        at = start + tl.arange(0, COUNTED)
        is_before = at < past + first
        before += tl.sum((tl.load(real + at.to(tl.int64) * real_step, mask=is_before, other=0) != 0).to(tl.int32))
    token = first + tl.arange(0, BLOCK)
    is_token = token < length
    is_real = tl.load(real + (past + token).to(tl.int64) * real_step, mask=is_token, other=0) != 0
    position = tl.maximum(before + tl.cumsum(is_real.to(tl.int32), 0) - 1, 0).to(tl.int64)
    token = token.to(tl.int64)
    x += batch * x_batch
    out += batch * out_batch
    for start in range(0, width, WIDE):
        channel = start + tl.arange(0, WIDE)
        inside = is_token[:, None] & (channel < width)[None, :]
        a = tl.load(x + token[:, None] * x_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(rows + position[:, None] * row_step + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token[:, None] * out_row + channel[None, :], (a + b).to(out.dtype.element_ty), mask=inside)


PLAIN = (torch.Tensor, torch.nn.Parameter)


def supports(x: torch.Tensor, rows: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether the kernel adds these without gradients; PyTorch's operations explain what does not fit."""
    return (
        type(rows) in PLAIN and type(real) in PLAIN and x.dtype in DTYPES and rows.dtype is x.dtype and real.dtype is torch.bool
        and x.get_device() == rows.get_device() == real.get_device() and x.shape[2] == rows.shape[1]
        and x.shape[0] == real.shape[0] and real.shape[1] <= LONGEST
        and x.stride(2) == rows.stride(1) == 1 and x.numel() > 0
    )  # fmt: skip


def add_counted(x: torch.Tensor, rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """x [B, L, n] + the row of rows [positions, n] of each token; real [B, keys], whose last L are x's."""
    with launches.on_device(x.device):
        return _add(x, rows, real)


def _add(x: torch.Tensor, rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    allocate = launches.find_allocation(x.device)
    if allocate is None:
        out = torch.empty((batch, length, width), dtype=x.dtype, device=x.device)
    else:
        out = allocate((batch, length, width), (length * width, width, 1), x.dtype)
    blocks, wide = -(-length // BLOCK), min(triton.next_power_of_2(width), WIDEST)
    (x_batch, x_row, _), (real_batch, real_step) = x.stride(), real.stride()
    strides = x_batch, x_row, rows.stride(0), real_batch, real_step, length * width, width
    constants = BLOCK, COUNTED, wide
    args = (x, rows, real, out, *strides, real.shape[1] - length, length, width, blocks, *constants)
    if launches.INTERPRETED:
        _add_kernel[(batch * blocks,)](*_as_bytes(args))
        return out
    key = ("counted", x.device, x.dtype, wide, launches.describe_variant(strides, (x, rows, real, out)))
    launches.launch_known(key, lambda: _compile(args), batch * blocks, x.device, args)
    return out


def _as_bytes(args: tuple) -> tuple:
    return (*args[:2], args[2].view(torch.uint8), *args[3:])


def _compile(args: tuple):
    return launches.compile_kernel(_add_kernel, _as_bytes(args), {"num_warps": 4})
