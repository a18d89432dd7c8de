"""Text to train on: the Python standard library's own source, present on every machine, or any file or folder of text."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
HELD_OUT = 10  # every tenth file, or the last tenth of a single one
MAX_BYTES = 16_000_000
LEAST = 1000  # bytes of a text
START = re.compile(rb"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG EBOOK[^\n]*\n", re.MULTILINE)
END = re.compile(rb"^\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG EBOOK", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    train: bytes
    held_out: bytes
    source: str
    files: int = 1

    @property
    def about(self) -> dict[str, str]:
        """What a report says of the text."""
        sizes = {"bytes": str(len(self.train)), "held_out": str(len(self.held_out)), "files": str(self.files)}
        return {"digest": self.digest, "source": self.source, **sizes}

    @property
    def digest(self) -> str:
        """A hash of the bytes: part of a trial's key, so results of different texts never mix."""
        whole = hashlib.sha256(self.train)
        whole.update(b"|")
        whole.update(self.held_out)
        return whole.hexdigest()[:16]


def read(path: str | Path | None = None) -> Corpus:
    """The text of a file or of a folder's files; None: the standard library."""
    if path is None:
        return standard_library()
    return from_folder(Path(path)) if Path(path).is_dir() else from_file(Path(path))


def from_file(path: Path) -> Corpus:
    """A plain text, such as a book; its last tenth is held out."""
    try:
        text = clean(path.read_bytes())
    except OSError as error:
        raise LabError(f"cannot read the text {path}: {error.strerror}") from None
    if len(text) < LEAST:
        raise LabError(f"{path} has {len(text)} bytes; a text needs some hundred thousand")
    cut = len(text) - len(text) // HELD_OUT
    return Corpus(text[:cut], text[cut:], path.name)


def from_folder(root: Path) -> Corpus:
    """Every text file under a folder in the order of its path, compressed ones (.gz) included; hidden and binary ones are
    left out. Every tenth file is held out; of fewer than ten files, the last tenth of each."""
    texts: list[bytes] = []
    size = 0
    for path in _files(root, {"__pycache__"}):
        try:
            text = clean(path.read_bytes())
        except OSError:  # not readable: left out like a binary file
            continue
        if not text or b"\0" in text[:65536]:
            continue
        size += len(text)
        if texts and size > MAX_BYTES:
            break
        texts.append(text)
    if (found := sum(map(len, texts))) < LEAST:
        raise LabError(
            f"{root} has {found} bytes of text in {len(texts)} files; a text needs some hundred thousand: "
            "give --text a folder of text files, or one file"
        )
    if len(texts) >= HELD_OUT:
        held = texts[HELD_OUT - 1 :: HELD_OUT]
        known = [text for n, text in enumerate(texts) if n % HELD_OUT != HELD_OUT - 1]
    else:
        cuts = [len(text) - len(text) // HELD_OUT for text in texts]
        known, held = [text[:cut] for text, cut in zip(texts, cuts)], [text[cut:] for text, cut in zip(texts, cuts)]
    return Corpus(b"\n".join(known), b"\n".join(held), f"{root.resolve().name or root}/", len(texts))


def _files(root: Path, left_out: set[str], ending: str = "") -> list[Path]:
    """Every file that is not hidden, in the order of its path."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        found += [Path(folder, name) for name in names if not name.startswith(".") and name.endswith(ending)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def clean(text: bytes) -> bytes:
    """Plain text as a model should read it: decompressed, lines that end in \\n, and of a Project Gutenberg file the book
    without the licence around it, which is the same in every book."""
    if text[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(text)) as file:
                text = file.read(MAX_BYTES)
        except (OSError, EOFError, zlib.error):
            return b""
    text = text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    start, end = START.search(text), None
    if start:
        text = text[start.end() :]
        end = END.search(text)
    return text[: end.start()].strip() + b"\n" if end else text


def standard_library() -> Corpus:
    """Every source file in the order of its path; every tenth is held out, so both parts cover the whole library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(_files(root, LEFT_OUT, ".py")):
        text = path.read_bytes()
        size += len(text)
        if size > MAX_BYTES:
            break
        parts[number % HELD_OUT == HELD_OUT - 1].append(text)
    train, held_out = (b"".join(part) for part in parts)
    if len(held_out) < 10_000:
        raise LabError(f"the standard library has no source under {root}; give a text with --text")
    return Corpus(train, held_out, "the Python standard library", sum(map(len, parts)))
