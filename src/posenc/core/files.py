"""Atomic file writes, and file locks that end with their process."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from .errors import OptionError

FIGURE_FORMATS = ("png", "svg", "pdf")


def figure_format(path: str | Path) -> str:
    """The format of a figure by the suffix of its file; commands validate it before any work."""
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in FIGURE_FORMATS:
        allowed = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise OptionError(f"cannot write {Path(path).name!r}: its name must end in {allowed}")
    return kind


def write(path: Path, content: bytes) -> None:
    """A reader never gets a partial file; a crash or a full disk (OSError) leaves the old file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        if os.name == "posix":  # the new name itself must reach the disk too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_json(path: str | Path, value: Any) -> None:
    """`write` a value as indented JSON; the folder is made where there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def lock(path: Path) -> int:
    """Hold a file's lock until the descriptor is closed or the process ends, however it ends.

    BlockingIOError: another process holds it. ImportError: this system (Windows) has no such locks.
    """
    import fcntl

    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held
