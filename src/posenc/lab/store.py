"""The folder of a run. Every file is written next to its place and moved there in one step, so that what has a name
is whole: killed at any moment, the same command goes on from what is there.

    DIR/settings.json            what was asked
    DIR/cells/KEY.train.json     the record of a training
    DIR/cells/KEY.test.json      the record of a test
    DIR/cells/KEY.weights        trained weights (see tensors.py)
    DIR/cells/KEY.checkpoint     weights and optimiser state in the middle of a training
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

from ..core import files
from . import cells, validate
from .errors import LabError

KINDS = ("train.json", "test.json", "weights", "checkpoint")


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

    def read(self, key: str, kind: str) -> bytes | None:
        """A file's content, or None where there is none (yet)."""
        try:
            return self.path(key, kind).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LabError(f"cannot read {self.path(key, kind)}: {error.strerror}") from None

    def write(self, key: str, kind: str, content: bytes) -> None:
        write(self.path(key, kind), content)

    def drop(self, key: str, kind: str) -> None:
        self.path(key, kind).unlink(missing_ok=True)

    def get(self, key: str, kind: str) -> dict[str, Any] | None:
        """A JSON record, or None where there is none (yet). One that is damaged or belongs to other settings is as good
        as none: whoever needs it makes it again, in its place."""
        content = self.read(key, kind)
        if content is None:
            return None
        try:
            record = validate.parse(content)
            if not isinstance(record, dict) or record.pop("digest", None) != _digest(key, kind, record):
                return None
            if kind in validate.RECORDS:
                checked = validate.RECORDS[kind](record, "")
                return checked if cells.key(record["settings"]) == key else None
        except ValueError:  # not JSON, not UTF-8, not a record of this kind
            return None
        return record

    def put(self, key: str, kind: str, record: dict[str, Any]) -> None:
        content = {**record, "digest": _digest(key, kind, record)}
        self.write(key, kind, json.dumps(content, indent=1).encode())

    def files(self, keys: list[str]) -> dict[str, bytes]:
        """Every file of some cells, to be carried to another machine."""
        found = {f"{key}.{kind}": self.read(key, kind) for key in keys for kind in KINDS}
        return {name: content for name, content in found.items() if content is not None}

    def add(self, files: dict[str, bytes]) -> None:
        """What `files` gave elsewhere; records go last, for they say that the rest is there."""
        for name in sorted(files, key=lambda name: name.endswith(".json")):
            key, _, kind = name.partition(".")
            if not (key.isalnum() and kind in KINDS):
                raise LabError(f"{name!r} is no file of a cell")
            self.write(key, kind, files[name])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One command at a time works in a folder. The lock goes away with the process, however it ends."""
        place = self.root / ".lock"
        try:
            held = files.lock(place)
        except ImportError:  # Windows: nothing is broken by two commands, work may be done twice
            yield
            return
        except BlockingIOError:
            owner = place.read_text(errors="replace")[:20].strip() or "unknown"
            raise LabError(
                f"another command (process {owner}) is working in {self.root}; wait for it or give another --out"
            ) from None
        except OSError as error:
            raise LabError(f"cannot work in {self.root}: {error.strerror}; make room, or give another --out") from None
        try:
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
                os.ftruncate(held, 0)
                os.write(held, str(os.getpid()).encode())
            for part in self.root.rglob(".*.part"):  # of a command that was killed while it wrote
                part.unlink(missing_ok=True)
            yield
        finally:
            os.close(held)


class MemoryStore(Store):
    """The same without a folder, for a cell on another machine: a worker that is killed leaves nothing behind."""

    def __init__(self, files: dict[str, bytes]):
        self.content: dict[tuple[str, str], bytes] = {}
        self.add(files)

    def read(self, key: str, kind: str) -> bytes | None:
        return self.content.get((key, kind))

    def write(self, key: str, kind: str, content: bytes) -> None:
        self.content[key, kind] = content

    def drop(self, key: str, kind: str) -> None:
        self.content.pop((key, kind), None)


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
