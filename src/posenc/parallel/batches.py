"""Cut batches into the parts of the ranks, and put parts back together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.mask import as_bool_mask
from .collectives import gather_tokens, total
from .context import ContextParallel, as_context
from .layout import slots_of, take_order


class Split(NamedTuple):
    """This rank's part of a batch.

    tensors [B, L/N, ..], positions [B, L/N] or [L/N], key_mask and documents [B, L/N]. Raises nothing:
    `split_sequence` makes it.

        >>> posenc.parallel.Split._fields[:2]
        ('tensors', 'positions')
    """

    tensors: dict[str, Tensor]  # as they were given, cut along the sequence
    positions: Tensor  # int64 [L/N] or [B, L/N(, axes)]
    key_mask: Tensor | None  # bool [B, L/N]; None: every token is real
    documents: Tensor | None  # int [B, L/N]
    length: int  # of the sequence, before padding


def split_sequence(
    tensors: Mapping[str, Tensor] | Tensor, context_parallel: Any, *, positions: Tensor | None = None,
    key_mask: Tensor | None = None, documents: Tensor | None = None, dim: int = 1, pad: bool = True,
    fill: Mapping[str, float] | float = 0,
) -> Split:  # fmt: skip
    """Cut a batch, which every rank has whole, into this rank's part.

        part = split_sequence({"ids": ids, "labels": labels}, cp, documents=documents, fill={"labels": -100})
        loss = model(part.tensors["ids"], positions=part.positions, key_mask=part.key_mask, documents=part.documents)

    tensors            [B, L, ..] each (dim: where the sequence is); or one tensor, which becomes tensors["x"]
    context_parallel   the ContextParallel that the layers have: its balance decides which tokens are this rank's
    positions          int [L], [B, L] or [B, L, axes]; None: slots
    key_mask           bool [B, L], True for real tokens
    documents          int ids [B, L]
    pad                a length that the ranks cannot divide is padded at the end: key_mask marks the new tokens, `fill` is
                       their content, and they form a separate document. pad=False raises instead

    Raises ValueError for shapes that do not fit and, with pad=False, for a length that the ranks cannot divide.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = posenc.parallel.ContextParallel(dist.group.WORLD)
        >>> posenc.parallel.split_sequence(torch.zeros(1, 8, 4), cp).positions.shape
        torch.Size([8])
        >>> dist.destroy_process_group()
    """
    cp = as_context(context_parallel)
    named = {"x": tensors} if isinstance(tensors, Tensor) else dict(tensors)
    if not named:
        raise ValueError("split_sequence needs a tensor to cut")
    lengths = {name: x.shape[dim] for name, x in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"tensors have different lengths along dim {dim}: {lengths}; give those of one sequence")
    length = next(iter(lengths.values()))
    first = next(iter(named.values()))
    batch, device = first.shape[0] if dim > 0 else 1, first.device
    missing = -length % cp.unit
    if missing and not pad:
        raise ValueError(
            f"{length} tokens cannot be divided among {cp.size} ranks (balance={cp.balance!r} needs a multiple of "
            f"{cp.unit}); give {length + missing}, or pad=True"
        )
    if positions is not None and positions.shape[0 if positions.dim() == 1 else 1] != length:
        raise ValueError(
            f"positions must be [L], [B, L] or [B, L, axes] with L = {length}, got {list(positions.shape)}"
        )
    for name, given in (("key_mask", key_mask), ("documents", documents)):
        if given is not None and (given.dim() != 2 or given.shape[1] != length):
            raise ValueError(f"{name} must be [B, L] = [{batch}, {length}], got {list(given.shape)}")
    real = None if key_mask is None else as_bool_mask(key_mask, "key_mask")
    if missing and real is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
    at = torch.arange(length, device=device) if positions is None else positions

    def part(x: Tensor, along: int, content: Any) -> Tensor:
        if missing:
            shape = list(x.shape)
            shape[along] = missing
            x = torch.cat((x, x.new_full(shape, content)), along)
        local = x.shape[along] // cp.size
        return take_order(x, cp.size, cp.balance, along).narrow(along, cp.rank * local, local)

    along = 0 if at.dim() == 1 else 1
    if missing and positions is None:  # padding goes on where the sequence ends, so that positions stay consecutive
        own = slots_of(cp.rank, cp.size, (length + missing) // cp.size, cp.balance, device)
    else:
        own = part(at, along, int(at.max()) if at.numel() else 0)
    last = 0 if documents is None or not documents.numel() else int(documents.max()) + 1
    cut = {name: part(x, dim, fill.get(name, 0) if isinstance(fill, Mapping) else fill) for name, x in named.items()}
    real = None if real is None else part(real, 1, False)
    return Split(cut, own, real, None if documents is None else part(documents, 1, last), length)


def unsplit_sequence(x: Tensor, context_parallel: Any, *, dim: int = 1, length: int | None = None) -> Tensor:
    """Put the parts of all ranks together: [B, L/N, ..] -> [B, L, ..] on every rank, in the order of the sequence.

    length   tokens to keep, `Split.length`; the rest is padding. Gradients pass: each rank's part gets the sum over the
             ranks of what their losses give it.

    Raises ParallelError where a rank does not answer in time.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = posenc.parallel.ContextParallel(dist.group.WORLD)
        >>> posenc.parallel.unsplit_sequence(torch.zeros(1, 8, 4), cp, length=7).shape
        torch.Size([1, 7, 4])
        >>> dist.destroy_process_group()
    """
    cp = as_context(context_parallel)
    whole = gather_tokens(cp, x, dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def reduce_gradients(parameters: nn.Module | Iterable[Tensor], context_parallel: Any) -> None:
    """Sum the gradients of parameters over the ranks, all of them in one message.

    Each rank's gradients come from its own tokens. FSDP and DDP over the ranks sum them; without these, call this after
    backward. Every rank must have a gradient for the same parameters.

    Raises ParallelError where a rank does not answer in time.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = posenc.parallel.ContextParallel(dist.group.WORLD)
        >>> posenc.parallel.reduce_gradients(torch.nn.Linear(2, 2), cp)
        >>> dist.destroy_process_group()
    """
    cp: ContextParallel = as_context(context_parallel)
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    grads = [p.grad for p in given if p.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        some = [grad for grad in grads if grad.dtype == dtype]
        sums = total(cp, torch.cat([grad.flatten() for grad in some]))
        for grad, summed in zip(some, sums.split([grad.numel() for grad in some]), strict=True):
            grad.copy_(summed.view_as(grad))
