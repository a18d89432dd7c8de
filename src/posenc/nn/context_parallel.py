"""Attention's forward where ranks share the sequence: x, positions, padding and documents are those of this rank's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.encoding import Encoding
from ..core.mask import as_bool_mask
from ..core.plan import Plan
from ..core.positions import Positions
from ..parallel.blocks import Tokens, positions_of
from ..parallel.collectives import gather_tokens, total
from ..parallel.context import ContextParallel
from ..parallel.functional import attend
from .sequence import count_tokens, document_lengths

if TYPE_CHECKING:
    from .attention import Attention


@dataclass(frozen=True)
class LayerPlan:
    """The plans of a layer, for any positions."""

    encoding: Encoding
    x: Tensor
    host: Attention

    def __call__(self, positions: Positions) -> Plan:
        return self.encoding.plan(positions, x=self.x, host=self.host)

    def with_encoding(self, encoding: Encoding) -> LayerPlan:
        return replace(self, encoding=encoding)


def forward(
    layer: Attention, x: Tensor, context: Tensor | None, *, positions: Tensor | None, context_positions: Tensor | None,
    segments: Any, mask: Tensor | None, key_mask: Tensor | None, documents: Tensor | None, memory: Any, cache: Any,
) -> Tensor:  # fmt: skip
    """x [B, L/N, d_model] -> [B, L/N, d_model]."""
    cp, encoding = layer.context_parallel, layer.encoding
    assert cp is not None
    if memory is not None or cache is not None:
        raise ValueError(
            f"{'memory' if cache is None else 'cache'} cannot be combined with context_parallel, which is for whole sequences; "
            "decode with a layer without it: the state_dict is the same"
        )
    if encoding.embeds_whole:
        raise ValueError(
            f"{type(encoding).__name__} is added to a whole input at once, and this rank has a part of it; "
            "add it to the whole input with embed(), then split_sequence"
        )
    if context is not None and (segments is not None or documents is not None):
        raise ValueError("segments and documents cannot be combined with context; give mask= for the visible keys")
    if context is None and context_positions is not None:
        raise ValueError("context_positions needs context")
    key_mask = None if key_mask is None else as_bool_mask(key_mask, "key_mask")
    length = None
    if context is None:
        counted = encoding.absolute or encoding.length_dependent
        if positions is None and counted and (key_mask is not None or documents is not None):
            positions = _counted(cp, x.shape[0], key_mask, documents)
        if encoding.length_dependent and positions is not None:
            length = _total(cp, x.shape[0], positions, documents)
    axes = _axes(positions)
    if segments is not None:
        axes = (*axes, segments[0] if isinstance(segments, (tuple, list)) else segments)
    x = encoding.embed(x, _side(cp, x, axes))
    states, k_axes = x, axes
    if context is not None:
        k_axes = _axes(context_positions)
        states = encoding.embed(context, _side(cp, context, k_axes))
    q, k, v = layer._heads(layer.q_proj(x)), layer._heads(layer.k_proj(states)), layer._heads(layer.v_proj(states))
    out = attend(
        q, k, v, LayerPlan(encoding, x, layer), context_parallel=cp, positions=axes, k_positions=k_axes, total=length,
        causal=layer.causal and context is None, window=layer.window, key_mask=key_mask, documents=documents, mask=mask,
        dropout=layer.dropout if layer.training else 0.0, engine=layer.engine, table_gradients="local",
        tensor_parallel=None if q.shape[1] == layer.heads else layer.head_mesh(),
    )  # fmt: skip
    return layer.o_proj(out.transpose(1, 2).flatten(2))


def _axes(positions: Tensor | None) -> tuple[Tensor | None, ...]:
    if positions is None or positions.dim() < 3:
        return (positions,)
    return positions.unbind(-1)


def _side(cp: ContextParallel, x: Tensor, axes: tuple[Tensor | None, ...]) -> Positions:
    """The positions of x's tokens, for `embed`."""
    sides = Tokens(cp.segments(x.shape[1]), axes).all_sides(x.device)
    return positions_of(sides, sides)


def _whole(cp: ContextParallel, x: Tensor | None) -> Tensor | None:
    """[B, L/N] of every rank, in the order of the sequence: [B, L] numbers, no states."""
    return None if x is None else gather_tokens(cp, x, 1)


def _counted(cp: ContextParallel, batch: int, key_mask: Tensor | None, documents: Tensor | None) -> Tensor:
    """The number of each real token in its document, whose other tokens may be on other ranks."""
    given = key_mask if documents is None else documents
    assert given is not None
    numbers = count_tokens(_whole(cp, documents), _whole(cp, key_mask), batch)
    return numbers[:, cp.slots(given.shape[1], numbers.device)]


def _total(cp: ContextParallel, batch: int, positions: Tensor, documents: Tensor | None) -> Tensor:
    """The length that a rotation follows: of each row, or of each token's document."""
    positions = positions.expand(batch, *positions.shape[1 if positions.dim() > 1 else 0 :])
    positions = positions if positions.dim() == 2 else positions.amax(-1)
    if documents is None:
        return total(cp, positions.amax(-1).long() + 1, "max")
    ids, numbers = _whole(cp, documents.expand(batch, -1)), _whole(cp, positions)
    assert ids is not None and numbers is not None
    return document_lengths(ids, numbers)[:, cp.slots(documents.shape[1], documents.device)]
