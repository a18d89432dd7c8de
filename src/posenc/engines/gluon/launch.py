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
from .kernel import PAD, ROWS, forward

LOG2E = 1.4426950408889634
CACHED = 1 << 24  # bytes of keys and values that causal blocks share in the L2 cache
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Tile(NamedTuple):
    consumers: int
    keys: int
    stages: int
    queue: int
    turns: bool
    registers: tuple[int, int]  # of a consumer and of the producer; 512 threads share 65,536, or 384 with two consumers


TILES = {64: Tile(3, 128, 3, 2, True, (160, 32)), 128: Tile(2, 128, 2, 1, True, (240, 24))}


@triton.jit(do_not_specialize=["row", "span", "before", "width"])
def pad_bias(bias, row, span, padded, before, width, BLOCK: tl.constexpr):
    """[H, span] -> [H, width], in base 2: `before` times the first number, the row, and the last number to the end."""
    h = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(bias + h * row + tl.minimum(tl.maximum(at - before, 0), span - 1))
        tl.store(padded + h * width + at, x * 1.4426950408889634, mask=at < width)


def run_forward(
    launch: Launch, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills out [B, H, Lq, D] and lse [B, H, Lq rounded up to 64] (base 2), and returns what triton.launch.run_forward does."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length = k.shape[2]
    tile = tile or TILES[size]
    table = lse
    if x.bias is not None:
        width = num.hi - num.lo + 1 + 2 * PAD.value
        table = lse.new_empty(heads, width)
        before = PAD.value + num.bias_lo - num.lo
        launch(pad_bias, heads, x.bias, x.bias.stride(0), x.bias.shape[1], table, before, width, 512)
    causal = num.right >= 0
    group = heads // k.shape[1]
    blocks = batch * heads * -(-q_length // (ROWS.value * tile.consumers))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    section = max(1, CACHED // (2 * k_length * size * q.element_size())) * group if causal else 1
    launch(
        forward, min(blocks, processors), _describe(q, ROWS.value), _describe(k, tile.keys), _describe(v, tile.keys),
        _describe(out, ROWS.value), lse, table, lse if x.slopes is None else x.slopes, scale * LOG2E, q_length, k_length,
        heads, group, batch * heads, min(section, batch * heads), max(num.right, 0), num.offset, num.lo, num.hi,
        NC=tile.consumers, STAGES=tile.stages, QUEUE=tile.queue, TURNS=tile.turns, BIAS=x.bias is not None,
        SLOPES=x.slopes is not None, CAUSAL=causal, CONSUMER_REGISTERS=tile.registers[0],
        PRODUCER_REGISTERS=tile.registers[1], num_warps=4,
    )  # fmt: skip
    return out, lse, q.new_empty(0)


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, heads, L, D] in blocks of rows."""
    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
