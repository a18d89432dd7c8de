"""The posenc code next to a figure: a few lines that compute the drawn values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.positions import Positions
from ...plot.analysis import DRAWN_OPTIONS, LAYER_SIZES, Subject


def create_call(name: str, options: Mapping[str, Any]) -> str:
    """posenc.create(...) with these options, as source text."""
    return f"posenc.create({arguments(name, {**LAYER_SIZES, **DRAWN_OPTIONS.get(name, {}), **options})})"


def arguments(name: str, options: Mapping[str, Any]) -> str:
    """An encoding's name and options as the arguments of a call."""
    return ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())])


def kernel(subject: Subject, options: Mapping[str, Any], length: int) -> str:
    """Code that computes the contribution of position to the scores, as `scores` [heads, length, length]."""
    if subject.tables == "trained":
        lines = [
            "from posenc.plot import analysis",
            f"subject = analysis.subject({arguments(subject.name, options)})  # with the trained table of posenc/plot/trained.json",
            f"positions = analysis.sample_positions({length})",
            "scores = analysis.kernel(subject, positions, positions)",
        ]
        return "\n".join(lines)
    heads, head_dim, d_model = subject.heads, subject.head_dim, subject.d_model
    lines = [
        "import torch, posenc",
        "torch.manual_seed(0)",
        f"encoding, positions = {create_call(subject.name, options)}, posenc.Positions({length})",
    ]
    if subject.absolute:
        lines += [
            f"vectors = encoding.embed(torch.zeros(1, {length}, {d_model}, dtype=torch.float64), positions)",
            f"q = k = vectors.unflatten(-1, ({heads}, {head_dim})).transpose(1, 2)",
            "scores = posenc.scores(q, k)[0]",
        ]
        return "\n".join(lines)
    try:
        subject.encoding.plan(Positions(2))
        plan = "encoding.plan(positions)"
    except ValueError:
        gates = subject.encoding.keep(torch.ones(1, 1, d_model))
        dtype = "" if gates is None else ", dtype=torch.float64"  # as analysis.Subject.plan draws them
        plan = f"encoding.plan(positions, x=torch.ones(1, {length}, {d_model}{dtype}))"
    rotary = subject.plan(Positions(2)).rotate is not None
    lines.append(f"q = k = torch.ones(1, {heads}, {length}, {head_dim}, dtype=torch.float64)")
    lines.append(f"plan = {plan}")
    content = "" if rotary else " - posenc.scores(q, k, posenc.Plan(positions, scale=plan.scale))[0]"
    causal = ", causal=True" if subject.encoding.causal_only else ""
    lines.append(f"scores = posenc.scores(q, k, plan{causal})[0]{content}")
    return "\n".join(lines)


def kernels(encodings: Mapping[str, tuple[str, Mapping[str, Any]]], length: int) -> str:
    """Code that computes the kernels of several encodings, as `kernels` {label: [heads, length, length]}."""
    lines = ["from posenc.plot import analysis", f"positions, kernels = analysis.sample_positions({length}), {{}}"]
    for label, (name, options) in encodings.items():
        subject = f"analysis.subject({arguments(name, options)})"
        lines.append(f"kernels[{label!r}] = analysis.kernel({subject}, positions, positions)")
    return "\n".join(lines)
