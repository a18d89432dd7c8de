"""The suite `uses`: everyday calls, layers and models, each measured next to the best code that computes the same without posenc.

    posenc bench --suite uses [--device cuda] [--only 'layer/rope/*' 'decode/*'] [--missing] [--seconds 480] [--part 1/3]
                             [--warm 8]
    posenc bench --suite uses --merge first.json second.json      parts that were measured on like machines, as one file

A cell has our call and one or more others that compute the same. Outputs (and gradients of training steps) are compared
first; a cell that disagrees or raises is reported as failed and the run goes on. Then all are timed in turns, round by
round. On a CPU each contender's figure is the lowest of its rounds, and ratio = ours / best other. The host of a GPU changes
its speed by a factor of two within a second, for all contenders alike: there figures are medians, and the ratio is the median of
the rounds' own ratios (the time above the floor likewise), each of turns that follow one another within milliseconds.
`floor` is attention without positions, or a layer's linear maps alone: it computes less, and is only given for comparison.

Clocks: "wall" is the time of a call as it is made; "graph" that of a replayed CUDA graph (device time alone); "host" the time
until the call has returned, without waiting for the device. On a CPU with one thread (OMP_NUM_THREADS=1) the thread's own
time counts, which other processes disturb less.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from ..core import files
from .measure import Call, OtherProcesses, capture_graph, release, seconds

Clock = Literal["wall", "graph", "host"]
OURS = "posenc"
GOAL = 1.05
"""The largest ratio that is no loss: 1.00 and 5 % of noise."""


@dataclass
class Contest:
    """Calls that compute the same, ready to run."""

    ours: Call
    others: Mapping[str, Call]
    check: Callable[[], tuple[float, float]]
    """The largest error of our results, relative in norm, and the error that is allowed."""
    floor: Call | None = None
    prepare: dict[str, Call] = field(default_factory=dict)
    """By contender: what to do before each round, outside the clock."""
    inner: int | None = None
    """Calls in a round; None: enough for the clock."""
    engine: Callable[[], str] | None = None


@dataclass(frozen=True)
class Measured:
    """A cell whose figures come from elsewhere (another process): seconds by contender, and remarks."""

    seconds: dict[str, float]
    error: float
    remarks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    name: str
    """group/what/sizes/pass; `--only` matches it."""
    make: Callable[[], Contest | Measured]
    clock: Clock = "wall"
    above: float | None = None
    """For host times: the goal in microseconds above the floor."""

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def select(cells: Iterable[Cell], only: list[str] | None) -> list[Cell]:
    """The cells whose names match one of the patterns: a shell pattern, or a part of the name."""
    return [
        cell for cell in cells if not only or any(fnmatch.fnmatch(cell.name, one) or one in cell.name for one in only)
    ]


PASSES = {"forward": False, "step": True}
"""The passes of a cell's name, and whether they train."""


def take_part(cells: list[Cell], part: str | None) -> list[Cell]:
    """ "2/3": every third cell from the second on, so that long and short ones are shared evenly."""
    if part is None:
        return cells
    number, _, count = part.partition("/")
    if not number.isdigit() or not count.isdigit() or not 1 <= int(number) <= int(count):
        raise ValueError(f"--part {part} must be a number and how many parts there are: 1/3, 2/3 or 3/3")
    return cells[int(number) - 1 :: int(count)]


