"""Presets: experiments as TOML files, ours in presets/ or anybody's. Settings at the top serve every task.

title = "..."
encodings = ["none", "alibi", "rope", "rope+ntk:8"]
seeds = 3
lr = 1e-3

[[tasks]]
task = "text"
train = 64
test = [64, 128, 256]
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..core import checks
from ..encodings import spec
from . import validate
from .errors import LabError, OptionError
from .trials import Testing, Training, Trial

FOLDER = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class TaskSettings:
    """One task with the sizes of its problems, its model and its training."""

    task: str
    train: int
    test: tuple[int, ...]
    steps: int
    encodings: tuple[str, ...]
    seeds: int = 3
    batch: int = 32
    width: int = 128
    heads: int = 4
    layers: int = 3
    lr: float = 1e-3
    position_lr: float = 1.0
    weight_decay: float = 0.01
    count: int = 512
    sliding: int = 0
    windows: int = 64
    rates: tuple[float, ...] = ()
    """Learning-rate check: multiples of lr that are trained too, with the first seed."""
    threads: int = 1
    """Of the CPU, in every trial: part of its settings, because the number changes the order of sums."""


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    tasks: tuple[TaskSettings, ...]
    device: str = "cpu"
    precision: str = "float32"
    compile: bool = False
    engine: str = "auto"
    published: tuple[str, ...] = field(default=())
    """Tables of published results that the report compares with the measured ones."""

    def on(self, device: str) -> Experiment:
        """The same experiment on a device; a GPU computes in bfloat16 and compiles."""
        if device not in ("cpu", "cuda"):
            raise LabError(f"device {device!r} is unknown; use cpu or cuda")
        fast = device == "cuda"
        return replace(self, device=device, precision="bfloat16" if fast else "float32", compile=fast)

    def change(self, **changes: Any) -> Experiment:
        """The same change in every task."""
        return replace(self, tasks=tuple(replace(task, **changes) for task in self.tasks))

    @property
    def needs_text(self) -> bool:
        from . import tasks

        return any(tasks.create(t.task).needs_text for t in self.tasks)

    def trials(self, text: str = "") -> list[Trial]:
        """Every trial. Seeds vary slowest, so that every encoding has a first result early."""
        found: dict[str, Trial] = {}
        most = max(t.seeds for t in self.tasks)
        plans = [(t, seed, 1.0) for seed in range(most) for t in self.tasks if seed < t.seeds]
        plans += [(t, 0, times) for t in self.tasks for times in t.rates if times != 1.0]
        for settings, seed, times in plans:
            for trial in self._trials_of(settings, seed, times, text):
                known = found.get(trial.training.key)
                if known is not None:  # the same encoding with more tests
                    trial = replace(trial, tests=tuple(dict.fromkeys((*known.tests, *trial.tests))))
                found[trial.training.key] = trial
        return list(found.values())

    def _trials_of(self, t: TaskSettings, seed: int, times: float, text: str) -> list[Trial]:
        from . import tasks

        task = tasks.create(t.task)
        trials = []
        for encoding in t.encodings:
            trained, extension = spec.split_extension(encoding)
            if times != 1.0 and extension:
                continue
            settings = {**vars(self), **vars(t), "encoding": trained, "seed": seed, "lr": t.lr * times}
            settings["text"] = text if task.needs_text else ""
            training = Training(**{f.name: settings[f.name] for f in fields(Training) if f.name in settings})
            sizes = t.test if times == 1.0 else (t.train,)
            sliding = t.sliding if task.needs_text and times == 1.0 else 0
            trials.append(Trial(training, (Testing(extension, sizes, t.count, sliding, t.windows if sliding else 0),)))
        return trials

    def check(self) -> None:
        """Build every task and encoding once, so that mistakes are reported before the first training."""
        from . import build_encoding, tasks

        for t in self.tasks:
            task = tasks.create(t.task)
            if not t.encodings:
                raise LabError(f"task {t.task} has no encodings")
            if t.width % t.heads:
                raise LabError(f"task {t.task}: width={t.width} must be a multiple of heads={t.heads}")
            if t.sliding and task.needs_text and not t.sliding <= min(t.test):
                raise LabError(f"sliding={t.sliding} must be at most the shortest test size, {min(t.test)}")
            try:
                sizes: dict[str, Any] = {"width": t.width, "heads": t.heads, "longest": task.length(t.train)}
            except (ValueError, TypeError, RuntimeError) as error:
                raise LabError(f"task {t.task} of size {t.train}: {error}") from None
            for encoding in t.encodings:
                trained, extension = spec.split_extension(encoding)
                try:
                    build_encoding.build_attention(trained, layers=1, causal=task.causal, **sizes)
                    if extension:
                        build_encoding.build_extended(trained, extension, **sizes)
                except OptionError:  # its message is complete
                    raise
                except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
                    raise LabError(f"task {t.task}, encoding {encoding}: {error}") from None


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def path_of(name: str | Path) -> Path:
    """The file of a preset: a name or a TOML file."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    if str(name) not in names():
        hint = spec.nearest(str(name), names())
        raise LabError(f"unknown preset {str(name)!r}{hint}; the presets are {', '.join(names())}, or a .toml file")
    return FOLDER / f"{name}.toml"


def load(name: str | Path) -> Experiment:
    """A preset by name, or a TOML file."""
    path = path_of(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read the preset {path}: {error.strerror}") from None
    except RecursionError:
        raise LabError(f"the preset {path} is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, not a path
        raise LabError(f"{str(path)!r} is not TOML: {error}") from None
    return from_dict(content, path.stem)


MAX_TRIALS = 100_000


def from_dict(content: dict[str, Any], name: str) -> Experiment:
    from .published import TABLES
    from .tasks import create

    content = dict(content)
    listed = content.pop("tasks", None)
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        raise LabError(f"preset {name} has no [[tasks]]")
    known = {f.name: f for f in fields(TaskSettings)}
    whole = {"title": validate.TEXT, "device": validate.DEVICE, "published": checks.listed(checks.one_of(*TABLES))}
    common = {key: value for key, value in content.items() if key not in whole}
    made = []
    try:
        about = {key: whole[key](key, value) for key, value in content.items() if key in whole}
        for entry in listed:
            given = {**common, **entry}
            unknown = [key for key in given if key not in known]
            if unknown:
                raise LabError(
                    f"preset {name} has unknown settings {', '.join(unknown)}; they are {', '.join([*whole, *known])}"
                )
            missing = [f.name for f in known.values() if f.default is MISSING and f.name not in given]
            if missing:
                raise LabError(f"preset {name}, task {given.get('task', '?')}: {', '.join(missing)} missing")
            checked: dict[str, Any] = {key: validate.TASK[key](key, value) for key, value in given.items()}
            lists = {key: tuple(value) for key, value in checked.items() if isinstance(value, list)}
            made.append(TaskSettings(**checked | lists))
    except LabError:
        raise
    except OptionError as error:
        raise LabError(f"preset {name}: {error}") from None
    if len({t.task for t in made}) < len(made):
        raise LabError(f"preset {name} has a task twice; give each its own preset")
    number = sum(len(t.encodings) * (t.seeds + len(t.rates)) for t in made)
    if number > MAX_TRIALS:
        raise LabError(f"preset {name} has {number} trials, encodings times seeds; at most {MAX_TRIALS} are possible")
    for t in made:
        create(t.task)
    experiment = Experiment(name, about.get("title", name), tuple(made), published=tuple(about.get("published", ())))
    return experiment.on(about.get("device", "cpu"))
