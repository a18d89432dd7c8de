"""Textbook claims about positional encodings, tested by measurement.

Some claims are arithmetic and are computed directly; the others are tested on small trained models: the text models of
the `quick` preset (in the same folder, so that nothing is trained twice) and a few encoders.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import posenc

from ..encodings import spec
from . import corpus, evidence, presets, run, run_trial, train, verdict
from .corpus import Corpus
from .model import Transformer
from .results import Mean, Results
from .store import Store, write

TEXT = (
    "none", "sinusoidal", "learned", "shaw", "shaw:max_distance=2", "clipped", "t5", "t5:max_distance=32", "alibi", "rope",
)  # fmt: skip
EXTENDED = ("rope+linear:4", "rope+ntk:8", "rope+dynamic", "rope+yarn:4,beta_fast=4")
CLEARLY = 0.05  # nats


class Finding(NamedTuple):
    evidence: str
    verdict: str  # true, false, partly
    why: str


@dataclass(frozen=True)
class Measured:
    """The results that the trained claims use."""

    text: Results
    neighbour: Results
    store: Store
    corpus: Corpus

    def task(self) -> dict[str, Any]:
        return self.text.tasks()[0]

    def loss(self, encoding: str, times: int) -> float:
        """The loss at a multiple of the training length; infinite if the encoding cannot run."""
        task = self.task()
        point = self.text.point(task, encoding, times * task["train"], "loss")
        return point.value if isinstance(point, Mean) else math.inf

    def change(self, encoding: str, times: int = 4) -> float:
        return self.loss(encoding, times) - self.loss(encoding, 1)

    def describe_change(self, *encodings: str, times: int = 4) -> str:
        return ", ".join(f"{s} {self.loss(s, 1):.2f} → {self.loss(s, times):.2f}" for s in encodings)


# ---- arithmetic ---------------------------------------------------------------------------------------------------
def order_needs_positions(_: Measured) -> Finding:
    """dog bites man (0 1 2) and man bites dog (2 1 0): are the reordered states equal?"""
    order = [2, 1, 0]

    def difference(encoding: str, causal: bool) -> float:
        model = Transformer(encoding, vocabulary=3, width=32, heads=2, layers=2, causal=causal, longest=3)
        with torch.no_grad():
            one, other = model(torch.tensor([[0, 1, 2], order]))
        return float((one[order] - other).abs().max())

    none, masked, sinusoidal = difference("none", False), difference("none", True), difference("sinusoidal", False)
    return Finding(
        f"largest difference between the two sentences' states: {none:.0e} without positions, {sinusoidal:.2f} with "
        f"sinusoidal ones; {masked:.2f} without positions under a causal mask",
        "true" if none < 1e-5 < min(masked, sinusoidal) else "false",
        "for an encoder; a causal mask alone already makes the order visible",
    )


def learned_stop(_: Measured) -> Finding:
    encoding = posenc.create("learned", d_model=8, max_length=16)
    encoding.embed(torch.zeros(1, 16, 8), posenc.Positions(16))
    try:
        encoding.embed(torch.zeros(1, 17, 8), posenc.Positions(17))
        refusal = None
    except ValueError as error:
        refusal = str(error)
    return Finding(
        f"at 17 tokens: “{refusal}”" if refusal else "17 tokens ran on a table of 16",
        "true" if refusal else "false",
        "there is no row for them; interpolating the table makes another model",
    )


def rope_depends_on_distance_only(_: Measured) -> Finding:
    encoding = posenc.create("rope", head_dim=64)
    q, k = torch.randn(2, 1, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    scores = [posenc.scores(q, k, encoding.plan(posenc.Positions((s, 32)))) for s in (0, 1000, 1_000_000)]
    apart = [float((scores[0] - other).abs().max()) for other in scores[1:]]
    size = float(scores[0].abs().max())
    return Finding(
        f"scores of size {size:.1f} moved by 1000 and by 1000000 positions change by {apart[0]:.0e} and {apart[1]:.0e}",
        "true" if max(apart) < 1e-4 * size else "false",
        "given exact phases: computed in bfloat16, positions past 256 would merge",
    )


def t5_near_is_exact(_: Measured) -> Finding:
    exact = {}
    for causal in (True, False):
        rows = posenc.create("t5", heads=1, causal=causal).index.lookup(-torch.arange(200)).tolist()
        exact[causal] = next(d for d in range(199) if rows[d] == rows[d + 1]) - 1
    return Finding(
        f"32 buckets to 128: distances 0 to {exact[True]} have a bucket each in a causal model, 0 to {exact[False]} to "
        "each side in a bidirectional one; all further ones share",
        "true" if min(exact.values()) >= 7 else "false",
        "near means a quarter or half of the buckets; distance 20 shares its bucket",
    )


# ---- trained ------------------------------------------------------------------------------------------------------
def sinusoidal_extrapolates(m: Measured) -> Finding:
    return Finding(
        f"text, trained at {m.task()['train']} bytes, loss at 1 × → 2 × and 4 ×: {m.describe_change('sinusoidal', times=2)}, "
        f"{m.describe_change('sinusoidal')}",
        "false" if m.change("sinusoidal") > CLEARLY else "true",
        "it is defined at every position; training does not cover the further ones",
    )


def _judge(number: int, of: int) -> str:
    """The verdict on a claim that holds for `number` of its cases."""
    return "true" if number == of else "partly" if number else "false"


def relative_extrapolates(m: Measured) -> Finding:
    relative = ("alibi", "clipped", "shaw", "t5:max_distance=32", "t5", "rope")
    hold = [s for s in relative if m.change(s) <= CLEARLY]
    lose = [s for s in relative if m.change(s) > CLEARLY]
    return Finding(
        f"all depend on the distance only; loss at 1 × → 4 ×: {m.describe_change(*relative)}",
        _judge(len(hold), len(relative)),
        f"{', '.join(hold) or 'none'} hold and {', '.join(lose) or 'none'} lose: a distance beyond "
        "training must act like one within it",
    )


def rope_extrapolates(m: Measured) -> Finding:
    return Finding(
        f"loss at 1 × → 2 × and 4 ×: {m.describe_change('rope', times=2)}, {m.describe_change('rope')}",
        "false" if m.change("rope") > CLEARLY else "true",
        "angles that training never reached",
    )


def rope_extends(m: Measured) -> Finding:
    """Linear interpolation, NTK and dynamic NTK against plain RoPE on the same weights, without fine-tuning."""
    plain = m.loss("rope", 4)
    better = [s for s in EXTENDED if m.loss(s, 4) < plain - CLEARLY]
    whole = [s for s in EXTENDED if m.loss(s, 4) <= m.loss("rope", 1) + CLEARLY]
    return Finding(
        f"the same weights, no fine-tuning, loss at 1 × → 4 ×: {m.describe_change(*EXTENDED)}; "
        f"plain RoPE {m.loss('rope', 1):.2f} → {plain:.2f}",
        _judge(len(better), len(EXTENDED)),
        f"better than plain RoPE at 4 ×: {', '.join(better) or 'none'}; as good as at the training length: "
        f"{', '.join(whole) or 'none'}. Fixed factors cost something at short lengths, dynamic NTK nothing",
    )


@dataclass(frozen=True, kw_only=True)
class Half(posenc.scaling.Scaling):
    """RoPE with one half of its pairs not rotated: what do the others carry?"""

    fast: bool

    def frequencies(self, w, size, base, total=None):
        middle = len(w) // 2
        return tuple(x if (c < middle) == self.fast else 0.0 for c, x in enumerate(w))


def fast_pairs_are_local(m: Measured) -> Finding:
    length = m.task()["train"]
    head_dim = m.task()["width"] // m.task()["heads"]
    w = posenc.create("rope", head_dim=head_dim).frequencies()
    full = sum(x * length >= 2 * math.pi for x in w)
    whole, fast, slow = (_text_loss(m, scaling) for scaling in (None, Half(fast=True), Half(fast=False)))
    return Finding(
        f"wavelengths grow from {2 * math.pi / w[0]:.1f} to {2 * math.pi / w[-1]:.0f} tokens, {full} of {len(w)} pairs "
        f"make a full rotation within {length} tokens; loss {whole:.2f} with all pairs, {fast:.2f} with the fast "
        f"half only, {slow:.2f} with the slow half only",
        "false" if fast > slow else "true" if fast - whole > CLEARLY else "partly",
        "true of wavelengths; how much the slow pairs carry depends on how far they rotate within the training length",
    )


def small_clip_is_enough(m: Measured) -> Finding:
    scores: dict[str, dict[int, float]] = {}
    for task in m.neighbour.tasks():
        of = scores.setdefault(task["task"].split("=")[1], {})
        for encoding in m.neighbour.encodings(task):
            point = m.neighbour.point(task, encoding, task["train"], "accuracy")
            of[int(encoding.split("=")[1])] = point.value if isinstance(point, Mean) else 0.0
    near, far = scores["1"], scores["4"]
    gap = m.loss("shaw:max_distance=2", 1) - m.loss("shaw", 1)
    accuracies = "; ".join(
        f"{distance} position{'s' * (distance != '1')} away: "
        + ", ".join(f"k={k} {value:.2f}" for k, value in sorted(of.items()))
        for distance, of in sorted(scores.items())
    )
    small = near[2] > 0.9 and abs(gap) < 3 * CLEARLY
    return Finding(
        f"text, 3 layers: loss {m.loss('shaw:max_distance=2', 1):.2f} with k=2, {m.loss('shaw', 1):.2f} with k=16. One layer that "
        f"must name the symbol some positions away, accuracy: {accuracies}",
        "partly" if small and far[4] < 0.9 else "true" if small else "false",
        "one layer distinguishes distances below k, because row k covers all further ones; several layers add up, and on text a small k costs little",
    )


def _text_loss(m: Measured, scaling) -> float:
    """The trained rope model's loss at the training length, with another scaling."""
    trial = next(c for c in text_experiment().trials(m.corpus.digest) if c.training.encoding == "rope")
    task = train.make_task(trial.training, m.corpus)
    model = train.make_model(trial.training, task)
    run_trial.ensure_trained(trial, m.store, m.corpus, weights=True)
    train.load_weights(model, trial.training, m.store)
    for block in model.blocks:
        attention: Any = block.attention
        attention.encoding = posenc.create("rope", head_dim=attention.head_dim, scaling=scaling)
    batch = task.windows(trial.training.train, 8192)  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()))


