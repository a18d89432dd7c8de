"""Run an experiment: what is finished stays, what is missing is done, here, in worker processes or on a cluster."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from . import cluster, corpus, progress, report, results, tensors, work, workers
from .cells import Cell
from .corpus import Corpus
from .errors import CellFailure, LabError
from .presets import Experiment
from .results import Results
from .store import Store
from .team import ALONE, Team
from .train import CHECKPOINT_SECONDS
from .workers import Event

MOST_JOBS = 8


def compare(
    experiment: Experiment,
    out: str | Path,
    *,
    text: str | Path | None = None,
    jobs: int | None = None,
    on: str = "here",
    team: Team = ALONE,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Results:
    """Do every cell that is missing in the folder `out` and write the report there.

    jobs   worker processes; 1 works in this process; None: one for each processor on the CPU, 1 on a GPU
    on     "here", "ray" (a local cluster) or an address such as ray://host:10001
    """
    tensors.library()
    experiment.check()
    if on != "here" and on != "ray" and not on.startswith("ray://"):
        raise LabError(f"--on {on!r} is unknown; use here, ray, or ray://HOST:PORT")
    if on != "here" and team.size > 1:
        raise LabError("torchrun spreads one cell, --on ray spreads cells; use one of them")
    if jobs is not None and jobs < 1:
        raise LabError(f"--jobs {jobs} must be at least 1")
    words = corpus.read(text) if experiment.needs_text else None
    cells = experiment.cells(words.digest if words else "")
    store = Store(out)
    if not team.first:
        for cell in _missing(cells, store, team):
            work.do(cell, store, words, team=team, checkpoint_seconds=checkpoint_seconds)
        return results.collect(experiment, cells, store, {})
    with store.alone():
        results.begin(
            experiment,
            store,
            {"digest": words.digest, "source": words.source, "bytes": str(len(words.train))} if words else {},
            jobs,
        )
        left = _missing(cells, store, team)
        try:
            _work_through(left, len(cells), store, words, jobs, on, team, checkpoint_seconds)
        except CellFailure:  # what the other cells found is reported before it is told
            report.save(results.read(out), store.root)
            raise
        found = results.read(out)
        report.save(found, store.root)
    return found


def complete(
    experiment: Experiment, out: str | Path, *, text: str | Path | None = None, jobs: int | None = None
) -> Results:
    """The same without a report: the cells that are missing in a folder, and the results of this experiment."""
    tensors.library()
    experiment.check()
    words = corpus.read(text) if experiment.needs_text else None
    cells = experiment.cells(words.digest if words else "")
    store = Store(out)
    with store.alone():
        left = _missing(cells, store, ALONE)
        _work_through(left, len(cells), store, words, jobs, "here", ALONE, CHECKPOINT_SECONDS)
    return results.collect(experiment, cells, store, {})


def _missing(cells: list[Cell], store: Store, team: Team) -> list[Cell]:
    """What is left, as every process of a team sees it before any of them starts."""
    left = [cell for cell in cells if work.missing(cell, store)]
    for cell in left if team.first else ():
        work.tell_damage(cell, store)
    team.wait()
    return left


def _work_through(
    left: list[Cell],
    number: int,
    store: Store,
    words: Corpus | None,
    jobs: int | None,
    on: str,
    team: Team,
    checkpoint_seconds: float,
) -> None:
    """Do what is left of `number` cells, and show it."""
    if left:
        with progress.start(left, number - len(left), store) as shown:
            _spread(left, store, words, jobs, on, team, checkpoint_seconds, shown.see)


def _spread(
    left: list[Cell],
    store: Store,
    words: Corpus | None,
    jobs: int | None,
    on: str,
    team: Team,
    checkpoint_seconds: float,
    see: Callable[[Event], None],
) -> None:
    if on != "here":
        for event in cluster.run(left, store, words, jobs, on):
            see(event)
        return
    if jobs is None:
        jobs = 1 if left[0].training.device == "cuda" or team.size > 1 else min(workers.cores(), MOST_JOBS)
    jobs = min(jobs, len(left))
    if jobs > 1 and team.size == 1:
        for event in workers.run(left, store, words, jobs):
            see(event)
        return
    failures = []
    for cell in left:
        try:
            work.do(
                cell, store, words, team=team, checkpoint_seconds=checkpoint_seconds,
                progress=lambda step, loss, cell=cell: see(Event(cell, step, loss)),  # type: ignore[misc]
            )  # fmt: skip
        except LabError:
            raise
        except Exception:
            if team.size > 1:  # the other processes wait for this one in the middle of the cell
                raise
            failures.append(f"{cell.training.task}, {cell.name()} failed:\n{traceback.format_exc()}")
            continue
        see(Event(cell))
    if failures:
        raise CellFailure("\n".join(failures))
