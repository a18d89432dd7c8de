"""Tensor parallelism over heads: a rank's queries have some of the heads, an encoding's tables all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..core.plan import Plan
from .collectives import sum_gradients
from .context import ContextParallel, as_context
from .plan_tensors import cut_heads, cut_pair, put_together, take_apart

Heads = tuple[int, int, int]
"""First head, number of heads, number of all heads."""


def own_heads(mesh: Any, count: int) -> tuple[ContextParallel, Heads]:
    """The heads of this rank, where every rank of the mesh has `count` of them."""
    tp = as_context(mesh)
    return tp, (tp.rank * count, count, tp.size * count)


def split_heads(plan: Plan, mesh: Any, q: Tensor) -> Plan:
    """The plan of this rank's heads: q [B, H/N, Lq, D] has them, the plan's tables are for all H.

    The gradients of the tables are summed over the mesh, in one message: the encoding is the same on every rank.

    Raises nothing itself: `attend` validates the shapes.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = posenc.parallel.ContextParallel(dist.group.WORLD)
        >>> plan = posenc.create("alibi", heads=4).plan(posenc.Positions(8))
        >>> posenc.parallel.split_heads(plan, dist.group.WORLD, torch.zeros(1, 4, 8, 16)).slopes.shape
        torch.Size([4])
        >>> dist.destroy_process_group()
    """
    tp, heads = own_heads(mesh, q.shape[1])
    tables, of_queries, of_keys = take_apart(plan, q.shape[2])
    values = tables | of_queries | of_keys
    values = cut_heads(dict(zip(values, sum_gradients(tp, list(values.values())), strict=True)), *heads)
    if plan.pair is not None:
        plan = replace(plan, pair=cut_pair(plan.pair, *heads))
    return put_together(plan, plan.positions, values)
