"""The lab's commands: posenc compare, posenc report."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from .errors import CellFailure, LabError


def compare(arguments: list[str]) -> int:
    """posenc compare"""
    parser = argparse.ArgumentParser(
        prog="posenc compare",
        description="Train small transformers that differ in their positional encoding only, test them at the "
        "training length and far past it, and say which one to use. The same command goes on where it stopped.",
    )
    add = parser.add_argument
    add("--preset", default="quick", help="smoke, quick, full, paper, or a .toml file (quick)")
    add("--out", help="the run's folder (out/PRESET)")
    add(
        "--encodings",
        "--schemes",
        nargs="+",
        metavar="ENCODING",
        help="for example: alibi rope:base=500000 rope+ntk:8 t5:buckets=64",
    )
    add("--tasks", nargs="+", metavar="TASK", help="only these tasks of the preset")
    add("--seeds", type=int, help="seeds an encoding, in place of the preset's")
    add("--steps", type=int, help="training steps, in place of the preset's")
    add("--rates", nargs="+", type=float, help="learning-rate check: multiples of the rate, for example 0.5 2")
    add("--text", metavar="FILE", help="the text of the text task (the Python standard library's source)")
    add("--device", choices=("cpu", "cuda"), help="cuda computes in bfloat16, with the fused engine and torch.compile")
    add("--no-compile", action="store_true", help="leave torch.compile out on a GPU")
    add("--jobs", type=int, help="worker processes (one for each processor; 1 on a GPU)")
    add("--on", default="here", help="here, ray (a local cluster), or ray://HOST:PORT")
    add("--throughput", action="store_true", help="measure the training speed of every encoding instead, at length 512")
    given = parser.parse_args(arguments)
    for name in ("seeds", "steps"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise LabError(f"--{name} {getattr(given, name)} must be at least 1")
    if given.throughput:
        from . import throughput

        print(throughput.as_text(throughput.measure(encodings=given.encodings, device=given.device or "cpu")))
        return 0
    from . import presets, report, run, team

    experiment = presets.load(given.preset)
    if given.device:
        experiment = experiment.on(given.device)
    if given.no_compile:
        experiment = replace(experiment, compile=False)
    if given.tasks:
        known = [t.task for t in experiment.tasks]
        wrong = [task for task in given.tasks if task not in known]
        if wrong:
            raise LabError(f"preset {given.preset} has no task {', '.join(wrong)}; it has {', '.join(known)}")
        experiment = replace(experiment, tasks=tuple(t for t in experiment.tasks if t.task in given.tasks))
    changes = {name: getattr(given, name) for name in ("seeds", "steps") if getattr(given, name) is not None}
    changes |= {name: tuple(getattr(given, name)) for name in ("encodings", "rates") if getattr(given, name)}
    experiment = experiment.change(**changes)
    if experiment.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise LabError("--device cuda: PyTorch sees no GPU here; leave it out to use the CPU")
    out = Path(given.out or Path("out") / Path(given.preset).stem)
    members = team.from_torchrun(experiment.device)
    found, status = None, 0
    try:
        found = run.compare(experiment, out, text=given.text, jobs=given.jobs, on=given.on, team=members)
    except KeyboardInterrupt:
        print(
            f"\nstopped; the same command goes on from here (posenc report {out} shows what there is)", file=sys.stderr
        )
        status = 130
    except CellFailure as error:
        print(f"\n{error}\nwhat the other cells found is in {out / 'report.html'}", file=sys.stderr)
        status = 1
    finally:
        team.leave(members)
    if found is not None and members.first:
        print(report.as_text(found))
        print(f"\n{out / 'report.html'}")
    return team.end(members, status)


def show_report(arguments: list[str]) -> int:
    """posenc report"""
    parser = argparse.ArgumentParser(
        prog="posenc report", description="Build a run's report again, or set two runs side by side."
    )
    parser.add_argument("runs", nargs="+", metavar="DIR", help="a run's folder; with two, they are compared")
    parser.add_argument("--out", help="where the comparison of two runs goes (DIR2/compare.html)")
    parser.add_argument("--still", action="store_true", help="figures as still pictures: a small page without scripts")
    given = parser.parse_args(arguments)
    if len(given.runs) > 2:
        raise LabError(f"one run or two can be reported, {len(given.runs)} were given")
    if given.out and len(given.runs) == 1:
        raise LabError("--out goes with two runs; one run's report is written into its folder")
    from . import report, results, side_by_side
    from .store import write

    found = [results.read(folder) for folder in given.runs]
    if len(found) == 2:
        print(side_by_side.as_text(found[0], found[1], given.runs))
        page = side_by_side.as_html(found[0], found[1], given.runs, still=given.still)
        place = Path(given.out) if given.out else Path(given.runs[1]) / "compare.html"
        write(place, page.encode())
        print(f"\n{place}")
        return 0
    report.save(found[0], Path(given.runs[0]), still=given.still)
    print(report.as_text(found[0]))
    return 0
