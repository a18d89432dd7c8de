"""Tokens: what a layer knows of its queries and of every key, cached and remembered ones included."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cache import KVCache
from .where import Run, Side, Where


class Tokens(NamedTuple):
    all: Where  # queries and every key
    new: Where  # queries and the keys made from this input (memory included)
    key_mask: Tensor | None  # [B, keys]
    documents: tuple[Tensor, Tensor] | None  # [B, queries], [B, keys]


def describe(
    x: Tensor,
    *,
    memory: int,
    cache: KVCache | None,
    positions: Tensor | None,
    segments: Tensor | tuple[Tensor, tuple[int, int]] | None,
    key_mask: Tensor | None,
    documents: Tensor | None,
    count_real: bool,
) -> Tokens:
    """Put together the arguments of a forward over x [B, L, ..] with what the cache knows of earlier tokens.

    Keys stand in the order: cached, memory, x. `count_real` says that positions must not count padding.
    """
    batch, queries = x.shape[:2]
    past = 0 if cache is None else cache.length
    new = memory + queries
    keys = past + new
    real = _key_mask(key_mask, batch, past, memory, queries, cache, x.device)
    ids = _joined("documents", documents, None, past, new, cache)
    bounds: tuple = ()
    if isinstance(segments, (tuple, list)):
        if len(segments) != 2:
            raise ValueError("segments takes ids [B, L], or (ids, (lowest, highest))")
        bounds = tuple(segments[1:]) if cache is None else ()  # cached ones may lie outside
        segments = segments[0]
    segment = _joined("segments", segments, torch.zeros(1, past, dtype=torch.int64, device=x.device), past, new, cache)
    known = cache is not None and "positions" in cache.marks
    if positions is None and not known and not (count_real and real is not None):
        q_side: Side = Run(past + memory, queries)
        k_side: Side = Run(0, keys)
        new_side: Side = Run(past, new)
    else:
        if positions is None and count_real and real is not None:
            place = (real.long().cumsum(-1) - 1).clamp(min=0)
            if cache is not None:
                cache.marks["positions"] = place
        else:
            place = _positions(positions, batch, past, new, cache, x.device)
        q_side, k_side, new_side = place[:, keys - queries :], place, place[:, past:]
    more = [] if segment is None else [(segment[:, keys - queries :], segment, *bounds)]
    return Tokens(
        Where(q_side, k_side, more=more),
        Where(q_side, new_side),
        real,
        None if ids is None else (ids[:, keys - queries :], ids),
    )


def _key_mask(given, batch, past, memory, queries, cache, device) -> Tensor | None:
    """bool over all keys; given for x alone or for every key; what is not mentioned is real."""
    keys = past + memory + queries
    if given is not None:
        given = given.bool()
        if tuple(given.shape) == (batch, keys):
            if cache is not None:
                cache.marks["key_mask"] = given
            return given
        if tuple(given.shape) != (batch, queries):
            raise ValueError(
                f"key_mask must be [B, L] = [{batch}, {queries}], or [{batch}, {keys}] over all keys, "
                f"got {list(given.shape)}"
            )
        given = torch.nn.functional.pad(given, (memory, 0), value=True)
    elif cache is not None and "key_mask" in cache.marks:
        given = torch.ones(batch, memory + queries, dtype=torch.bool, device=device)
    if given is None or cache is None:
        return given
    return cache.mark("key_mask", torch.ones(1, past, dtype=torch.bool, device=device), given)


def _joined(name: str, given: Tensor | None, earlier: Tensor | None, past, new, cache) -> Tensor | None:
    """A fact over all keys; `earlier` [1, past] stands for tokens that were cached without it (None: not allowed)."""
    known = cache is not None and name in cache.marks
    if given is None and not known:
        return None
    if given is None or (earlier is None and past and not known):
        raise ValueError(f"{name} were given for some tokens of this sequence only; give them with every call")
    if given.dim() != 2 or given.shape[1] != new:
        raise ValueError(f"{name} must be int ids [B, {new}] (memory included), got {list(given.shape)}")
    if cache is None:
        return given
    return cache.mark(name, given[:, :0] if earlier is None else earlier, given)


def _positions(given: Tensor | None, batch: int, past: int, new: int, cache: KVCache | None, device) -> Tensor:
    """Positions [B, keys] or [B, keys, axes]; without new ones they go on from the last known."""
    if given is None:
        assert cache is not None
        last = cache.marks["positions"][:, -1:]
        steps = torch.arange(1, new + 1, device=device)
        given = last + (steps if last.dim() == 2 else steps[:, None])
    else:
        Where(given)  # says in plain words what is wrong with its type or shape
        if given.dim() == 1:
            given = given[None]
        if given.shape[0] not in (1, batch) or given.shape[1] != new:
            raise ValueError(
                f"positions must be [{batch}, {new}] or [{batch}, {new}, axes] (memory included), got {list(given.shape)}"
            )
        given = given.expand(batch, *given.shape[1:])
    if cache is None:
        return given
    steps = torch.arange(past, device=device)[None]
    earlier = steps if given.dim() == 2 else steps[..., None].expand(1, past, given.shape[2])
    return cache.mark("positions", earlier, given)
