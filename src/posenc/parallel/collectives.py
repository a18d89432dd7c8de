"""Every message between ranks: with a time limit, counted, and differentiable where it carries activations.

forward                     backward
all_to_all                  all_to_all the other way
all_gather                  all_to_all, and each rank adds what arrives: in the order of the ranks, in float32
(nothing)                   all_reduce of a table's gradient, `sum_gradients`
exchange (ring)             written out in ring.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.torch_modes import first_derivatives_only
from .context import ContextParallel, ParallelError
from .layout import restore_order

# PyTorch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Collective = Callable[[ContextParallel, Tensor], Tensor]
_counters: list[Counter] = []


@contextmanager
def count_traffic() -> Iterator[Counter]:
    """Count the bytes that this rank sends to others, by kind of message.

        with count_traffic() as sent:
            loss(attend(...)).backward()
        sent["ring"], sent["all_to_all"], sent["all_gather"], sent["all_reduce"]

    Collectives count what a bandwidth-optimal algorithm sends: a rank's part goes to size - 1 others once.

    Raises nothing.

        >>> with posenc.parallel.count_traffic() as sent: pass
        >>> sum(sent.values())
        0
    """
    counter: Counter = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def _count(kind: str, size: int) -> None:
    for counter in _counters:
        counter[kind] += size


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@dataclass
class Pending:
    """Messages under way: `wait` ends when all have arrived, or raises ParallelError."""

    cp: ContextParallel
    works: Sequence[Any]
    what: str
    results: list[Tensor]
    kept: Any  # what is sent, until it has arrived
    device: torch.device  # of the results

    def wait(self) -> list[Tensor]:
        began = time.monotonic()
        on_cpu = all(not x.is_cuda for x in self.results)
        try:
            for work in self.works:
                # NCCL's wait orders streams and returns; with a limit it would block the host
                work.wait(self.cp.limit) if on_cpu else work.wait()
        except RuntimeError as error:
            raise _failure(self.cp, self.what, time.monotonic() - began, error) from error
        self.kept = None
        return [x.to(self.device) for x in self.results]


def _failure(cp: ContextParallel, what: str, seconds: float, error: Exception) -> ParallelError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ParallelError(
        f"rank {cp.rank} of {cp.size}: {what} failed after {seconds:.1f} s (limit {cp.timeout:.0f} s): {lines[0].rstrip('.!')}. "
        "Another rank ended, takes another path, or holds another length; see the log of the rank that stopped first"
    )


def _start(
    cp: ContextParallel, what: str, call: Any, results: list[Tensor], kept: Any, device: torch.device
) -> Pending:  # fmt: skip
    """Start messages; a connection that is closed already raises here."""
    began = time.monotonic()
    try:
        works = call()
    except RuntimeError as error:
        raise _failure(cp, what, time.monotonic() - began, error) from error
    return Pending(cp, works if isinstance(works, list) else [works], what, results, kept, device)


def exchange(cp: ContextParallel, tensors: Sequence[Tensor], hop: int = 1) -> Pending:
    """Send tensors to the rank `hop` further in the ring and receive those of the rank `hop` before. Does not wait."""
    following, previous = (cp.rank + hop) % cp.size, (cp.rank - hop) % cp.size
    sent, device = [_wire(cp, x) for x in tensors], tensors[0].device
    received = [torch.empty_like(x) for x in sent]
    operations = []
    for x, y in zip(sent, received, strict=True):
        if x.numel():
            operations.append(dist.P2POp(dist.isend, _plain(x), group=cp.group, group_peer=following))
            operations.append(dist.P2POp(dist.irecv, _plain(y), group=cp.group, group_peer=previous))
    _count("ring", sum(map(_bytes, sent)))
    what = f"the exchange with ranks {previous} and {following}"
    if not operations:
        return Pending(cp, [], what, received, None, device)
    return _start(cp, what, lambda: dist.batch_isend_irecv(operations), received, sent, device)


def _wire(cp: ContextParallel, x: Tensor) -> Tensor:
    """What is sent of x: contiguous, and in a CPU's memory where the backend is gloo."""
    return (x.cpu() if cp.through_host else x).contiguous()


