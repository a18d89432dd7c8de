"""posenc rope-diff A.json B.json: the differences between the rotations of two RoPE configurations.

Frequencies, factors and phases are compared as numbers, whatever the configurations call them. Torch is not needed; a
figure (--output) needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..core import files
from ..core.errors import OptionError
from ..encodings.rope.configs import DIALECTS, Setup, read
from ..encodings.rope.fields import LONGEST, has_rotation, keys, no_rotation, validate
from ..encodings.rope.scaling import frequencies
from . import terminal

MAX_BYTES = 16_000_000
"""Largest accepted file; a config.json has a few thousand bytes."""
SAME = 1e-9
"""Relative difference below which two frequencies are equal."""


@dataclass(frozen=True)
class ConfiguredRotation:
    """The rotation of a configuration for sequences of some length."""

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
            "layout": setup.layout or "unspecified",
            "scaling": type(scaling).__name__ if scaling is not None else "none",
            "depends on length": "yes" if scaling is not None and scaling.length_dependent else "no",
            "factor of cos and sin": f"{self.magnitude:.9g}",
            "factor of scores": f"{self.magnitude**2 * (1.0 if scaling is None else scaling.score_factor):.9g}",
            "sections": "none" if setup.sections is None else "-".join(map(str, setup.sections)),
        }


@dataclass(frozen=True)
class Difference:
    """A pair with different frequencies; `phase` is B's angle minus A's at the last position, in radians."""

    pair: int
    a: float
    b: float
    phase: float

    @property
    def diverges_at(self) -> float:
        """The first position at which the two phases differ by 0.1 radians."""
        return math.ceil(0.1 / abs(self.b - self.a))


def read_rotation(
    config, label: str, dialect: str, length: int, *, layer_type=None, head_dim: int | None = None
) -> ConfiguredRotation:
    if dialect != "llama.cpp" and not has_rotation(config := keys("the configuration", config)):
        raise OptionError(no_rotation(config))
    if dialect == "llama.cpp" and not any("rope" in str(key) for key in keys("the configuration", config)):
        raise OptionError(
            "this GGUF metadata has no rotation: no key of rope, such as llama.rope.dimension_count, is in it; if its model "
            "rotates queries and keys, add that key"
        )
    setup = read(config, dialect, layer_type=layer_type, length=length if dialect in ("vllm", "llama.cpp") else None)
    size = setup.rotary_dim or validate("head_dim", head_dim)
    if size is None:
        raise OptionError(f"{label} has no head size; give --head-dim")
    if size % 2:
        raise OptionError(f"{label} rotates {size} channels; the number must be even, because RoPE rotates pairs")
    magnitude = 1.0 if setup.scaling is None else setup.scaling.magnitude_at(length)
    return ConfiguredRotation(label, setup, frequencies(size, setup.base or 10000.0, setup.scaling, length), magnitude)


def compare(
    a: ConfiguredRotation, b: ConfiguredRotation, length: int
) -> tuple[dict[str, tuple[str, str]], list[Difference]]:
    """(facts that differ, pairs that differ)."""
    facts = {name: (value, b.facts[name]) for name, value in a.facts.items() if value != b.facts[name]}
    facts.pop("scaling", None)  # a different name may mean the same rotation; the numbers decide
    pairs = [
        Difference(c, x, y, (y - x) * (length - 1))
        for c, (x, y) in enumerate(zip(a.frequencies, b.frequencies, strict=False))
        if not abs(x - y) <= SAME * max(x, y)
    ]
    return facts, pairs


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc rope-diff",
        description="Compare the frequencies, factors and phases of two RoPE configurations.",
        epilog="Exit status: 0 equal, 1 different, 2 error. Give one file twice with two dialects to compare how two "
        "libraries read it.",
    )
    parser.add_argument("a", metavar="A.json", help="a model's config.json, or its rope_parameters alone")
    parser.add_argument("b", metavar="B.json")
    parser.add_argument("--length", type=int, default=4096, help="tokens in the sequence (default: %(default)s)")
    parser.add_argument(
        "--dialect", choices=DIALECTS, default="hf", help="library whose format the files have (default: %(default)s)"
    )
    parser.add_argument("--dialect-b", choices=DIALECTS, help="library whose format B has, if different")
    parser.add_argument("--layer-type", help="which rotation, for models with one per type of layer")
    parser.add_argument("--head-dim", type=int, help="head size, if a file has none")
    parser.add_argument("-o", "--output", help="also write a figure: png, svg or pdf, by its suffix")
    given = parser.parse_args(arguments)
    if not 1 <= given.length <= LONGEST:
        raise OptionError(f"--length must be from 1 to {LONGEST}, got {given.length:.6g}")
    if given.output:
        files.figure_format(given.output)
    try:
        a = _load(given.a, given.dialect, given)
        b = _load(given.b, given.dialect_b or given.dialect, given)
    except (ValueError, OSError) as error:
        raise OptionError(f"rope-diff: {error}") from None
    facts, pairs = compare(a, b, given.length)
    print("\n".join(_report(a, b, facts, pairs, given.length)))
    if given.output:
        print(_save_figure(a, b, given.length, given.output))
    return 1 if facts or pairs else 0


def _load(path: str, dialect: str, given: argparse.Namespace) -> ConfiguredRotation:
    config = _json(path)
    try:
        return read_rotation(
            config, f"{Path(path).name} ({dialect})", dialect, given.length,
            layer_type=given.layer_type, head_dim=given.head_dim,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _json(path: str):
    """The JSON object of a file; at most MAX_BYTES are read, whatever the path is."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise OptionError(f"{path} does not exist") from None
    if len(content) > MAX_BYTES:
        raise OptionError(
            f"{path} has more than {MAX_BYTES // 10**6} MB; give a config.json, which has a few thousand bytes"
        )
    try:
        config = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply for a configuration; give a config.json") from None
    except ValueError as error:  # invalid JSON or UTF-8, or a number with more digits than Python accepts
        raise OptionError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise OptionError(f"{path} must hold a JSON object, got a {type(config).__name__}; give a config.json")
    return config


