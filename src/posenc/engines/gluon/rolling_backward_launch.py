"""Launch the Gluon backward kernels with a content term over every distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..triton.arguments import FAR, Inputs, Numbers
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from ..triton.structs import view
from .backward_launch import order_keys
from .backward_tiles import KEYS as BOTH
from .backward_tiles import OWN
from .kernel import NUMBERS, ROWS
from .launch import LOG2E, NO_LIMIT, _describe, _rows, prepare_blocks
from .rolling import KEYS
from .rolling_backward import BLOCK, PAIR, backward_rolling
from .rolling_backward_keys import backward_rolling_keys
from .rolling_launch import describe_chunks
from .rolling_prepare import prepare_rolling, sum_tables


class RollingSchedule(NamedTuple):
    stages: int = 4  # tiles of keys and values
    ring: int = 6  # chunks of the table
    registers: tuple[int, int, int] = (208, 72, 24)  # of a consumer, the adder and the producer
    turns: bool = True  # whether consumers take turns on the tensor cores
    key_stages: int = 4  # the same for dk and dv: tiles of queries
    key_ring: int = 6
    key_registers: tuple[int, int] = (240, 24)
    key_turns: bool = True


def run_backward(
    launch: Launch, do: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, x: Inputs, num: Numbers, scale: float,
    dq: Tensor, dk: Tensor, dv: Tensor, schedule: RollingSchedule | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Fills dq, dk and dv; the gradients of the table [H, span, D] and of a bias that is part of the row term [H, span], float32."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    kv_heads, k_length = k.shape[1:3]
    group = heads // kv_heads
    s = schedule or RollingSchedule()
    block, keys, both = BLOCK.value, KEYS.value, BOTH.value
    count, q_tiles, blocks = -(-q_length // block), -(-q_length // ROWS.value), -(-k_length // both)
    batch_rows = 1 if x.key_mask is None and x.doc_q is None else batch
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))

    tiles, _, _, bits = prepare_blocks(
        launch, x._replace(bias=None), num, scale, lse, block, keys, (-FAR, FAR), (0, 0), 0
    )
    delta = torch.empty_like(lse)
    key_tiles = lse.new_empty(batch_rows, blocks, NUMBERS.value, dtype=torch.int32)
    launch(
        prepare_rolling, batch * heads * q_tiles + batch_rows * blocks, view(out), view(do), d_lse, delta, key_tiles, batch_rows * blocks, blocks,
        position_args(x), make_masks(x), heads, batch * heads, q_length, k_length, num.offset, left, right, -FAR, FAR, size, ROWS.value, both,
        num_warps=4,
    )  # fmt: skip

    table, bias = describe_chunks(launch, x, num, scale)
    masks, mask_rows = zip(*(_rows(y, lse) for y in (bits, x.doc_q, x.doc_k, x.doc_q_keys)), strict=True)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    limits = NO_LIMIT if left is None else left, NO_LIMIT if right is None else right
    flags = {
        "BIAS": x.bias is not None,
        "WINDOW": left is not None,
        "PADDED": bits is not None,
        "DOCS": x.doc_q is not None,
    }
    programs = max(1, min(processors // heads, batch * count))
    chunks = PAIR.value * count + -(-k_length // keys)
    sums = lse.new_zeros(heads, programs, chunks, keys * size)
    bias_sums = None if x.bias is None else lse.new_zeros(heads, programs, chunks, keys)
    launch(
        backward_rolling, heads * programs, _describe(q, ROWS.value), _describe(do, ROWS.value), _describe(dq, ROWS.value), _describe(k, keys),
        _describe(v, keys), table, bias, lse, delta, tiles, *masks, sums, lse if bias_sums is None else bias_sums,
        scale * LOG2E, q_length, k_length, heads, group, batch, batch if num.right == 0 else 1, programs, *limits,
        0 if batch_rows == 1 else count * NUMBERS.value, chunks, *mask_rows, num.rows_lo,
        STAGES=s.stages, RING=s.ring, TURNS=s.turns, **flags, CONSUMER_REGISTERS=s.registers[0], ADDER_REGISTERS=s.registers[1],
        PRODUCER_REGISTERS=s.registers[2], num_warps=4,
    )  # fmt: skip
    d_table = lse.new_zeros(x.table.shape)
    d_bias = None if x.bias is None else lse.new_zeros(x.table.shape[:2])
    first = num.offset - count * block - num.rows_lo
    launch(
        sum_tables, heads * chunks, sums, bias_sums, d_table, d_bias, programs, chunks, first, x.table.shape[1], scale, size, keys, num_warps=8
    )  # fmt: skip

    order, order_row, programs = order_keys(x, num, both, ROWS.value)
    launch(
        backward_rolling_keys, programs, _describe(k, OWN.value), _describe(v, OWN.value), _describe(dk, OWN.value), _describe(dv, OWN.value),
        _describe(q, ROWS.value), _describe(do, ROWS.value), table, bias, lse, delta, key_tiles,
        order, *masks, scale * LOG2E, q_length, k_length, heads, group, *limits,
        0 if batch_rows == 1 else blocks * NUMBERS.value, order_row, *mask_rows, num.rows_lo,
        STAGES=s.key_stages, RING=s.key_ring, TURNS=s.key_turns, **flags, CONSUMER_REGISTERS=s.key_registers[0], PRODUCER_REGISTERS=s.key_registers[1], num_warps=4,
    )  # fmt: skip
    return d_table, d_bias
