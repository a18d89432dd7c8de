"""Cells on a Ray cluster: a local one (`--on ray`) or one that runs already (`--on ray://HOST:PORT`).

A cell's files travel with it and its results travel back, so the machines need no common disk, only posenc.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from .cells import Cell
from .corpus import Corpus
from .errors import CellFailure, LabError
from .store import Store
from .workers import Event, cores


def run(cells: Sequence[Cell], store: Store, corpus: Corpus | None, jobs: int | None, address: str) -> Iterator[Event]:
    """`jobs` limits the cells at work at one time; None leaves that to Ray."""
    try:
        import ray
    except ImportError:
        raise LabError("--on ray needs Ray, which is not installed: pip install ray") from None
    started = not ray.is_initialized()
    if started and address == "ray":
        # a cluster of this process alone, heard on this machine only
        ray.init(
            address="local", num_cpus=jobs or cores(), include_dashboard=False, log_to_driver=False,
            configure_logging=False, _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(_import_paths())}},
        )  # fmt: skip
    elif started:
        ray.init(address=address, log_to_driver=False)
    try:
        text = ray.put(corpus)
        gpus = 1 if any(cell.training.device == "cuda" for cell in cells) else 0
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1)(_remote)
        left = list(reversed(cells))
        running: dict[Any, Cell] = {}
        failures = []
        while left or running:
            while left and (jobs is None or len(running) < jobs):
                cell = left.pop()
                keys = [cell.training.key, *(cell.test_key(testing) for testing in cell.tests)]
                running[remote.remote(cell, store.files(keys), text)] = cell
            done, _ = ray.wait(list(running))
            for reference in done:
                cell = running.pop(reference)
                try:
                    store.add(ray.get(reference))
                except ray.exceptions.RayError as error:
                    if isinstance(getattr(error, "cause", None), LabError):
                        raise LabError(str(error.cause)) from None
                    failures.append(f"{cell.training.task}, {cell.name()} failed on the cluster:\n{error}")
                    continue
                store.drop(cell.training.key, "checkpoint")
                yield Event(cell)
        if failures:
            raise CellFailure("\n".join(failures))
    finally:
        if started:
            ray.shutdown()


def _remote(cell: Cell, files: dict[str, bytes], corpus: Corpus | None) -> dict[str, bytes]:
    import torch

    from .work import do

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="posenc-") as folder:
        store = Store(folder)
        store.add(files)
        do(cell, store, corpus)
        keys = [cell.training.key, *(cell.test_key(testing) for testing in cell.tests)]
        return store.files(keys)


def _import_paths() -> list[str]:
    """Where this process found posenc, so that its workers find the same."""
    import posenc

    found = os.path.dirname(os.path.dirname(os.path.abspath(posenc.__file__ or "")))
    return [found, *filter(None, [os.environ.get("PYTHONPATH")])]