CLAIMS: tuple[tuple[str, Callable[[Measured], Finding]], ...] = (
    ("Attention without positions cannot tell “dog bites man” from “man bites dog”.", order_needs_positions),
    ("Learned positions stop at max_length.", learned_stop),
    ("Sinusoidal positions extrapolate.", sinusoidal_extrapolates),
    ("Relative encodings extrapolate, because only the distance matters.", relative_extrapolates),
    ("RoPE's scores depend on the distance only.", rope_depends_on_distance_only),
    ("RoPE extrapolates without help.", rope_extrapolates),
    ("Linear interpolation, NTK and dynamic NTK extend RoPE.", rope_extends),
    ("Low dimensions carry local order, high dimensions global order.", fast_pairs_are_local),
    ("T5's buckets keep near distances exact.", t5_near_is_exact),
    ("Shaw's clip at a small k is enough.", small_clip_is_enough),
)


def text_experiment() -> presets.Experiment:
    """The text task of quick, with the encodings of the claims."""
    quick = presets.load("quick")
    text = presets.Experiment("claims", "claims", tuple(t for t in quick.tasks if t.task == "text"))
    wanted = (*TEXT, *EXTENDED)
    assert all(spec.split_extension(encoding)[0] in TEXT for encoding in wanted)
    return text.change(encodings=wanted)


