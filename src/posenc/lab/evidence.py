"""The strongest run that comes with posenc: the preset `paper` on one H200, without its training curves.

Reports of small runs quote it, because small models mislead past the training length. `python -m posenc.lab.evidence` writes
evidence.json from docs/results/paper/results.json; a test compares the two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from . import validate
from .results import Results

FILE = Path(__file__).with_name("evidence.json")
CLEARLY = 2.0  # times the size from which larger models are the stronger evidence


@cache
def strongest() -> Results:
    return Results(**validate.read_json(FILE, validate.RESULTS))


def stronger_than(results: Results) -> tuple[Results, dict[str, Any]] | None:
    """The strongest run and its text task, if it has clearly larger models than `results` and longer training texts."""
    ours, (strongest, theirs) = text_task(results), strongest_text()
    if ours is None or "width" not in ours:
        return None
    larger = model_size(theirs) >= CLEARLY * model_size(ours) and theirs["train"] >= ours["train"]
    return (strongest, theirs) if larger else None


def strongest_text() -> tuple[Results, dict[str, Any]]:
    """The strongest run and its text task."""
    results = strongest()
    task = text_task(results)
    assert task is not None
    return results, task


def text_task(results: Results) -> dict[str, Any] | None:
    return next((task for task in results.tasks() if task["task"] == "text"), None)


def model_size(task: dict[str, Any]) -> float:
    """Parameters of a model's layers, from its settings: attention has 4 width², the MLP 8."""
    return 12.0 * task.get("layers", 3) * task["width"] ** 2


def trained_bytes(task: dict[str, Any]) -> float:
    return float(task["train"]) * task["steps"] * task.get("batch", 32)


def without_curves(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "trainings": [{**training, "curve": []} for training in content["trainings"]]}


def main() -> None:
    source = Path(__file__).parents[3] / "docs" / "results" / "paper" / "results.json"
    content = without_curves(json.loads(source.read_text(encoding="utf-8")))
    FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
