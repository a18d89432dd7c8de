"""Run one trial: train if the training is missing, then run the missing tests. The files are the same wherever it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Unpack

import torch

from . import tensor_files
from .corpus import Corpus
from .evaluate import evaluate, evaluate_midway
from .process_group import SINGLE
from .store import Store
from .train import Conditions, train
from .trials import Testing, Trial


def is_unfinished(trial: Trial, store: Store) -> bool:
    """Whether the training or a test of a trial is missing."""
    return store.get(trial.training.key, "train.json") is None or bool(_missing_tests(trial, store))


def _missing_tests(trial: Trial, store: Store) -> list[Testing]:
    return [testing for testing in trial.tests if store.get(trial.test_key(testing), "test.json") is None]


def warn_about_damage(trial: Trial, store: Store) -> None:
    """Print which files of a trial are damaged; `run_trial` computes them again."""
    for kind in ("weights", "checkpoint"):
        damage = tensor_files.find_damage(store, trial.training.key, kind)
        if damage:
            name = f"{trial.training.task}, {trial.name()}, seed {trial.training.seed}"
            print(
                f"{store.path(trial.training.key, kind)} cannot be used: {damage}; {name} is computed again",
                file=sys.stderr,
            )


@contextlib.contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Compute with `number` threads: sums then have one order, and a trial the same bits, on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_trial(trial: Trial, store: Store, corpus: Corpus | None = None, **conditions: Unpack[Conditions]) -> None:
    group = conditions.get("group", SINGLE)
    with use_threads(trial.training.threads):
        missing = _missing_tests(trial, store)
        record = ensure_trained(trial, store, corpus, weights=bool(missing), **conditions)
        group.barrier()
        for testing in missing if group.is_main else ():  # tests are short: the main process runs them
            if record["status"] == "trained":
                result = evaluate(trial, testing, store, corpus)
            else:
                points = [{"size": size, "error": record["status"]} for size in testing.test]
                settings = {"training": asdict(trial.training), "testing": asdict(testing)}
                result = {"settings": settings, "points": points}
            store.put(trial.test_key(testing), "test.json", result)
        group.barrier()


def ensure_trained(
    trial: Trial, store: Store, corpus: Corpus | None = None, *, weights: bool, **conditions: Unpack[Conditions]
) -> dict[str, Any]:
    """The record of a trial's training. Train if there is none, or if `weights` are needed and cannot be read."""
    key = trial.training.key
    record = store.get(key, "train.json")
    if record is not None and not (weights and not _weights_are_usable(key, store)):
        return record
    test = lambda model: evaluate_midway(trial, corpus, model)  # noqa: E731
    record = train(trial.training, store, corpus, evaluate_midway=test, **conditions)
    if conditions.get("group", SINGLE).is_main:
        store.put(key, "train.json", record)
        store.drop(key, "checkpoint")
    return record


def _weights_are_usable(key: str, store: Store) -> bool:
    try:
        return tensor_files.read(store, key, "weights") is not None
    except tensor_files.Damaged:
        return False
