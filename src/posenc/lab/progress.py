"""The progress of a run: a live table with rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from .results import metric_of
from .store import Store
from .texts import Words
from .trials import Trial
from .worker_processes import Event

SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Follows a run's events; `left` estimates the remaining time from the cost of the finished trials."""

    def __init__(self, trials: list[Trial], done: int, store: Store, words: Words):
        self.words, self.store, self.number, self.done = words, store, done + len(trials), done
        self.total = sum(trial.cost for trial in trials) or 1.0
        self.finished = 0.0
        self.partial: dict[str, float] = {}
        self.curves: dict[str, list[float]] = {}
        self.began = time.monotonic()

    def __enter__(self) -> Progress:
        print(f"[{self.done}/{self.number}] {self.words('starting')}", flush=True)
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, event: Event) -> None:
        key = event.trial.training.key
        if event.step is None:
            self.partial.pop(key, None)
            self.finished += event.trial.cost
            self.done += 1
            self.print_trial(event.trial)
        else:
            self.partial[key] = event.trial.cost * event.step / event.trial.training.steps
            self.curves.setdefault(key, []).append(event.loss if event.loss is not None else float("nan"))
            self.print_step(event)

    @property
    def share(self) -> float:
        return min(1.0, (self.finished + sum(self.partial.values())) / self.total)

    @property
    def left(self) -> float | None:
        spent = time.monotonic() - self.began
        return None if self.share < 0.02 or spent < 2 else spent * (1 - self.share) / self.share

    def points(self, trial: Trial) -> list[tuple[str, str]]:
        """(encoding, "64: 1.67  128: 1.66 ..") of every finished test."""
        metric = metric_of({"task": trial.training.task})
        found = []
        for testing in trial.tests:
            record = self.store.get(trial.test_key(testing), "test.json") or {"points": []}
            scores = {
                p["size"]: f"{p[metric]:.3f}" if metric in p else self.words("cannot run") for p in record["points"]
            }
            found.append((trial.name(testing), "  ".join(f"{size}: {score}" for size, score in scores.items())))
        return found

    def print_step(self, event: Event) -> None:
        """Nothing here: plain lines report finished trials only."""

    def print_trial(self, trial: Trial) -> None:
        """Print the results of a finished trial."""
        count, seed = f"[{self.done}/{self.number}]", self.words("seed", seed=trial.training.seed)
        for encoding, scores in self.points(trial):
            print(f"{count} {trial.training.task}  {encoding:<24} {seed}  {scores}  {self.remaining()}", flush=True)
            count = " " * len(count)

    def remaining(self) -> str:
        return "" if self.left is None or self.share >= 1 else f"({self.words('left', time=clock(self.left))})"


class Live(Progress):
    """The same on a terminal, drawn in place: a bar, the running trials with their loss curves, the results."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        from rich.console import Console
        from rich.live import Live as Screen

        self.console = Console()
        self.screen = Screen(console=self.console, refresh_per_second=4, transient=True)
        self.working: dict[str, Trial] = {}

    def __enter__(self) -> Live:
        self.screen.start()
        self.draw()  # the bar stands from the start, before the first step
        return self

    def __exit__(self, *_: Any) -> None:
        self.screen.stop()

    def print_step(self, event: Event) -> None:
        self.working[event.trial.training.key] = event.trial
        self.draw()

    def print_trial(self, trial: Trial) -> None:
        from rich.text import Text

        self.working.pop(trial.training.key, None)
        task, seed = (trial.training.task, "dim"), (self.words("seed", seed=trial.training.seed), "dim")
        for encoding, scores in self.points(trial):
            self.console.print(Text.assemble(task, "  ", (encoding, "bold"), "  ", seed, "  ", scores))
        self.draw()

    def draw(self) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for key, trial in self.working.items():
            curve = self.curves.get(key, [])
            step = int(self.partial.get(key, 0) / trial.cost * trial.training.steps + 0.5)
            last = f"{curve[-1]:.3f}" if curve else ""
            table.add_row(trial.training.task, trial.name(), f"{step}/{trial.training.steps}", spark(curve), last)
        left = "" if self.left is None else self.words("left", time=clock(self.left))
        time_left = left if self.curves or self.finished else self.words("starting")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=self.share, width=40), f"{self.done}/{self.number}", time_left)
        self.screen.update(Group(table, bar, Text("")))


def start(trials: list[Trial], done: int, store: Store, words: Words) -> Progress:
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # without rich
            return Live(trials, done, store, words)
    return Progress(trials, done, store, words)


def spark(values: list[float]) -> str:
    """A curve in one line of text, its last 30 values."""
    finite = [v for v in values if v == v][-30:]
    low, high, top = min(finite, default=0.0), max(finite, default=0.0), len(SPARKS) - 1
    return "".join(SPARKS[round((v - low) / (high - low or 1.0) * top)] for v in finite)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
