"""Run an experiment's unfinished trials: in this process, in worker processes or on a Ray cluster."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import corpus, progress, ray_cluster, report, results, run_trial, tensor_files, worker_processes
from .corpus import Corpus
from .errors import LabError, TrialFailure
from .presets import Experiment
from .process_group import SINGLE, ProcessGroup
from .results import Results
from .store import Store
from .texts import Words
from .train import CHECKPOINT_SECONDS, Progress
from .trials import Trial
from .worker_processes import Event

MAX_JOBS = 8
ENGLISH = Words("en")


def compare(
    experiment: Experiment, out: str | Path, *, text: str | Path | None = None, jobs: int | None = None,
    on: str = "here", group: ProcessGroup = SINGLE, checkpoint_seconds: float = CHECKPOINT_SECONDS,
    language: str | None = None,
) -> Results:  # fmt: skip
    """Run every trial that is missing in the folder `out` and write the report there.

    jobs   worker processes; 1: this process; None: one for each processor on the CPU, 1 on a GPU
    on     "here", "ray" (a local cluster) or an address such as ray://host:10001
    language   of the progress and of the page when it opens, "en" or "zh"; None: English, and the browser's
    """
    if on != "here" and on != "ray" and not on.startswith("ray://"):
        raise LabError(f"--on {on!r} is unknown; use here, ray, or ray://HOST:PORT")
    if on != "here" and group.size > 1:
        raise LabError("torchrun shards each trial, --on ray distributes the trials; use one of them")
    if jobs is not None and jobs < 1:
        raise LabError(f"--jobs {jobs} must be at least 1")
    source, trials = _prepare(experiment, text)
    run = _Run(Store(out), source, jobs, on, group, checkpoint_seconds, Words(language or "en"))
    if not group.is_main:
        for trial in run.unfinished(trials):
            run.run_here(trial)
        return results.collect(experiment, trials, run.store, {})
    with run.store.lock():
        about = source.about if source else {}
        results.restore(trials, run.store)
        results.begin(experiment, run.store, about, jobs)
        failure = None
        try:
            run.run(trials)
        except TrialFailure as error:  # raised after the report of the other trials
            failure = error
        found = results.read(out)
        report.save(found, run.store.root, language=language)
    if failure is not None:
        raise failure
    return found


def complete(
    experiment: Experiment, out: str | Path, *, text: str | Path | None = None, jobs: int | None = None
) -> Results:
    """Run every missing trial without writing a report; return the results."""
    source, trials = _prepare(experiment, text)
    store = Store(out)
    with store.lock():
        _Run(store, source, jobs).run(trials)
    return results.collect(experiment, trials, store, {})


def _prepare(experiment: Experiment, text: str | Path | None) -> tuple[Corpus | None, list[Trial]]:
    """The text and the trials of an experiment; raises LabError before any work if something is missing or wrong."""
    tensor_files.library()
    experiment.check()
    source = corpus.read(text) if experiment.needs_text else None
    return source, experiment.trials(source.digest if source else "")


@dataclass(frozen=True)
class _Run:
    """Where trials run and where their files are."""

    store: Store
    source: Corpus | None
    jobs: int | None
    on: str = "here"
    group: ProcessGroup = SINGLE
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    words: Words = ENGLISH

    def unfinished(self, trials: list[Trial]) -> list[Trial]:
        """The unfinished trials. All processes of a group list them before any of them starts."""
        left = [trial for trial in trials if run_trial.is_unfinished(trial, self.store)]
        for trial in left if self.group.is_main else ():
            run_trial.warn_about_damage(trial, self.store)
        self.group.barrier()
        return left

    def run(self, trials: list[Trial]) -> None:
        """Run the unfinished trials and display the progress; raises TrialFailure at the end."""
        left = self.unfinished(trials)
        if not left:
            print(self.words("trials 0", number=len(trials)), flush=True)
            return
        jobs = self.jobs
        if jobs is None:
            alone = left[0].training.device == "cuda" or self.group.size > 1
            jobs = 1 if alone else min(worker_processes.cores(), MAX_JOBS)
        jobs = min(jobs, len(left))
        key = "trials" if self.on == "here" and jobs > 1 else "trials 1"
        print(self.words(key, left=len(left), number=len(trials), jobs=jobs), flush=True)
        with progress.start(left, len(trials) - len(left), self.store, self.words) as display:
            if self.on != "here":
                events = ray_cluster.run(left, self.store, self.source, self.jobs, self.on)
            elif jobs > 1 and self.group.size == 1:
                events = worker_processes.run(left, self.store, self.source, jobs)
            else:
                events = self._run_all_here(left, display.update)
            for event in events:
                display.update(event)

    def _run_all_here(self, left: list[Trial], update: Callable[[Event], None]) -> Iterator[Event]:
        failures = []
        for trial in left:
            try:
                self.run_here(trial, lambda step, loss, trial=trial: update(Event(trial, step, loss)))  # type: ignore[misc]
            except LabError:
                raise
            except Exception:
                if self.group.size > 1:  # the other processes wait for this one
                    raise
                failures.append(f"{trial.training.task}, {trial.name()} failed:\n{traceback.format_exc()}")
                continue
            yield Event(trial)
        if failures:
            raise TrialFailure("\n".join(failures))

    def run_here(self, trial: Trial, progress: Progress | None = None) -> None:
        run_trial.run_trial(
            trial, self.store, self.source, group=self.group, progress=progress,
            checkpoint_seconds=self.checkpoint_seconds,
        )  # fmt: skip
