"""What a run shows while it works: a live table with rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from .cells import Cell
from .results import metric_of
from .store import Store
from .workers import Event

SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Follows events; `left` is the time that remains, guessed from the work that is done."""

    def __init__(self, cells: list[Cell], done: int, store: Store):
        self.store, self.number, self.done = store, done + len(cells), done
        self.total = sum(cell.work for cell in cells) or 1.0
        self.finished = 0.0
        self.partial: dict[str, float] = {}
        self.curves: dict[str, list[float]] = {}
        self.began = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def see(self, event: Event) -> None:
        key = event.cell.training.key
        if event.step is None:
            self.partial.pop(key, None)
            self.finished += event.cell.work
            self.done += 1
            self.tell(event.cell)
        else:
            self.partial[key] = event.cell.work * event.step / event.cell.training.steps
            self.curves.setdefault(key, []).append(event.loss if event.loss is not None else float("nan"))
            self.watch(event)

    @property
    def share(self) -> float:
        return min(1.0, (self.finished + sum(self.partial.values())) / self.total)

    @property
    def left(self) -> float | None:
        spent = time.monotonic() - self.began
        return None if self.share < 0.02 or spent < 2 else spent * (1 - self.share) / self.share

    def points(self, cell: Cell) -> list[tuple[str, str]]:
        """(encoding, "64: 1.67  128: 1.66 ..") of every finished test."""
        metric = metric_of({"task": cell.training.task})
        found = []
        for testing in cell.tests:
            record = self.store.get(cell.test_key(testing), "test.json")
            shown = "  ".join(
                f"{p['size']}: {p[metric]:.3f}" if metric in p else f"{p['size']}: cannot"
                for p in (record or {"points": []})["points"]
            )
            found.append((cell.name(testing), shown))
        return found

    def watch(self, event: Event) -> None:
        """A step was made."""

    def tell(self, cell: Cell) -> None:
        """A cell is finished."""
        for number, (encoding, shown) in enumerate(self.points(cell)):
            count = f"[{self.done}/{self.number}]" if number == 0 else " " * (2 + len(f"{self.done}/{self.number}"))
            seed = f"seed {cell.training.seed}"
            print(f"{count} {cell.training.task}  {encoding:<24} {seed}  {shown}  {self.remaining()}", flush=True)

    def remaining(self) -> str:
        return "" if self.left is None or self.share >= 1 else f"({clock(self.left)} left)"


class Live(Progress):
    """The same on a terminal, drawn in place: a bar, the cells at work with their loss curves, what came out."""

    def __init__(self, cells: list[Cell], done: int, store: Store):
        super().__init__(cells, done, store)
        from rich.console import Console
        from rich.live import Live as Screen

        self.console = Console()
        self.screen = Screen(console=self.console, refresh_per_second=4, transient=True)
        self.working: dict[str, Cell] = {}

    def __enter__(self) -> Live:
        self.screen.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.screen.stop()

    def watch(self, event: Event) -> None:
        self.working[event.cell.training.key] = event.cell
        self.draw()

    def tell(self, cell: Cell) -> None:
        self.working.pop(cell.training.key, None)
        from rich.text import Text

        for encoding, shown in self.points(cell):
            seed = f"seed {cell.training.seed}"
            self.console.print(
                Text.assemble((cell.training.task, "dim"), "  ", (encoding, "bold"), "  ", (seed, "dim"), "  ", shown)
            )
        self.draw()

    def draw(self) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for key, cell in self.working.items():
            curve = self.curves.get(key, [])
            step = int(self.partial.get(key, 0) / cell.work * cell.training.steps + 0.5)
            last = f"{curve[-1]:.3f}" if curve else ""
            table.add_row(cell.training.task, cell.name(), f"{step}/{cell.training.steps}", spark(curve), last)
        time_left = "" if self.left is None else f"{clock(self.left)} left"
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=self.share, width=40), f"{self.done}/{self.number}", time_left)
        self.screen.update(Group(table, bar, Text("")))


def start(cells: list[Cell], done: int, store: Store) -> Progress:
    if sys.stdout.isatty():
        try:
            return Live(cells, done, store)
        except ImportError:
            pass
    return Progress(cells, done, store)


def spark(values: list[float], width: int = 30) -> str:
    """A curve in one line of text, its last `width` values."""
    shown = [v for v in values if v == v][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((v - low) / (high - low) * top) if high > low else 0] for v in shown)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