# ---- one cell ------------------------------------------------------------------------------------------------------
def measure(cell: Cell, device: str, budget: float = 1.0) -> dict[str, Any]:
    """A cell's record. `budget`: seconds of timing, about."""
    contest = cell.make()
    if isinstance(contest, Measured):
        return _record(contest.seconds, None, contest.error, contest.remarks)
    error, allowed = contest.check()
    if not error <= allowed:
        raise WrongResult(f"results differ by {error:.1e}, {allowed:.0e} is allowed")
    calls: dict[str, Call] = {OURS: contest.ours, **contest.others}
    if contest.floor is not None:
        calls["floor"] = contest.floor
    remarks: dict[str, Any] = {}
    if contest.engine is not None:
        remarks["engine"] = contest.engine()
    if cell.clock == "graph":
        calls = _captured(calls, remarks)
    taken = _rounds(calls, cell.clock, device, contest, budget)
    lowest = min if device == "cpu" else statistics.median
    found = {name: lowest(times) for name, times in taken.items()}
    floor = found.pop("floor", None)
    record = _record(found, floor, error, remarks)
    record["spread"] = (max(taken[OURS]) - min(taken[OURS])) / found[OURS]
    if cell.above is not None:
        assert floor is not None
        record["above_us"], record["goal_us"] = (found[OURS] - floor) * 1e6, cell.above
    if device != "cpu":
        record["ratio"] = statistics.median(_paired(taken, record["best"]))
        if cell.above is not None:
            differences = [own - its for own, its in zip(taken[OURS], taken["floor"], strict=True)]
            record["above_us"] = statistics.median(differences) * 1e6
    return record


class WrongResult(RuntimeError):
    """Contenders disagree."""


def _paired(taken: dict[str, list[float]], other: str) -> list[float]:
    """Our time over another's, round by round."""
    return [own / its for own, its in zip(taken[OURS], taken[other], strict=True)]


def _captured(calls: dict[str, Call], remarks: dict[str, Any]) -> dict[str, Call]:
    """Replays of CUDA graphs. An other that cannot be captured is left out; ours must be."""
    replays = {}
    for name, call in calls.items():
        try:
            replays[name] = capture_graph(call)
        except RuntimeError as error:
            if name == OURS:
                raise RuntimeError(f"cannot be captured: {_first_line(error)}") from error
            torch.cuda.synchronize()
            remarks.setdefault("not captured", []).append(name)
    return replays


def _rounds(calls: dict[str, Call], clock: Clock, device: str, contest: Contest, budget: float):
    """Seconds of each contender, round by round."""
    rough = {}
    for name, call in calls.items():
        _prepared(contest, name)
        for _ in range(2):
            call()
        rough[name] = _once(call, clock, device, contest.inner or 1)
    # short rounds: on a CPU some of many fall between other processes' turns, and the host of a GPU changes its speed
    enough = 0.002 if device == "cpu" else 0.003
    longest = 200 if clock != "host" else 30  # more would fill the queue of launches, and wait for the device
    inner = {name: contest.inner or max(1, min(longest, math.ceil(enough / max(rough[name], 1e-7)))) for name in calls}
    if device != "cpu" and contest.inner is None:
        # the first call of a round finds an idle device, which no call within a model does
        inner = {name: max(count, AT_LEAST) if rough[name] < 0.02 else count for name, count in inner.items()}
    a_round = sum(rough[name] * inner[name] for name in calls)
    rounds = max(3, min(200 if device == "cpu" else 40, int(budget / max(a_round, 1e-6))))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()  # a collection would fall into one contender's round
    try:
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                _prepared(contest, name)
                taken[name].append(_once(calls[name], clock, device, inner[name]))
            if device != "cpu" and number + 1 >= STEADY_ROUNDS:
                if all(is_steady(_paired(taken, name)) for name in names if name != OURS):
                    break
    finally:
        gc.enable()
    return taken


AT_LEAST = 4
"""Calls in a round on a GPU, unless a call takes long."""
STEADY_ROUNDS = 10
"""Rounds, as many of them forwards as backwards, after which a GPU's ratios are enough where they agree."""


