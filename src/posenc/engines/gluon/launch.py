"""Launch the Gluon kernel: tiles by head size, the padded table, descriptors for the copy engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import Inputs, Numbers
from ..triton.launcher import Launch
from .kernel import CONSUMERS, PAD, ROWS, forward

LOG2E = 1.4426950408889634
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Tile(NamedTuple):
    keys: int
    stages: int
    turns: bool = True  # whether consumers take turns with the tensor cores
    heads: int = 0  # of all batch rows, whose blocks are taken together where causal; 0: all


TILES = {64: Tile(128, 4), 128: Tile(64, 4)}
REGISTERS = 160, 32  # of a consumer and of the producer; 512 threads share 65,536


@triton.jit(do_not_specialize=["row", "bias_lo", "bias_hi", "first", "last", "width", "scale"])
def pad_bias(
    bias, row, bias_lo, bias_hi, table, first, last, width, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """bias [H, bias_lo .. bias_hi] or None -> table [H, width] by distance from `first` on, divided by the scale. CAUSAL: distances
    beyond `last` are not visible."""
    h = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        r = first + at
        x = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            x = tl.load(bias + h * row + tl.minimum(tl.maximum(r, bias_lo), bias_hi) - bias_lo) / scale
        if CAUSAL:
            x = tl.where(r > last, float("-inf"), x)
        tl.store(table + h * width + at, x, mask=at < width)


def run_forward(
    launch: Launch, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor, tile: Tile | None = None
) -> tuple[Tensor, Tensor, None]:
    """Fills out [B, H, Lq, D] and lse [B, H, Lq rounded up to 64] (base 2), and returns what triton.launch.run_forward does."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length, group = k.shape[2], heads // k.shape[1]
    tile = tile or TILES[size]
    causal = num.right == 0
    lo, hi = table_span(x, num)
    table, width = lse, 0
    if causal or x.bias is not None:
        width = hi - lo + 1 + 2 * PAD.value
        rows = 1 if x.bias is None else heads
        table = lse.new_empty(rows, width)
        row = 0 if x.bias is None else x.bias.stride(0)
        last = k_length - q_length + num.offset
        launch(
            pad_bias, rows, x.bias, row, num.bias_lo, num.bias_hi, table, lo - PAD.value, last, width, scale, causal, 512
        )  # fmt: skip
        width = width if rows > 1 else 0
    blocks = batch * heads * -(-q_length // (ROWS.value * CONSUMERS.value))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    real, bounds, real_row = lse, lse, 0
    if x.key_mask is not None:
        assert x.key_bounds is not None
        real, bounds, real_row = x.key_mask, x.key_bounds, 0 if x.key_mask.shape[0] == 1 else x.key_mask.stride(0)
    section = min(tile.heads or batch * heads, batch * heads) if causal else 1
    launch(
        forward, min(blocks, processors), _describe(q, ROWS.value), _describe(k, tile.keys), _describe(v, tile.keys),
        _describe(out, ROWS.value), lse, table, lse if x.slopes is None else x.slopes, real, bounds, scale * LOG2E, q_length,
        k_length, heads, group, batch * heads, section, num.offset, width, real_row, lo, hi,
        STAGES=tile.stages, TURNS=tile.turns, TABLE=table is not lse, SLOPES=x.slopes is not None, CAUSAL=causal,
        PADDED=x.key_mask is not None, CONSUMER_REGISTERS=REGISTERS[0], PRODUCER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    return out, lse, None


def table_span(x: Inputs, num: Numbers) -> tuple[int, int]:
    """The distances outside of which the kernel's table is constant: those of the bias and, where causal, the last visible one and
    the first that is not."""
    if num.right != 0:
        return num.lo, num.hi
    last = x.k.shape[2] - x.q.shape[2] + num.offset
    return min(num.lo, last), last + 1


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, heads, L, D] in blocks of rows."""
    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    # a stride over one element may be any number, but must be one that the copy engine takes
    strides = [step if size > 1 else x.shape[3] for step, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)
