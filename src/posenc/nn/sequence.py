"""Sequence: positions, padding and documents of a layer's queries and of all its keys, cached ones and memory included."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.encoding import Encoding, Kept
from ..core.launches import has_triton
from ..core.mask import MaskOptions, as_bool_mask, check_key_mask
from ..core.plan_checks import check_is_tensor
from ..core.positions import INTEGERS, Positions, Run, Side
from .cache import LayerCache


class Sequence(NamedTuple):
    """A forward's arguments and the cache's tokens, joined. Keys are in the order

    [ cached tokens | memory | x ]          queries: the last ones, x
    '------------- all ---------'           every key
                    '--- new ---'           keys computed from this input
    """

    all: Positions  # queries and every key
    new: Positions  # queries and the keys made from this input (memory included)
    inputs: Positions  # the keys made from this input, alone
    key_mask: Tensor | None  # [B, keys]
    documents: tuple[Tensor, Tensor] | None  # [B, queries], [B, keys]
    marks: dict[str, Tensor]  # what the cache keeps of all keys when the forward has succeeded


def resolve_sequence(
    encoding: Encoding, x: Tensor, *, cache: LayerCache | None, positions: Tensor | None, key_mask: Tensor | None,
    documents: Tensor | None, segments: Tensor | tuple[Tensor, tuple[int, int]] | None = None, memory: int = 0,
) -> Sequence:  # fmt: skip
    """Join the arguments of a forward over x [B, L, ..] with what the cache holds of earlier tokens.

    The cache is read, not changed. Positions default to slot numbers; for an encoding that is `absolute` or
    `length_dependent` they count the real tokens of each document, and lengths are those of the document.
    """
    batch, queries = x.shape[:2]
    past, known = _known(cache)
    new = memory + queries
    keys = past + new
    marks: dict[str, Tensor] = {}
    real = _join_key_mask(key_mask, batch, past, memory, queries, known)
    ids = _join_ids("documents", documents, batch, past, new, known)
    bounds: tuple = ()
    if isinstance(segments, (tuple, list)):
        if len(segments) != 2:
            raise ValueError("segments takes ids [B, L], or (ids, (lowest, highest))")
        bounds = tuple(segments[1:]) if cache is None else ()  # cached ones may lie outside
        segments = segments[0]
    segment = _join_ids("segments", segments, batch, past, new, known, earlier=0)
    if cache is not None:
        given = (("key_mask", real), ("documents", ids), ("segments", segment))
        marks = {name: mark.expand(batch, -1) for name, mark in given if mark is not None}
    counted = (encoding.absolute or encoding.length_dependent) and (real is not None or ids is not None)
    total: Tensor | None = None
    if positions is None and "positions" not in known and not counted:
        q_side: Side = Run(past + memory, queries)
        k_side: Side = Run(0, keys)
        new_side: Side = Run(past, new)
    else:
        known_positions = count_tokens(ids, real, batch) if counted else None
        if positions is not None or "positions" in known:
            if positions is None and counted and ids is not None:
                raise ValueError(
                    "positions were given for earlier tokens of these documents; give them with every call"
                )
            marks["positions"] = _join_positions(positions, batch, past, new, known, known_positions, x.device)
            known_positions = marks["positions"]
        assert known_positions is not None
        if ids is not None and encoding.length_dependent:
            total = document_lengths(ids, known_positions)
        q_side, k_side, new_side = known_positions[:, keys - queries :], known_positions, known_positions[:, past:]
    more = [] if segment is None else [(segment[:, keys - queries :], segment, *bounds)]
    every = Positions(q_side, k_side, more=more, total=total)
    encoding.check_axes(every)
    return Sequence(
        every, Positions(q_side, new_side), Positions(new_side), real,
        None if ids is None else (ids[:, keys - queries :], ids), marks,
    )  # fmt: skip


def keep_numbers(encoding: Encoding, states: Tensor, slot: LayerCache | None, sequence: Sequence) -> Kept | None:
    """What the encoding keeps of every token, the cached ones included; the slot's marks take it over."""
    numbers = encoding.keep(states)
    if numbers is None:
        return None
    if slot is not None:
        if slot.length:
            numbers = torch.cat((slot.marks["kept"], numbers), dim=1)
        sequence.marks["kept"] = numbers
    return Kept(numbers, None if sequence.documents is None else sequence.documents[1], sequence.key_mask)


def refuse_part(encoding: Encoding, slot: LayerCache) -> NoReturn:
    raise ValueError(
        f"{type(encoding).__name__} is added to a whole input at once, and the cache holds {slot.length} "
        "tokens of this one already; add it to the whole input with embed(), or use no cache"
    )


def _known(cache: LayerCache | None) -> tuple[int, dict[str, Tensor]]:
    """How many tokens the cache holds, and their marks."""
    return (0, {}) if cache is None or not cache.length else (cache.length, cache.marks)


