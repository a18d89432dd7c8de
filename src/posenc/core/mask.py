"""Mask: the keys that are visible to each query. Masks count slots, not positions: positions may repeat or jump.

Queries and keys are aligned at their ends, as in FlashAttention. x: visible, Lq = 2, Lk = 5:

    causal                  window=(1, 0)           key_mask=[0 1 1 1 1]     documents=[1 1], [0 0 1 1 1]
    key      0 1 2 3 4      key      0 1 2 3 4      key      0 1 2 3 4       key      0 1 2 3 4
    query 0  x x x x .      query 0  . . x x .      query 0  . x x x x       query 0  . . x x x
    query 1  x x x x x      query 1  . . . x x      query 1  . x x x x       query 1  . . x x x

A key is visible if every given mask allows it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypedDict

import torch
from torch import Tensor

from .checks import show_value
from .plan_checks import check_is_tensor, check_layout
from .positions import INTEGERS, WHOLE
from .printing import short_repr

Window = tuple[int | None, int | None]
"""Visible slots before and after the query's own: (left, right); None: no limit."""


class MaskOptions(TypedDict, total=False):
    """The mask arguments of `attend`, for signatures with `**masks: Unpack[MaskOptions]`.

    causal     no later slot is visible; the last query is aligned with the last key
    window     n or (left, right): slots before and after the query that are visible, None for no limit
    key_mask   bool (or 0/1 integers) [B, Lk], True for real keys, False for padding
    documents  int ids [B, L], or (query ids, key ids): only keys of the query's document are visible (packing)
    mask       bool (True: visible) or float (added to the scores), broadcasting to [B, H, Lq, Lk]
    """

    causal: bool
    window: int | Window | None
    key_mask: Tensor | None
    documents: Tensor | tuple[Tensor, Tensor] | None
    mask: Tensor | None


@dataclass(frozen=True)
class Mask:
    """The validated mask of one call, as engines read it; `make_mask` makes it from `MaskOptions`.

    Raises nothing itself: `attend` validates what users give.

        >>> posenc.Mask(causal=True).allowed(2, 2, torch.device("cpu")).reshape(2, 2)
        tensor([[ True, False],
                [ True,  True]])
    """

    causal: bool = False
    window: Window | None = None
    key_mask: Tensor | None = None  # bool [B or 1, Lk], True: a real key
    documents: tuple[Tensor, Tensor] | None = None  # int ids [B or 1, Lq], [B or 1, Lk]
    extra: Tensor | None = None  # `mask` as [B or 1, H or 1, Lq or 1, Lk or 1]: bool (True: visible) or float (added)
    __repr__ = short_repr

    @property
    def limits(self) -> Window:
        """(left, right) in slots relative to the bottom-right diagonal, causality included."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def plain(self) -> bool:
        """Whether there is no mask tensor: only causality and a window, or nothing."""
        return self.key_mask is None and self.documents is None and self.extra is None

    def tensors(self) -> list[Tensor]:
        """The tensors that are given."""
        return [x for x in (self.key_mask, *(self.documents or ()), self.extra) if x is not None]

    def allowed(
        self, q_length: int, k_length: int, device, rows: slice = slice(None), columns: slice = slice(None)
    ) -> Tensor | None:
        """The boolean mask of a block, broadcasting to [B, H, lq, lk]; None where every key is visible."""
        parts = []
        left, right = self.limits
        if left is not None or right is not None:
            q = torch.arange(q_length, device=device)[rows] + (k_length - q_length)
            k = torch.arange(k_length, device=device)[columns]
            offset = k[None, :] - q[:, None]
            if right is not None:
                parts.append(offset <= right)
            if left is not None:
                parts.append(offset >= -left)
        by_token = self.allowed_by_token(rows, columns)
        return _every([*parts, by_token] if by_token is not None else parts)

    def allowed_by_token(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor | None:
        """`allowed` without causality and window: what padding, documents and a boolean mask leave visible."""
        parts = []
        if self.key_mask is not None:
            parts.append(self.key_mask[:, None, None, columns])
        if self.documents is not None:
            ours, theirs = self.documents
            parts.append((ours[:, rows, None] == theirs[:, None, columns])[:, None])
        if self.extra is not None and self.extra.dtype == torch.bool:
            parts.append(_block(self.extra, rows, columns))
        return _every(parts)

    def added(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor | None:
        """The additive part of a block, or None."""
        if self.extra is None or self.extra.dtype == torch.bool:
            return None
        return _block(self.extra, rows, columns)


OPEN, CAUSAL = Mask(), Mask(True)


def _every(parts: list[Tensor]) -> Tensor | None:
    """Where all of them are True; None without any."""
    return reduce(operator.and_, parts) if parts else None


def _block(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """A block of a mask whose last two sizes may be 1."""
    rows = slice(None) if mask.shape[-2] == 1 else rows
    columns = slice(None) if mask.shape[-1] == 1 else columns
    return mask[..., rows, columns]


def make_mask(
    q: Tensor, k: Tensor, *, causal: bool = False, window: int | Window | None = None, key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None, **unknown: Any,
) -> Mask:  # fmt: skip
    """Validate `MaskOptions` against q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    if unknown:
        known = f"the masks are {', '.join(MaskOptions.__annotations__)}"
        raise TypeError("; ".join(f"unknown argument {name}: {OTHER_NAMES.get(name, known)}" for name in unknown))
    if causal is not True and causal is not False:
        causal = as_truth("causal", causal)
    if window is None and key_mask is None and documents is None and mask is None:
        return CAUSAL if causal else OPEN
    batch, heads, q_length, _ = q.shape
    k_length = k.shape[2]
    sides = None if window is None else make_window(window)
    if key_mask is not None:
        key_mask = check_key_mask(key_mask, batch, k_length)
        _same_device("key_mask", key_mask, q)
    if documents is not None:
        if isinstance(documents, tuple) and len(documents) != 2:
            raise ValueError(f"documents takes ids [B, L] or (query ids, key ids), got a tuple of {len(documents)}")
        ours, theirs = documents if isinstance(documents, tuple) else (documents, documents)
        for name, ids, length in (("query", ours, q_length), ("key", theirs, k_length)):
            if not isinstance(ids, Tensor):
                raise TypeError(
                    f"{name} documents must be ids, an int tensor [B, L], got {_kind(ids)}; "
                    "use torch.tensor(ids), and a tuple for (query ids, key ids)"
                )
            check_layout("documents", ids)
            if ids.dtype not in INTEGERS:
                raise ValueError(f"{name} documents must be int ids [B, L], got {ids.dtype}; use ids.long()")
            if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
                raise ValueError(
                    f"{name} documents must be ids [B, L] = [{batch}, {length}], got {list(ids.shape)}; "
                    "for different queries and keys give (query ids, key ids)"
                )
            _same_device("documents", ids, q)
        documents = ours, theirs
    if mask is not None:
        target = [batch, heads, q_length, k_length]
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor that broadcasts to [B, H, Lq, Lk], got {_kind(mask)}")
        check_is_tensor("mask", mask)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask must be boolean (True: visible) or floating point (added), got {mask.dtype}")
        shape = [1] * (4 - mask.dim()) + list(mask.shape)
        if mask.dim() < 2 or mask.dim() > 4 or any(a not in (1, b) for a, b in zip(shape, target, strict=True)):
            raise ValueError(f"mask must broadcast to [B, H, Lq, Lk] = {target}, got {list(mask.shape)}")
        _same_device("mask", mask, q)
        mask = mask.reshape(shape)
    return Mask(causal, sides, key_mask, documents, mask)


