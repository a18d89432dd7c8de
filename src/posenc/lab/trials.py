"""Trials: one (task, encoding, seed) each, with every setting that can change the results.

A trial's key is a hash of these settings, so results of other settings are never reused. A trial has one training and
one or more tests: extensions such as rope+ntk:8 are tests of the same trained weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

RULES = 1
"""Increase this when the lab changes what a setting means: all earlier results are then computed again."""


@dataclass(frozen=True)
class Training:
    """Every setting that affects the trained weights."""

    task: str  # a specification, for example copy:unique=true
    encoding: str  # a specification without extension, for example rope:base=500000
    seed: int
    train: int  # the largest size of training
    steps: int
    batch: int
    width: int
    heads: int
    layers: int
    lr: float
    position_lr: float  # multiplies lr for the encoding's own parameters
    weight_decay: float
    device: str  # "cpu" or "cuda"
    precision: str  # "float32" or "bfloat16" (autocast)
    compile: bool
    engine: str
    text: str  # a digest; empty for tasks without text
    threads: int = 1  # of the CPU: the number changes the order of sums
    rules: int = RULES

    @property
    def key(self) -> str:
        return key(asdict(self))


@dataclass(frozen=True)
class Testing:
    """Every setting of a test of the trained weights."""

    extension: str | None
    test: tuple[int, ...]  # sizes
    count: int  # problems a size, or held-out bytes of text
    sliding: int  # stride of the sliding windows (text); 0: none
    windows: int  # how many of them
    rules: int = RULES


@dataclass(frozen=True)
class Trial:
    training: Training
    tests: tuple[Testing, ...]

    def test_key(self, testing: Testing) -> str:
        return key({"training": asdict(self.training), "testing": asdict(testing)})

    def name(self, testing: Testing | None = None) -> str:
        """The encoding's specification, extension included."""
        return self.training.encoding + ("" if testing is None or not testing.extension else "+" + testing.extension)

    @property
    def cost(self) -> float:
        """A rough measure of its duration, in arbitrary units, to estimate the time left."""
        t = self.training
        parameters = 12 * t.layers * t.width**2
        tested = sum(len(testing.test) * testing.count for testing in self.tests)
        tokens = 3 * t.steps * t.batch * t.train * (1 if t.text else 0.75)
        return parameters * (tokens + tested * (1 if t.text else t.train))


def key(settings: dict[str, Any]) -> str:
    """A hash of names and values that does not depend on their order."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
