"""Do one cell: train if that is missing, then the tests that are missing. Whoever runs it, the files are the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

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


def tell_damage(cell: Cell, store: Store) -> None:
    """Say which files of a cell cannot be used; `do` computes them again."""
    for kind in ("weights", "checkpoint"):
        wrong = tensors.damage(store, cell.training.key, kind)
        if wrong:
            name = f"{cell.training.task}, {cell.name()}, seed {cell.training.seed}"
            print(
                f"{store.path(cell.training.key, kind)} cannot be used: {wrong}; {name} is computed again",
                file=sys.stderr,
            )


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads: sums then have one order wherever a cell runs, and its numbers the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def do(
    cell: Cell,
    store: Store,
    corpus: Corpus | None = None,
    *,
    team: Team = ALONE,
    progress: Progress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> None:
    with threads(cell.training.threads):
        wanted = _untested(cell, store)
        record = trained(
            cell, store, corpus, weights=bool(wanted), team=team, progress=progress,
            checkpoint_seconds=checkpoint_seconds,
        )  # fmt: skip
        team.wait()
        for testing in wanted if team.first else ():  # testing is short: one process does it
            if record["status"] == "trained":
                result = evaluate(cell, testing, store, corpus)
            else:
                points = [{"size": size, "error": record["status"]} for size in testing.test]
                settings = {"training": asdict(cell.training), "testing": asdict(testing)}
                result = {"settings": settings, "points": points}
            store.put(cell.test_key(testing), "test.json", result)
        team.wait()


def trained(
    cell: Cell,
    store: Store,
    corpus: Corpus | None = None,
    *,
    weights: bool,
    team: Team = ALONE,
    progress: Progress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> dict[str, Any]:
    """The record of a cell's training, which is done where it is missing, or where its weights are asked for and cannot
    be used."""
    key = cell.training.key
    record = store.get(key, "train.json")
    if record is not None and not (weights and not _usable_weights(key, store)):
        return record
    record = train(cell.training, store, corpus, team=team, progress=progress, checkpoint_seconds=checkpoint_seconds)
    if team.first:
        store.put(key, "train.json", record)
        store.drop(key, "checkpoint")
    return record


def _usable_weights(key: str, store: Store) -> bool:
    try:
        return tensors.read(store, key, "weights") is not None
    except tensors.Damaged:
        return False
