"""Validation of the lab's files by core/checks.py: a file that is damaged, of another version or hostile ends in a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..core.checks import Check, flag, keys, listed, maybe, number, one_of, record, refuse, text, whole
from .errors import LabError, OptionError

MAX_BYTES = 1 << 28  # of a JSON file
TEXT = text(20_000)  # a compiler's error message fits


def remarks(name: str, value: Any) -> dict[str, Any]:
    """A flat table of printable values: the machine, the text's source."""
    if len(keys(name, value)) > 100:
        raise refuse(name, value, "a table of at most 100 entries")
    for key, part in value.items():
        TEXT(name, key)
        if not (part is None or isinstance(part, bool)):
            (TEXT if isinstance(part, str) else number())(f"{name}.{key}", part)
    return value


def real(low: float = -1e300, high: float = 1e300) -> Check:
    """A number as a float: 1 and 1.0 are the same setting."""
    return lambda name, value: float(number(low, high)(name, value))


def pair(first: Check, second: Check) -> Check:
    def check(name: str, value: Any) -> list[Any]:
        listed(lambda name, part: part, least=2, most=2)(name, value)
        return [first(name, value[0]), second(name, value[1])]

    return check


def read_json(file: Path, check: Check) -> Any:
    """A JSON file's content, checked; raises LabError."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise OptionError(f"it has more than {MAX_BYTES >> 20} MiB")
        return check("", parse(file.read_bytes()))
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise LabError(f"{file} cannot be used: {error}") from None


def parse(content: bytes) -> Any:
    """JSON; raises ValueError if it is malformed, nested too deeply, or has a NaN."""
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise OptionError("it is nested too deeply") from None


def _no_constant(name: str) -> None:
    raise OptionError(f"{name} is not JSON")


# ---- the lab's own files ------------------------------------------------------------------------------------------
SIZE = whole(1, 1 << 24)  # of a problem, in its task's units
MODEL: dict[str, Check] = {
    "task": TEXT, "train": SIZE, "steps": whole(1, 10**9), "batch": whole(1, 1 << 20), "width": whole(1, 1 << 16),
    "heads": whole(1, 1 << 12), "layers": whole(1, 1000), "lr": real(0), "position_lr": real(0),
    "weight_decay": real(0), "threads": whole(1, 1024),
}  # fmt: skip
TASK: dict[str, Check] = {
    **MODEL, "test": listed(SIZE, least=1), "encodings": listed(TEXT), "seeds": whole(1, 1000), "count": whole(1, 1 << 40),
    "sliding": whole(0, 1 << 24), "windows": whole(1, 1 << 24), "rates": listed(real(0), most=100),
}  # fmt: skip
"""The settings of a task, in presets and in settings.json."""

DEVICE, PRECISION = one_of("cpu", "cuda"), one_of("float32", "bfloat16")
TASKS_REQUIRED = ("task", "train", "test", "steps", "encodings", "seeds", "width", "heads", "lr")

EXPERIMENT = record(
    {
        "name": TEXT, "title": TEXT, "device": DEVICE, "published": listed(TEXT, most=20),
        "tasks": listed(
            record({name: TASK[name] for name in TASKS_REQUIRED}, TASK), least=1, most=100
        ),
        "precision": PRECISION, "compile": flag, "engine": TEXT,
    },
    {"text": remarks},
)  # fmt: skip
SETTINGS = record({"experiment": EXPERIMENT, "text": remarks, "machine": remarks})

TRAINING = record(
    {
        **{name: check for name, check in MODEL.items() if name != "threads"}, "encoding": TEXT, "seed": whole(0, 1 << 31),
        "device": DEVICE, "precision": PRECISION, "compile": flag, "engine": TEXT, "text": TEXT, "rules": whole(0, 10**6),
    },
    {"threads": MODEL["threads"]},
)  # fmt: skip
CURVE = listed(pair(whole(0, 10**9), maybe(real())), most=10**5)
COUNT = whole(0, 1 << 60)
TESTING = record({
    "extension": maybe(TEXT), "test": listed(SIZE), "count": TASK["count"], "sliding": TASK["sliding"],
    "windows": whole(0, 1 << 24), "rules": whole(0, 10**6),
})  # fmt: skip
SCORES: dict[str, Check] = {name: maybe(real()) for name in ("loss", "accuracy", "exact", "sliding")}
POINT: dict[str, Check] = {"length": whole(1, 1 << 30), **SCORES, "error": maybe(TEXT)}
MIDWAY = listed(record({"step": whole(1, 10**9), "points": listed(record({"size": SIZE}, POINT))}), most=100)
TRAINED = record(
    {
        "settings": TRAINING, "status": TEXT, "curve": CURVE, "seconds": real(0),
        "tokens_per_second": maybe(real(0)), "memory": maybe(COUNT), "compile": TEXT, "compile_seconds": real(0),
        "torch": TEXT, "parameters": COUNT, "position_parameters": COUNT,
    },
    {"midway": MIDWAY},
)  # fmt: skip
TESTED = record(
    {
        "settings": record({"training": TRAINING, "testing": TESTING}),
        "points": listed(record({"size": SIZE}, POINT)),
    },
    {"seconds": real(0)},
)  # fmt: skip
RECORDS: dict[str, Check] = {"train.json": TRAINED, "test.json": TESTED}

ROW = record(
    {"task": TEXT, "encoding": TEXT, "seed": whole(0, 1 << 31), "lr": real(0), "size": SIZE},
    {"train_size": SIZE, **POINT},
)
RESULTS = record({
    "experiment": EXPERIMENT, "machine": remarks, "trainings": listed(TRAINED, most=10**5), "rows": listed(ROW, most=10**6),
    "wanted": COUNT, "finished": COUNT,
})  # fmt: skip
