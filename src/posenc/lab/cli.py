"""The lab's commands: posenc compare, posenc report."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from .errors import LabError, TrialFailure


def compare(arguments: list[str]) -> int:
    """posenc compare"""
    parser = argparse.ArgumentParser(
        prog="posenc compare",
        description="Train small transformers that differ in their positional encoding only, test them at the "
        "training length and far past it, and recommend one. Run the same command again to resume.",
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
    add("--seeds", type=int, help="seeds an encoding, instead of the preset's")
    add("--steps", type=int, help="training steps, instead of the preset's")
    add("--rates", nargs="+", type=float, help="learning-rate check: multiples of the rate, for example 0.5 2")
    add("--text", metavar="FILE", help="the text of the text task (the Python standard library's source)")
    add("--device", choices=("cpu", "cuda"), help="cuda computes in bfloat16, with the fused engine and torch.compile")
    add("--no-compile", action="store_true", help="leave torch.compile out on a GPU")
    add("--jobs", type=int, help="worker processes (one for each processor; 1 on a GPU)")
    add("--on", default="here", help="here, ray (a local cluster), or ray://HOST:PORT")
    add(
        "--shard", default="rows", choices=("rows", "sequence"),
        help="under torchrun: what the processes share of a batch, its rows or each sequence (without torch.compile)",
    )  # fmt: skip
    add("--throughput", action="store_true", help="measure the training speed of every encoding instead, at length 512")
    given = parser.parse_args(arguments)
    for name in ("seeds", "steps"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise LabError(f"--{name} {getattr(given, name)} must be at least 1")
    if given.throughput:
        from . import throughput

        print(throughput.as_text(throughput.measure(encodings=given.encodings, device=given.device or "cpu")))
        return 0
    from . import presets, process_group, report, run

    experiment = presets.load(given.preset)
    if given.device:
        experiment = experiment.on(given.device)
    if given.no_compile or given.shard == "sequence":
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
            raise LabError("--device cuda: PyTorch finds no GPU; leave the option out to use the CPU")
    out = Path(given.out or Path("out") / Path(given.preset).stem)
    group = process_group.from_torchrun(experiment.device, given.shard)
    found, status = None, 0
    try:
        found = run.compare(experiment, out, text=given.text, jobs=given.jobs, on=given.on, group=group)
    except KeyboardInterrupt:
        print(
            f"\nstopped; run the same command again to resume (posenc report {out} shows the results so far)",
            file=sys.stderr,
        )
        status = 130
    except TrialFailure as error:
        print(f"\n{error}\nthe other trials' results are in {out / 'report.html'}", file=sys.stderr)
        status = 1
    finally:
        process_group.destroy(group)
    if found is not None and group.is_main:
        print(report.as_text(found))
        print(f"\n{out / 'report.html'}")
    return process_group.exit_status(group, status)


def show_report(arguments: list[str]) -> int:
    """posenc report"""
    parser = argparse.ArgumentParser(
        prog="posenc report", description="Build a run's report again, or compare two runs."
    )
    parser.add_argument("runs", nargs="+", metavar="DIR", help="a run's folder; with two, they are compared")
    parser.add_argument("--out", help="where the comparison of two runs goes (DIR2/compare.html)")
    parser.add_argument("--still", action="store_true", help="figures as still pictures: a small page without scripts")
    given = parser.parse_args(arguments)
    if len(given.runs) > 2:
        raise LabError(f"posenc report takes one or two runs, got {len(given.runs)}")
    if given.out and len(given.runs) == 1:
        raise LabError("--out goes with two runs; one run's report is written into its folder")
    from . import compare_runs, report, results
    from .store import write

    found = [results.read(folder) for folder in given.runs]
    if len(found) == 2:
        print(compare_runs.as_text(found[0], found[1], given.runs))
        page = compare_runs.as_html(found[0], found[1], given.runs, still=given.still)
        path = Path(given.out) if given.out else Path(given.runs[1]) / "compare.html"
        write(path, page.encode())
        print(f"\n{path}")
        return 0
    report.save(found[0], Path(given.runs[0]), still=given.still)
    print(report.as_text(found[0]))
    return 0
