"""KVCache: the keys and values of a model, a slot for each attention layer, with what is known of each token."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..core.torch_modes import is_exporting

if TYPE_CHECKING:
    from .graph_cache import GraphCache


class LayerKey:
    """The name of a layer in caches. A layer holds its own, so that a cache does not keep a model alive; a copy of
    the layer (deepcopy, pickle) has a different one.
    """


class Layer(Protocol):
    """The attributes of an attention layer that a cache reads."""

    layer_idx: int | None
    layer_key: LayerKey


class Appended(NamedTuple):
    """Cached keys and values followed by the new ones, not yet committed to the cache."""

    k: Tensor  # [B, Hkv, L, D]
    v: Tensor
    stored: tuple[Tensor, Tensor]
    length: int
    own: bool


class LayerCache:
    """One layer's slot: keys and values [B, Hkv, L, D] of `length` tokens.

    Keys of an encoding whose rotation depends on the total length are stored unrotated, those of others rotated.
    `marks` holds one fact per token where it was given (positions, key_mask, documents, segments).

    A slot of cross-attention holds the keys of a context, which do not grow: `length` and `marks` count the queries
    so far, `context` holds the facts of the context's keys.

    A forward pass computes with `append` and changes the slot at its end, with `commit`: an error in between leaves it
    unchanged. Storage doubles as it grows, so that a step costs no copy of the past; with `max_length` it is made
    once, with the first tokens, and never moves.
    """

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length
        self.length = 0
        self.marks: dict[str, Tensor] = {}
        self.context: dict[str, Tensor] | None = None
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._own = False  # storage that only this slot refers to: it may be written past `length`
        self._found = False  # by a layer itself, not by the caller
        self._layer: weakref.ref[LayerKey] | None = None

    @property
    def filled(self) -> bool:
        """Whether a forward has succeeded with it."""
        return self._k is not None

    @property
    def k(self) -> Tensor | None:
        return None if self._k is None else self._k[:, :, : self._keys]

    @property
    def v(self) -> Tensor | None:
        return None if self._v is None else self._v[:, :, : self._keys]

    @property
    def _keys(self) -> int | None:
        return self.length if self.context is None else None

    def append(self, k: Tensor, v: Tensor, *, differentiable: bool = False) -> Appended:
        """The stored keys and values followed by k, v [B, Hkv, n, D]; `commit` stores the result.

        differentiable: a graph may hold what the slot has stored, or what it returns.
        """
        length = self.length + k.shape[2]
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"the cache holds {self.length} tokens of at most {self.max_length}, got {k.shape[2]} more; "
                "make a longer KVCache(max_length=...), or crop it"
            )
        differentiable = differentiable or (torch.is_grad_enabled() and k.requires_grad)
        differentiable = differentiable or is_exporting()  # an exported program does not write to its caller's storage
        if self._k is None or self._v is None:
            if self.max_length is None or differentiable:
                return Appended(k, v, (k, v), length, False)  # the caller's tensors: never written to
            stored = _room(k, self.max_length), _room(v, self.max_length)
            stored = self._written(stored[0], k, length), self._written(stored[1], v, length)
            return Appended(stored[0][:, :, :length], stored[1][:, :, :length], stored, length, True)
        for new, old in ((k, self._k), (v, self._v)):
            (rows, heads, _, size), (old_rows, old_heads, _, old_size) = new.shape, old.shape
            if rows != old_rows or heads != old_heads or size != old_size:
                raise ValueError(
                    f"the cache holds keys of shape {list(old.shape[:2])} + [L, {old.shape[3]}], got {list(new.shape)}; "
                    "a slot serves one layer and one batch: make a new KVCache for another"
                )
            if new.dtype != old.dtype or new.device != old.device:
                raise ValueError(
                    f"the cache holds {old.dtype} on {old.device}, got {new.dtype} on {new.device}; "
                    "decode as the cache was filled (autocast included), or make a new KVCache"
                )
        if differentiable or (torch.is_grad_enabled() and self._k.requires_grad):
            k, v = (torch.cat(both, dim=2) for both in ((self.k, k), (self.v, v)))  # type: ignore[arg-type]
            return Appended(k, v, (k, v), length, False)
        stored = self._written(self._k, k, length), self._written(self._v, v, length)
        return Appended(stored[0].narrow(2, 0, length), stored[1].narrow(2, 0, length), stored, length, True)

    def append_in_place(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """The short way of `append`, for eager code without gradients: everything, where it fits into storage that only this slot
        knows; None elsewhere. `length`, once it is set, makes it the slot's."""
        stored_k, stored_v, start = self._k, self._v, self.length
        if not self._own or stored_k is None or stored_v is None or torch.is_grad_enabled():
            return None
        rows, heads, count, size = shape = k.shape
        old_rows, old_heads, room, old_size = old_shape = stored_k.shape
        end = start + count
        if rows != old_rows or heads != old_heads or size != old_size or end > room:
            return None
        if v.shape != shape or stored_v.shape != old_shape or v.get_device() != stored_v.get_device():
            return None  # `append` has values of another size
        if k.dtype is not stored_k.dtype or v.dtype is not stored_v.dtype or k.get_device() != stored_k.get_device():
            return None
        stored_k[:, :, start:end] = k
        stored_v[:, :, start:end] = v
        return stored_k.narrow(2, 0, end), stored_v.narrow(2, 0, end)

    def _written(self, stored: Tensor, new: Tensor, length: int) -> Tensor:
        """Storage with `new` past the tokens so far: this slot's own where it has room."""
        if self._k is not None and (not self._own or length > stored.shape[2]):
            room = max(length, 2 * self.length) if self.max_length is None else self.max_length
            past, stored = stored[:, :, : self.length], _room(stored, room)
            stored[:, :, : self.length] = past.detach()
        stored[:, :, self.length : length] = new
        return stored

    def _moved(self) -> tuple[Tensor, Tensor]:
        """Storage of max_length tokens that only this slot knows, with the tokens so far."""
        assert self._k is not None and self._v is not None
        k, v = (self._written(x, x[:, :, :0], self.length) for x in (self._k, self._v))
        return k, v

    def commit(self, appended: Appended, marks: dict[str, Tensor]) -> None:
        """Make it the slot's. `marks` has every fact of all its tokens."""
        (self._k, self._v), self._own = appended.stored, appended.own
        self.length, self.marks = appended.length, marks

    def commit_cross(
        self, k: Tensor, v: Tensor, context: dict[str, Tensor], length: int, marks: dict[str, Tensor]
    ) -> None:
        """The keys of a context, and `length` queries so far."""
        self._k, self._v, self.context = k, v, context
        self.length, self.marks = length, marks

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B, Hkv, n, D] and return everything."""
        appended = self.append(k, v)
        self.commit(appended, self.marks)
        return appended.k, appended.v

    def check(self, batch: int, cross: bool) -> None:
        """Raise where this slot cannot serve a forward of `batch` rows."""
        if self._k is None:
            return
        if cross != (self.context is not None):
            holds, needs = ("its own", "a context's") if cross else ("a context's", "its own")
            raise ValueError(
                f"this slot holds {holds} keys and was given to attention that needs {needs}; "
                "self-attention and cross-attention need a slot each: cache.layer(key), cache.layer(key, cross=True)"
            )
        if self._k.shape[0] != batch:
            raise ValueError(
                f"the cache holds {self._k.shape[0]} rows and the input has {batch}; a cache serves one batch: "
                "choose rows with cache.reorder(rows), or make a new KVCache"
            )

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows in this order (beam search)."""
        self.__dict__.update(self._reordered(rows))

    def _reordered(self, rows: Tensor) -> dict[str, Any]:
        if self._k is None or self._v is None:
            return {}
        chosen: dict[str, Any] = {
            "_k": _select(self._k, rows), "_v": _select(self._v, rows), "_own": self.context is None,
            "marks": {name: _select(mark, rows) for name, mark in self.marks.items()},
        }  # fmt: skip
        if chosen["_k"].requires_grad:
            chosen["_own"] = False
        if self.context is not None:
            chosen["context"] = {name: _select(fact, rows) for name, fact in self.context.items()}
        return chosen

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} tokens to {length}")
        self.length = length
        self.marks = {name: mark[:, :length] for name, mark in self.marks.items()} if length else {}

    def __copy__(self) -> LayerCache:
        """Shares the storage, which neither writes to any more: the next token copies it."""
        self._own = False
        new = LayerCache(self.max_length)
        new.__dict__.update(self.__dict__)
        new.marks = dict(self.marks)
        new.context = None if self.context is None else dict(self.context)
        return new

    def __deepcopy__(self, memo: dict) -> LayerCache:
        new = self.__copy__()
        if self._k is not None and self._v is not None:
            new._k, new._v = self.k.clone(), self.v.clone()  # type: ignore[union-attr]
        new.marks = {name: mark.clone() for name, mark in self.marks.items()}
        if self.context is not None:
            new.context = {name: fact.clone() for name, fact in self.context.items()}
        new._layer = None
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layer": None}

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        context = "" if self.context is None or self._k is None else f", a context of {self._k.shape[2]}"
        return f"LayerCache({self.length} tokens{context})"