def is_steady(ratios: list[float]) -> bool:
    """Whether the middle half lies within 2 %."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return high - low < 0.02 * middle


def _prepared(contest: Contest, name: str) -> None:
    if name in contest.prepare:
        contest.prepare[name]()


def _once(call: Call, clock: Clock, device: str, inner: int) -> float:
    if device == "cpu" and torch.get_num_threads() == 1:
        start = time.thread_time()
        for _ in range(inner):
            call()
        return (time.thread_time() - start) / inner
    if clock != "host" or device == "cpu":
        return seconds(call, device, inner)
    torch.cuda.synchronize()
    taken = seconds(call, "cpu", inner)
    torch.cuda.synchronize()
    return taken


def _record(found: dict[str, float], floor: float | None, error: float, remarks: dict[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in found.items() if name != OURS}
    best = min(others, key=lambda name: others[name])
    record: dict[str, Any] = {
        "ours": found[OURS], "others": others, "best": best, "ratio": found[OURS] / others[best], "error": error,
    }  # fmt: skip
    if floor is not None:
        record["floor"] = floor
    return record | remarks


def warm(cell: Cell) -> None:
    """What a measurement compiles, into the caches of Triton and Inductor on disk."""
    contest = cell.make()
    if isinstance(contest, Contest):
        contest.check()
        for name, call in {OURS: contest.ours, **contest.others}.items():
            _prepared(contest, name)
            call()


# ---- all of them ---------------------------------------------------------------------------------------------------
def run(
    cells: list[Cell], device: str, path: Path, *, machine: dict[str, Any], limit: float | None = None,
    budget: float = 1.0, missing: bool = False, show: Callable[[str, float], None] = lambda line, done: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the cells one by one, writing each to `path`; results there of the same machine are kept.

    limit: seconds after which no further cell starts; the rest is listed under "not run" and keeps an earlier result with its date.
    With a limit, cells without a result come first, then the oldest, of one day those first that miss their goal: run it again until
    no cell is left.
    """
    result = load(path)
    if result.get("device") != device or not is_same_machine(result.get("machine", {}), machine, device):
        result = {"suite": "uses", "device": device, "machine": machine, "cells": {}}
    known = result["cells"]
    waiting = [name for name in result.get("not run", []) if name not in {cell.name for cell in cells}]
    if missing:
        cells = [cell for cell in cells if "ratio" not in known.get(cell.name, {})]
    if limit is not None:
        cells = sorted(cells, key=lambda cell: _turn(known.get(cell.name, {}), result))
    began, left = time.monotonic(), []
    gc.collect()
    gc.freeze()  # what is loaded stays: collections between cells need not look at it
    for number, cell in enumerate(cells):
        if limit is not None and time.monotonic() - began > limit:
            if "ratio" not in known.get(cell.name, {}):
                left.append(cell.name)
            continue
        start, others = time.monotonic(), OtherProcesses()
        try:
            record = measure(cell, device, budget)
        except Exception as error:
            failed = f"{type(error).__name__}: {_first_line(error)}"
            record = {"failed": failed, "where": traceback.format_exc()[-1500:]}
        record |= {"group": cell.group, "clock": cell.clock, "took": round(time.monotonic() - start, 2)}
        record["busy"] = round(others.share(), 2)
        known[cell.name] = record
        result["date"] = record["date"] = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        to_come = [one.name for one in cells[number + 1 :] if "ratio" not in known.get(one.name, {})]
        result["not run"] = [*waiting, *to_come]
        files.write_json(path, result)
        show(line(cell.name, record), (number + 1) / len(cells))
        release(device)
    gc.unfreeze()
    result["not run"] = [*waiting, *left]
    files.write_json(path, result)
    return result


def is_same_machine(one: dict[str, Any], other: dict[str, Any], device: str) -> bool:
    """On a GPU whatever the number of CPU threads."""
    ignored = () if device == "cpu" else ("threads",)
    return {**one, **dict.fromkeys(ignored)} == {**other, **dict.fromkeys(ignored)}


def _turn(record: dict[str, Any], result: dict[str, Any]) -> str:
    """When a cell was measured, "" where there is no figure; of those of one day, what misses its goal comes first."""
    measured = _measured(record, result)
    if not measured or not misses_goal(record):
        return measured
    return str(datetime.fromisoformat(measured) - timedelta(days=1))[: len(measured)]