def _plain(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def gather(cp: ContextParallel, x: Tensor, what: str = "gathering keys and values", kind: str = "all_gather") -> Tensor:
    """[..] of every rank -> [size, ..]; without gradients."""
    if cp.is_alone:
        return x[None]
    device, x = x.device, _wire(cp, x)
    out = x.new_empty((cp.size, *x.shape))
    _count(kind, (cp.size - 1) * _bytes(x))
    flat, plain = _plain(out).view(-1), _plain(x).view(-1)
    call = lambda: _all_gather(flat, plain, group=cp.group, async_op=True)  # noqa: E731
    return _start(cp, what, call, [out], x, device).wait()[0]


def total(cp: ContextParallel, x: Tensor, kind: str = "sum") -> Tensor:
    """The sum (or "max") over the ranks."""
    if cp.is_alone:
        return x
    device, x = x.device, _wire(cp, x).clone()
    _count("all_reduce", 2 * (cp.size - 1) * _bytes(x) // cp.size)
    operation = dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX
    call = lambda: dist.all_reduce(x, op=operation, group=cp.group, async_op=True)  # noqa: E731
    return _start(cp, "summing gradients of tables", call, [x], None, device).wait()[0]


def broadcast(cp: ContextParallel, x: Tensor) -> Tensor:
    """The tensor of rank 0."""
    if cp.is_alone:
        return x
    device, x = x.device, _wire(cp, x).clone()
    if cp.rank == 0:
        _count("broadcast", (cp.size - 1) * _bytes(x))
    call = lambda: dist.broadcast(x, group_src=0, group=cp.group, async_op=True)  # noqa: E731
    return _start(cp, "receiving the seed of rank 0", call, [x], None, device).wait()[0]


def swap(cp: ContextParallel, x: Tensor, what: str = "the all-to-all over heads") -> Tensor:
    """[size, ..]: part n goes to rank n; -> [size, ..]: part n is from rank n. Without gradients."""
    if cp.is_alone:
        return x
    device, x = x.device, _wire(cp, x)
    out = torch.empty_like(x)
    _count("all_to_all", _bytes(x) // cp.size * (cp.size - 1))
    call = lambda: dist.all_to_all_single(_plain(out).view(-1), _plain(x).view(-1), group=cp.group, async_op=True)  # noqa: E731
    return _start(cp, what, call, [out], x, device).wait()[0]


def scatter_sum(cp: ContextParallel, x: Tensor) -> Tensor:
    """[size, ..] of every rank -> [..]: this rank's part of the sum over the ranks, in float32 or better.

    Not a reduce_scatter: that sends float32 where gradients are bfloat16; gloo's sends twice as much, and its wait was seen to
    outlast its time limit when a rank had died.
    """
    if cp.is_alone:
        return x[0]
    parts = swap(cp, x, "summing gradients of keys and values")
    return parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def check_alike(cp: ContextParallel, names: Sequence[str], numbers: Sequence[int], device: torch.device) -> None:
    """Raise where ranks have different sizes. On a CPU at every call; on a GPU at the first only, since it synchronises."""
    if cp.is_alone or (cp.checked and device.type != "cpu" and not torch.is_anomaly_enabled()):
        return
    cp.checked = True
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    sizes = gather(cp, own, "comparing the ranks' sizes", "check").tolist()
    for number, name in enumerate(names):
        each = [row[number] for row in sizes]
        if len(set(each)) > 1:
            raise ParallelError(
                f"ranks have different {name}: {', '.join(f'rank {rank}: {n}' for rank, n in enumerate(each))}; "
                "every rank needs the same: split_sequence pads a sequence that cannot be divided"
            )


# ---- with gradients ------------------------------------------------------------------------------------------------
class _Exchange(torch.autograd.Function):
    """A collective, and the one that carries its gradient back."""

    @staticmethod
    def forward(ctx, x: Tensor, cp: ContextParallel, there: Collective, back: Collective) -> Tensor:  # type: ignore[override]
        ctx.cp, ctx.back = cp, back
        return there(cp, x)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return ctx.back(ctx.cp, grad), None, None, None


def _exchange(cp: ContextParallel, x: Tensor, there: Collective, back: Collective) -> Tensor:
    return _Exchange.apply(x, cp, there, back) if x.requires_grad else there(cp, x)


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cp: ContextParallel, *tensors: Tensor):  # type: ignore[override]
        ctx.cp, ctx.like = cp, [(x.shape, x.dtype, x.device) for x in tensors]
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        precision = torch.float32
        for _, dtype, _ in ctx.like:
            precision = torch.promote_types(precision, dtype)
        # ranks must send the same, so a gradient that is missing here is sent as zeros
        flat = [
            torch.zeros(shape.numel(), dtype=precision, device=device) if grad is None else grad.to(precision).flatten()
            for grad, (shape, _, device) in zip(grads, ctx.like, strict=True)
        ]
        sums = total(ctx.cp, torch.cat(flat)).split([x.numel() for x in flat])
        each = zip(sums, ctx.like, strict=True)
        return None, *(x.view(shape).to(dtype) for x, (shape, dtype, _) in each)


def all_gather(cp: ContextParallel, x: Tensor, dim: int) -> Tensor:
    """x of every rank, one after another along `dim`, in the order of the ranks."""
    if cp.is_alone:
        return x
    return _exchange(cp, x.movedim(dim, 0), gather, scatter_sum).flatten(0, 1).movedim(0, dim)


def gather_tokens(cp: ContextParallel, x: Tensor, dim: int) -> Tensor:
    """Tokens of every rank along `dim`, in the order of the sequence."""
    return restore_order(all_gather(cp, x, dim), cp.size, cp.balance, dim)


def all_to_all(cp: ContextParallel, x: Tensor, split: int, join: int) -> Tensor:
    """Cut x along `split`, part n to rank n; put the parts that arrive one after another along `join`."""
    if cp.is_alone:
        return x
    parts = x.unflatten(split, (cp.size, -1)).movedim(split, 0)
    return _exchange(cp, parts, swap, swap).movedim(0, join).flatten(join, join + 1)


def sum_gradients(cp: ContextParallel, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors themselves; their gradients are summed over the ranks, all of them in one message."""
    trained = [x for x in tensors if x.requires_grad]
    if cp.is_alone or not trained or not torch.is_grad_enabled():
        return list(tensors)
    summed = iter(_SumGradients.apply(cp, *trained))
    return [next(summed) if x.requires_grad else x for x in tensors]
