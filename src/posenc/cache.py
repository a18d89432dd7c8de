"""KVCache: the keys and values of one attention layer, with what is known of each token."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values seen so far, [B, Hkv, L, D], one cache for each Attention layer.

    `Attention` fills it. Keys of a scheme whose rotation depends on the total length are stored unrotated, those of
    others rotated. `marks` holds one fact per token where it was given (positions, key_mask, documents, segments).
    Storage doubles as it grows, so that a step costs no copy of the past.
    """

    def __init__(self) -> None:
        self.length = 0
        self.marks: dict[str, Tensor] = {}
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._own = False  # the first keys are the caller's: never written to

    @property
    def k(self) -> Tensor | None:
        return None if self._k is None else self._k[:, :, : self.length]

    @property
    def v(self) -> Tensor | None:
        return None if self._v is None else self._v[:, :, : self.length]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B, Hkv, n, D] and return everything."""
        if self._k is None or self._v is None:
            self._k, self._v = k, v
        else:
            if k.shape[:2] != self._k.shape[:2] or k.shape[3] != self._k.shape[3]:
                raise ValueError(
                    f"the cache holds keys of shape {list(self._k.shape[:2])} + [L, {self._k.shape[3]}], "
                    f"got {list(k.shape)}; a cache serves one layer and one batch"
                )
            self._k, self._v = self._append(self._k, k), self._append(self._v, v)
            self._own = True
        self.length += k.shape[2]
        return self._k[:, :, : self.length], self._v[:, :, : self.length]

    def _append(self, stored: Tensor, new: Tensor) -> Tensor:
        """`new` behind the tokens so far, in place where there is room and no gradient to keep."""
        if torch.is_grad_enabled() and (stored.requires_grad or new.requires_grad):
            return torch.cat((stored[:, :, : self.length], new), dim=2)
        end = self.length + new.shape[2]
        if end > stored.shape[2] or stored.requires_grad or not self._own:
            grown = stored.new_empty(*stored.shape[:2], max(end, 2 * self.length), stored.shape[3])
            grown[:, :, : self.length] = stored[:, :, : self.length].detach()
            stored = grown
        stored[:, :, self.length : end] = new
        return stored

    def mark(self, name: str, past: Tensor, new: Tensor) -> Tensor:
        """Append a fact [B, n, ...] about the new tokens; `past` [B, L, ...] stands for tokens it was not given for."""
        known = self.marks.get(name, past)
        joined = torch.cat((known.expand(new.shape[0], *known.shape[1:]), new), dim=1)
        self.marks[name] = joined
        return joined

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows in this order (beam search)."""
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)
        self.marks = {name: mark.index_select(0, rows) for name, mark in self.marks.items()}

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} tokens to {length}")
        self.length = length
        self.marks = {name: mark[:, :length] for name, mark in self.marks.items()}

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"KVCache({self.length} tokens)"