def misses_goal(record: dict[str, Any]) -> bool:
    """Of a cell with a result: by its ratio, or by its time above the floor where it has a goal of its own."""
    return record["above_us"] > record["goal_us"] if "goal_us" in record else record["ratio"] > GOAL


def _measured(record: dict[str, Any], result: dict[str, Any]) -> str:
    """When a cell was measured; "" where there is no figure."""
    return str(record.get("date", result.get("date", ""))) if "ratio" in record else ""


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of one device and one kind of machine as one: of a cell in several, the latest.

    Raises ValueError where machines differ.
    """
    first = results[0]
    merged: dict[str, Any] = {**first, "cells": {}}
    for result in results:
        alike = {name: result.get(name) == first.get(name) for name in ("suite", "device")}
        alike["machine"] = is_same_machine(
            result.get("machine", {}), first.get("machine", {}), str(first.get("device"))
        )
        for name in (name for name in alike if not alike[name]):
            raise ValueError(
                f"results of {first.get(name)} and {result.get(name)} cannot be merged; give those of one {name}"
            )
        for name, record in result["cells"].items():
            known = merged["cells"].get(name)
            if known is None or _measured(known, first) <= _measured(record, result):
                merged["cells"][name] = {"date": result.get("date", ""), **record}
    merged["date"] = max(str(result.get("date", "")) for result in results)
    waiting = dict.fromkeys(name for result in results for name in result.get("not run", []))
    merged["not run"] = [name for name in waiting if "ratio" not in merged["cells"].get(name, {})]
    return merged


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def line(name: str, record: dict[str, Any]) -> str:
    """One cell as text."""
    if "failed" in record:
        return f"{name:<44} FAILED {record['failed']}"
    best = f"{record['best']} {duration(record['others'][record['best']])}"
    text = f"{name:<44} {record['ratio']:5.2f}  {duration(record['ours'])}, {best}"
    if "floor" in record:
        what = "linear maps alone" if name.startswith("layer/") else "without positions"
        text += f", {what} {duration(record['floor'])}"
    if "above_us" in record:
        text += f"; above it {record['above_us']:.0f} µs (goal {record['goal_us']:.0f})"
    return text + (f"  [{record['engine']}]" if "engine" in record else "")


def duration(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1.0 else f"{value:.2f} s"


def ranked_ratios(cells: dict[str, dict[str, Any]]) -> list[tuple[float, str]]:
    """From the best to the worst, of cells without a goal of their own: host times have one, in microseconds above the floor."""
    return sorted((one["ratio"], name) for name, one in cells.items() if "ratio" in one and "goal_us" not in one)


def summary(result: dict[str, Any]) -> str:
    """Best, median and worst ratio, what failed, what was not run; the worst cell last."""
    cells = result["cells"]
    ranked = ranked_ratios(cells)
    lines = [f"FAILED {name}: {record['failed']}" for name, record in cells.items() if "failed" in record]
    if left := result.get("not run"):
        lines.append(f"not run, for lack of time: {len(left)} cells ({', '.join(left[:6])}, ..)")
    for name, record in cells.items():
        if "goal_us" in record and misses_goal(record):
            lines.append(f"above the goal: {line(name, record)}")
    if ranked:
        over = [name for ratio, name in ranked if ratio > GOAL]
        best, middle, worst = ranked[0][0], statistics.median(ratio for ratio, _ in ranked), ranked[-1][0]
        lines.append(
            f"{len(ranked)} cells, {len(over)} above {GOAL}: best {best:.2f}, median {middle:.2f}, worst {worst:.2f}"
        )
        lines += [line(name, cells[name]) for name in over[-10:]]
        lines.append(f"worst: {line(ranked[-1][1], cells[ranked[-1][1]])}")
    return "\n".join(lines)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else ""
