"""One cell on several processes: torchrun starts them, FSDP2 shards the model, each takes its rows of every batch.

Alone (the usual case) a Team of one does nothing and costs nothing.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn


class Team:
    """The processes that train one cell together."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """FSDP2, block by block; where blocks share a parameter (T5's table) the model is sharded as one piece, for a
        parameter belongs to one piece only."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import fully_shard

        blocks: Any = model.blocks
        used = Counter(id(p) for block in blocks for p in block.parameters())
        if max(used.values()) == 1:
            for block in blocks:
                fully_shard(block)
        fully_shard(model)

    def rows(self, count: int) -> slice:
        """This process's rows of a batch."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def total(self, value: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.size == 1:
            return value
        value = value.clone()
        torch.distributed.all_reduce(value)
        return value

    def agree(self, flag: bool, device: torch.device) -> bool:
        """What the first process decided."""
        if self.size == 1:
            return flag
        told = torch.tensor(int(flag), device=device)
        torch.distributed.broadcast(told, src=0)
        return bool(told.item())

    def whole(self, tensor: Tensor) -> Tensor:
        """A sharded tensor put together; every process must ask."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def fill(self, place: Any, whole: Tensor) -> None:
        """Copy a whole tensor into a place that may be sharded."""
        with torch.no_grad():
            if hasattr(place, "device_mesh"):  # every process holds the whole: it cuts its own piece out
                (placement,) = place.placements
                pieces = whole.chunk(self.size, placement.dim)
                mine = pieces[self.rank] if self.rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
                place.to_local().copy_(mine)
            else:
                place.copy_(whole)

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


ALONE = Team()


def from_torchrun(device: str) -> Team:
    """The team that torchrun made, or a team of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return ALONE
    if not torch.distributed.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return Team(torch.distributed.get_rank(), size)


def leave(team: Team) -> None:
    if team.size > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def end(team: Team, status: int) -> int:
    """The command's exit status. In a team the process ends here and now: while an interpreter goes down, a thread of
    PyTorch's can abort it (rare, on a busy machine), and torchrun then calls finished work failed."""
    if team.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