def _report(a: ConfiguredRotation, b: ConfiguredRotation, facts, pairs: list[Difference], length: int) -> list[str]:
    bold, dim, shared = terminal.bold, terminal.dim, min(len(a.frequencies), len(b.frequencies))
    lines = [f"{bold('A')}  {a.label}: {_name(a)}", f"{bold('B')}  {b.label}: {_name(b)}", ""]
    if not facts and not pairs:
        return [*lines, f"The {len(a.frequencies)} frequencies and all factors are equal at {length} tokens."]
    if facts:
        lines += [*terminal.table(("difference", "A", "B"), [(name, *both) for name, both in facts.items()]), ""]
    if not pairs:
        return [*lines, f"The {shared} frequencies that both have are equal at {length} tokens."]
    worst = max(pairs, key=lambda pair: abs(pair.phase))
    first = min(pair.diverges_at for pair in pairs)
    lines += [
        f"{len(pairs)} of {shared} pairs have different frequencies.",
        f"At position {length - 1} their phases differ by up to {abs(worst.phase):.4g} radians (pair {worst.pair}); "
        f"the difference reaches 0.1 radians at position {first:g}.",
        "",
    ]
    rows = [
        (str(d.pair), f"{d.a:.6g}", f"{d.b:.6g}", f"{d.b / d.a:.4f}" if d.a else "–", f"{d.phase:+.4g}", f"{d.diverges_at:g}")
        for d in pairs
    ]  # fmt: skip
    header = ("pair", "A", "B", "B / A", f"phase at {length - 1}", "0.1 rad at")
    lines += [*terminal.table(header, rows), ""]
    ratios = [y / x if x else 1.0 for x, y in zip(a.frequencies, b.frequencies, strict=False)]
    if len(ratios) > 1:
        lines.append(dim("B / A over the pairs, from high to low frequency"))
        axis = ("0", str(len(ratios) // 2), str(len(ratios) - 1))
        lines += terminal.chart({"B / A": ratios}, axis, low=min(0.0, *ratios), high=max(1.0, *ratios))
    return lines


def _name(rotation: ConfiguredRotation) -> str:
    return str(rotation.setup.scaling) if rotation.setup.scaling is not None else "plain RoPE"


def _save_figure(a: ConfiguredRotation, b: ConfiguredRotation, length: int, output: str) -> str:
    import numpy as np

    from ..plot import save
    from ..plot.canvas import figure
    from ..plot.panels import Lines

    shared = min(len(a.frequencies), len(b.frequencies))
    x, y = np.array(a.frequencies[:shared]), np.array(b.frequencies[:shared])
    pairs = np.arange(shared)
    with np.errstate(divide="ignore"):
        waves = {f"A {a.label}": math.tau / x, f"B {b.label}": math.tau / y}
    difference = {"B - A": (y - x) * (length - 1)}
    drawing = figure([
        Lines("Wavelengths", pairs, waves, "pair", "tokens", log_y=True),
        Lines(f"Phase at position {length - 1}", pairs, difference, "pair", "difference (radians)"),
    ])  # fmt: skip
    try:
        return str(save(drawing, output))
    except (ValueError, OSError) as error:
        raise OptionError(f"rope-diff: {error}") from None
