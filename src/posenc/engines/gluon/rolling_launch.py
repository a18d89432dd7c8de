"""Launch the Gluon kernel with a content term over every distance."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import FAR, Inputs, Numbers
from ..triton.launcher import Launch
from .kernel import PAD
from .launch import describe_table, launch_forward
from .rolling import KEYS, SPLIT, forward_rolling
from .rolling_prepare import split_bias


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
    depth = depth or DEPTHS[x.q.shape[3]]
    table, bias = describe_chunks(launch, x, num, scale)
    return launch_forward(
        launch, forward_rolling, x._replace(bias=None), num, scale, out, lse, KEYS.value, (-FAR, FAR), (num.rows_lo, num.rows_hi), PAD.value,
        descriptors=(table, bias), table_heads=(x.table.shape[0],),
        STAGES=depth.stages, RING=depth.ring, TURNS=depth.turns, BIAS=x.bias is not None,
    )  # fmt: skip


def describe_chunks(launch: Launch, x: Inputs, num: Numbers, scale: float) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The table and the bias [H, span, SPLIT] in chunks; without a bias the table twice."""
    rows = describe_table(x.table.to(x.q.dtype).contiguous(), KEYS.value, x.table.shape[2])
    if x.bias is None:
        return rows, rows
    heads, span = x.q.shape[1], num.rows_hi - num.rows_lo + 1
    bias = x.q.new_empty(heads, span, SPLIT.value)
    launch(
        split_bias, heads * -(-span // 128), x.bias, x.bias.stride(0), num.bias_lo, num.bias_hi, bias, num.rows_lo, span, scale, SPLIT.value, 128,
        num_warps=4,
    )  # fmt: skip
    return rows, describe_table(bias, KEYS.value, SPLIT.value)