class KVCache:
    """The keys and values of a model's past tokens: one object for a model and a batch, a slot for each layer.

        cache = KVCache()
        for layer in layers:
            x = layer(x, cache=cache)

    An `Attention` finds its own slot: by its `layer_idx`, or else by itself; self-attention and cross-attention of one
    layer have a slot each. `length`, `crop`, `reorder` and copies apply to all layers. Copies are independent, and
    cost no memory until one of them is extended.

    Every layer takes the same tokens in each step. Anything else raises: another batch size, head count, dtype or
    device; two layers with one layer_idx; a layer that is called while others lag behind, or that was not called from
    the start. So does the step after one that failed between two layers: crop(n) to the length before it, then repeat.

    Not detected: a model whose only layer is called twice in each step, and a step that is repeated after every layer had
    taken it (crop first). Layers that share their weights are one module and need explicit slots, as do layers that
    take tokens at a different rate:

        for n in range(12):
            x = shared(x, cache=cache.layer(n))

    Memory: a step writes its keys and values behind the others, in place. Without `max_length` storage doubles when it
    is full, one copy for as many tokens as it holds. With it, storage for max_length tokens is made by the first
    forward (where gradients may be wanted, by the first one without), and nothing is ever copied; more tokens raise.
    Such a cache can serve steps of fixed shapes, for CUDA graphs: `cache.fix_shapes()` (graph_cache.py).

        >>> layer, cache = posenc.Attention(64, 4, encoding="rope", causal=True), posenc.KVCache()
        >>> y = layer(torch.randn(2, 7, 64), cache=cache)  # keys and values are [B, Hkv, L, D]
        >>> cache.length
        7
    """

    def __init__(self, max_length: int | None = None) -> None:
        is_number = isinstance(max_length, int) and not isinstance(max_length, bool)
        if max_length is not None and not (is_number and max_length >= 1):
            raise ValueError(f"max_length={max_length!r} must be a number of tokens, at least 1, or None to grow")
        self.max_length = max_length
        self._layers: dict[tuple[Hashable, bool], LayerCache] = {}

    def layer(self, key: Hashable | Layer, *, cross: bool = False) -> LayerCache:
        """A layer's slot, by an Attention, a layer_idx or any other key; a new one is empty."""
        key = key_of(key)
        slot = self._layers.get((key, cross))
        if slot is None:
            slot = self._layers[key, cross] = LayerCache(self.max_length)
        return slot

    def slot_of(self, layer: Layer, cross: bool, new: int) -> LayerCache:
        """The slot of a layer that is about to take `new` tokens; raises where the layers are out of step."""
        own = layer.layer_key
        key: Hashable = own if layer.layer_idx is None else layer.layer_idx
        slot = self._layers.get((key, cross))
        if slot is None:
            slot = self.layer(key, cross=cross)
        owner = None if slot._layer is None else slot._layer()
        if owner is None or slot._k is None:
            slot._layer = weakref.ref(own)
        elif owner is not own:
            raise ValueError(
                f"two layers have layer_idx={layer.layer_idx}; give each its own "
                "(a copy of a model continues with copy.deepcopy(cache))"
            )
        slot._found = True
        before, after = slot.length, slot.length + new
        for (_, kind), other in self._layers.items() if len(self._layers) > 1 else ():
            if other.length != before and other.length != after and kind == cross and other._found and other.filled:
                raise ValueError(self._out_of_step(slot, cross, before, after))
        return slot

    def _out_of_step(self, slot: LayerCache, cross: bool, before: int, after: int) -> str:
        filled = [o for (_, kind), o in self._layers.items() if kind == cross and o._found and o.filled]
        lengths = sorted({other.length for other in filled if other is not slot})
        return (
            f"this layer is to go from {before} to {after} tokens, and the other layers of the cache hold "
            f"{' or '.join(map(str, lengths))}; call each layer once in a step, with the same tokens. After a step "
            f"that failed: cache.crop({min(other.length for other in filled)}). A layer that is used twice in a step, "
            "or with different tokens, needs explicit slots: layer(x, cache=cache.layer(key))"
        )

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The slots that hold something, in the order of their first call."""
        return tuple(slot for slot in self._layers.values() if slot.filled)

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min((slot.length for slot in self.layers), default=0)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, in every layer (the context of cross-attention stays)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} tokens to {length}")
        for slot in self.layers:
            slot.crop(length)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows in this order, in every layer (beam search)."""
        changes = [(slot, slot._reordered(rows)) for slot in self.layers]  # all, before one of them changes
        for slot, change in changes:
            slot.__dict__.update(change)

    def fix_shapes(self) -> GraphCache:
        """This cache for steps of one token whose shapes and addresses stay the same; see GraphCache."""
        from .graph_cache import GraphCache

        return GraphCache(self)

    def copy(self) -> KVCache:
        """An independent cache with the same tokens, as copy.copy: shared storage is copied when one of them is extended."""
        return self.__copy__()

    def __copy__(self) -> KVCache:
        new = KVCache(self.max_length)
        new._layers = {key: slot.__copy__() for key, slot in self._layers.items()}
        return new

    def __deepcopy__(self, memo: dict) -> KVCache:
        new = KVCache(self.max_length)
        for (key, cross), slot in self._layers.items():
            # a layer that is copied together with its cache has a new key; otherwise it can use both caches
            new._layers[memo.get(id(key), key), cross] = slot.__deepcopy__(memo)
        return new

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"KVCache({self.length} tokens, {len(self.layers)} layers)"


