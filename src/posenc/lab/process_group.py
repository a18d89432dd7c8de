"""One trial on several processes: torchrun starts them, FSDP2 shards the model, each takes its rows of every batch, or (`--shard
sequence`) its part of every sequence.

Without torchrun the group has one process, and every method returns at once.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import LabError
from .tasks import IGNORE, Batch

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class ProcessGroup:
    """The processes that train one trial together."""

    def __init__(self, rank: int = 0, size: int = 1, context: ContextParallel | None = None):
        """context: the processes share each sequence, not the rows of a batch."""
        self.rank, self.size, self.context = rank, size, context

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """Shard every block with FSDP2. Blocks that share a parameter (T5's table) are sharded together with the model,
        because FSDP2 allows a parameter in one sharded module only."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import fully_shard

        blocks: Any = model.blocks
        used = Counter(id(p) for block in blocks for p in block.parameters())
        if max(used.values()) == 1:
            for block in blocks:
                fully_shard(block)
        fully_shard(model)

    def part(self, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
        """This process's part of a batch, and what the model must know of its tokens where it is a part of each sequence."""
        if self.context is None:
            count = batch.inputs.shape[0]
            rows = slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
            return Batch(*(tensor[rows] for tensor in batch)), {}
        from ..parallel import split_sequence

        cut = split_sequence(batch._asdict(), self.context, fill={"targets": IGNORE})
        options = {"positions": cut.positions.clamp(max=cut.length - 1)}  # a learned table has no row for padding
        return Batch(**cut.tensors), options if cut.key_mask is None else {**options, "key_mask": cut.key_mask}

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.size == 1:
            return value
        value = value.clone()
        torch.distributed.all_reduce(value)
        return value

    def broadcast(self, flag: bool, device: torch.device) -> bool:
        """The main process's flag, on every process."""
        if self.size == 1:
            return flag
        sent = torch.tensor(int(flag), device=device)
        torch.distributed.broadcast(sent, src=0)
        return bool(sent.item())

    def gather(self, tensor: Tensor) -> Tensor:
        """The full tensor of a sharded one; every process must call it."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def copy_full(self, target: Any, full: Tensor) -> None:
        """Copy a full tensor into a target that may be sharded; each process copies its own shard."""
        with torch.no_grad():
            if hasattr(target, "device_mesh"):
                (placement,) = target.placements
                shards = full.chunk(self.size, placement.dim)
                own = shards[self.rank] if self.rank < len(shards) else full.narrow(placement.dim, 0, 0)
                target.to_local().copy_(own)
            else:
                target.copy_(full)

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


SINGLE = ProcessGroup()


def from_torchrun(device: str, shard: str = "rows") -> ProcessGroup:
    """The group that torchrun started, or the group of this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        if shard == "sequence":
            raise LabError(
                "--shard sequence cuts each sequence among processes, and this is one; start several: "
                "torchrun --nproc-per-node 8 -m posenc compare --shard sequence ..."
            )
        return SINGLE
    if not torch.distributed.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    context = None
    if shard == "sequence":
        from ..parallel import ContextParallel

        context = ContextParallel(torch.distributed.group.WORLD, balance="zigzag")
    return ProcessGroup(torch.distributed.get_rank(), size, context)


def destroy(group: ProcessGroup) -> None:
    if group.size > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def exit_status(group: ProcessGroup, status: int) -> int:
    """The command's exit status. With several processes, end this one at once: during the interpreter's shutdown one of
    PyTorch's threads can abort it (rarely, on a busy machine), and torchrun would report finished work as failed."""
    if group.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