def measure(out: Path, *, text: str | None = None, jobs: int | None = None) -> list[dict[str, str]]:
    """Train what is missing in the folder and test every claim."""
    measured = Measured(
        run.complete(text_experiment(), out, text=text, jobs=jobs),
        run.complete(presets.load("claims"), out, jobs=jobs),
        Store(out),
        corpus.read(text),
    )
    return [{"claim": claim, **test(measured)._asdict()} for claim, test in CLAIMS]


INTRODUCTION = """# Textbook claims, tested

Statements of textbooks about positional encodings, the measurements, and the verdict. `posenc claims` measures all of
them again and writes this page: some claims are arithmetic, the others are tested on the small text models of
`posenc compare --preset quick` and on a few encoders of one layer."""


def larger_models() -> list[str]:
    """Markdown: what the strongest run says of the claims on extrapolation, after each number of training steps."""
    results, task = evidence.strongest_text()
    steps, far = results.steps(task), max(task["test"])
    rows = [
        f"| {encoding} | " + " | ".join(f"{s.change} {s.outcome}" for s in found) + " |"
        for encoding, found in verdict.by_steps(results, task)
        if found[-1].far is not None
    ]
    if not rows:
        return []
    return [
        "",
        "## With larger models and longer training",
        "",
        f"What holds depends on the training too. Models of {task['layers']} layers and width {task['width']}, trained at {task['train']} bytes "
        f"(`posenc compare --preset paper`): loss at {task['train']} → {far}, and the verdict, after {len(steps)} numbers of steps of one "
        f"training; {results.seeds(task)}.",
        "",
        "| encoding | " + " | ".join(f"{step:,} steps" for step in steps) + " |",
        "| --- " * (len(steps) + 1) + "|",
        *rows,
    ]


def as_markdown(verdicts: list[dict[str, str]], about: str) -> str:
    """The page docs/claims.md."""
    lines = [INTRODUCTION, "", "| claim | measured | verdict |", "| --- | --- | --- |"]
    lines += ["| {claim} | {evidence} | **{verdict}**: {why} |".format(**entry) for entry in verdicts]
    return "\n".join([*lines, "", about, *larger_models(), ""])


def as_text(verdicts: list[dict[str, str]]) -> str:
    from ..cli import terminal

    lines = []
    for entry in verdicts:
        lines += ["", terminal.bold(entry["claim"])]
        lines += terminal.hanging("  measured  ", entry["evidence"])
        lines += terminal.hanging(f"  {entry['verdict']:<8}  ", entry["why"])
    return "\n".join(lines)


def write_all(out: Path, *, text: str | None = None, jobs: int | None = None) -> int:
    """Measure every claim, write claims.json and claims.md, print them."""
    verdicts = measure(out, text=text, jobs=jobs)
    task, source = (
        text_experiment().tasks[0],
        "the Python standard library's source" if text is None else Path(text).name,
    )
    about = (
        f"Text: models of {task.layers} layers and width {task.width}, trained at {task.train} bytes of {source} for {task.steps} steps "
        f"of {task.batch} windows; losses in nats per byte. One seed each: differences of a few hundredths are not significant."
    )
    write(out / "claims.json", json.dumps(verdicts, indent=1).encode())
    write(out / "claims.md", as_markdown(verdicts, about).encode())
    print(as_text(verdicts))
    print(f"\n{out / 'claims.md'}")
    return 0
