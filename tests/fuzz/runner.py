"""python -m tests.fuzz --engine cpu --count 1000 --seed 1: draw cases, check them, shrink what fails, report.

The last line is "N draws, F failures, seed S" (with how many draws the engine refused); the exit code is 1 where
something failed. Every failure comes with the command that draws it again and a script of its smallest form.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

PARTS = ("engines", "layers", "models")
CHUNK = 10
"""Draws that a process takes at once."""


@dataclass
class Result:
    number: int
    state: str  # right | refused | failed
    report: str = ""


@dataclass(frozen=True)
class Setting:
    part: str = "engines"
    engine: str = "auto"
    seed: int = 0
    device: str = "cpu"
    only: str | None = None
    without: tuple[str, ...] = ()
    structures: int = 0
    hopper: bool = False

    def drawn(self, number: int):
        """The case of this number, from nothing but the seed."""
        random = Random(f"{self.part} {self.seed} {number}")
        case = self._drawn(number, random)
        return self.module.for_hopper(case, Random(f"{self.seed} {self._structure(number)}")) if self.hopper else case

    def _structure(self, number: int) -> int:
        """What a kernel is compiled for is drawn `structures` times only, lengths and numbers each time. The draws of a chunk share it, so that a
        process compiles for one structure at a time."""
        return number // CHUNK % self.structures if self.structures else number

    def _drawn(self, number: int, random: Random):
        if self.structures:
            return self.module.resize(self.module.draw(Random(f"{self.seed} {self._structure(number)}")), random)
        return self.module.draw(random)

    @property
    def module(self):
        return importlib.import_module(f"tests.fuzz.{self.part}")

    def numbers(self, start: int, count: int) -> Iterator[int]:
        """`count` numbers from `start` on, those whose cases have the features that are asked for."""
        every: Iterable[int] = itertools.count(start)
        if self.only is not None or self.without:
            every = filter(self._fits, every)
        return itertools.islice(every, count)

    def _fits(self, number: int) -> bool:
        features = self.module.features(self.drawn(number))
        return (self.only is None or self.only in features) and not features & set(self.without)

    def command(self, number: int) -> str:
        return (
            f"python -m tests.fuzz --part {self.part} --engine {self.engine} --device {self.device} "
            f"--seed {self.seed} --start {number} --count 1"
            + (f" --structures {self.structures}" if self.structures else "")
            + " --hopper" * self.hopper
        )


def examine(setting: Setting, number: int, shrinking: bool = True) -> Result:
    """One draw: what came of it, and a report where it failed."""
    from tests.fuzz.refused import Refused
    from tests.fuzz.shrink import shrink

    part = setting.module
    case = setting.drawn(number)

    def faults(one) -> list[str]:
        try:
            return part.check(one, setting.engine, setting.device)
        except Refused:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            return [f"raised {type(error).__name__}: {error} ({os.path.basename(at.filename)}:{at.lineno})"]

    def kind(found: list[str]) -> str:
        """What is kept while shrinking, so that a gross fault does not become one in the last digit."""
        if not found or found[0].startswith("raised"):
            return found[0].split(":")[0] if found else ""
        return "far off" if any(_times(fault) > 50 for fault in found) else "off"

    try:
        found = faults(case)
    except Refused as reason:
        return Result(number, "refused", str(reason))
    if not found:
        return Result(number, "right")
    lines = [f"FAILED draw {number}: {found[0]}", f"  again: {setting.command(number)}", f"  drawn: {case!r}"]
    if shrinking:

        def fails(one) -> bool:
            try:
                return kind(faults(one)) == kind(found)
            except Refused:
                return False

        case = shrink(case, fails, part.simpler)
        left = faults(case)
        lines += [f"  shrunk: {case!r}", *(f"    {fault}" for fault in left[:3])]
        lines += [f"    and {len(left) - 3} more"] * (len(left) > 3)
        script = part.script(case, setting.engine, setting.device)
        lines += ["  ---- a script of it, for the repository's root ----", script.rstrip(), "  ----"]
    return Result(number, "failed", "\n".join(lines))


def _times(fault: str) -> float:
    """How many times its budget an error is."""
    match = re.search(r"an error of (\S+) times", fault)
    return float(match[1]) if match else math.inf


def _several(setting: Setting, numbers: list[int], shrinking: bool) -> list[Result]:
    import torch

    torch.set_num_threads(1)
    return [examine(setting, number, shrinking) for number in numbers]


def _results(setting: Setting, numbers: Iterator[int], processes: int, shrinking: bool) -> Iterator[Result]:
    chunks = iter(lambda: list(itertools.islice(numbers, CHUNK)), [])
    if processes <= 1:
        for chunk in chunks:
            for number in chunk:
                yield from _several(setting, [number], shrinking)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [
            pool.submit(_several, setting, chunk, shrinking) for chunk in itertools.islice(chunks, 2 * processes)
        ]
        while waiting:
            yield from waiting.pop(0).result()
            waiting += [pool.submit(_several, setting, chunk, shrinking) for chunk in itertools.islice(chunks, 1)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--engine", default="auto", help="auto, or a name of posenc.ENGINES")
    parser.add_argument("--count", type=int, default=1000, help="draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, default="engines")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("-j", "--processes", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--only", metavar="FEATURE", help="draws with this alone: documents, dot_key, bfloat16, ...")
    parser.add_argument("--without", action="append", default=[], metavar="FEATURE", help="draws that do not have this")
    parser.add_argument(
        "--structures",
        type=int,
        default=0,
        metavar="N",
        help="engines: N plans and masks, each with many lengths (GPU: N compilations)",
    )
    parser.add_argument(
        "--hopper", action="store_true", help="engines: only what engines/gluon computes, in any length"
    )
    parser.add_argument("--no-shrink", action="store_true", help="report failures as they were drawn")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    given = parser.parse_args(arguments)
    setting = Setting(
        given.part,
        given.engine,
        given.seed,
        given.device,
        given.only,
        tuple(given.without),
        given.structures,
        given.hopper,
    )
    counts = {"right": 0, "refused": 0, "failed": 0}
    began = shown = time.monotonic()
    for result in _results(setting, setting.numbers(given.start, given.count), given.processes, not given.no_shrink):
        counts[result.state] += 1
        if result.state == "failed":
            print(result.report, flush=True)
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            done = sum(counts.values())
            print(
                f"... {done} of {given.count} draws, {counts['refused']} refused, {counts['failed']} failures, "
                f"{done / (shown - began):.0f} a second",
                file=sys.stderr,
                flush=True,
            )
        if counts["failed"] >= given.most:
            break
    done, rate = sum(counts.values()), sum(counts.values()) / max(1e-9, time.monotonic() - began)
    print(f"{counts['refused']} refused by {given.engine}, {rate:.0f} draws a second")
    print(f"{done} draws, {counts['failed']} failures, seed {given.seed}")
    return int(counts["failed"] > 0)
