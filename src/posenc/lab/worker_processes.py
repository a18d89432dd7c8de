"""Trials in worker processes of this machine. Each worker has its own pipe, so a worker that dies affects no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from .corpus import Corpus
from .errors import LabError, TrialFailure
from .store import Store
from .trials import Trial


class Event(NamedTuple):
    trial: Trial
    step: int | None = None  # None: the trial is finished
    loss: float | None = None


ATTEMPTS = 2  # of a trial whose worker died: the second attempt resumes from the checkpoint


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(trials: Sequence[Trial], store: Store, corpus: Corpus | None, jobs: int) -> Iterator[Event]:
    """Run the trials with `jobs` processes, which share the processors. After a failed trial the others continue; the
    failures are raised at the end."""
    context = multiprocessing.get_context("spawn")
    waiting, tried = deque(trials), dict.fromkeys((trial.training.key for trial in trials), 0)
    busy: dict[Any, tuple[Any, Trial]] = {}
    idle: list[tuple[Any, Any]] = []
    processes: list[Any] = []
    share = max(1, cores() // jobs)
    failures: list[str] = []

    def start() -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, store.root, corpus, share))
        process.start()
        theirs.close()
        processes.append(process)
        return ours, process

    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                pipe, process = idle.pop() if idle else start()
                try:
                    pipe.send(waiting[0])
                except OSError:  # it died while idle
                    continue
                trial = waiting.popleft()
                tried[trial.training.key] += 1
                busy[pipe] = (process, trial)
            ready: list[Any] = wait(list(busy), timeout=1.0)
            for pipe in ready:
                process, trial = busy[pipe]
                try:
                    kind, *rest = pipe.recv()
                except (EOFError, OSError):  # between two messages, or in the middle of one
                    del busy[pipe]
                    process.join()
                    if tried[trial.training.key] >= ATTEMPTS:
                        raise LabError(
                            f"the worker of {trial.training.task}, {trial.name()} died twice (exit {process.exitcode}; "
                            "-9 is usually too little memory: use fewer --jobs); finished trials are kept"
                        ) from None
                    waiting.append(trial)
                    continue
                if kind == "step":
                    yield Event(trial, *rest)
                elif kind == "done":
                    del busy[pipe]
                    idle.append((pipe, process))
                    yield Event(trial)
                elif kind == "refused":
                    raise LabError(rest[0])
                else:
                    del busy[pipe]
                    process.kill()  # what broke the trial may have broken its process (a CUDA error does)
                    failures.append(f"{trial.training.task}, {trial.name()} failed in a worker:\n{rest[0]}")
        if failures:
            raise TrialFailure("\n".join(failures))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _serve(pipe: Connection, root: Path, corpus: Corpus | None, share: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with_parent, args=(parent.sentinel,), daemon=True).start()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
    from .run_trial import run_trial

    store = Store(root)
    while True:
        try:
            trial = pipe.recv()
        except EOFError:
            return
        try:
            run_trial(trial, store, corpus, progress=lambda step, loss: pipe.send(("step", step, loss)))
            pipe.send(("done",))
        except LabError as error:
            with contextlib.suppress(OSError):
                pipe.send(("refused", str(error)))
        except Exception:
            with contextlib.suppress(OSError):
                pipe.send(("failed", traceback.format_exc()))


def _end_with_parent(sentinel: int) -> None:
    """End this worker when its parent ends, however it ends."""
    wait([sentinel])
    os._exit(1)
