"""Encoding words into encodings, with the settings that make a comparison fair."""

from __future__ import annotations

from typing import Any

from torch import nn

import posenc

from . import words
from .errors import LabError

SHARED = {"t5"}
"""Encodings whose authors use one table for the whole stack; the others get one instance a layer."""

EXTENSIONS = {"linear": "Linear", "ntk": "NTK", "dynamic": "DynamicNTK", "yarn": "YaRN", "llama3": "Llama3"}


def fair_options(name: str, *, causal: bool, longest: int) -> dict[str, Any]:
    """Options that the comparison itself decides; a word's own options win.

    T5 divides by sqrt(d) like all the others; a learned table ends at the longest training input, since rows that
    training never reaches would be noise.
    """
    decided: dict[str, dict[str, Any]] = {
        "t5": {"causal": causal, "scale": None},
        "learned": {"max_length": longest},
        "transformer_xl": {"causal": causal},
        "xlnet": {"attn_type": "uni" if causal else "bi"},
    }
    return decided.get(name, {})


def build(word: str, *, width: int, heads: int, layers: int, causal: bool, longest: int) -> list[posenc.Encoding]:
    """One encoding per layer (the same instance where it is shared) for a trained encoding's word."""
    name, options = words.split(word)
    options = {**fair_options(name, causal=causal, longest=longest), **options}
    made = [posenc.create(name, d_model=width, heads=heads, **options) for _ in range(1 if name in SHARED else layers)]
    return made * layers if name in SHARED else made


def extended(word: str, extension: str, *, width: int, heads: int, longest: int) -> posenc.Encoding:
    """A rotary encoding's word with a context extension: no parameters, so trained weights stay as they are."""
    name, options = words.split(word)
    if name != "rope":
        raise LabError(f"{word}+{extension}: extensions rescale rotary frequencies, so they go with rope only")
    kind, given = words.split(extension, bare="factor")
    if kind not in EXTENSIONS:
        raise LabError(f"unknown extension {kind!r} in {word}+{extension}; they are {', '.join(EXTENSIONS)}")
    if kind in ("dynamic", "yarn", "llama3"):
        given.setdefault("original", longest)
    try:
        scaling = getattr(posenc.scaling, EXTENSIONS[kind])(**given)
    except TypeError as error:
        raise LabError(f"{word}+{extension}: {error}; for example rope+{kind}:8") from None
    return posenc.create(name, d_model=width, heads=heads, **options, scaling=scaling)


def position_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Every parameter that belongs to an encoding."""
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        if isinstance(part, posenc.Encoding):
            found.update((id(p), p) for p in part.parameters())
    return list(found.values())
