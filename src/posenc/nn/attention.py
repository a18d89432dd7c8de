"""Attention: projections around `attend`, with any encoding, for training, packing, padding and decoding."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.encoding import Encoding, follow_assigned
from ..core.formulas import head_size
from ..core.mask import Window, as_truth, make_window
from ..core.options import WIDEST, require_int, require_number
from ..core.plan import Plan
from ..core.plan_checks import check_states
from ..core.positions import Positions
from ..core.rotation import Rotation
from ..core.torch_modes import call_like
from ..encodings.registry import causal_options, create, options_of
from ..functional import attend
from . import plain_forward
from .cache import KVCache, LayerCache, LayerKey, find_slot, is_training
from .graph_cache import GraphCache, run_fixed
from .sequence import (
    are_slots,
    keep_numbers,
    refuse_part,
    resolve_context,
    resolve_masks,
    resolve_queries,
    resolve_sequence,
)

if TYPE_CHECKING:
    from ..parallel.context import ContextParallel, Strategy


class Attention(nn.Module):
    """Multi-head attention with a positional encoding.

        attn = Attention(512, 8, kv_heads=2, encoding="rope", causal=True)
        y = attn(x)                                     x, y [B, L, d_model]

    encoding   an Encoding, an encoding's name, or None. One encoding instance may serve many layers (a shared table).
               With a name, a causal layer uses the variant for past keys where there is one (`causal_options`): t5,
               transformer_xl, xlnet, shaw and clipped. It gives all later keys of a context distance 0, so
               cross-attention needs a layer that is not causal.
               Absolute encodings are added to this layer's input; in a stack add them once, with `encoding.embed`.
    kv_heads   fewer key heads than query heads (grouped queries)
    head_dim   channels of a head; None: d_model / heads
    causal     later keys are masked; in cross-attention the whole context is visible
    window     keys at most this many slots away: n, or (left, right)
    dropout    of the probabilities, in training mode
    bias       of the projections of queries, keys and values, and of the output unless out_bias is given
    engine     "auto", or one engine by name
    context_parallel  mesh["cp"], or a posenc.parallel.ContextParallel: x is this rank's part of the sequence, cut by
               posenc.parallel.split_sequence; positions, key_mask and documents too. For training and prefill: no cache
    strategy   how attention crosses the ranks: "ulysses", "gather", "ring" or "auto"
    layer_idx  the layer's name in a KVCache; None: the layer itself. With a number a copy of the model (deepcopy,
               pickle) can continue with a copy of the cache

    Raises OptionError for sizes and options that do not fit, ValueError for an x of another shape.

        >>> posenc.Attention(64, 4, encoding="t5", causal=True)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self, d_model: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None,
        encoding: Encoding | str | None = None, causal: bool = False, window: int | Window | None = None,
        dropout: float = 0.0, bias: bool = False, out_bias: bool | None = None, engine: str = "auto",
        layer_idx: int | None = None, context_parallel: Any = None, strategy: Strategy | None = None,
    ):  # fmt: skip
        super().__init__()
        head_dim = head_size(d_model, heads, head_dim)
        kv_heads = heads if kv_heads is None else require_int("kv_heads", kv_heads, least=1, most=WIDEST)
        if heads % kv_heads:
            raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
        causal, bias = as_truth("causal", causal), as_truth("bias", bias)
        out_bias = bias if out_bias is None else as_truth("out_bias", out_bias)
        require_number("dropout", dropout, least=0.0, below=1.0)
        if window is not None:
            make_window(window)
        if isinstance(encoding, str):
            options: dict[str, Any] = causal_options(encoding) if causal else {}
            if kv_heads != heads and "kv_heads" in options_of(encoding):  # it has a rotation for each key head
                options["kv_heads"] = kv_heads
            encoding = create(encoding, d_model=d_model, heads=heads, head_dim=head_dim, **options)
        elif not (encoding is None or isinstance(encoding, Encoding)):
            given = f"the class {encoding.__name__}" if isinstance(encoding, type) else type(encoding).__name__
            raise TypeError(
                f"encoding must be an Encoding, an encoding's name or None, got {given}; give an object or a name"
            )
        self.d_model, self.heads, self.kv_heads, self.head_dim = d_model, heads, kv_heads, head_dim
        self.causal, self.window, self.dropout, self.engine = causal, window, dropout, engine
        self.encoding = Encoding() if encoding is None else encoding
        self.layer_idx, self.layer_key = layer_idx, LayerKey()
        self.register_load_state_dict_post_hook(follow_assigned)
        if strategy is not None and context_parallel is None:
            raise ValueError(f"strategy={strategy!r} needs context_parallel=mesh['cp']")
        self.context_parallel: ContextParallel | None = None
        if context_parallel is not None:
            from ..parallel.context import as_context

            self.context_parallel = as_context(context_parallel, strategy)
        misfit = self.encoding.check_causal(causal)
        if misfit is not None:
            warnings.warn(misfit, stacklevel=2)
        self.q_proj = nn.Linear(d_model, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, d_model, bias=out_bias)
        self.encoding.reset_host(self)

    def extra_repr(self) -> str:
        """The sizes, and the options that differ from their defaults."""
        defaults = dict(kv_heads=self.heads, causal=False, window=None, dropout=0.0, engine="auto", layer_idx=None)
        given = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        return ", ".join([f"{self.d_model}, heads={self.heads}", *(f"{name}={x!r}" for name, x in given.items())])

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, positions: Tensor | None = None,
        context_positions: Tensor | None = None, segments: Tensor | tuple[Tensor, tuple[int, int]] | None = None,
        mask: Tensor | None = None, key_mask: Tensor | None = None, documents: Tensor | None = None,
        memory: Tensor | None = None, cache: KVCache | LayerCache | GraphCache | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, L, d_model] -> [B, L, d_model].

        context            attend to these states instead of x (cross-attention), with context_positions
        positions          int [L], [B, L] or [B, L, axes]; default: consecutive, after the cache or memory. For encodings
                           that depend on absolute positions (learned, sinusoidal, rotations that follow the length,
                           ...) the default counts the real tokens of each document
        segments           int [B, L], a second axis of positions (XLNet); or (segments, (lowest, highest)): with the bounds
                           nothing is read from the device, and a compiled layer can use the triton engine
                           (not used with a cache, whose segments may lie outside)
        mask               bool (True: visible) or float (added), broadcasting to [B, H, L, keys]
        key_mask           bool [B, L] (or over all keys, cached ones included), True for real tokens
        documents          int [B, L]: only keys of the query's document are visible (packing)
        memory             earlier states [B, M, d_model]: keys before x's, no queries (Transformer-XL)
        cache              a KVCache, one for all layers of a model: x's keys are appended to this layer's; or one slot
                           of it, `cache.layer(key)`. A context's keys are cached by the first call. A forward that
                           raises leaves the cache unchanged. `cache.fix_shapes()`: one token, in fixed shapes
        """
        if (
            not isinstance(x, Tensor)
            or x.layout is not torch.strided
            or x.is_nested
            or x.dim() != 3
            or x.shape[2] != self.d_model
        ):
            check_states("x", x, self.d_model)
        if (
            positions is not None and cache is None and memory is None and context is None and segments is None
            and self.context_parallel is None and are_slots(positions, x)
        ):  # fmt: skip
            counts = self.encoding.absolute or self.encoding.length_dependent  # the real tokens of each document
            if not counts or (key_mask is None and documents is None):
                positions = None
        if (
            positions is None and segments is None and memory is None and context is None and context_positions is None
            and self.context_parallel is None and not isinstance(cache, GraphCache)
        ):  # fmt: skip
            slot = None if cache is None else self._slot(cache, x, cross=False)
            encoding: Any = self._modules["encoding"]
            if mask is None and key_mask is None and documents is None and (slot is None or not slot.marks):
                if not encoding.keeps:
                    return plain_forward.forward(self, x, slot, {})
            elif not encoding.keeps and not torch.compiler.is_compiling():
                if not (encoding.absolute and encoding.acts_inside) and not encoding.length_dependent:
                    masks = resolve_masks(x, slot, key_mask, documents, mask)
                    if masks is not None:
                        return plain_forward.forward(self, x, slot, masks)
        if self.context_parallel is not None:
            from .context_parallel import forward

            return forward(
                self, x, context, positions=positions, context_positions=context_positions, segments=segments,
                mask=mask, key_mask=key_mask, documents=documents, memory=memory, cache=cache,
            )  # fmt: skip
        if context is not None:
            given = {"segments": segments, "documents": documents, "memory": memory}
            unused = ", ".join(name for name, value in given.items() if value is not None)
            if unused:
                raise ValueError(f"{unused} cannot be combined with context; give mask= for the visible keys")
            return self._cross(x, context, positions, context_positions, mask, key_mask, cache)
        if context_positions is not None:
            raise ValueError("context_positions needs context")
        if memory is not None and cache is not None:
            raise ValueError("give memory (states) or cache (keys and values), not both")
        if isinstance(cache, GraphCache):
            if any(one is not None for one in (positions, segments, mask, key_mask, documents)):
                raise ValueError("a step of fixed shapes takes only x and the cache; give masks with the prompt")
            return run_fixed(self, x, cache)
        if memory is not None:
            check_states("memory", memory, self.d_model, x.shape[0])
        slot = None if cache is None else self._slot(cache, x, cross=False)
        sequence = resolve_sequence(
            self.encoding, x, cache=slot, positions=positions, key_mask=key_mask, documents=documents, segments=segments,
            memory=0 if memory is None else memory.shape[1],
        )  # fmt: skip
        states = x if memory is None else torch.cat((memory.to(x.dtype), x), dim=1)
        states = self.encoding.embed(states, sequence.inputs)
        x = states if memory is None else states[:, memory.shape[1] :]
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        kept = keep_numbers(self.encoding, states, slot, sequence)
        appended = None
        if slot is None or self.encoding.length_dependent:
            plan = self.encoding.plan(sequence.all, x=x, host=self, kept=kept)
        else:
            rotation = self.encoding.rotation(sequence.new)
            plan = self.encoding.terms(sequence.all, x=x, host=self, **({} if kept is None else {"kept": kept}))
            k, v, plan = _rotate_keys(k, v, rotation, plan)
        if slot is not None:
            appended = slot.append(k, v, differentiable=is_training(self, q))
            k, v = appended.k, appended.v
        out = self._attend(q, k, v, plan, self.causal, sequence.key_mask, sequence.documents, mask)
        if slot is not None and appended is not None:
            slot.commit(appended, sequence.marks)  # last: an error above leaves the cache unchanged
        return out

    if TYPE_CHECKING:

        @call_like(forward)
        def __call__(self, *args: Any, **options: Any) -> Tensor: ...

    def _slot(self, cache: KVCache | LayerCache | None, x: Tensor, *, cross: bool) -> LayerCache | None:
        slot = find_slot(cache, self, x, cross)
        if slot is not None and slot.length and self._modules["encoding"].embeds_whole:  # type: ignore[union-attr]
            refuse_part(self.encoding, slot)
        return slot

    def _cross(self, x, context, positions, context_positions, mask, key_mask, cache) -> Tensor:
        check_states("context", context, self.d_model, x.shape[0])
        if self.encoding.keep(x[:, :0]) is not None:
            raise ValueError(
                f"{type(self.encoding).__name__} keeps numbers of each token along one sequence, and a context is another; "
                "use another encoding for cross-attention, or none"
            )
        if cache is None and positions is None and context_positions is None and mask is None:
            out = plain_forward.attend_context(self, x, context, key_mask)
            if out is not None:
                return out
        slot = self._slot(cache, x, cross=True)
        q_side, marks = resolve_queries(x, slot, positions)
        k_side, facts = resolve_context(context, slot, context_positions, key_mask)
        positions = Positions(q_side, k_side)
        self.encoding.check_axes(positions)
        x = self.encoding.embed(x, Positions(q_side))
        q = self._heads(self.q_proj(x))
        if slot is not None and slot.filled:
            k, v, facts = _cached_context(slot, context.shape[1], facts)
        else:
            context = self.encoding.embed(context, Positions(k_side))
            k, v = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        if slot is None or self.encoding.length_dependent:
            plan = self.encoding.plan(positions, x=x, host=self)
        else:
            rotation = self.encoding.rotation(Positions(q_side) if slot.filled else positions)
            if rotation is not None and slot.filled:
                rotation = replace(rotation, k=None)  # the cached keys are rotated
            k, v, plan = _rotate_keys(k, v, rotation, self.encoding.terms(positions, x=x, host=self))
        out = self._attend(q, k, v, plan, False, facts.get("key_mask"), None, mask)
        if slot is not None:
            slot.commit_cross(k, v, facts, slot.length + x.shape[1], marks)
        return out

    def _attend(self, q, k, v, plan, causal, key_mask, documents, mask) -> Tensor:
        if q.shape[1] != self.heads:
            plan = self._own_heads(plan, q)
        k, v = plain_forward.as_appended(k, v, plan)
        out = attend(
            q, k, v, plan, causal=causal, window=self.window, key_mask=key_mask, documents=documents, mask=mask,
            dropout=self.dropout if self.training else 0.0, engine=self.engine,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _own_heads(self, plan: Plan, q: Tensor) -> Plan:
        """The plan of q's heads: under tensor parallelism the projections have some of them."""
        from ..parallel.tensor import split_heads

        return split_heads(plan, self.head_mesh(), q)

    def head_mesh(self) -> Any:
        """The mesh of tensor parallelism, over which the query projection is cut."""
        mesh = getattr(self.q_proj.weight, "device_mesh", None)
        if mesh is None:
            raise ValueError(
                f"q_proj must return {self.heads} heads of {self.head_dim}, except under tensor parallelism"
            )
        return mesh

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, L, heads * D] -> [B, heads, L, D]."""
        batch, length = projected.shape[:2]
        heads = projected.shape[-1] // self.head_dim
        if length == 1:  # the same numbers in the same order
            return projected.view(batch, heads, 1, self.head_dim)
        return projected.view(batch, length, heads, self.head_dim).transpose(1, 2)


def _rotate_keys(k: Tensor, v: Tensor, rotation: Rotation | None, plan: Plan) -> tuple[Tensor, Tensor, Plan]:
    """Keys (and values) as they are cached, where the rotation does not depend on the length; the plan rotates the queries."""
    if rotation is None:
        return k, v, plan
    v = rotation.rotate_k(v) if rotation.values else v
    return rotation.rotate_k(k), v, replace(plan, rotate=replace(rotation, k=None, values=False))


def _cached_context(
    slot: LayerCache, length: int, facts: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The cached keys and values of a context, and what is known of them."""
    k, v = slot.k, slot.v
    assert k is not None and v is not None
    if k.shape[2] != length:
        raise ValueError(
            f"the cache holds {k.shape[2]} context keys, the context has {length}; "
            "give the context that filled it, or a new KVCache"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling and k.is_inference() and not torch.is_inference_mode_enabled():  # autograd may not save those
        k, v, facts = k.clone(), v.clone(), {name: fact.clone() for name, fact in facts.items()}
    return k, v, facts
