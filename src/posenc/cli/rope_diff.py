"""posenc rope-diff A.json B.json: where two configurations turn differently.

Frequencies, factors and phases are compared as numbers, whatever the configurations call them. Nothing here needs
torch; a picture file needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import OptionError
from ..encodings.rope.configs import DIALECTS, Setup, read
from ..encodings.rope.fields import LONGEST, has_rotation, keys, no_rotation, validate
from ..encodings.rope.scaling import frequencies
from . import terminal

LARGEST = 16_000_000
"""Bytes of a file; a config.json has a few thousand."""
SAME = 1e-9
"""Relative difference below which two frequencies are the same: far below what a phase at position 2^31 shows."""


@dataclass(frozen=True)
class Turning:
    """What a configuration does to a sequence of some length."""

    label: str
    setup: Setup
    frequencies: tuple[float, ...]
    magnitude: float

    @property
    def facts(self) -> dict[str, str]:
        setup, scaling = self.setup, self.setup.scaling
        return {
            "base": f"{setup.base or 10000.0:g}",
            "head size": str(setup.head_dim),
            "rotated channels": str(2 * len(self.frequencies)),
            "layout": setup.layout or "not said",
            "scaling": type(scaling).__name__ if scaling is not None else "none",
            "follows the length": "yes" if scaling is not None and scaling.length_dependent else "no",
            "cos and sin times": f"{self.magnitude:.9g}",
            "scores times": f"{self.magnitude**2 * (1.0 if scaling is None else scaling.score_factor):.9g}",
            "sections": "none" if setup.sections is None else "-".join(map(str, setup.sections)),
        }


@dataclass(frozen=True)
class Difference:
    """One pair whose frequency differs. `phase` is B's angle less A's at the last position, in radians."""

    pair: int
    a: float
    b: float
    phase: float

    @property
    def parts_at(self) -> float:
        """The first position at which the two are a tenth of a radian apart."""
        return math.ceil(0.1 / abs(self.b - self.a))


def turning(config, label: str, dialect: str, length: int, *, layer_type=None, head_dim: int | None = None) -> Turning:
    if dialect != "llama.cpp" and not has_rotation(config := keys("the configuration", config)):
        raise OptionError(no_rotation(config))
    setup = read(config, dialect, layer_type=layer_type, length=length if dialect in ("vllm", "llama.cpp") else None)
    size = setup.rotary_dim or validate("head_dim", head_dim)
    if size is None:
        raise OptionError(f"{label} does not say the head size; give --head-dim")
    if size % 2:
        raise OptionError(f"{label} rotates {size} channels; RoPE rotates pairs, so give an even number")
    magnitude = 1.0 if setup.scaling is None else setup.scaling.magnitude_at(length)
    return Turning(label, setup, frequencies(size, setup.base or 10000.0, setup.scaling, length), magnitude)


def compare(a: Turning, b: Turning, length: int) -> tuple[dict[str, tuple[str, str]], list[Difference]]:
    """(facts that differ, pairs that differ)."""
    facts = {name: (value, b.facts[name]) for name, value in a.facts.items() if value != b.facts[name]}
    facts.pop("scaling", None)  # names are not numbers: what they do is below
    pairs = [
        Difference(c, x, y, (y - x) * (length - 1))
        for c, (x, y) in enumerate(zip(a.frequencies, b.frequencies, strict=False))
        if not abs(x - y) <= SAME * max(x, y)
    ]
    return facts, pairs


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc rope-diff",
        description="Which frequencies, factors and phases differ between two configurations of RoPE.",
        epilog="Exit status: 0 the same, 1 different, 2 trouble. The same file with two dialects shows what another "
        "reader makes of it.",
    )
    parser.add_argument("a", metavar="A.json", help="a model's config.json, or its rope_parameters alone")
    parser.add_argument("b", metavar="B.json")
    parser.add_argument("--length", type=int, default=4096, help="tokens in the sequence (default: %(default)s)")
    parser.add_argument("--dialect", choices=DIALECTS, default="hf", help="who reads the files (default: %(default)s)")
    parser.add_argument("--dialect-b", choices=DIALECTS, help="who reads B, where that is another")
    parser.add_argument("--layer-type", help="which rotation, for models with one for each kind of layer")
    parser.add_argument("--head-dim", type=int, help="the head size, where a file does not say it")
    parser.add_argument("-o", "--output", help="write a picture too: png, svg or pdf by its name")
    given = parser.parse_args(arguments)
    if not 1 <= given.length <= LONGEST:
        raise OptionError(f"--length {given.length:.6g} must be from 1 to {LONGEST}")
    try:
        a = _load(given.a, given.dialect, given)
        b = _load(given.b, given.dialect_b or given.dialect, given)
    except (ValueError, OSError) as error:
        raise OptionError(f"rope-diff: {error}") from None
    facts, pairs = compare(a, b, given.length)
    print("\n".join(_report(a, b, facts, pairs, given.length)))
    if given.output:
        print(_picture(a, b, given.length, given.output))
    return 1 if facts or pairs else 0


def _load(path: str, dialect: str, given: argparse.Namespace) -> Turning:
    config = _json(path)
    try:
        return turning(
            config, f"{Path(path).name} ({dialect})", dialect, given.length,
            layer_type=given.layer_type, head_dim=given.head_dim,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _json(path: str):
    """The JSON of a file. No more than a configuration's size is read, whatever the path is."""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise OptionError(f"{path} does not exist") from None
    if len(content) > LARGEST:
        raise OptionError(f"{path} has more than {LARGEST // 10**6} MB; a config.json has a few thousand bytes")
    try:
        config = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise OptionError(f"{path} is nested too deep to be a configuration; give a config.json") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number with more digits than Python reads
        raise OptionError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise OptionError(f"{path} holds a {type(config).__name__}, not an object of JSON; give a config.json")
    return config