OTHER_NAMES = {
    "is_causal": "give causal", "attn_mask": "give mask", "attention_mask": "give key_mask [B, Lk], or mask",
    "key_padding_mask": "give key_mask, True for real keys", "dropout_p": "give dropout", "window_size": "give window",
    "scale": "give the plan a scale, Plan(positions, scale=...)", "softmax_scale": "give the plan a scale, Plan(positions, scale=...)",
    "enable_gqa": "leave it out, k and v may have fewer heads", "return_attn_probs": "use scores(q, k, plan).softmax(-1)",
}  # fmt: skip
"""Arguments of PyTorch's and other attention functions -> what to do here."""


def make_window(window: int | Window) -> Window:
    """Validate a window: n becomes (n, n)."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window={window} has {len(sides)} numbers; give n, or (left, right) with None for no limit")
    for side in sides:
        if side is None and sides is window:
            continue
        if isinstance(side, bool) or not isinstance(side, WHOLE):
            raise TypeError(f"window={window!r} must be an integer, or (left, right) with None for no limit")
        if side < 0:
            raise ValueError(f"window={window} must be 0 or more slots (None: no limit)")
    left, right = sides
    return left, right


def check_key_mask(mask: Tensor, batch: int, k_length: int) -> Tensor:
    """A padding mask as bool [B or 1, Lk]; raises where it does not fit."""
    mask = as_bool_mask(mask, "key_mask")
    if mask.dim() != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != k_length:
        raise ValueError(f"key_mask must be [B, Lk] = [{batch}, {k_length}] (True: a real key), got {list(mask.shape)}")
    return mask


def as_bool_mask(mask: Tensor, name: str) -> Tensor:
    """Convert a padding mask [B, Lk] of bools or 0/1 integers to bool. Float masks raise: 0 and -inf of an additive mask
    mean the opposite of 0 and 1. Integer values are validated where reading them costs no synchronisation (on a CPU, or
    in anomaly mode).
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a bool tensor [B, Lk] (True: a real key), got {_kind(mask)}")
    check_layout(name, mask)
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be boolean or 0/1 integers [B, Lk] (1: a real key), got {mask.dtype}; "
            "pass mask= for additive masks"
        )
    readable = mask.is_cpu or (not torch.compiler.is_compiling() and torch.is_anomaly_enabled() and not mask.is_meta)
    if readable and mask.numel() and not torch.compiler.is_compiling():
        lowest, highest = torch.stack(torch.aminmax(mask)).tolist()
        if lowest < 0 or highest > 1:
            raise ValueError(
                f"{name} of integers must be 0 (padding) or 1 (a real key), got {lowest} to {highest}; "
                "pass mask= for additive masks"
            )
    return mask != 0


def as_truth(name: str, value: Any) -> bool:
    """A bool, 0, 1, or a bool of another library."""
    is_symbol = isinstance(value, torch.SymBool)
    if not is_symbol and (isinstance(value, (Tensor, float)) or type(value).__hash__ is None or value not in (0, 1)):
        raise TypeError(f"{name}={show_value(value)} must be True or False")
    return bool(value)


def _kind(value) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; move one of them")
