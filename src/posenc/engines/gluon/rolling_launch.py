"""Launch the Gluon kernel with a content term over every distance."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..triton.arguments import FAR, Inputs, Numbers
from ..triton.launcher import Launch
from .kernel import PAD
from .launch import describe_table, launch_forward
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
    depth = depth or DEPTHS[x.q.shape[3]]
    table = x.table.to(x.q.dtype).contiguous()
    return launch_forward(
        launch, forward_rolling, x, num, scale, out, lse, KEYS.value, (-FAR, FAR), (num.rows_lo, num.rows_hi), PAD.value,
        descriptors=(describe_table(table, KEYS.value, table.shape[2]),), table_heads=(table.shape[0],),
        STAGES=depth.stages, RING=depth.ring, TURNS=depth.turns, BIAS=x.bias is not None,
    )  # fmt: skip
