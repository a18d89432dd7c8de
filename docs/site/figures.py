"""The figures of the course and of the encodings' pages: name -> panels, computed by posenc from its own plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import posenc
from posenc.core import formulas
from posenc.encodings.absolute import sinusoid
from posenc.encodings.registry import ENCODINGS
from posenc.lab.results import Mean
from posenc.plot import analysis, canvas, panels
from posenc.plot.panels import Heat, Lines, Panel, array

FIGURES: dict[str, Callable[[], list[Panel]]] = {}


def figure(make: Callable[[], list[Panel]]) -> Callable[[], list[Panel]]:
    """The function `rope_decay` draws the figure `rope-decay`."""
    FIGURES[make.__name__.replace("_", "-")] = make
    return make


def draw(name: str, path: Path) -> None:
    if name.startswith("overview-"):
        drawn = panels.overview(analysis.subject(name.removeprefix("overview-")), 96)
    elif name in FIGURES:
        drawn = FIGURES[name]()
    else:
        raise ValueError(f"unknown figure {name!r}; there are {', '.join(FIGURES)} and overview-ENCODING")
    canvas.save(canvas.figure(drawn), path)


def names() -> list[str]:
    return [*FIGURES, *(f"overview-{name}" for name in ENCODINGS if name != "none")]


@figure
def order_lost() -> list[Panel]:
    """How much a layer's output for a token changes when two other tokens swap places."""
    torch.manual_seed(0)
    x = torch.randn(1, 12, 64)
    swapped = x.clone()
    swapped[:, [2, 5]] = x[:, [5, 2]]
    series = {}
    for label, encoding, causal in (
        ("no positions", "none", False), ("no positions, causal mask", "none", True), ("sinusoidal", "sinusoidal", False),
    ):  # fmt: skip
        torch.manual_seed(1)
        layer = posenc.Attention(64, 4, encoding=encoding, causal=causal)
        with torch.no_grad():
            change = (layer(swapped) - layer(x)).abs().amax(-1)[0]
        change[[2, 5]] = float("nan")  # the tokens that moved
        series[label] = array(change)
    title = "Change of each other token's output when tokens 2 and 5 swap places"
    return [Lines(title, np.arange(12), series, "token", "largest change")]


@figure
def sinusoid_table() -> list[Panel]:
    subject = analysis.subject("sinusoidal", d_model=64)
    return [*panels.encoding(subject, 100), *panels.dimensions(subject, 100, selected=[0, 1, 10, 20, 40])]


@figure
def sinusoid_similarity() -> list[Panel]:
    z = sinusoid(torch.arange(200), 128)
    product = array(z[100] @ z.mT)
    title = "PE(100)·PE(p): largest at p = 100, symmetric around it"
    return [Lines(title, np.arange(200) - 100, {"dot product": product}, "p − 100", "dot product")]


@figure
def learned_resize() -> list[Panel]:
    """A smooth stand-in for a trained table, and what resize makes of it."""
    table = posenc.Learned(max_length=64, d_model=8)
    with torch.no_grad():
        table.table.copy_(sinusoid(torch.arange(64), 8, base=50.0))
    before = array(table.table[:, 2])
    after = array(table.resize(128).table[:, 2])
    series = {"64 rows": before}
    return [
        Lines("Channel 2 of a table with 64 rows", np.arange(64), series, "position", "value"),
        Lines("The same channel after resize(128)", np.arange(128), {"128 rows": after}, "position", "value"),
    ]


@figure
def shaw_clip() -> list[Panel]:
    subject = analysis.subject("shaw", max_distance=4)
    return [*panels.buckets(subject, 10), *panels.kernel(subject, 24)]


@figure
def shaw_memory() -> list[Panel]:
    lengths = np.array([2**n for n in range(7, 15)])
    d, k, heads = 64, 16, 8
    series = {
        "a[i, j, :] for every pair: L² d": 4 * lengths**2 * d / 2**20,
        "q·a per clipped distance, then gathered: H L (2k+1)": 4 * heads * lengths * (2 * k + 1) / 2**20,
    }
    title = "Memory of the relative keys (d = 64, H = 8, k = 16, float32)"
    return [Lines(title, lengths, series, "length (tokens)", "MiB", log_x=True, log_y=True)]


@figure
def four_terms() -> list[Panel]:
    torch.manual_seed(0)
    encoding = posenc.TransformerXL(d_model=64, heads=4, std=0.3)
    layer = posenc.Attention(64, 4, encoding=encoding)
    return panels.decomposition(layer, torch.randn(1, 16, 64))


@figure
def t5_buckets() -> list[Panel]:
    both = analysis.subject("t5")
    past = analysis.subject("t5", causal=True)
    return [*panels.buckets(both, 130), *panels.buckets(past, 130)]


@figure
def t5_mistake() -> list[Panel]:
    """The well-known wrong version: the halving is forgotten in the number of exact buckets."""
    r = np.arange(-130, 131)
    right = np.array([formulas.t5_bucket(int(d), buckets=32, max_distance=128, causal=False) for d in r])

    def mistaken(d: int) -> int:
        n, exact = abs(d), 16
        far = exact + int(math.log(max(n, exact) / exact) / math.log(128 / exact) * 16)
        return (16 if d > 0 else 0) + (n if n < exact else min(far, 31))

    wrong = np.array([mistaken(int(d)) for d in r])
    series = {"correct: 0 to 31": right, "mistaken: ids reach 47 and collide": wrong}
    marks = {"rows of the table: 32": 31.5}
    title = "Bucket ids, correct and mistaken (32 buckets, max_distance 128, bidirectional)"
    return [Lines(title, r, series, "distance r = j − i", "bucket id", steps=True, horizontal_marks=marks)]


