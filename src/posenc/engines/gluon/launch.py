"""Launch the Gluon kernel: tiles by head size, the padded table, descriptors for the copy engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import Inputs, Numbers
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from .kernel import CONSUMERS, NUMBERS, OWN_NUMBERS, PAD, ROWS, forward
from .prepare import prepare

LOG2E = 1.4426950408889634
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class PlainTile(NamedTuple):
    keys: int
    stages: int
    turns: bool = True  # whether consumers take turns on the tensor cores (ping-pong)
    heads: int = 0  # causal: heads (of all batch rows) whose blocks are scheduled together; 0: all
    consumers: int = CONSUMERS.value  # warpgroups of 64 queries, three or two


TILES = {64: PlainTile(128, 4), 128: PlainTile(64, 4)}
NO_LIMIT = 1 << 30  # more than any distance of keys; sums with it stay within 32 bits
SECTION = 512  # blocks (of all heads) that are ordered together: for 16 heads those of 6144 queries, or 4096 keys
REGISTERS = 160, 32  # of a consumer's thread and of a producer's; 512 threads share 65,536


def run_forward(
    launch: Launch, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor, tile: PlainTile | None = None
) -> tuple[Tensor, Tensor, None]:
    """Fills out [B, H, Lq, D] and lse [B, H, Lq rounded up to 64] (base 2), and returns what triton.launch.run_forward does."""
    tile = tile or choose_tile(x.q.shape[3], x.q.shape[2])
    return launch_forward(
        launch, forward, x, num, scale, out, lse, tile.keys, (num.lo, num.hi), (num.lo, num.hi), PAD.value, section=tile.heads,
        consumers=tile.consumers, tables=(lse if x.slopes is None else x.slopes,), ordered=x.doc_q is not None, NC=tile.consumers,
        STAGES=tile.stages, TURNS=tile.turns, TABLE=x.bias is not None, SLOPES=x.slopes is not None,
    )  # fmt: skip


def record_forward(launch: Launch, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor) -> None:
    """The launches of texts of every length, where launches are recorded."""
    for consumers in (2, 3):
        run_forward(launch, x, num, scale, out, lse, TILES[x.q.shape[3]]._replace(consumers=consumers))


def choose_tile(size: int, queries: int) -> PlainTile:
    """As measured: with two consumers up to 512 queries, where their blocks of 128 leave no more rows empty than three consumers' of 192."""
    tile = TILES[size]
    is_short = queries <= 512 and -(-queries // 128) * 128 <= -(-queries // 192) * 192
    return tile._replace(consumers=2) if is_short else tile


def launch_forward(
    launch: Launch, kernel, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor, keys: int, near: tuple[int, int],
    span: tuple[int, int], side: int, descriptors=(), tables=(), table_heads=(), section: int = 0, consumers: int = CONSUMERS.value,
    ordered: bool = False, **constants
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """prepare_blocks, then a forward kernel. section: heads whose blocks are scheduled together, if causal; descriptors, tables,
    table_heads, constants: what only this kernel takes; ordered: as in prepare_blocks."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, _ = q.shape
    k_length, queries = k.shape[2], ROWS.value * consumers
    tiles, bias, width, bits = prepare_blocks(launch, x, num, scale, lse, queries, keys, near, span, side, ordered)
    count = tiles.shape[1]
    masks, mask_rows = zip(*(_rows(y, lse) for y in (bits, x.doc_q, x.doc_k, x.doc_q_keys)), strict=True)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    section = min(section or batch * heads, batch * heads) if num.right == 0 else 1
    launch(
        kernel, min(batch * heads * count, processors), _describe(q, ROWS.value), _describe(k, keys), _describe(v, keys),
        _describe(out, ROWS.value), *descriptors, lse, tiles, lse if bias is None else bias, *tables, *masks, scale * LOG2E,
        q_length, k_length, heads, heads // k.shape[1], batch * heads, section, NO_LIMIT if num.left < 0 else num.left,
        NO_LIMIT if num.right < 0 else num.right, 0 if tiles.shape[0] == 1 else count * NUMBERS.value, *table_heads, width, *mask_rows, *span,
        **constants, WINDOW=num.left >= 0, PADDED=bits is not None, DOCS=x.doc_q is not None,
        CONSUMER_REGISTERS=REGISTERS[0], PRODUCER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    return out, lse, None


def prepare_blocks(
    launch: Launch, x: Inputs, num: Numbers, scale: float, lse: Tensor, queries: int, keys: int, near: tuple[int, int],
    span: tuple[int, int], side: int, ordered: bool = False,
) -> tuple[Tensor, Tensor | None, int, Tensor | None]:  # fmt: skip
    """What blocks of so many queries and tiles of so many keys read beside the tensors: tiles, the padded bias and the width of its
    rows, padding as bits. near: beyond these distances tiles are far; span: the tables' distances, with `side` more before and after;
    ordered: tiles in the order in which blocks are taken, with what each consumer needs (prepare.order_block)."""
    batch, heads, q_length, _ = x.q.shape
    k_length, count = x.k.shape[2], -(-q_length // queries)
    batch_rows = 1 if x.key_mask is None and x.doc_q is None and x.starts is None else batch
    tiles = lse.new_empty(batch_rows, count, OWN_NUMBERS.value if ordered else NUMBERS.value, dtype=torch.int32)
    bias_row, width, bias, bits = 0, 0, None, None
    if x.bias is not None:
        bias_row, width = x.bias.stride(0), span[1] - span[0] + 1 + 2 * side
        bias = lse.new_empty(heads, width)
    if x.key_mask is not None:
        bits = lse.new_empty(x.key_mask.shape[0], -(-k_length // keys), 8, dtype=torch.int32)
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    programs = batch_rows * count, 0 if bias is None else heads, 0 if bits is None else bits.shape[0] * bits.shape[1]
    launch(
        prepare, sum(programs), tiles, programs[0], count, position_args(x), make_masks(x), q_length, k_length, num.offset, left, right,
        *near, x.bias, bias_row, num.bias_lo, num.bias_hi, bias, programs[1], span[0] - side, width, scale, bits, section_of(heads), queries, keys, 512,
        ORDERED=ordered,
    )  # fmt: skip
    return tiles, bias, width, bits


def section_of(heads: int) -> int:
    """How many blocks of one head are ordered together with those of the other heads."""
    return max(SECTION // heads, 1)


def _rows(x: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    """x [B or 1, ..] and its stride over batch rows."""
    return (unused, 0) if x is None else (x, 0 if x.shape[0] == 1 else x.stride(0))


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, heads, L, D] in blocks of rows."""
    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    # a stride over one element may be any number, but must be one that the copy engine takes
    strides = [step if size > 1 else x.shape[3] for step, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def describe_table(table: Tensor, rows: int, channels: int) -> TensorDescriptor:
    """table [H or 1, span, E] in blocks of rows; channels after the last are copied as zeros."""
    block = [1, rows, channels]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[table.dtype])
    return TensorDescriptor(table, list(table.shape), list(table.stride()), block, layout)
