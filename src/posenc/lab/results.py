"""Results: the records of a run, with means and confidence intervals over the seeds."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..encodings import spec
from . import validate
from .errors import LabError, OptionError
from .presets import Experiment, from_dict
from .store import Store, write
from .trials import Testing, Trial, key

# two-sided 95 % of Student's t for 1, 2, .. degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
COLUMNS = (
    "task", "encoding", "seed", "lr", "train_size", "size", "length", "loss", "accuracy", "exact", "sliding", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with the half width of its 95 % confidence interval (None for one seed)."""

    value: float
    half: float | None
    number: int

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def mean(values: Iterable[float]) -> Mean:
    values = list(values)
    number = len(values)
    middle = sum(values) / number
    if number == 1:
        return Mean(middle, None, 1)
    deviation = statistics.stdev(values, middle)
    t = STUDENT[number - 2] if number - 2 < len(STUDENT) else 1.96
    return Mean(middle, t * deviation / math.sqrt(number), number)


@dataclass
class Results:
    """The finished part of a run: the records of its trainings, and one row for each (task, encoding, seed, size)."""

    experiment: dict[str, Any]
    machine: dict[str, Any]
    trainings: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    wanted: int  # trials of the experiment
    finished: int

    # ---- queries -------------------------------------------------------------------------
    def tasks(self) -> list[dict[str, Any]]:
        """The settings of every task, in the experiment's order."""
        return self.experiment["tasks"]

    def encodings(self, task: dict[str, Any]) -> list[str]:
        present = {row["encoding"] for row in self.rows if row["task"] == task["task"]}
        return [encoding for encoding in task["encodings"] if encoding in present]

    def trained(self, task: dict[str, Any]) -> list[str]:
        """The encodings without those that extend another one's training."""
        return list(dict.fromkeys(encoding.split("+")[0] for encoding in self.encodings(task)))

    def point(self, task: dict[str, Any], encoding: str, size: int, metric: str) -> Mean | str | None:
        """The mean over seeds; the error if every seed failed; None if there is no result."""
        rows = [r for r in self._rows_of(task["task"], encoding, size) if r["lr"] == task["lr"]]
        values = [r[metric] for r in rows if r.get(metric) is not None]
        if values:
            return mean(values)
        return next((r["error"] for r in rows if r.get("error")), None)

    def _rows_of(self, task: str, encoding: str, size: int) -> list[dict[str, Any]]:
        """The rows of a point, found by an index that is made again when rows were added."""
        count, index = self.__dict__.get("_index", (-1, {}))
        if count != len(self.rows):
            index = {}
            for row in self.rows:
                index.setdefault((row["task"], row["encoding"], row["size"]), []).append(row)
            self.__dict__["_index"] = (len(self.rows), index)
        return index.get((task, encoding, size), [])

    def training(self, task: dict[str, Any], encoding: str) -> list[dict[str, Any]]:
        """The training records of an encoding (an extension's are its trained encoding's)."""
        trained = encoding.split("+")[0]
        return [
            t for t in self.trainings
            if t["settings"]["task"] == task["task"] and t["settings"]["encoding"] == trained
            and t["settings"]["lr"] == task["lr"]
        ]  # fmt: skip

    def midway(self, task: dict[str, Any], encoding: str, step: int, size: int, metric: str) -> Mean | None:
        """The mean over seeds in the middle of the training, after `step` steps."""
        values = [
            point[metric]
            for training in self.training(task, encoding)
            for test in training.get("midway", ())
            for point in test["points"]
            if test["step"] == step and point["size"] == size and point.get(metric) is not None
        ]
        return mean(values) if values else None

    def steps(self, task: dict[str, Any]) -> list[int]:
        """The numbers of training steps after which there are results, where trainings were tested midway."""
        found = {
            test["step"]
            for training in self.trainings
            if training["settings"]["task"] == task["task"]
            for test in training.get("midway", ())
        }
        return [*sorted(found), task["steps"]] if found else []

    def seeds(self, task: dict[str, Any]) -> str:
        """How many seeds the encodings were trained with, in words."""
        least, most = self.seed_numbers(task)
        shown = str(most) if least == most else f"{least} to {most}"
        return f"{shown} seed{'s' * (shown != '1')}"

    def seed_numbers(self, task: dict[str, Any]) -> tuple[int, int]:
        """The fewest and the most seeds that an encoding was trained with so far."""
        trained = {encoding.split("+")[0] for encoding in self.encodings(task)}
        numbers = [len(self.training(task, encoding)) for encoding in trained]
        return (min(numbers), max(numbers)) if numbers else (0, 0)

    def rates(self, task: dict[str, Any], encoding: str) -> dict[float, Mean | str]:
        """The learning-rate check: score at the training size for each rate, first seed only."""
        found: dict[float, Mean | str] = {}
        metric = metric_of(task)
        for row in self.rows:
            same = row["task"] == task["task"] and row["encoding"] == encoding and row["size"] == task["train"]
            if same and row["seed"] == 0:
                value = row.get(metric)
                found[row["lr"]] = row.get("error") or "unknown" if value is None else mean([value])
        return found

    # ---- files ----------------------------------------------------------------------------------------------
    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    def as_csv(self) -> bytes:
        """One line for each row, for other tools."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue().encode()


def metric_of(task: dict[str, Any]) -> str:
    from .tasks import task_class

    return task_class(spec.parse_options(task["task"]).name).metric


def begin(experiment: Experiment, store: Store, text: dict[str, str], jobs: int | None) -> None:
    """Write settings.json."""
    about = machine(experiment.device) | {"jobs": jobs}
    content = {"experiment": asdict(experiment), "text": text, "machine": about}
    write(store.root / "settings.json", json.dumps(content, indent=1).encode())


def collect(experiment: Experiment, trials: list[Trial], store: Store, settings: dict[str, Any]) -> Results:
    """The results of all finished trials and tests."""
    trainings, rows, finished = [], [], 0
    for trial in trials:
        record = store.get(trial.training.key, "train.json")
        if record is not None:
            trainings.append(record)
        whole = record is not None
        for testing in trial.tests:
            tested = store.get(trial.test_key(testing), "test.json")
            if tested is None:
                whole = False
                continue
            rows += [{**_about(trial, testing), **point} for point in tested["points"]]
        finished += whole
    saved = asdict(experiment) | {"text": settings.get("text", {})}
    return Results(saved, settings.get("machine", {}), trainings, rows, len(trials), finished)


def _about(trial: Trial, testing: Testing) -> dict[str, Any]:
    """What the rows of a test have in common."""
    t = trial.training
    return {"task": t.task, "encoding": trial.name(testing), "seed": t.seed, "lr": t.lr, "train_size": t.train}


def restore(trials: list[Trial], store: Store) -> int:
    """Write the records of finished trials from results.json into a folder that has no trials: a published run, which comes without its
    weights, goes on with what is missing. Returns how many."""
    path = store.root / "results.json"
    if not path.is_file() or any(store.trials.iterdir()):
        return 0
    found, known, number = read(store.root), {trial.training.key: trial for trial in trials}, 0
    for record in found.trainings:
        trial = known.get(key(record["settings"]))
        if trial is None:
            continue
        t = trial.training
        store.put(t.key, "train.json", record)
        for testing in trial.tests:
            about = _about(trial, testing)
            rows = [row for row in found.rows if all(row[name] == value for name, value in about.items())]
            points = [{name: value for name, value in row.items() if name not in about} for row in rows]
            if tuple(point["size"] for point in points) == tuple(testing.test):
                settings = {"training": asdict(t), "testing": asdict(testing)}
                store.put(trial.test_key(testing), "test.json", {"settings": settings, "points": points})
        number += 1
    return number


def read(folder: str | Path) -> Results:
    """A run's results, from the files of its trials or, without them, from results.json."""
    root = Path(folder)
    saved = (root / "results.json").is_file()
    if (root / "settings.json").is_file() and (root / "trials").is_dir():
        settings = validate.read_json(root / "settings.json", validate.SETTINGS)
        experiment = experiment_of(settings["experiment"], root / "settings.json")
        trials = experiment.trials(str(settings["text"].get("digest", "")))
        found = collect(experiment, trials, Store(root), settings)
        if found.rows or not saved:
            return found
    if not saved:
        raise LabError(f"{root} is not the folder of a run: it has neither settings.json with trials nor results.json")
    content = validate.read_json(root / "results.json", validate.RESULTS)
    experiment_of(content["experiment"], root / "results.json")
    return Results(**content)


def experiment_of(saved: dict[str, Any], path: Path) -> Experiment:
    """An Experiment from its saved form."""
    whole = {key: saved[key] for key in ("title", "device", "published")} | {"tasks": saved["tasks"]}
    try:
        made = from_dict(whole, saved["name"])
    except OptionError as error:
        raise LabError(f"{path} cannot be used: {error}") from None
    return replace(made, precision=saved["precision"], compile=saved["compile"], engine=saved["engine"])


def machine(device: str) -> dict[str, Any]:
    import torch

    from .worker_processes import cores

    about = {
        "python": platform.python_version(), "torch": torch.__version__, "system": platform.system(),
        "processors": cores(), "threads": os.environ.get("OMP_NUM_THREADS"),
    }  # fmt: skip
    if device == "cuda" and torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about
