"""Build encodings, and the attention layers around them, from specifications, with the options that make a comparison fair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

import posenc

from ..core.errors import OptionError
from ..encodings import spec
from ..encodings.registry import OWN_ATTENTION
from . import own_attention

if TYPE_CHECKING:
    from ..parallel import ContextParallel

SHARED = {"t5", "kerple"}
"""Encodings whose authors use one table for the whole stack; the others get one instance a layer."""


def fair_options(name: str, *, causal: bool, longest: int) -> dict[str, Any]:
    """Options that the comparison sets; options of the specification override them.

    T5 divides by sqrt(d) like all the others; a learned table ends at the longest training input, since rows that
    training never reaches would be noise.
    """
    fair: dict[str, dict[str, Any]] = {
        "t5": {"causal": causal, "scale": None},
        "learned": {"max_length": longest},
        "transformer_xl": {"causal": causal},
        "xlnet": {"attn_type": "uni" if causal else "bi"},
    }
    return fair.get(name, {})


def build_attention(
    text: str, *, width: int, heads: int, layers: int, causal: bool, longest: int, engine: str = "auto",
    context: ContextParallel | None = None,
) -> tuple[posenc.Encoding | None, list[nn.Module]]:  # fmt: skip
    """The encoding that enters at the input, if it does, and one attention layer for each block."""
    name, options = spec.parse_options(text)
    if name in OWN_ATTENTION:
        if context is not None:
            raise OptionError(f"{name} does not run on a sequence that processes share; leave --shard sequence out")
        return None, own_attention.build(name, options, width=width, heads=heads, layers=layers, causal=causal)
    each = build(text, width=width, heads=heads, layers=layers, causal=causal, longest=longest)
    absolute = type(each[0]).embed is not posenc.Encoding.embed
    made: list[nn.Module] = [
        posenc.Attention(width, heads, encoding=one, causal=causal, engine=engine, context_parallel=context)
        for one in ([None] * len(each) if absolute else each)
    ]
    return (each[0] if absolute else None), made


def build(text: str, *, width: int, heads: int, layers: int, causal: bool, longest: int) -> list[posenc.Encoding]:
    """One encoding per layer (one instance for all layers if the encoding is shared) from its specification."""
    name, options = spec.parse_options(text)
    options = {**fair_options(name, causal=causal, longest=longest), **options}
    count = 1 if name in SHARED else layers
    encodings = [posenc.create(name, d_model=width, heads=heads, **options) for _ in range(count)]
    return encodings * (layers // count)


def build_extended(text: str, extension: str, *, width: int, heads: int, longest: int) -> posenc.Encoding:
    """A rotary encoding with a context extension. It adds no parameters, so trained weights are used unchanged."""
    name, options = spec.parse_options(text)
    scaling = spec.make_extension(name, f"{text}+{extension}", extension, longest)
    return posenc.create(name, d_model=width, heads=heads, **options, scaling=scaling)


def position_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Every parameter that belongs to an encoding, or to positions in attention of its own."""
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        if isinstance(part, (posenc.Encoding, own_attention.Positional)):
            found.update((id(p), p) for p in part.parameters())
    return list(found.values())
