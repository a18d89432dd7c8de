"""GraphCache: decoding steps whose shapes and addresses stay the same, so that one can be captured as a CUDA graph.

    cache = KVCache(max_length=512)
    model(prompt, cache=cache)                             as usual
    fixed = cache.fix_shapes()
    with torch.cuda.graph(graph):                          after a warm-up, see PyTorch's documentation
        y = model(x, cache=fixed)                          x [B, 1, d_model]
        fixed.advance()
    for token in ...:
        x.copy_(...)
        graph.replay()
    fixed.write_back()                                     the cache continues as usual

Attention runs over all max_length keys; a mask on the device hides those that are not written yet, and the kernels skip them. The number of tokens is a tensor too:

    before a step      keys  k0 k1 k2 .  .  .          length 3          key_mask  1 1 1 1 0 0      the new token included
    advance            keys  k0 k1 k2 k3 .  .          length 4          key_mask  1 1 1 1 1 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.positions import Positions
from ..functional import attend
from .cache import KVCache, Layer, LayerCache, is_training, key_of

if TYPE_CHECKING:
    from .attention import Attention


class GraphCache:
    """A KVCache with max_length and a prompt, for steps of one token. Without gradients; one `advance()` after each step, when
    every layer has taken its token. More than max_length tokens raise in eager steps, and fail on the device in replayed ones.
    """

    def __init__(self, cache: KVCache):
        slots = cache.layers
        if cache.max_length is None or not slots:
            raise ValueError(
                f"fixed shapes need KVCache(max_length=...) with a prompt in it, got max_length={cache.max_length} and "
                f"{cache.length} tokens; run the model on the prompt first"
            )
        for slot in slots:
            self._check(slot, cache.length)
        self.cache, self.max_length, self.tokens = cache, cache.max_length, cache.length
        k = slots[0].k
        assert k is not None
        self.length = torch.full((1,), self.tokens, dtype=torch.int64, device=k.device)
        """Tokens so far, on the device: the position of the next one."""
        self.slots = torch.arange(self.max_length, device=k.device)
        known = slots[0].marks.get("key_mask")
        rows = 1 if known is None else known.shape[0]
        self.key_mask = torch.zeros(rows, self.max_length, dtype=torch.bool, device=k.device)
        self.key_mask[:, : self.tokens] = True if known is None else known
        self._show_next()

    def _check(self, slot: LayerCache, length: int) -> None:
        if slot.context is not None:
            raise ValueError("fixed shapes are for self-attention; this cache holds keys of a context too")
        if slot.length != length:
            raise ValueError(f"the layers hold {slot.length} and {length} tokens; crop the cache to one length first")
        others = sorted(set(slot.marks) - {"key_mask"})
        if others:
            raise ValueError(f"the prompt was given with {', '.join(others)}; fixed shapes support key_mask only")
        if not slot._own:
            slot._k, slot._v = slot._moved()
            slot._own = True

    def _show_next(self) -> None:
        self.key_mask.index_fill_(1, self.length.clamp(max=self.max_length - 1), True)

    def advance(self) -> None:
        """Every layer has taken the step's token."""
        self.tokens += 1
        self.length += 1
        self._show_next()

    def write_back(self) -> KVCache:
        """The ordinary cache with all tokens so far. Waits for the device."""
        self.tokens = int(self.length)
        for slot in self.cache.layers:
            if "key_mask" in slot.marks:
                slot.marks = {"key_mask": self.key_mask[:, : self.tokens].clone()}
            slot.length = self.tokens
        return self.cache

    def slot_of(self, layer: Layer) -> LayerCache:
        slot = self.cache.layer(key_of(layer))
        if not slot.filled:
            raise ValueError("the cache has no keys of this layer; run the whole model on the prompt first")
        return slot


def run_fixed(layer: Attention, x: Tensor, cache: GraphCache) -> Tensor:
    """`layer(x, cache=cache)` for one token."""
    encoding = layer.encoding
    if x.shape[1] != 1 or is_training(layer, x):
        raise ValueError(f"fixed shapes are for one token without gradients (torch.no_grad()), got {x.shape[1]} tokens")
    if encoding.length_dependent or encoding.embeds_whole or (encoding.absolute and cache.key_mask.shape[0] > 1):
        raise ValueError(
            f"{type(encoding).__name__} depends on the whole text here, which fixed shapes do not have; use the cache itself"
        )
    if cache.tokens >= cache.max_length:
        raise ValueError(f"the cache is full: {cache.max_length} tokens; make a longer KVCache(max_length=...)")
    slot = cache.slot_of(layer)
    new = Positions((cache.length, 1))
    x = encoding.embed(x, new)
    q, k, v = layer._heads(layer.q_proj(x)), layer._heads(layer.k_proj(x)), layer._heads(layer.v_proj(x))
    rotation = encoding.rotation(new)
    plan = encoding.terms(Positions((cache.length, 1), cache.max_length), x=x, host=layer)
    if rotation is not None:
        q, plan = plan.take_shift(q)
        q, k, v = rotation.rotate_qkv(q, k, v)
    stored_k, stored_v = slot._k, slot._v
    assert stored_k is not None and stored_v is not None
    stored_k.index_copy_(2, cache.length, k)
    stored_v.index_copy_(2, cache.length, v)
    out = attend(
        q, stored_k, stored_v, plan, key_mask=_visible(layer, cache), dropout=layer.dropout if layer.training else 0.0,
        engine=layer.engine,
    )  # fmt: skip
    return layer.o_proj(out.transpose(1, 2).flatten(2))


def _visible(layer: Attention, cache: GraphCache) -> Tensor:
    """[B or 1, max_length]; windows count from the newest token, not from the last key."""
    left = layer.window[0] if isinstance(layer.window, tuple) else layer.window
    return cache.key_mask if left is None else cache.key_mask & (cache.slots >= cache.length - left)
