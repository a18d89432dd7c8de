"""Cells: the unit of work. A cell is one (task, encoding, seed) with every setting that could change its numbers.

Its key is a hash of all of them, so changed settings never meet old results. A cell has one training and one or more
tests: extensions such as rope+ntk:8 are tests of the same trained weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

RULES = 1
"""Raise this when the lab itself changes what a setting means: all earlier results are then computed again."""


@dataclass(frozen=True)
class Training:
    """Everything that decides what is learnt."""

    task: str  # a task's word
    encoding: str  # a trained encoding's word
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
    text: str  # a digest, empty where the task reads no text
    threads: int = 1  # of the CPU: another number of them sums in another order
    rules: int = RULES

    @property
    def key(self) -> str:
        return key(asdict(self))


@dataclass(frozen=True)
class Testing:
    """Everything that decides how the trained weights are tested."""

    extension: str | None
    test: tuple[int, ...]  # sizes
    count: int  # problems a size, or held-out bytes of text
    sliding: int  # stride of the sliding windows (text); 0: none
    windows: int  # how many of them
    rules: int = RULES


@dataclass(frozen=True)
class Cell:
    training: Training
    tests: tuple[Testing, ...]

    def test_key(self, testing: Testing) -> str:
        return key({"training": asdict(self.training), "testing": asdict(testing)})

    def name(self, testing: Testing | None = None) -> str:
        """The encoding as typed, extension included."""
        return self.training.encoding + ("" if testing is None or not testing.extension else "+" + testing.extension)

    @property
    def work(self) -> float:
        """Roughly how long it takes, in arbitrary units, to guess the time left."""
        t = self.training
        parameters = 12 * t.layers * t.width**2
        tested = sum(len(testing.test) * testing.count for testing in self.tests)
        tokens = 3 * t.steps * t.batch * t.train * (1 if t.text else 0.75)
        return parameters * (tokens + tested * (1 if t.text else t.train))


def key(settings: dict[str, Any]) -> str:
    """A hash that depends on names and values, not on their order."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