def are_slots(positions: Tensor, x: Tensor) -> bool:
    """Whether they are 0, 1, 2 .. in each row of x [B, L, ..], as where none are given; read on a CPU only, in eager code."""
    if type(positions) is not Tensor or not positions.is_cpu or positions.dtype != torch.int64:
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    batch, length = x.shape[:2]
    if positions.shape not in ((length,), (1, length), (batch, length)):
        return False
    return positions.equal(_slots(length).expand_as(positions))


@lru_cache(maxsize=8)
def _slots(length: int) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.arange(length, device="cpu")


def resolve_masks(
    x: Tensor, cache: LayerCache | None, key_mask: Tensor | None, documents: Tensor | None, mask: Tensor | None
) -> MaskOptions | None:
    """The masks of consecutive tokens over all keys, where they are given or the cache has some; None: there are none, or the cache
    holds more of its tokens than padding."""
    past, known = _known(cache)
    if len(known) > ("key_mask" in known) or (documents is not None and cache is not None):
        return None
    batch, queries = x.shape[:2]
    masks: MaskOptions = {}
    real = _join_key_mask(key_mask, batch, past, 0, queries, known)
    if real is not None:
        masks["key_mask"] = real
    if documents is not None:
        masks["documents"] = _join_ids("documents", documents, batch, 0, queries, {})
    if mask is not None:
        masks["mask"] = mask
    return masks


def resolve_queries(x: Tensor, cache: LayerCache | None, positions: Tensor | None) -> tuple[Side, dict[str, Tensor]]:
    """Positions of cross-attention's queries, after those that the cache has counted; and the marks to keep."""
    batch, queries = x.shape[:2]
    past, known = _known(cache)
    if positions is None and "positions" not in known:
        return Run(past, queries), {}
    known_positions = _join_positions(positions, batch, past, queries, known, None, x.device)
    return known_positions[:, past:], {"positions": known_positions}


def resolve_context(
    context: Tensor, cache: LayerCache | None, positions: Tensor | None, key_mask: Tensor | None
) -> tuple[Side, dict[str, Tensor]]:
    """Positions of a context's keys and what else is known of them; a cached context keeps what it was cached with."""
    batch, keys = context.shape[:2]
    facts = {} if cache is None or cache.context is None else dict(cache.context)
    if key_mask is not None:
        facts["key_mask"] = check_key_mask(key_mask, batch, keys).expand(batch, -1)
    if positions is not None:
        known_positions = _join_positions(positions, batch, 0, keys, {}, None, context.device, "context_positions")
        if cache is not None and cache.context is not None:
            _check_same_positions(facts.get("positions"), known_positions)
        else:
            facts["positions"] = known_positions
    return facts.get("positions", Run(0, keys)), facts


def _check_same_positions(kept: Tensor | None, given: Tensor) -> None:
    """Raise where a cached context has other positions; read on a CPU only, where that costs nothing."""
    if not given.is_cpu or torch.compiler.is_compiling():
        return
    if kept is None:
        kept = torch.arange(given.shape[1], device="cpu")[None]
    if kept.dim() != given.dim() or not torch.equal(kept.expand_as(given).long(), given.long()):
        raise ValueError("the context was cached at other context_positions; give the same, none, or a new KVCache")


def _join_key_mask(given, batch, past, memory, queries, known: dict[str, Tensor]) -> Tensor | None:
    """The padding mask over all keys, bool [B, keys]. It is given for x or for every key; all other keys are real."""
    keys = past + memory + queries
    if given is not None:
        given = as_bool_mask(given, "key_mask")
        if tuple(given.shape) == (batch, keys):
            return given
        if tuple(given.shape) != (batch, queries):
            raise ValueError(
                f"key_mask must be [B, L] = [{batch}, {queries}], or [{batch}, {keys}] over all keys, "
                f"got {list(given.shape)}"
            )
        given = torch.nn.functional.pad(given, (memory, 0), value=True)
    elif "key_mask" in known:
        return torch.nn.functional.pad(known["key_mask"], (0, memory + queries), value=True)
    if given is None or past == 0:
        return given
    return _concatenate(known["key_mask"] if "key_mask" in known else given.new_ones(1, past), given)


def _join_ids(
    name: str, given: Tensor | None, batch: int, past: int, new: int, known: dict[str, Tensor],
    earlier: int | None = None,
) -> Tensor | None:  # fmt: skip
    """Ids over all keys; `earlier` is the id of tokens that were cached without one (None: not allowed)."""
    if given is None and name not in known:
        return None
    if given is None or (earlier is None and past and name not in known):
        raise ValueError(f"{name} were given for some tokens of this sequence only; give them with every call")
    if not isinstance(given, Tensor) or given.dtype not in INTEGERS:
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} must be int ids [B, {new}] (memory included), got {kind}")
    if given.dim() != 2 or given.shape[0] not in (1, batch) or given.shape[1] != new:
        raise ValueError(f"{name} must be int ids [{batch}, {new}] (memory included), got {list(given.shape)}")
    if past == 0:
        return given
    return _concatenate(known[name] if name in known else given.new_full((1, past), earlier or 0), given)


