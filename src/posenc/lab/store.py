"""The folder of a run. Every file is written next to its place and moved there in one step, so that what has a name
is whole: killed at any moment, the same command goes on from what is there.

    DIR/settings.json            what was asked
    DIR/cells/KEY.train.json     the record of a training
    DIR/cells/KEY.test.json      the record of a test
    DIR/cells/KEY.weights        trained weights (safetensors)
    DIR/cells/KEY.checkpoint     weights and optimiser state in the middle of a training (safetensors, JSON inside)
    DIR/results.json, results.csv, report.html
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files
from .errors import LabError


class Store:
    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.cells = self.root / "cells"
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"cannot make the folder {self.cells}: {error.strerror}; give another with --out") from None

    def path(self, key: str, kind: str) -> Path:
        return self.cells / f"{key}.{kind}"

    def has(self, key: str, kind: str) -> bool:
        return self.path(key, kind).exists()

    def get(self, key: str, kind: str) -> dict[str, Any] | None:
        """A JSON record, or None where there is none (yet). One that is damaged is as good as none: whoever needs it
        makes it again, in its place."""
        try:
            record = json.loads(self.path(key, kind).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LabError(f"cannot read {self.path(key, kind)}: {error.strerror}") from None
        except ValueError:  # not JSON, not UTF-8
            return None
        if not isinstance(record, dict) or record.pop("digest", None) != _digest(key, kind, record):
            return None
        return record

    def put(self, key: str, kind: str, record: dict[str, Any]) -> None:
        content = {**record, "digest": _digest(key, kind, record)}
        write(self.path(key, kind), json.dumps(content, indent=1).encode())

    def drop(self, key: str, kind: str) -> None:
        self.path(key, kind).unlink(missing_ok=True)

    def files(self, keys: list[str]) -> dict[str, bytes]:
        """Every file of some cells, to be carried to another machine."""
        return {p.name: p.read_bytes() for key in keys for p in sorted(self.cells.glob(f"{key}.*")) if _whole(p)}

    def add(self, files: dict[str, bytes]) -> None:
        """What `files` gave elsewhere; records go last, for they say that the rest is there."""
        for name in sorted(files, key=lambda name: name.endswith(".json")):
            if Path(name).name != name:
                raise LabError(f"{name!r} is not a file name")
            write(self.cells / name, files[name])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One command at a time works in a folder. The lock goes away with the process, however it ends."""
        try:
            import fcntl
        except ImportError:  # Windows: nothing is broken by two commands, work may be done twice
            yield
            return
        try:
            lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LabError(f"cannot work in {self.root}: {error.strerror}; make room, or give another --out") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.read(lock, 20).decode().strip() or "unknown"
                raise LabError(
                    f"another command (process {owner}) is working in {self.root}; wait for it or give another --out"
                ) from None
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
                os.ftruncate(lock, 0)
                os.write(lock, str(os.getpid()).encode())
            for part in self.root.rglob(".*.part"):  # of a command that was killed while it wrote
                part.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, and a sentence where it cannot be."""
    try:
        files.write(path, content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LabError(
                f"no space left for {path} ({len(content) / 1e6:.1f} MB); free some and run the same command again: "
                "what is finished is kept"
            ) from None
        raise LabError(f"cannot write {path}: {error.strerror}") from None


def _digest(key: str, kind: str, record: dict[str, Any]) -> str:
    """Belongs to one record in one place: a number changed, or a file under another name, is damage."""
    return hashlib.sha256(json.dumps([key, kind, record], sort_keys=True).encode()).hexdigest()[:20]


def _whole(path: Path) -> bool:
    return not path.name.startswith(".")
