"""Cells in worker processes of this machine. Each worker has its own pipe: one that dies takes down nobody else."""

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

from .cells import Cell
from .corpus import Corpus
from .errors import CellFailure, LabError
from .store import Store


class Event(NamedTuple):
    cell: Cell
    step: int | None = None  # None: the cell is done
    loss: float | None = None


ATTEMPTS = 2  # of a cell whose worker died: the second one goes on from the checkpoint


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(cells: Sequence[Cell], store: Store, corpus: Corpus | None, jobs: int) -> Iterator[Event]:
    """Work through the cells with `jobs` processes, which share the processors. A cell that fails stops no other: it
    is told at the end."""
    context = multiprocessing.get_context("spawn")
    waiting, tried = deque(cells), dict.fromkeys((cell.training.key for cell in cells), 0)
    busy: dict[Any, tuple[Any, Cell]] = {}
    idle: list[tuple[Any, Any]] = []
    everyone: list[Any] = []
    share = max(1, cores() // jobs)
    failures: list[str] = []

    def start() -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, store.root, corpus, share))
        process.start()
        theirs.close()
        everyone.append(process)
        return ours, process

    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                pipe, process = idle.pop() if idle else start()
                try:
                    pipe.send(waiting[0])
                except OSError:  # it died while it had nothing to do
                    continue
                cell = waiting.popleft()
                tried[cell.training.key] += 1
                busy[pipe] = (process, cell)
            ready: list[Any] = wait(list(busy), timeout=1.0)
            for pipe in ready:
                process, cell = busy[pipe]
                try:
                    kind, *rest = pipe.recv()
                except (EOFError, OSError):  # between two messages, or in the middle of one
                    del busy[pipe]
                    process.join()
                    if tried[cell.training.key] >= ATTEMPTS:
                        raise LabError(
                            f"the worker of {cell.training.task}, {cell.name()} died twice (exit {process.exitcode}; "
                            "-9 is usually too little memory: use fewer --jobs); the rest is kept"
                        ) from None
                    waiting.append(cell)
                    continue
                if kind == "step":
                    yield Event(cell, *rest)
                elif kind == "done":
                    del busy[pipe]
                    idle.append((pipe, process))
                    yield Event(cell)
                elif kind == "wrong":
                    raise LabError(rest[0])
                else:
                    del busy[pipe]
                    process.kill()  # what broke the cell may have broken its process (a CUDA error does)
                    failures.append(f"{cell.training.task}, {cell.name()} failed in a worker:\n{rest[0]}")
        if failures:
            raise CellFailure("\n".join(failures))
    finally:
        for process in everyone:
            process.kill()
        for process in everyone:
            process.join()


def _serve(pipe: Connection, root: Path, corpus: Corpus | None, share: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
    from .work import do

    store = Store(root)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        try:
            do(cell, store, corpus, progress=lambda step, loss: pipe.send(("step", step, loss)))
            pipe.send(("done",))
        except LabError as error:
            with contextlib.suppress(OSError):
                pipe.send(("wrong", str(error)))
        except Exception:
            with contextlib.suppress(OSError):
                pipe.send(("failed", traceback.format_exc()))


def _end_with(sentinel: int) -> None:
    """However the parent ends, nobody works on without it."""
    wait([sentinel])
    os._exit(1)