@figure
def deberta_buckets() -> list[Panel]:
    v1 = analysis.subject("deberta", max_distance=64)
    v3 = analysis.subject("deberta", buckets=32, max_distance=128)
    return [*panels.buckets(v1, 150), *panels.buckets(v3, 150)]


@figure
def rope_decay() -> list[Panel]:
    """Σ_c cos(r w_c), the score of a query and a key of ones, and the paper's bound of its partial sums."""
    w = np.array(formulas.inverse_frequencies(128, 10000.0))
    r = np.arange(0, 257)
    partial = np.cumsum(np.exp(1j * r[:, None] * w), axis=1)
    score = 2 * partial[:, -1].real
    bound = np.abs(partial).mean(axis=1)
    return [
        Lines("Score of q = k = (1, 1, …) over distance", r, {"Σ 2 cos(r w)": score}, "distance |j − i|", "score"),
        Lines(
            "Mean size of the partial sums: the decay of the paper", r, {"mean |S|": bound}, "distance |j − i|", "size"
        ),
    ]


@figure
def rope_rotation() -> list[Panel]:
    """One vector's pairs as they rotate with the position."""
    rope = posenc.RoPE(head_dim=8)
    x = torch.ones(1, 1, 64, 8)
    y = rope.rotate(x, (0, 64))[0, 0]
    series = {f"pair {c}": array(y[:, c]) for c in range(4)}
    return [Lines("First channel of each pair, all starting at 1", np.arange(64), series, "position", "value")]


@figure
def scaling_wavelengths() -> list[Panel]:
    return panels.wavelengths(128, 10000.0, original=4096, target=16384)


@figure
def scaling_divisors() -> list[Panel]:
    """By how much each scaling slows each pair down."""
    kinds = posenc.scaling
    plain = np.array(kinds.frequencies(128, 10000.0))
    scalings = {
        "linear": kinds.Linear(factor=4.0),
        "NTK-aware": kinds.NTK(factor=4.0),
        "YaRN": kinds.YaRN(factor=4.0, original=4096),
        "Llama 3 (factor 4)": kinds.Llama3(factor=4.0, original=4096),
    }
    series = {name: plain / np.array(kinds.frequencies(128, 10000.0, one)) for name, one in scalings.items()}
    return [
        Lines("Divisor of each pair's frequency, factor 4", np.arange(64), series, "pair (fast to slow)", "divisor")
    ]


@figure
def dynamic_base() -> list[Panel]:
    n = np.arange(1024, 32769, 256)
    series = {}
    for factor in (1.0, 2.0, 4.0):
        stretch = np.where(n > 4096, factor * n / 4096 - (factor - 1), 1.0)
        series[f"factor {factor:g}"] = 10000 * stretch ** (128 / 126)
    title = "Base of dynamic NTK over the length, trained at 4096"
    return [Lines(title, n, series, "length (tokens)", "base", vertical_marks={"trained length": 4096})]


@figure
def yarn_ramp() -> list[Panel]:
    kinds = posenc.scaling
    plain = np.array(kinds.frequencies(128, 10000.0))
    series = {}
    for label, ramp in (("code: linear in the pair", "code"), ("paper: linear in rotations", "paper")):
        one = kinds.YaRN(factor=16.0, original=4096, ramp=ramp)
        series[label] = np.array(kinds.frequencies(128, 10000.0, one)) / plain
    return [Lines("Share of each frequency that YaRN keeps, factor 16", np.arange(64), series, "pair", "w′ / w")]


@figure
def alibi_slopes() -> list[Panel]:
    subject = analysis.subject("alibi", heads=8)
    return [*panels.distance(subject, 64, [0, 2, 4, 7]), *panels.kernel(subject, 48)]


@figure
def lab_quick() -> list[Panel]:
    from . import tables

    found, task = tables.run("quick"), tables.run("quick").tasks()[0]
    sizes = np.array(task["test"])
    series = {}
    for name in ("alibi", "clipped", "t5", "rope", "rope+yarn:4,beta_fast=4", "none", "sinusoidal"):
        if name not in found.encodings(task):
            continue
        points = [found.point(task, name, int(size), "loss") for size in sizes]
        series[name] = np.array([point.value if isinstance(point, Mean) else float("nan") for point in points])
    marks = {"trained": task["train"]}
    title = "Loss on text past the training length (preset quick)"
    return [Lines(title, sizes, series, "length (bytes)", "nats per byte", log_x=True, vertical_marks=marks)]


@figure
def attention_order() -> list[Panel]:
    """A map of which of the four doors each encoding takes."""
    doors = ["input", "queries, keys", "scores", "values"]
    rows = list(ENCODINGS)
    z = np.zeros((len(rows), 4))
    for row, name in enumerate(rows):
        enters = ENCODINGS[name].enters
        z[row] = [door in enters for door in ("input", "queries", "scores", "values")]
    return [
        Heat("Where each encoding enters", np.arange(4), np.arange(len(rows)), z, "", "", "enters", (0.0, 1.0),
             diverging=False, labels=(rows, doors))
    ]  # fmt: skip
