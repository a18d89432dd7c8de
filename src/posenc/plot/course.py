"""The figures of the course, each a function of one number: the documentation draws them once, the explorer's learn page
lets the reader change the number.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import formulas
from ..core.translation import Translation
from ..encodings.absolute import Learned, sinusoid
from ..encodings.rope import scaling as kinds
from ..encodings.rope.rope import RoPE
from ..encodings.transformer_xl import TransformerXL
from ..nn.attention import Attention
from . import analysis, panels
from .panels import Lines, Panel, array
from .translations import COURSE_ENGLISH as ENGLISH

TRAINED = 4096  # the training length of the chapters on extension


def order_lost(other: int = 5, words: Translation = ENGLISH) -> list[Panel]:
    """How much a layer's output for a token changes when tokens 2 and `other` swap places."""
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    swapped = x.clone()
    swapped[:, [2, other]] = x[:, [other, 2]]
    series = {}
    for label, encoding, causal in (
        ("no positions", "none", False), ("no positions, causal mask", "none", True), ("sinusoidal", "sinusoidal", False),
    ):  # fmt: skip
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            layer = Attention(64, 4, encoding=encoding, causal=causal)
            change = (layer(swapped) - layer(x)).abs().amax(-1)[0]
        change[[2, other]] = float("nan")  # the tokens that moved
        series[words(label)] = array(change)
    return [Lines(words("swap title", other=other), np.arange(12), series, words("token"), words("largest change"))]


