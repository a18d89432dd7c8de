"""Do one cell: train if that is missing, then the tests that are missing. Whoever runs it, the files are the same."""

from __future__ import annotations

from dataclasses import asdict

from . import tensors
from .cells import Cell, Testing
from .corpus import Corpus
from .evaluate import evaluate
from .store import Store
from .team import ALONE, Team
from .train import CHECKPOINT_SECONDS, Progress, train


def missing(cell: Cell, store: Store) -> bool:
    """Whether anything of a cell is left to do."""
    return store.get(cell.training.key, "train.json") is None or bool(_untested(cell, store))


def _untested(cell: Cell, store: Store) -> list[Testing]:
    return [testing for testing in cell.tests if store.get(cell.test_key(testing), "test.json") is None]


def do(
    cell: Cell,
    store: Store,
    corpus: Corpus | None = None,
    *,
    team: Team = ALONE,
    progress: Progress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> None:
    key = cell.training.key
    wanted = _untested(cell, store)
    record = store.get(key, "train.json")
    if record is None or (wanted and not tensors.sound(store.path(key, "weights"))):
        record = train(
            cell.training, store, corpus, team=team, progress=progress, checkpoint_seconds=checkpoint_seconds
        )
        if team.first:
            store.put(key, "train.json", record)
            store.drop(key, "checkpoint")
    team.wait()
    if not team.first:  # testing is short: one process does it
        team.wait()
        return
    for testing in wanted:
        if record["status"] == "trained":
            result = evaluate(cell, testing, store, corpus)
        else:
            points = [{"size": size, "error": record["status"]} for size in testing.test]
            settings = {"training": asdict(cell.training), "testing": asdict(testing)}
            result = {"settings": settings, "points": points}
        store.put(cell.test_key(testing), "test.json", result)
    team.wait()
