"""The verdict on each encoding: one rule for all, all thresholds here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .results import Mean, Results, metric_of

HOLDS = {"loss": 0.05, "accuracy": 0.02}
BREAKS = {"loss": 0.3, "accuracy": 0.2}
LEARNT = 0.9  # accuracy at the training size
LITTLE = 3.0  # loss, nats per byte: what the frequencies of bytes alone give, about


@dataclass(frozen=True)
class Standing:
    """How one encoding does on one task: at the training size and at one size past it."""

    encoding: str
    here: Mean | None
    far: Mean | None
    size: int
    outcome: str  # holds, loses, breaks, cannot, not learnt, missing
    reason: str = ""

    @property
    def change(self) -> str:
        """The scores at the training size and at the far one, as text."""
        return f"{self.here.value:.3f} → {self.far.value:.3f}" if self.here and self.far else "–"


def standing(results: Results, task: dict[str, Any], encoding: str, size: int) -> Standing:
    metric = metric_of(task)
    here, far = (results.point(task, encoding, at, metric) for at in (task["train"], size))
    if isinstance(here, str) or isinstance(far, str):
        known = here if isinstance(here, Mean) else None
        return Standing(encoding, known, None, size, "cannot", far if isinstance(far, str) else str(here))
    # an extension is compared with the same weights without it: a score that is bad at every size does not "hold"
    plain = results.point(task, encoding.split("+")[0], task["train"], metric)
    return Standing(encoding, here, far, size, _outcome(metric, here, far, plain))


def _outcome(metric: str, here: Mean | None, far: Mean | None, plain: Mean | str | None) -> str:
    if here is None or far is None:
        return "missing"
    if metric == "accuracy" and here.value < LEARNT:
        return "not learnt"
    start = plain if isinstance(plain, Mean) else here
    lost = far.value - start.value if metric == "loss" else start.value - far.value
    return "holds" if lost <= HOLDS[metric] else "breaks" if lost > BREAKS[metric] else "loses"


def midway(results: Results, task: dict[str, Any], encoding: str, step: int) -> Standing:
    """An encoding's standing at the largest size tested, after `step` of its training steps."""
    metric, size = metric_of(task), max(task["test"])
    if step == task["steps"]:
        return standing(results, task, encoding, size)
    here, far = (results.midway(task, encoding, step, at, metric) for at in (task["train"], size))
    return Standing(encoding, here, far, size, _outcome(metric, here, far, here))


def standings(results: Results, task: dict[str, Any], size: int | None = None) -> list[Standing]:
    """Every encoding's standing at a size (the largest tested), best first."""
    size = max(task["test"]) if size is None else size
    found = [standing(results, task, encoding, size) for encoding in results.encodings(task)]
    sign = sign_of(task)
    return sorted(found, key=lambda s: (s.far is None, sign * s.far.value if s.far else 0.0))


def by_steps(results: Results, task: dict[str, Any]) -> list[tuple[str, list[Standing]]]:
    """Every encoding's standing at the largest size after each number of training steps, best at the end first, without
    extensions, which are tested at the end alone. Empty where trainings were not tested midway."""
    steps = results.steps(task)
    names = [s.encoding for s in standings(results, task) if "+" not in s.encoding] if steps else []
    return [(name, [midway(results, task, name, step) for step in steps]) for name in names]


def sign_of(task: dict[str, Any]) -> int:
    """1 if lower is better, -1 if higher is."""
    return 1 if metric_of(task) == "loss" else -1


def apart(a: Mean, b: Mean, metric: str) -> bool:
    """Whether two scores differ by more than both intervals; for single seeds, by more than the threshold of `holds`."""
    known = a.half is not None and b.half is not None
    noise = (a.half or 0.0) + (b.half or 0.0) if known else HOLDS[metric]
    return abs(a.value - b.value) > noise


def best_here(results: Results, task: dict[str, Any]) -> tuple[list[Standing], list[Standing]]:
    """(those that are level with the best at the training size, the others), best first, without extensions."""
    sign, metric = sign_of(task), metric_of(task)
    known = [s for s in standings(results, task) if s.here is not None and "+" not in s.encoding]
    known.sort(key=lambda s: sign * s.here.value)  # type: ignore[union-attr]
    level = [s for s in known if not apart(s.here, known[0].here, metric)]  # type: ignore[arg-type]
    return level, [s for s in known if s not in level]
