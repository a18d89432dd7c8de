"""Launch the Gluon kernel with a content term over every distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import FAR, Inputs, Numbers
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from .kernel import CONSUMERS, NUMBERS, PAD, ROWS
from .launch import ELEMENTS, LOG2E, NO_LIMIT, REGISTERS, _describe, _rows
from .prepare import prepare
from .rolling import KEYS, forward_rolling


class Depth(NamedTuple):
    """How far the producer may be ahead."""

    stages: int  # tiles of keys and values
    ring: int  # chunks of the table; each serves three steps
    turns: bool = True


DEPTHS = {64: Depth(4, 6)}


def run_forward(
    launch: Launch, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor, depth: Depth | None = None
) -> tuple[Tensor, Tensor, None]:
    """launch.run_forward, with a row term over every visible distance."""
    q, k, v, table = x.q, x.k, x.v, x.table
    batch, heads, q_length, size = q.shape
    k_length, group = k.shape[2], heads // k.shape[1]
    depth = depth or DEPTHS[size]
    queries, keys = ROWS.value * CONSUMERS.value, KEYS.value
    count = -(-q_length // queries)

    batch_rows = 1 if x.key_mask is None and x.doc_q is None else batch
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    tiles, bias, width, bits = prepare_blocks(launch, x, num, scale, lse, queries)

    table = table.to(q.dtype).contiguous()
    masks, mask_rows = zip(*(_rows(y, lse) for y in (bits, x.doc_q, x.doc_k, x.doc_q_keys)), strict=True)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    section = batch * heads if num.right == 0 else 1
    launch(
        forward_rolling, min(batch * heads * count, processors), _describe(q, ROWS.value), _describe(k, keys), _describe(v, keys),
        _describe(out, ROWS.value), _describe_table(table, keys), lse, tiles, lse if bias is None else bias, *masks,
        scale * LOG2E, q_length, k_length, heads, group, batch * heads, section, NO_LIMIT if left is None else left,
        NO_LIMIT if right is None else right, 0 if batch_rows == 1 else count * NUMBERS.value, table.shape[0], width, *mask_rows,
        num.rows_lo, num.rows_hi, STAGES=depth.stages, RING=depth.ring, TURNS=depth.turns, BIAS=bias is not None, WINDOW=left is not None,
        PADDED=bits is not None, DOCS=x.doc_q is not None, CONSUMER_REGISTERS=REGISTERS[0], PRODUCER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    return out, lse, None


def prepare_blocks(
    launch: Launch, x: Inputs, num: Numbers, scale: float, lse: Tensor, queries: int
) -> tuple[Tensor, Tensor | None, int, Tensor | None]:
    """What blocks of so many queries read beside the tensors: tiles, the padded bias and the width of its rows, padding as bits."""
    batch, heads, q_length, _ = x.q.shape
    k_length, keys = x.k.shape[2], KEYS.value
    count = -(-q_length // queries)
    batch_rows = 1 if x.key_mask is None and x.doc_q is None else batch
    tiles = lse.new_empty(batch_rows, count, NUMBERS.value, dtype=torch.int32)
    bias_row, width, bias = 0, 0, None
    if x.bias is not None:
        bias_row, width = x.bias.stride(0), num.rows_hi - num.rows_lo + 1 + 2 * PAD.value
        bias = lse.new_empty(heads, width)
    bits = None
    if x.key_mask is not None:
        bits = lse.new_empty(x.key_mask.shape[0], -(-k_length // keys), 8, dtype=torch.int32)
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    programs = batch_rows * count, 0 if bias is None else heads, 0 if bits is None else bits.shape[0] * bits.shape[1]
    launch(
        prepare, sum(programs), tiles, programs[0], count, position_args(x), make_masks(x), q_length, k_length, num.offset, left, right,
        -FAR, FAR, x.bias, bias_row, num.bias_lo, num.bias_hi, bias, programs[1], num.rows_lo - PAD.value, width, scale, bits,
        queries, keys, 512,
    )  # fmt: skip
    return tiles, bias, width, bits


def _describe_table(table: Tensor, rows: int) -> TensorDescriptor:
    """table [H or 1, span, D] in blocks of rows."""
    block = [1, rows, table.shape[2]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[table.dtype])
    return TensorDescriptor(table, list(table.shape), list(table.stride()), block, layout)