def find_slot(cache: KVCache | LayerCache | None, layer: Layer, x: Tensor, cross: bool) -> LayerCache | None:
    """The slot for a layer's input x [B, L, ..], which may be given itself."""
    if cache is None:
        return None
    if isinstance(cache, KVCache):
        slot = cache.slot_of(layer, cross, x.shape[1])
    elif isinstance(cache, LayerCache):
        slot = cache
    else:
        raise TypeError(f"cache must be a KVCache, or a slot of one, cache.layer(key); got {type(cache).__name__}")
    slot.check(x.shape[0], cross)
    return slot


def is_training(layer: nn.Module, x: Tensor) -> bool:
    """Whether autograd may save the keys of x: storage must not be written in place then."""
    return torch.is_grad_enabled() and (x.requires_grad or any(one.requires_grad for one in layer.parameters()))


def key_of(layer: Any) -> Hashable:
    """The key of a layer's slot: its layer_idx, or else its layer_key; anything that is not a layer is a key itself."""
    own = getattr(layer, "layer_key", None)
    if not isinstance(own, LayerKey):
        return layer
    return own if layer.layer_idx is None else layer.layer_idx


def _room(like: Tensor, length: int) -> Tensor:
    """Fresh storage. Zeros: steps of fixed shapes read slots that are not filled yet with weight 0, and 0 times NaN is NaN.
    It is not an inference tensor even in inference mode: the cache may be used outside of it."""
    shape = (*like.shape[:2], length, like.shape[3])
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return tensor.index_select(0, rows)
    with torch.inference_mode(False), torch.no_grad():
        return tensor.index_select(0, rows)
