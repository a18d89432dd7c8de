"""Validation of files: types, ranges, sizes and depth. A file may be damaged, of another version, or hostile; each case
ends in a one-line error.

A check takes a value and its path in the file ("rows[3].loss") and returns the value, or raises Invalid.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import LabError

Check = Callable[[Any, str], Any]

MAX_BYTES = 1 << 28  # of a JSON file
MAX_TEXT_LENGTH = 20_000  # characters of a text: a compiler's error message fits


class Invalid(ValueError):
    """A value that a check refuses; the message has its path."""


def text(value: Any, path: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_LENGTH or any("\ud800" <= c <= "\udfff" for c in value):
        raise _invalid(
            value, path, f"text of at most {MAX_TEXT_LENGTH} characters"
        )  # a lone surrogate cannot be encoded
    return value


def flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _invalid(value, path, "true or false")
    return value


def integer(low: int, high: int) -> Check:
    def check(value: Any, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _invalid(value, path, f"an integer from {low} to {high}")
        return value

    return check


def number(low: float = -1e300, high: float = 1e300) -> Check:
    def check(value: Any, path: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise _invalid(value, path, f"a finite number from {low:g} to {high:g}")
        return float(value)

    return check


def one_of(*allowed: str) -> Check:
    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise _invalid(value, path, " or ".join(allowed))
        return value

    return check


def maybe(inner: Check) -> Check:
    return lambda value, path: None if value is None else inner(value, path)


def each(inner: Check, *, least: int = 0, most: int = 1000) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            raise _invalid(value, path, f"a list of {least} to {most} values")
        return [inner(part, f"{path}[{n}]") for n, part in enumerate(value)]

    return check


def record(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    """A table of known fields; others are dropped, because a later version may have written them."""
    known = {**required, **(optional or {})}

    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _invalid(value, path, "a table")
        missing = [name for name in required if name not in value]
        if missing:
            raise Invalid(f"{path} has no {', '.join(missing)}")
        inside = f"{path}." if path else ""
        return {name: known[name](part, inside + name) for name, part in value.items() if name in known}

    return check


def remarks(value: Any, path: str) -> dict[str, Any]:
    """A flat table of printable values: the machine, the text's source."""
    if not isinstance(value, dict) or len(value) > 100:
        raise _invalid(value, path, "a table of at most 100 entries")
    for name, part in value.items():
        text(name, path)
        if not (part is None or isinstance(part, bool)):
            (text if isinstance(part, str) else number())(part, f"{path}.{name}")
    return value


def pair(first: Check, second: Check) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise _invalid(value, path, "a pair")
        return [first(value[0], path), second(value[1], path)]

    return check


def _invalid(value: Any, path: str, allowed: str) -> Invalid:
    return Invalid(f"{path or 'it'} must be {allowed}, got {reprlib.repr(value)}")


def read_json(file: Path, check: Check) -> Any:
    """A JSON file's content, checked; raises LabError."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise Invalid(f"it has more than {MAX_BYTES >> 20} MiB")
        return check(parse(file.read_bytes()), "")
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise LabError(f"{file} cannot be used: {error}") from None


def parse(content: bytes) -> Any:
    """JSON; raises ValueError if it is malformed, nested too deeply, or has a NaN."""
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise Invalid("it is nested too deeply") from None


def _no_constant(name: str) -> None:
    raise Invalid(f"{name} is not JSON")


# ---- the lab's own files ------------------------------------------------------------------------------------------
SIZE = integer(1, 1 << 24)  # of a problem, in its task's units
MODEL: dict[str, Check] = {
    "task": text, "train": SIZE, "steps": integer(1, 10**9), "batch": integer(1, 1 << 20), "width": integer(1, 1 << 16),
    "heads": integer(1, 1 << 12), "layers": integer(1, 1000), "lr": number(0), "position_lr": number(0),
    "weight_decay": number(0), "threads": integer(1, 1024),
}  # fmt: skip
TASK: dict[str, Check] = {
    **MODEL, "test": each(SIZE, least=1), "encodings": each(text), "seeds": integer(1, 1000), "count": integer(1, 1 << 40),
    "sliding": integer(0, 1 << 24), "windows": integer(1, 1 << 24), "rates": each(number(0), most=100),
}  # fmt: skip
"""The settings of a task, in presets and in settings.json."""

DEVICE, PRECISION = one_of("cpu", "cuda"), one_of("float32", "bfloat16")
TASKS_REQUIRED = ("task", "train", "test", "steps", "encodings", "seeds", "width", "heads", "lr")

EXPERIMENT = record(
    {
        "name": text, "title": text, "device": DEVICE, "published": each(text, most=20),
        "tasks": each(
            record({name: TASK[name] for name in TASKS_REQUIRED}, TASK), least=1, most=100
        ),
        "precision": PRECISION, "compile": flag, "engine": text,
    },
    {"text": remarks},
)  # fmt: skip
SETTINGS = record({"experiment": EXPERIMENT, "text": remarks, "machine": remarks})

TRAINING = record(
    {
        **{name: check for name, check in MODEL.items() if name != "threads"}, "encoding": text, "seed": integer(0, 1 << 31),
        "device": DEVICE, "precision": PRECISION, "compile": flag, "engine": text, "text": text, "rules": integer(0, 10**6),
    },
    {"threads": MODEL["threads"]},
)  # fmt: skip
CURVE = each(pair(integer(0, 10**9), maybe(number())), most=10**5)
COUNT = integer(0, 1 << 60)
TESTING = record({
    "extension": maybe(text), "test": each(SIZE), "count": TASK["count"], "sliding": TASK["sliding"],
    "windows": integer(0, 1 << 24), "rules": integer(0, 10**6),
})  # fmt: skip
SCORES: dict[str, Check] = {name: maybe(number()) for name in ("loss", "accuracy", "exact", "sliding")}
POINT: dict[str, Check] = {"length": integer(1, 1 << 30), **SCORES, "error": maybe(text)}
MIDWAY = each(record({"step": integer(1, 10**9), "points": each(record({"size": SIZE}, POINT))}), most=100)
TRAINED = record(
    {
        "settings": TRAINING, "status": text, "curve": CURVE, "seconds": number(0),
        "tokens_per_second": maybe(number(0)), "memory": maybe(COUNT), "compile": text, "compile_seconds": number(0),
        "torch": text, "parameters": COUNT, "position_parameters": COUNT,
    },
    {"midway": MIDWAY},
)  # fmt: skip
TESTED = record(
    {
        "settings": record({"training": TRAINING, "testing": TESTING}),
        "points": each(record({"size": SIZE}, POINT)),
    },
    {"seconds": number(0)},
)  # fmt: skip
RECORDS: dict[str, Check] = {"train.json": TRAINED, "test.json": TESTED}

ROW = record(
    {"task": text, "encoding": text, "seed": integer(0, 1 << 31), "lr": number(0), "size": SIZE},
    {"train_size": SIZE, **POINT},
)
RESULTS = record({
    "experiment": EXPERIMENT, "machine": remarks, "trainings": each(TRAINED, most=10**5), "rows": each(ROW, most=10**6),
    "wanted": COUNT, "finished": COUNT,
})  # fmt: skip