def _join_positions(
    given: Tensor | None, batch: int, past: int, new: int, known: dict[str, Tensor], earlier: Tensor | None, device,
    name: str = "positions",
) -> Tensor:  # fmt: skip
    """Positions [B, keys] or [B, keys, axes]; by default they continue from the last known one. `earlier` holds those of
    tokens that were cached without positions (None: slot numbers).
    """
    if given is None:
        last = known["positions"][:, -1:]
        steps = torch.arange(1, new + 1, device=device)
        given = last + (steps if last.dim() == 2 else steps[:, None])
    else:
        if not isinstance(given, Tensor):
            check_is_tensor(name, given)
        Positions(given)  # validates its type and shape
        if given.dim() == 1:
            given = given[None]
        if given.shape[0] not in (1, batch) or given.shape[1] != new:
            raise ValueError(
                f"{name} must be [{batch}, {new}] or [{batch}, {new}, axes] (memory included), got {list(given.shape)}"
            )
        given = given.expand(batch, *given.shape[1:])
        if "positions" in known and known["positions"].shape[2:] != given.shape[2:]:
            raise ValueError(
                f"positions of the cached tokens are [B, L{', axes' * (known['positions'].dim() - 2)}], got "
                f"{list(given.shape)}; give all tokens of a sequence the same axes"
            )
    if past == 0:
        return given
    if "positions" in known:
        return _concatenate(known["positions"], given)
    earlier = torch.arange(past, device=device)[None] if earlier is None else earlier[:, :past]
    if given.dim() == 3:
        earlier = earlier[..., None].expand(*earlier.shape, given.shape[2])
    return _concatenate(earlier, given)


def _concatenate(known: Tensor, new: Tensor) -> Tensor:
    """Concatenate [B, n, ...] of the cached and of the new tokens."""
    rows = max(known.shape[0], new.shape[0])
    return torch.cat([part.expand(rows, *part.shape[1:]) for part in (known, new)], dim=1)


def count_tokens(documents: Tensor | None, real: Tensor | None, batch: int) -> Tensor:
    """Number the real tokens of each document from 0, [B, L]; padding has the number of the token before it.
    The tokens of a document need not be contiguous.
    """
    if documents is None:
        assert real is not None
        return real.cumsum(-1).sub_(1).clamp_(min=0)
    ids, order = documents.expand(batch, -1).sort(dim=-1, stable=True)
    real = torch.ones_like(order) if real is None else real.long().gather(-1, order)
    slots = torch.arange(ids.shape[1], device=ids.device).expand_as(order)
    upto = real.cumsum(-1)
    first = torch.where(_document_starts(ids), slots, 0).cummax(-1).values
    numbers = upto - (upto - real).gather(-1, first) - 1
    return torch.empty_like(order).scatter(-1, order, numbers.clamp(min=0))


def embed_counted(encoding: Encoding, x: Tensor, real: Tensor | None, documents: Tensor | None, past: int) -> Tensor:
    """The encoding added to x [B, L, n] at the numbers of its real tokens (`count_tokens`); real, documents: over all keys, of which
    `past` come before x."""
    batch, length, _ = x.shape
    if documents is None and real is not None and _is_counted_in_kernel(x):
        rows = encoding.rows_below(x, past + length)
        if rows is not None and not (torch.is_grad_enabled() and (x.requires_grad or rows.requires_grad)):
            from ..core.counted_kernel import add_counted, supports

            if supports(x, rows, real):
                return add_counted(x, rows, real)
    counted = count_tokens(documents, real, batch)
    return encoding.embed_below(x, counted[:, past:] if past else counted, past + length)


def _is_counted_in_kernel(x: Tensor) -> bool:
    """Whether a kernel may count and add: eager code on a GPU, where no mode of PyTorch must meet operators."""
    if not x.is_cuda or type(x) is not Tensor or torch.compiler.is_compiling() or not has_triton():
        return False
    return not (
        torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )  # fmt: skip


def document_lengths(documents: Tensor, positions: Tensor) -> Tensor:
    """The last position of each token's document + 1, [B, L]."""
    positions = positions if positions.dim() == 2 else positions.amax(-1)
    ids, order = documents.expand_as(positions).sort(dim=-1, stable=True)
    groups = torch.empty_like(order).scatter(-1, order, _document_starts(ids).long().cumsum(-1) - 1)
    last = torch.zeros_like(order).scatter_reduce(-1, groups, positions.long(), "amax", include_self=False)
    return last.gather(-1, groups) + 1


def _document_starts(ids: Tensor) -> Tensor:
    """Where a document begins, in sorted ids [B, L]."""
    return torch.cat((torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]), dim=-1)