def sinusoid_table(exponent: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    """The vectors with base 10^exponent."""
    subject = analysis.subject("sinusoidal", d_model=64, base=10.0**exponent)
    drawn = panels.encoding(subject, 100, words=words)
    return [*drawn, *panels.dimensions(subject, 100, selected=[0, 1, 10, 20, 40], words=words)]


def sinusoid_similarity(exponent: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    z = sinusoid(torch.arange(200), 128, base=10.0**exponent)
    series = {words("dot product"): array(z[100] @ z.mT)}
    return [Lines(words("similarity title"), np.arange(200) - 100, series, "p − 100", words("dot product"))]


def learned_resize(rows: int = 128, words: Translation = ENGLISH) -> list[Panel]:
    """A smooth stand-in for a trained table, and what resize makes of it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        table = Learned(max_length=64, d_model=8)
        table.table.copy_(sinusoid(torch.arange(64), 8, base=50.0))
        before = array(table.table[:, 2]).copy()  # resize changes the table
        after = array(table.resize(rows).table[:, 2])
    names = [words("rows", rows=64), words("rows resized", rows=rows)]
    axes = words("position"), words("value")
    return [
        Lines(words("table title"), np.arange(64), {names[0]: before}, *axes),
        Lines(words("resized title", rows=rows), np.arange(rows), {names[1]: after}, *axes),
    ]


def shaw_clip(k: int = 4, words: Translation = ENGLISH) -> list[Panel]:
    subject = analysis.subject("shaw", max_distance=k)
    return [*panels.buckets(subject, max(10, 2 * k), words=words), *panels.kernel(subject, 24, words=words)]


def shaw_memory(k: int = 16, words: Translation = ENGLISH) -> list[Panel]:
    lengths = np.array([2**n for n in range(7, 15)])
    d, heads = 64, 8
    series = {
        words("every pair"): 4 * lengths**2 * d / 2**20,
        words("every distance"): 4 * heads * lengths * (2 * k + 1) / 2**20,
    }
    title = words("memory title", d=d, heads=heads, k=k)
    return [Lines(title, lengths, series, words("length (tokens)"), "MiB", log_x=True, log_y=True)]


def four_terms(std: float = 0.3, words: Translation = ENGLISH) -> list[Panel]:
    """Content and position terms of a Transformer-XL layer whose learned vectors have this standard deviation."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = Attention(64, 4, encoding=TransformerXL(d_model=64, heads=4, std=std))
        return panels.decomposition(layer, torch.randn(1, 16, 64), words=words)


def t5_buckets(buckets: int = 32, words: Translation = ENGLISH) -> list[Panel]:
    both, past = (analysis.subject("t5", buckets=buckets, causal=causal) for causal in (False, True))
    return [*panels.buckets(both, 130, words=words), *panels.buckets(past, 130, words=words)]


def t5_mistake(buckets: int = 32, words: Translation = ENGLISH) -> list[Panel]:
    """The well-known wrong version: the halving is forgotten in the number of exact buckets."""
    r = np.arange(-130, 131)
    right = [formulas.t5_bucket(int(d), buckets=buckets, max_distance=128, causal=False) for d in r]
    half = buckets // 2

    def mistaken(d: int) -> int:
        n = abs(d)
        far = half + int(math.log(max(n, half) / half) / math.log(128 / half) * half)
        return (half if d > 0 else 0) + (n if n < half else min(far, buckets - 1))

    wrong = [mistaken(int(d)) for d in r]
    series = {
        words("bucket right", most=max(right)): np.array(right),
        words("bucket wrong", most=max(wrong)): np.array(wrong),
    }
    marks = {words("table rows", rows=buckets): buckets - 0.5}
    title = words("mistake title", buckets=buckets)
    return [Lines(title, r, series, words("distance"), words("bucket id"), steps=True, horizontal_marks=marks)]


def deberta_buckets(buckets: int = 32, words: Translation = ENGLISH) -> list[Panel]:
    v1 = analysis.subject("deberta", max_distance=64)
    v3 = analysis.subject("deberta", buckets=buckets, max_distance=128)
    return [*panels.buckets(v1, 150, words=words), *panels.buckets(v3, 150, words=words)]


def rope_decay(exponent: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    """Σ_c cos(r w_c), the score of a query and a key of ones, and the paper's bound of its partial sums."""
    w = np.array(formulas.inverse_frequencies(128, 10.0**exponent))
    r = np.arange(0, 257)
    partial = np.cumsum(np.exp(1j * r[:, None] * w), axis=1)
    score, bound = 2 * partial[:, -1].real, np.abs(partial).mean(axis=1)
    past = words("distance |j − i|")
    return [
        Lines(words("decay title"), r, {"Σ 2 cos(r w)": score}, past, words("score")),
        Lines(words("bound title"), r, {words("mean |S|"): bound}, past, words("size")),
    ]


def rope_rotation(exponent: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    """One vector's pairs as they rotate with the position."""
    y = RoPE(head_dim=8, base=10.0**exponent).rotate(torch.ones(1, 1, 64, 8), (0, 64))[0, 0]
    series = {words("pair number", pair=c): array(y[:, c]) for c in range(4)}
    return [Lines(words("rotation title"), np.arange(64), series, words("position"), words("value"))]


def scaling_wavelengths(factor: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    return panels.wavelengths(128, 10000.0, original=TRAINED, target=int(factor * TRAINED), words=words)


def dynamic_base(factor: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    n = np.arange(1024, 32769, 256)
    series = {}
    for one in sorted({1.0, 2.0, float(factor)}):
        scaling = kinds.DynamicNTK(factor=one, original=TRAINED)
        slowest = [kinds.frequencies(128, 10000.0, scaling, int(total))[-1] for total in n]
        series[words("factor", factor=f"{one:g}")] = np.array(slowest) ** (-128 / 126)  # as of RoPE with another base
    marks = {words("trained length"): TRAINED}
    title = words("dynamic title", length=TRAINED)
    return [Lines(title, n, series, words("length (tokens)"), words("base axis"), vertical_marks=marks)]


def scaling_divisors(factor: float = 4, words: Translation = ENGLISH) -> list[Panel]:
    """By how much each scaling slows each pair down."""
    plain, factor = np.array(kinds.frequencies(128, 10000.0)), float(factor)
    scalings = {
        words("linear"): kinds.Linear(factor=factor),
        "NTK-aware": kinds.NTK(factor=factor),
        "YaRN": kinds.YaRN(factor=factor, original=TRAINED),
        "Llama 3": kinds.Llama3(factor=factor, original=TRAINED),
    }
    series = {name: plain / np.array(kinds.frequencies(128, 10000.0, one)) for name, one in scalings.items()}
    title = words("divisor title", factor=f"{factor:g}")
    return [Lines(title, np.arange(64), series, words("pair axis"), words("divisor"))]


def yarn_ramp(factor: float = 16, words: Translation = ENGLISH) -> list[Panel]:
    plain = np.array(kinds.frequencies(128, 10000.0))
    series = {}
    for label, ramp in (("ramp code", "code"), ("ramp paper", "paper")):
        one = kinds.YaRN(factor=float(factor), original=TRAINED, ramp=ramp)  # type: ignore[arg-type]
        series[words(label)] = np.array(kinds.frequencies(128, 10000.0, one)) / plain
    title = words("ramp title", factor=f"{factor:g}")
    return [Lines(title, np.arange(64), series, words("pair axis"), "w′ / w")]


def alibi_slopes(heads: int = 8, words: Translation = ENGLISH) -> list[Panel]:
    subject = analysis.subject("alibi", heads=heads)
    return [*panels.distance(subject, 64, words=words), *panels.kernel(subject, 48, words=words)]


@cache
def published() -> dict[str, Any]:
    """{train, test, loss: {encoding: one for each tested length}} of the lab's published run `quick`, task text."""
    return json.loads(Path(__file__).with_name("published_quick.json").read_text(encoding="utf-8"))


def lab_quick(longest: int = 512, words: Translation = ENGLISH) -> list[Panel]:
    found = published()
    sizes = np.array([size for size in found["test"] if size <= longest])
    series = {name: np.array(loss[: len(sizes)]) for name, loss in found["loss"].items()}
    marks, axes = {words("trained here"): found["train"]}, (words("length (bytes)"), words("nats per byte"))
    return [Lines(words("lab title"), sizes, series, *axes, log_x=True, vertical_marks=marks)]
