"""Text to train on: the Python standard library's own source, present on every machine, or any file."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
HELD_OUT = 10  # every tenth file, or the last tenth of a single one
MAX_BYTES = 16_000_000  # bytes


@dataclass(frozen=True)
class Corpus:
    train: bytes
    held_out: bytes
    source: str

    @property
    def digest(self) -> str:
        """A hash of the bytes: part of a trial's key, so results of different texts never mix."""
        whole = hashlib.sha256(self.train)
        whole.update(b"|")
        whole.update(self.held_out)
        return whole.hexdigest()[:16]


def read(file: str | Path | None = None) -> Corpus:
    """The bytes of `file`, or of the standard library."""
    return standard_library() if file is None else from_file(Path(file))


def from_file(path: Path) -> Corpus:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise LabError(f"cannot read the text {path}: {error.strerror}") from None
    if len(text) < 1000:
        raise LabError(f"{path} has {len(text)} bytes; a text needs some hundred thousand")
    cut = len(text) - len(text) // HELD_OUT
    return Corpus(text[:cut], text[cut:], path.name)


def standard_library() -> Corpus:
    """Every source file in the order of its path; every tenth is held out, so both parts cover the whole library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(files):
        text = path.read_bytes()
        size += len(text)
        if size > MAX_BYTES:
            break
        parts[number % HELD_OUT == HELD_OUT - 1].append(text)
    train, held_out = (b"".join(part) for part in parts)
    if len(held_out) < 10_000:
        raise LabError(f"the standard library has no source under {root}; give a text with --text FILE")
    return Corpus(train, held_out, "the Python standard library")
