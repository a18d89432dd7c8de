"""The folder of a run. Every file is written under a temporary name and renamed in one step, so a file is complete or
absent: after a kill at any moment the same command resumes from the finished files.

    DIR/settings.json            the experiment and the machine
    DIR/trials/KEY.train.json     the record of a training
    DIR/trials/KEY.test.json      the record of a test
    DIR/trials/KEY.weights        trained weights (see tensor_files.py)
    DIR/trials/KEY.checkpoint     weights and optimiser state in the middle of a training
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
from . import trials, validate
from .errors import LabError

KINDS = ("train.json", "test.json", "weights", "checkpoint")


class Store:
    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.trials = self.root / "trials"
        try:
            self.trials.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"cannot make the folder {self.trials}: {error.strerror}; use another --out") from None

    def path(self, key: str, kind: str) -> Path:
        return self.trials / f"{key}.{kind}"

    def read(self, key: str, kind: str) -> bytes | None:
        """A file's content, or None if there is none (yet)."""
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
        """A JSON record, or None if there is none (yet). A record that is damaged or belongs to other settings counts as
        none: it is computed again."""
        content = self.read(key, kind)
        if content is None:
            return None
        try:
            record = validate.parse(content)
            if not isinstance(record, dict) or record.pop("digest", None) != _digest(key, kind, record):
                return None
            if kind in validate.RECORDS:
                checked = validate.RECORDS[kind]("", record)
                return checked if trials.key(record["settings"]) == key else None
        except ValueError:  # not JSON, not UTF-8, not a record of this kind
            return None
        return record

    def put(self, key: str, kind: str, record: dict[str, Any]) -> None:
        content = {**record, "digest": _digest(key, kind, record)}
        self.write(key, kind, json.dumps(content, indent=1).encode())

    def files(self, keys: list[str]) -> dict[str, bytes]:
        """Every file of some trials, to send them to another machine."""
        found = {f"{key}.{kind}": self.read(key, kind) for key in keys for kind in KINDS}
        return {name: content for name, content in found.items() if content is not None}

    def add(self, files: dict[str, bytes]) -> None:
        """Write what `files` returned elsewhere. Records go last: a record implies that the other files are there."""
        for name in sorted(files, key=lambda name: name.endswith(".json")):
            key, _, kind = name.partition(".")
            if not (key.isalnum() and kind in KINDS):
                raise LabError(f"{name!r} is not a file of a trial")
            self.write(key, kind, files[name])

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock: one command at a time. The lock ends with the process, however it ends."""
        path = self.root / ".lock"
        try:
            held = files.lock(path)
        except ImportError:  # Windows: two commands may do the same work twice, which is harmless
            yield
            return
        except BlockingIOError:
            owner = path.read_text(errors="replace")[:20].strip() or "unknown"
            why = f"another command (process {owner}) is working in {self.root}; wait for it or use another --out"
            raise LabError(why) from None
        except OSError as error:
            why = f"cannot work in {self.root}: {error.strerror}; free some space, or use another --out"
            raise LabError(why) from None
        try:
            with contextlib.suppress(OSError):  # on a full disk the lock is held all the same
                os.ftruncate(held, 0)
                os.write(held, str(os.getpid()).encode())
            for part in self.root.rglob(".*.part"):  # of a command that was killed while it wrote
                part.unlink(missing_ok=True)
            yield
        finally:
            os.close(held)


class MemoryStore(Store):
    """A store in memory, for a trial on another machine: a killed worker leaves no files behind."""

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
    """Write a complete file or none; raises LabError."""
    try:
        files.write(path, content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LabError(
                f"no space left for {path} ({len(content) / 1e6:.1f} MB); free some and run the same command again: "
                "finished trials are kept"
            ) from None
        raise LabError(f"cannot write {path}: {error.strerror}") from None


def _digest(key: str, kind: str, record: dict[str, Any]) -> str:
    """A digest of a record and its name: a changed number or a renamed file counts as damage."""
    return hashlib.sha256(json.dumps([key, kind, record], sort_keys=True).encode()).hexdigest()[:20]
