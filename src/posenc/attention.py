"""Attention: projections around `attend`, with any scheme, for training, packing, padding and decoding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from .cache import KVCache
from .dispatch import attend
from .formulas import head_size
from .plan import Plan
from .registry import create
from .scheme import Scheme
from .tokens import Tokens, describe
from .where import Where


class Attention(nn.Module):
    """Multi-head attention with a positional encoding.

        attn = Attention(512, 8, kv_heads=2, position="rope", causal=True)
        y = attn(x)                                     x, y [B, L, d_model]

    position   a Scheme, a scheme's name, or None. One scheme instance may serve many layers (a shared table).
               Absolute schemes are added to this layer's input; in a stack add them once, with `scheme.embed`.
    kv_heads   fewer key heads than query heads (grouped queries)
    causal     no query sees a later key (among its own kind: a context is seen whole)
    window     keys at most this many slots away: n, or (left, right)
    engine     "auto", or one engine by name
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        position: Scheme | str | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        out_bias: bool | None = None,
        engine: str = "auto",
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
        head_dim = head_size(d_model, heads, head_dim)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
        if isinstance(position, str):
            position = create(position, d_model=d_model, heads=heads, head_dim=head_dim)
        elif not (position is None or isinstance(position, Scheme)):
            raise TypeError(f"position must be a Scheme, a scheme's name or None, got {type(position).__name__}")
        self.d_model, self.heads, self.kv_heads, self.head_dim = d_model, heads, kv_heads, head_dim
        self.causal, self.window, self.dropout, self.engine = causal, window, dropout, engine
        self.position = Scheme() if position is None else position
        self.q_proj = nn.Linear(d_model, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, d_model, bias=bias if out_bias is None else out_bias)
        self.position.reset_host(self)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        segments: Tensor | tuple[Tensor, tuple[int, int]] | None = None,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        documents: Tensor | None = None,
        memory: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x [B, L, d_model] -> [B, L, d_model].

        context            attend to these states instead of x (cross-attention), with context_positions
        positions          int [L], [B, L] or [B, L, axes]; default: consecutive, after the cache or memory
        segments           int [B, L], a second axis of positions (XLNet); or (segments, (lowest, highest)): with the bounds
                           nothing is read from the device, and a compiled layer can use the triton engine
                           (with a cache they are not used: what it holds may lie outside)
        mask               bool (True: may be seen) or float (added), broadcasting to [B, H, L, keys]
        key_mask           bool [B, L] (or over all keys, cached ones included), True for real tokens
        documents          int [B, L]: tokens see their own document only (packing)
        memory             earlier states [B, M, d_model], seen before x, not queried (Transformer-XL)
        cache              a KVCache: its keys are seen before x's, and x's are added to it
        """
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x must be [B, L, {self.d_model}], got {list(x.shape)}")
        if context is not None:
            given = {"segments": segments, "documents": documents, "memory": memory}
            unused = [name for name, value in given.items() if value is not None]
            if unused:
                raise ValueError(f"{', '.join(unused)} cannot go with context; say what may be seen with mask")
            return self._cross(x, context, positions, context_positions, mask, key_mask, cache)
        if context_positions is not None:
            raise ValueError("context_positions goes with context")
        if memory is not None and cache is not None:
            raise ValueError("give memory (states) or cache (keys and values), not both")
        if memory is not None and (memory.dim() != 3 or memory.shape[::2] != x.shape[::2]):
            raise ValueError(f"memory must be [{x.shape[0]}, M, {self.d_model}], got {list(memory.shape)}")
        told = describe(
            x, memory=0 if memory is None else memory.shape[1], cache=cache, positions=positions, segments=segments,
            key_mask=key_mask, documents=documents, count_real=self.position.absolute or self.position.length_dependent,
        )  # fmt: skip
        states = x if memory is None else torch.cat((memory.to(x.dtype), x), dim=1)
        states = self.position.embed(states, Where(told.new.k))
        x = states if memory is None else states[:, memory.shape[1] :]
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        if cache is None:
            plan = self.position.plan(told.all, x=x, host=self)
        elif self.position.length_dependent:
            k, v = cache.extend(k, v)
            plan = self.position.plan(told.all, x=x, host=self)
        else:
            k, v, plan = self._rotated_into(cache, k, v, told, x)
        return self._attend(q, k, v, plan, self.causal, told.key_mask, told.documents, mask)

    def _rotated_into(
        self, cache: KVCache, k: Tensor, v: Tensor, told: Tokens, x: Tensor
    ) -> tuple[Tensor, Tensor, Plan]:
        """Fixed rotations are applied to new keys once, before they are cached."""
        rotation = self.position.rotation(told.new)
        plan = self.position.terms(told.all, x=x, host=self)
        if rotation is not None:
            if rotation.values:
                v = rotation.keys(v)
            k = rotation.keys(k)
            plan = replace(plan, rotate=replace(rotation, k=None, values=False))
        k, v = cache.extend(k, v)
        return k, v, plan

    def _cross(self, x, context, positions, context_positions, mask, key_mask, cache) -> Tensor:
        if context.dim() != 3 or context.shape[::2] != x.shape[::2]:
            raise ValueError(f"context must be [{x.shape[0]}, M, {self.d_model}], got {list(context.shape)}")
        where = Where(
            x.shape[1] if positions is None else positions,
            context.shape[1] if context_positions is None else context_positions,
        )
        x = self.position.embed(x, Where(where.q))
        q = self._heads(self.q_proj(x))
        if cache is not None and cache.k is not None and cache.v is not None:
            if cache.length != context.shape[1]:
                raise ValueError(f"the cache holds {cache.length} context keys, the context has {context.shape[1]}")
            k, v = cache.k, cache.v
        else:
            context = self.position.embed(context, Where(where.k))
            k, v = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
            if cache is not None:
                k, v = cache.extend(k, v)
        plan = self.position.plan(where, x=x, host=self)
        return self._attend(q, k, v, plan, False, key_mask, None, mask)

    def _attend(self, q, k, v, plan, causal, key_mask, documents, mask) -> Tensor:
        out = attend(
            q, k, v, plan, causal=causal, window=self.window, key_mask=key_mask, documents=documents, mask=mask,
            dropout=self.dropout if self.training else 0.0, engine=self.engine,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, L, heads * D] -> [B, heads, L, D]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
