"""Trials on a Ray cluster: a local one (`--on ray`) or one that runs already (`--on ray://HOST:PORT`).

A trial's files are sent to the worker and its results are sent back, so the machines need posenc and no common disk.
A worker keeps them in memory: a killed worker leaves no files behind.
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
from .corpus import Corpus
from .errors import LabError, TrialFailure
from .store import MemoryStore, Store
from .trials import Trial
from .worker_processes import Event, cores

LOOPBACK = "127.0.0.1"
ONLY_HERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0 is its default on those systems
PREFIX = "posenc-ray-"
MAX_FOLDER_LENGTH = 25  # a socket's name has at most 107 characters; Ray's session takes 60 of them, this prefix 20
NEW = 60.0  # seconds: a younger folder may not be locked yet


def run(
    trials: Sequence[Trial], store: Store, corpus: Corpus | None, jobs: int | None, address: str
) -> Iterator[Event]:
    """`jobs` limits the number of trials that run at one time; None leaves it to Ray."""
    with _cluster(address, jobs) as ray:
        yield from _run(ray, trials, store, corpus, jobs)


@contextlib.contextmanager
def _cluster(address: str, jobs: int | None) -> Iterator[Any]:
    """Connect to Ray; a local cluster ends with the context, and its folder is removed."""
    # Ray replaces a loopback address by the machine's own, unless this variable, set before the import, rules other
    # machines out; its servers then bind to the loopback address only.
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
            f"--on ray would listen on {bound}, not on this machine alone, because Ray was imported before; set "
            f"{ONLY_HERE}=0 before Python starts, or use --jobs without Ray"
        )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The folder of a local cluster's logs and sockets, removed at the end; a later command removes that of a killed
    one."""
    parent = Path(tempfile.gettempdir())
    if os.name == "posix" and len(str(parent)) > MAX_FOLDER_LENGTH:
        parent = Path("/tmp")
    _remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    held = None
    with contextlib.suppress(ImportError):
        held = files.lock(folder / ".lock")
    try:
        yield folder
    finally:
        _remove(folder)
        if held is not None:
            os.close(held)


def _remove_stale(parent: Path) -> None:
    """Remove the folders of killed commands: those whose lock is free, and those without a lock that a late worker has
    made again."""
    for folder in parent.glob(f"{PREFIX}*"):
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


def _run(ray: Any, trials: Sequence[Trial], store: Store, corpus: Corpus | None, jobs: int | None) -> Iterator[Event]:
    text = ray.put(corpus)
    gpus = 1 if any(trial.training.device == "cuda" for trial in trials) else 0
    remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1)(_remote)
    left = list(reversed(trials))
    running: dict[Any, Trial] = {}
    failures = []
    while left or running:
        while left and (jobs is None or len(running) < jobs):
            trial = left.pop()
            running[remote.remote(trial, store.files(_keys(trial)), text)] = trial
        done, _ = ray.wait(list(running))
        for reference in done:
            trial = running.pop(reference)
            try:
                store.add(ray.get(reference))
            except ray.exceptions.RayError as error:
                if isinstance(getattr(error, "cause", None), LabError):
                    raise LabError(str(error.cause)) from None
                failures.append(f"{trial.training.task}, {trial.name()} failed on the cluster:\n{error}")
                continue
            store.drop(trial.training.key, "checkpoint")
            yield Event(trial)
    if failures:
        raise TrialFailure("\n".join(failures))


def _remote(trial: Trial, files: dict[str, bytes], corpus: Corpus | None) -> dict[str, bytes]:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from .run_trial import run_trial

    store = MemoryStore(files)
    run_trial(trial, store, corpus, checkpoint_seconds=float("inf"))  # a checkpoint in memory is lost with the worker
    return store.files(_keys(trial))


def _keys(trial: Trial) -> list[str]:
    return [trial.training.key, *(trial.test_key(testing) for testing in trial.tests)]


def _import_paths() -> list[str]:
    """The import paths of this process, so that its workers import the same posenc."""
    import posenc

    found = os.path.dirname(os.path.dirname(os.path.abspath(posenc.__file__ or "")))
    return [found, *filter(None, [os.environ.get("PYTHONPATH")])]
