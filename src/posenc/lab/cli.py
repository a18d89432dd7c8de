"""The lab's commands: posenc compare, posenc report, posenc claims.

Each prints its first line before it loads torch, which takes seconds on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..encodings import spec
from . import presets
from .errors import LabError, TrialFailure
from .texts import LANGUAGES, Words


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
        nargs="+",
        metavar="ENCODING",
        help="for example: alibi rope:base=500000 rope+ntk:8 t5:buckets=64",
    )
    add("--tasks", nargs="+", metavar="TASK", help="only these tasks of the preset")
    add("--seeds", type=int, help="seeds an encoding, instead of the preset's")
    add("--steps", type=int, help="training steps, instead of the preset's")
    add("--rates", nargs="+", type=float, help="learning-rate check: multiples of the rate, for example 0.5 2")
    text = "the text of the text task: a plain text file or a folder of them (the Python standard library's source)"
    add("--text", metavar="PATH", help=text)
    add("--device", choices=("cpu", "cuda"), help="cuda computes in bfloat16, with the fused engine and torch.compile")
    add("--no-compile", action="store_true", help="leave torch.compile out on a GPU")
    add("--jobs", type=int, help="worker processes (one for each processor; 1 on a GPU)")
    add("--on", default="here", help="here, ray (a local cluster), or ray://HOST:PORT")
    add(
        "--shard", default="rows", choices=("rows", "sequence"),
        help="under torchrun: what the processes share of a batch, its rows or each sequence (without torch.compile)",
    )  # fmt: skip
    add("--throughput", action="store_true", help="measure the training speed of every encoding instead, at length 512")
    _add_language(parser)
    given = parser.parse_args(arguments)
    words = Words(given.lang or "en")
    changes: dict[str, Any] = {
        name: getattr(given, name) for name in ("seeds", "steps") if getattr(given, name) is not None
    }
    for name, number in changes.items():
        if number < 1:
            raise LabError(f"--{name} {number} must be at least 1")
    encodings = tuple(spec.normalise(text) for text in given.encodings or ())
    for encoding in encodings:
        spec.check(encoding, own_attention=True)
    if given.throughput:
        _announce(words, "compare", "--throughput")
        from . import throughput

        print(throughput.as_text(throughput.measure(encodings=encodings or None, device=given.device or "cpu")))
        return 0
    presets.path_of(given.preset)
    out = Path(given.out or Path("out") / Path(given.preset).stem)
    if os.environ.get("RANK", "0") == "0":  # torchrun starts several processes
        _announce(words, "compare", words("what compare", preset=given.preset, out=out))
    from . import process_group, report, run

    experiment = presets.load(given.preset)
    if given.device:
        experiment = experiment.on(given.device)
    if given.no_compile or given.shard == "sequence":
        experiment = replace(experiment, compile=False)
    if given.tasks:
        known = [t.task for t in experiment.tasks]
        wrong = [task for task in given.tasks if task not in known]
        if wrong:
            hint = spec.nearest(wrong[0], known)
            raise LabError(f"preset {given.preset} has no task {', '.join(wrong)}{hint}; it has {', '.join(known)}")
        experiment = replace(experiment, tasks=tuple(t for t in experiment.tasks if t.task in given.tasks))
    changes |= {"rates": tuple(given.rates)} if given.rates else {}
    changes |= {"encodings": encodings} if encodings else {}
    experiment = experiment.change(**changes)
    if experiment.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise LabError("--device cuda: PyTorch finds no GPU; leave the option out to use the CPU")
    group = process_group.from_torchrun(experiment.device, given.shard)
    found, status = None, 0
    try:
        found = run.compare(
            experiment, out, text=given.text, jobs=given.jobs, on=given.on, group=group, language=given.lang
        )
    except KeyboardInterrupt:
        print(f"\n{words('stopped', out=out)}", file=sys.stderr)
        status = 130
    except TrialFailure as error:
        print(f"\n{error}\n{words('others kept', path=out / 'report.html')}", file=sys.stderr)
        status = 1
    finally:
        process_group.destroy(group)
    if found is not None and group.is_main:
        print(report.as_text(found, words, bold=terminal.bold, width=terminal.width()))
        print(f"\n{words('written', path=out / 'report.html')}")
    return process_group.exit_status(group, status)


def show_report(arguments: list[str]) -> int:
    """posenc report"""
    parser = argparse.ArgumentParser(
        prog="posenc report", description="Build a run's report again, or compare two runs."
    )
    parser.add_argument("runs", nargs="+", metavar="DIR", help="a run's folder; with two, they are compared")
    parser.add_argument("--out", help="where the comparison of two runs goes (DIR2/compare.html)")
    parser.add_argument(
        "--still", action="store_true", help="a page without scripts; the language switch works all the same"
    )
    _add_language(parser)
    given = parser.parse_args(arguments)
    words = Words(given.lang or "en")
    if len(given.runs) > 2:
        raise LabError(f"posenc report takes one or two runs, got {len(given.runs)}")
    if given.out and len(given.runs) == 1:
        raise LabError("--out goes with two runs; one run's report is written into its folder")
    if given.out and Path(given.out).suffix.lower() not in (".html", ".htm"):
        raise LabError(f"--out {given.out}: the comparison is a page; its name must end in .html")
    missing = [folder for folder in given.runs if not Path(folder).is_dir()]
    if missing:
        raise LabError(f"{missing[0]} is not the folder of a run: there is no such folder; posenc compare makes one")
    _announce(words, "report", words("what report", runs=", ".join(given.runs)))
    from . import compare_runs, report, results
    from .store import write

    found = [results.read(folder) for folder in given.runs]
    if len(found) == 2:
        print(compare_runs.as_text(found[0], found[1], given.runs, words))
        page = compare_runs.as_html(found[0], found[1], given.runs, still=given.still, language=given.lang)
        path = Path(given.out) if given.out else Path(given.runs[1]) / "compare.html"
        write(path, page.encode())
    else:
        report.save(found[0], Path(given.runs[0]), still=given.still, language=given.lang)
        print(report.as_text(found[0], words, bold=terminal.bold, width=terminal.width()))
        path = Path(given.runs[0]) / "report.html"
    print(f"\n{words('written', path=path)}")
    return 0


def claims(arguments: list[str]) -> int:
    """posenc claims"""
    parser = argparse.ArgumentParser(
        prog="posenc claims", description="Test textbook claims about positional encodings by measurement."
    )
    parser.add_argument("--out", default="out/quick", help="the folder of the trained models (out/quick)")
    parser.add_argument("--text", metavar="PATH", help="another text than the Python standard library's source")
    parser.add_argument("--jobs", type=int, help="worker processes (one for each processor)")
    given = parser.parse_args(arguments)
    _announce(Words("en"), "claims", given.out)
    from .claims import write_all

    return write_all(Path(given.out), text=given.text, jobs=given.jobs)


def _add_language(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lang",
        choices=tuple(LANGUAGES),
        help="the language of the output and of the page when it opens (English, and the browser's)",
    )


def _announce(words: Words, command: str, what: object) -> None:
    print(words("loading", command=command, what=what), flush=True)
