"""posenc bench"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc bench",
        description="Attention with positions beside its peers: each result is compared with the float64 reference "
        "first, a wrong one is reported and not timed. Ratios are to PyTorch's attention without positions, same run.",
    )
    add = parser.add_argument
    add("--suite", choices=("attention", "hf"), default="attention", help="hf: whole transformers models, as they are "
        "and accelerated; takes --device, --repeats and --out, writes hf.json")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="float32; on cuda bfloat16")
    add("--schemes", nargs="+", metavar="WORKLOAD", help="which workloads (all); --list names them")
    add("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096], metavar="TOKENS", help="512 1024 2048 4096")
    add("--peers", nargs="+", metavar="PEER", help="which peers (all)")
    add("--repeats", type=int, default=5, help="runs a median is taken of (5)")
    add("--forward-only", action="store_true", help="no training steps")
    add("--out", default="out/bench", help="folder for results.json and results.png (out/bench); results there of the "
        "same machine are kept")  # fmt: skip
    add("--list", action="store_true", help="name the workloads and the peers")
    given = parser.parse_args(arguments)

    import torch

    if given.suite == "hf":
        from ..hf import measure

        out = Path(given.out) / "hf.json"
        measure.main(["--device", given.device, "--times", str(given.repeats), "--out", str(out)])
        return 0

    from . import report
    from .peers import PEERS
    from .run import run
    from .workloads import WORKLOADS

    if given.list:
        print("workloads:", ", ".join(WORKLOADS))
        print("peers:", ", ".join(f"{name} {peer.version() or '(not installed)'}" for name, peer in PEERS.items()))
        return 0
    for what, asked, known in (("workload", given.schemes, WORKLOADS), ("peer", given.peers, PEERS)):
        unknown = [name for name in asked or () if name not in known]
        if unknown:
            parser.error(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    if min(given.lengths) < 1 or given.repeats < 1:
        parser.error("--lengths and --repeats must be at least 1")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but PyTorch sees no GPU here")
    dtype = getattr(torch, given.dtype or ("float32" if given.device == "cpu" else "bfloat16"))

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting", total=None)
        result = run(
            given.schemes or list(WORKLOADS),
            given.lengths,
            given.peers or list(PEERS),
            device=given.device,
            dtype=dtype,
            repeats=given.repeats,
            train=not given.forward_only,
            tick=lambda text: progress.update(task, description=text),
        )
    path = Path(given.out) / "results.json"
    old = json.loads(path.read_text()) if path.exists() else None
    result = report.merged(old, result)
    report.save(result, path)
    report.plot(result, path.with_suffix(".png"))
    report.print_table(result)
    print(f"\nwrote {path} and {path.with_suffix('.png')}")
    return 0