def _report(a: Turning, b: Turning, facts, pairs: list[Difference], length: int) -> list[str]:
    bold, dim = terminal.bold, terminal.dim
    lines = [f"{bold('A')}  {a.label}: {_name(a)}", f"{bold('B')}  {b.label}: {_name(b)}", ""]
    if not facts and not pairs:
        return [*lines, f"The same {len(a.frequencies)} frequencies and factors at {length} tokens."]
    if facts:
        lines += [*terminal.table(("differs", "A", "B"), [(name, *both) for name, both in facts.items()]), ""]
    if not pairs:
        shared = min(len(a.frequencies), len(b.frequencies))
        return [*lines, f"The {shared} frequencies that both have are the same at {length} tokens."]
    lines.append(f"{len(pairs)} of {min(len(a.frequencies), len(b.frequencies))} pairs turn at another speed.")
    worst = max(pairs, key=lambda pair: abs(pair.phase))
    first = min(pair.parts_at for pair in pairs)
    lines.append(
        f"At position {length - 1} they are up to {abs(worst.phase):.4g} radians apart (pair {worst.pair}); "
        f"a tenth of a radian is reached at position {first:g}."
    )
    lines.append("")
    rows = [
        (
            str(d.pair),
            f"{d.a:.6g}",
            f"{d.b:.6g}",
            f"{d.b / d.a:.4f}" if d.a else "–",
            f"{d.phase:+.4g}",
            f"{d.parts_at:g}",
        )
        for d in pairs
    ]
    header = ("pair", "A", "B", "B / A", f"phase at {length - 1}", "0.1 rad at")
    lines += [*terminal.table(header, rows), ""]
    ratios = [y / x if x else 1.0 for x, y in zip(a.frequencies, b.frequencies, strict=False)]
    if len(ratios) > 1:
        lines.append(dim("B / A over the pairs, fast to slow"))
        axis = ("0", str(len(ratios) // 2), str(len(ratios) - 1))
        lines += terminal.chart({"B / A": ratios}, axis, low=min(0.0, *ratios), high=max(1.0, *ratios))
    return lines


def _name(turning: Turning) -> str:
    return str(turning.setup.scaling) if turning.setup.scaling is not None else "plain RoPE"


def _picture(a: Turning, b: Turning, length: int, output: str) -> str:
    import numpy as np

    from ..plot import save
    from ..plot.canvas import figure
    from ..plot.panels import Lines

    shared = min(len(a.frequencies), len(b.frequencies))
    x, y = np.array(a.frequencies[:shared]), np.array(b.frequencies[:shared])
    pairs = np.arange(shared)
    with np.errstate(divide="ignore"):
        waves = {f"A {a.label}": math.tau / x, f"B {b.label}": math.tau / y}
    apart = {"B - A": (y - x) * (length - 1)}
    drawing = figure([
        Lines("Wavelengths", pairs, waves, "pair", "tokens", log_y=True),
        Lines(f"Phase at position {length - 1}", pairs, apart, "pair", "radians apart"),
    ])  # fmt: skip
    try:
        return str(save(drawing, output))
    except (ValueError, OSError) as error:
        raise OptionError(f"rope-diff: {error}") from None
