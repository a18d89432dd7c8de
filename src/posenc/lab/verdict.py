"""The verdict: the results in sentences. One rule for every encoding, all thresholds here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import published
from .results import Mean, Results, metric_of

HOLDS = {"loss": 0.05, "accuracy": 0.02}
BREAKS = {"loss": 0.3, "accuracy": 0.2}
LEARNT = 0.9  # accuracy at the training size


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
    def loss(self) -> float | None:
        """The loss from the training size to the far one; negative if it improves."""
        return None if self.here is None or self.far is None else self.far.value - self.here.value


def standing(results: Results, task: dict[str, Any], encoding: str, size: int) -> Standing:
    metric = metric_of(task)
    here, far = (results.point(task, encoding, at, metric) for at in (task["train"], size))
    if isinstance(here, str) or isinstance(far, str):
        known = here if isinstance(here, Mean) else None
        return Standing(encoding, known, None, size, "cannot", far if isinstance(far, str) else str(here))
    if here is None or far is None:
        return Standing(encoding, here, far, size, "missing")
    if metric == "accuracy" and here.value < LEARNT:
        return Standing(encoding, here, far, size, "not learnt")
    # an extension is compared with the same weights without it: a score that is bad at every size does not "hold"
    plain = results.point(task, encoding.split("+")[0], task["train"], metric)
    start = plain if isinstance(plain, Mean) else here
    lost = far.value - start.value if metric == "loss" else start.value - far.value
    outcome = "holds" if lost <= HOLDS[metric] else "breaks" if lost > BREAKS[metric] else "loses"
    return Standing(encoding, here, far, size, outcome)


def standings(results: Results, task: dict[str, Any], size: int | None = None) -> list[Standing]:
    """Every encoding's standing at a size (the largest tested), best first."""
    metric = metric_of(task)
    size = max(task["test"]) if size is None else size
    found = [standing(results, task, encoding, size) for encoding in results.encodings(task)]
    sign = 1 if metric == "loss" else -1
    return sorted(found, key=lambda s: (s.far is None, sign * s.far.value if s.far else 0.0))


def sentences(results: Results) -> list[str]:
    """The verdict on the whole run."""
    found = []
    if results.finished < results.wanted:
        found.append(f"Only {results.finished} of {results.wanted} trials are finished: the verdict is provisional.")
    for task in results.tasks():
        found += _on_task(results, task)
    found += _overall(results)
    found += [published.sentence(name, results) for name in results.experiment.get("published", ())]
    return found


def _on_task(results: Results, task: dict[str, Any]) -> list[str]:
    metric = metric_of(task)
    ranked = standings(results, task)
    far = max(task["test"])
    times = far / task["train"]
    known = [s for s in ranked if s.far is not None]
    if not known:
        return [f"{task['task']}: nothing was measured at size {far}."]
    sign = 1 if metric == "loss" else -1
    near = sorted((s for s in ranked if s.here is not None), key=lambda s: sign * s.here.value)  # type: ignore[union-attr]
    unit = "nats a byte" if metric == "loss" else "of the answers right"
    best = f"At the training size {near[0].encoding} is best with {near[0].here} {unit}; at" if near else "At"
    found = [
        f"{task['task']} (trained to size {task['train']}, tested to {far}, {times:g} ×). "
        f"{best} {times:g} × it is {known[0].encoding} with {known[0].far}."
    ]
    for outcome, phrase in (
        ("holds", "keep their quality"),
        ("loses", "lose"),
        ("breaks", "break"),
        ("not learnt", "did not learn the task at the training size"),
    ):
        group = [s for s in ranked if s.outcome == outcome]
        if group:
            found.append(f"At {times:g} × these {phrase}: " + ", ".join(_moved(s) for s in group) + ".")
    found += [f"{s.encoding} cannot run at size {far}: {s.reason}." for s in ranked if s.outcome == "cannot"]
    found += _sliding(results, task)
    if task["seeds"] == 1:
        found.append("One seed: differences of a few hundredths are not significant.")
    return found


def _sliding(results: Results, task: dict[str, Any]) -> list[str]:
    """The change in sliding windows, where the first bytes of a window do not count."""
    far = max(task["test"])
    changes = {}
    for encoding in results.encodings(task) if task.get("sliding") else ():
        ends = [results.point(task, encoding, size, "sliding") for size in (task["train"], far)]
        if isinstance(ends[0], Mean) and isinstance(ends[1], Mean):
            changes[encoding] = ends[1].value - ends[0].value
    if not changes:
        return []
    hold = [f"{encoding} ({change:+.3f})" for encoding, change in changes.items() if change <= HOLDS["loss"]]
    lose = [f"{s} {change:+.2f}" for s, change in sorted(changes.items(), key=lambda c: c[1]) if change > HOLDS["loss"]]
    return [
        f"Where only the last {task['sliding']} bytes of a window count, so that each has a long context, "
        f"{', '.join(hold) or 'none'} keep{'s' * (len(hold) == 1)} the quality from {task['train']} to {far}"
        + (f"; the others change by {', '.join(lose)}." if lose else ".")
    ]


def _overall(results: Results) -> list[str]:
    """The encoding to use past the training size: the best mean rank over all tasks."""
    ranks: dict[str, list[int]] = {}
    for task in results.tasks():
        for rank, s in enumerate(s for s in standings(results, task) if "+" not in s.encoding):
            ranks.setdefault(s.encoding, []).append(rank + 1 if s.outcome == "holds" else rank + 100)
    everywhere = {name: found for name, found in ranks.items() if len(found) == len(results.tasks())}
    if not everywhere:
        return []
    best = min(everywhere, key=lambda name: sum(everywhere[name]))
    if all(rank < 100 for rank in everywhere[best]):
        return [f"Past the training length, use {best}: it keeps its quality on every task."]
    return [f"No encoding keeps its quality on every task; {best} comes nearest."]


def _moved(s: Standing) -> str:
    return f"{s.encoding} ({s.here.value:.3f} → {s.far.value:.3f})"  # type: ignore[union-attr]
