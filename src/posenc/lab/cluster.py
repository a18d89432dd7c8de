"""Cells on a Ray cluster: a local one (`--on ray`) or one that runs already (`--on ray://HOST:PORT`).

A cell's files travel with it and its results travel back, so the machines need no common disk, only posenc. A worker
keeps them in memory: killed, it leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core import files
from .cells import Cell
from .corpus import Corpus
from .errors import CellFailure, LabError
from .store import MemoryStore, Store
from .workers import Event, cores

LOOPBACK = "127.0.0.1"
ONLY_HERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0 is its default on those systems
PREFIX = "posenc-ray-"
LONGEST_PLACE = 25  # the name of a socket has at most 107 characters; Ray's session takes 60 of them, this prefix 20
NEW = 60.0  # seconds


def run(cells: Sequence[Cell], store: Store, corpus: Corpus | None, jobs: int | None, address: str) -> Iterator[Event]:
    """`jobs` limits the cells at work at one time; None leaves that to Ray."""
    with _cluster(address, jobs) as ray:
        yield from _run(ray, cells, store, corpus, jobs)


@contextlib.contextmanager
def _cluster(address: str, jobs: int | None) -> Iterator[Any]:
    """Ray, connected; a cluster that was started here ends here, with its folder."""
    # Ray replaces a loopback address by the machine's own, unless it is told, before it is imported, that there are no
    # other machines; its servers then bind to the loopback address only.
    local = address == "ray"
    before = os.environ.get(ONLY_HERE)
    if local:
        os.environ[ONLY_HERE] = "0"
    try:
        import ray
    except ImportError:
        raise LabError("--on ray needs Ray, which is not installed: pip install ray") from None
    finally:
        os.environ.pop(ONLY_HERE, None)
        if before is not None:
            os.environ[ONLY_HERE] = before
    if ray.is_initialized():  # the caller's own
        yield ray
        return
    if not local:
        ray.init(address=address, log_to_driver=False)
        try:
            yield ray
        finally:
            ray.shutdown()
        return
    _refuse_other_addresses(ray)
    with _folder() as folder:
        try:
            ray.init(
                address="local", num_cpus=jobs or cores(), include_dashboard=False, log_to_driver=False,
                configure_logging=False, _node_ip_address=LOOPBACK, _temp_dir=str(folder),
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(_import_paths())}},
            )  # fmt: skip
            _refuse_other_addresses(ray)
            yield ray
        finally:
            ray.shutdown()


def _refuse_other_addresses(ray: Any) -> None:
    bound = ray.util.get_node_ip_address()
    if bound != LOOPBACK:
        raise LabError(
            f"--on ray would listen on {bound}, not on this machine alone, for Ray was imported before; set "
            f"{ONLY_HERE}=0 before Python starts, or use --jobs without Ray"
        )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Where the local cluster keeps its logs and sockets, removed at the end; the folder of a killed command, by a
    later one."""
    place = Path(tempfile.gettempdir())
    if os.name == "posix" and len(str(place)) > LONGEST_PLACE:
        place = Path("/tmp")
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    held = None
    with contextlib.suppress(ImportError):
        held = files.lock(folder / ".lock")
    try:
        yield folder
    finally:
        _remove(folder)
        if held is not None:
            os.close(held)


def _sweep(place: Path) -> None:
    """Remove what killed commands have left: folders whose lock is free, and those that workers which started too late
    have made again, without a lock."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ImportError):
            if (folder / ".lock").exists():
                os.close(files.lock(folder / ".lock"))
            elif time.time() - folder.stat().st_mtime < NEW:
                continue  # its command is about to lock it
            _remove(folder)


def _remove(folder: Path) -> None:
    """Ray's processes may write for a moment after they were stopped."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        (folder / ".lock").touch()  # the next command tries again


def _run(ray: Any, cells: Sequence[Cell], store: Store, corpus: Corpus | None, jobs: int | None) -> Iterator[Event]:
    text = ray.put(corpus)
    gpus = 1 if any(cell.training.device == "cuda" for cell in cells) else 0
    remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1)(_remote)
    left = list(reversed(cells))
    running: dict[Any, Cell] = {}
    failures = []
    while left or running:
        while left and (jobs is None or len(running) < jobs):
            cell = left.pop()
            running[remote.remote(cell, store.files(_keys(cell)), text)] = cell
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


def _remote(cell: Cell, files: dict[str, bytes], corpus: Corpus | None) -> dict[str, bytes]:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from .work import do

    store = MemoryStore(files)
    do(cell, store, corpus, checkpoint_seconds=float("inf"))  # nobody could read one before the cell is done
    return store.files(_keys(cell))


def _keys(cell: Cell) -> list[str]:
    return [cell.training.key, *(cell.test_key(testing) for testing in cell.tests)]


def _import_paths() -> list[str]:
    """Where this process found posenc, so that its workers find the same."""
    import posenc

    found = os.path.dirname(os.path.dirname(os.path.abspath(posenc.__file__ or "")))
    return [found, *filter(None, [os.environ.get("PYTHONPATH")])]
