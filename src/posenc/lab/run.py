"""Run an experiment's unfinished trials: in this process, in worker processes or on a Ray cluster."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from . import corpus, progress, ray_cluster, report, results, run_trial, tensor_files, worker_processes
from .corpus import Corpus
from .errors import LabError, TrialFailure
from .presets import Experiment
from .process_group import SINGLE, ProcessGroup
from .results import Results
from .store import Store
from .train import CHECKPOINT_SECONDS
from .trials import Trial
from .worker_processes import Event

MAX_JOBS = 8


def compare(
    experiment: Experiment,
    out: str | Path,
    *,
    text: str | Path | None = None,
    jobs: int | None = None,
    on: str = "here",
    group: ProcessGroup = SINGLE,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Results:
    """Run every trial that is missing in the folder `out` and write the report there.

    jobs   worker processes; 1: this process; None: one for each processor on the CPU, 1 on a GPU
    on     "here", "ray" (a local cluster) or an address such as ray://host:10001
    """
    tensor_files.library()
    experiment.check()
    if on != "here" and on != "ray" and not on.startswith("ray://"):
        raise LabError(f"--on {on!r} is unknown; use here, ray, or ray://HOST:PORT")
    if on != "here" and group.size > 1:
        raise LabError("torchrun shards each trial, --on ray distributes the trials; use one of them")
    if jobs is not None and jobs < 1:
        raise LabError(f"--jobs {jobs} must be at least 1")
    source = corpus.read(text) if experiment.needs_text else None
    trials = experiment.trials(source.digest if source else "")
    store = Store(out)
    if not group.is_main:
        for trial in _missing(trials, store, group):
            run_trial.run_trial(trial, store, source, group=group, checkpoint_seconds=checkpoint_seconds)
        return results.collect(experiment, trials, store, {})
    with store.lock():
        results.begin(
            experiment,
            store,
            {"digest": source.digest, "source": source.source, "bytes": str(len(source.train))} if source else {},
            jobs,
        )
        left = _missing(trials, store, group)
        try:
            _run_with_progress(left, len(trials), store, source, jobs, on, group, checkpoint_seconds)
        except TrialFailure:  # report the other trials first
            report.save(results.read(out), store.root)
            raise
        found = results.read(out)
        report.save(found, store.root)
    return found


def complete(
    experiment: Experiment, out: str | Path, *, text: str | Path | None = None, jobs: int | None = None
) -> Results:
    """Run every missing trial without writing a report; return the results."""
    tensor_files.library()
    experiment.check()
    source = corpus.read(text) if experiment.needs_text else None
    trials = experiment.trials(source.digest if source else "")
    store = Store(out)
    with store.lock():
        left = _missing(trials, store, SINGLE)
        _run_with_progress(left, len(trials), store, source, jobs, "here", SINGLE, CHECKPOINT_SECONDS)
    return results.collect(experiment, trials, store, {})


def _missing(trials: list[Trial], store: Store, group: ProcessGroup) -> list[Trial]:
    """The unfinished trials. All processes of a group list them before any of them starts."""
    left = [trial for trial in trials if run_trial.is_unfinished(trial, store)]
    for trial in left if group.is_main else ():
        run_trial.warn_about_damage(trial, store)
    group.barrier()
    return left


def _run_with_progress(
    left: list[Trial],
    number: int,
    store: Store,
    source: Corpus | None,
    jobs: int | None,
    on: str,
    group: ProcessGroup,
    checkpoint_seconds: float,
) -> None:
    """Run what is left of `number` trials and display the progress."""
    if left:
        with progress.start(left, number - len(left), store) as display:
            _run_trials(left, store, source, jobs, on, group, checkpoint_seconds, display.update)


def _run_trials(
    left: list[Trial],
    store: Store,
    source: Corpus | None,
    jobs: int | None,
    on: str,
    group: ProcessGroup,
    checkpoint_seconds: float,
    update: Callable[[Event], None],
) -> None:
    if on != "here":
        for event in ray_cluster.run(left, store, source, jobs, on):
            update(event)
        return
    if jobs is None:
        jobs = 1 if left[0].training.device == "cuda" or group.size > 1 else min(worker_processes.cores(), MAX_JOBS)
    jobs = min(jobs, len(left))
    if jobs > 1 and group.size == 1:
        for event in worker_processes.run(left, store, source, jobs):
            update(event)
        return
    failures = []
    for trial in left:
        try:
            run_trial.run_trial(
                trial, store, source, group=group, checkpoint_seconds=checkpoint_seconds,
                progress=lambda step, loss, trial=trial: update(Event(trial, step, loss)),  # type: ignore[misc]
            )  # fmt: skip
        except LabError:
            raise
        except Exception:
            if group.size > 1:  # the other processes wait for this one
                raise
            failures.append(f"{trial.training.task}, {trial.name()} failed:\n{traceback.format_exc()}")
            continue
        update(Event(trial))
    if failures:
        raise TrialFailure("\n".join(failures))
