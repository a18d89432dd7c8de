"""ContextParallel: the processes that share a sequence, how attention crosses them, and which tokens each of them holds."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor

from .layout import BALANCES, Balance, Segment, segments_of, slots_of, unit

Strategy = Literal["auto", "ulysses", "gather", "ring"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
TIMEOUT = 300.0
"""Seconds that a rank waits for the others (gloo). NCCL ends a process by the time limit of its process group."""


class ParallelError(RuntimeError):
    """Ranks do not fit together, or one of them did not answer.

    >>> issubclass(posenc.parallel.ParallelError, RuntimeError)
    True
    """


class ContextParallel:
    """A one-dimensional mesh whose ranks hold parts of the same sequences.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))
        cp = ContextParallel(mesh["cp"], strategy="ring", balance="zigzag")

    mesh       a DeviceMesh with one dimension, or a ProcessGroup
    strategy   "ulysses"  all-to-all over heads: each rank has all tokens for some of the heads
               "gather"   each rank gathers all keys and values for its own queries
               "ring"     keys and values travel from rank to rank; a rank never holds more than two parts of them
               "auto"     ulysses where the ranks divide the heads, otherwise ring
    balance    which tokens a rank holds: "none" (consecutive ones), "zigzag" or "striped" (equal work where attention is
               causal). `split_sequence` must cut batches in the same way: give it this object
    timeout    seconds after which a rank that waits for another one raises ParallelError (gloo; NCCL has a limit of its
               own, the process group's)

    Raises ValueError for a mesh of several dimensions and for an unknown strategy or balance.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = posenc.parallel.ContextParallel(dist.group.WORLD)
        >>> cp.strategy
        'auto'
        >>> dist.destroy_process_group()
    """

    def __init__(self, mesh: Any, *, strategy: Strategy = "auto", balance: Balance = "none", timeout: float = TIMEOUT):
        for name, given, known in (("strategy", strategy, STRATEGIES), ("balance", balance, BALANCES)):
            if given not in known:
                raise ValueError(f"{name}={given!r} is unknown; use one of {', '.join(map(repr, known))}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0")
        self.group = _group_of(mesh)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.strategy, self.balance, self.timeout = strategy, balance, float(timeout)
        self.checked = False
        self.through_host = dist.get_backend(self.group) == "gloo"
        """Whether messages are sent from a CPU's memory, wherever the tensors are."""
        self.sends_alone = False
        """Whether a single rank sends messages to itself, which tests use."""

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to send to."""
        return self.size == 1 and not self.sends_alone

    @property
    def unit(self) -> int:
        """A sequence's length must be a multiple of this."""
        return unit(self.size, self.balance)

    def segments(self, local: int, rank: int | None = None) -> tuple[Segment, ...]:
        return segments_of(self.rank if rank is None else rank, self.size, local, self.balance)

    def slots(self, local: int, device=None) -> Tensor:
        """The slots of this rank's tokens in the sequence, [local]."""
        return slots_of(self.rank, self.size, local, self.balance, device)

    def check_local(self, length: int, name: str = "q") -> None:
        if self.balance == "zigzag" and self.size > 1 and length % 2:
            raise ValueError(
                f"{name} has {length} tokens on rank {self.rank}; balance='zigzag' needs an even number on every rank: "
                f"pad the sequence to a multiple of {self.unit} (split_sequence does)"
            )

    def __deepcopy__(self, memo: dict) -> ContextParallel:
        return self  # a copied layer works with the same processes

    def __reduce__(self):
        raise TypeError("a ContextParallel belongs to running processes and cannot be pickled; save the state_dict")

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.size}, strategy={self.strategy!r}, balance={self.balance!r})"


def as_context(mesh: Any, strategy: Strategy | None = None) -> ContextParallel:
    """A mesh, a process group or a ContextParallel as a ContextParallel."""
    if isinstance(mesh, ContextParallel):
        if strategy not in (None, mesh.strategy):
            raise ValueError(
                f"strategy={strategy!r} was given together with {mesh!r}; give it to ContextParallel(...) only"
            )
        return mesh
    return _context_of(mesh, strategy or "auto")


@lru_cache(maxsize=64)
def _context_of(mesh: Any, strategy: Strategy) -> ContextParallel:
    return ContextParallel(mesh, strategy=strategy)


def _group_of(mesh: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "context parallelism needs running processes; start them with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim != 1:
            names = ", ".join(mesh.mesh_dim_names or ())
            raise ValueError(
                f"context_parallel is a mesh with one dimension, got {mesh.ndim} ({names}); give one of them, mesh['cp']"
            )
        return mesh.get_group()
    raise TypeError(f"context_parallel must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
