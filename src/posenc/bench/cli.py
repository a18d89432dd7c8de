"""posenc bench"""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc bench",
        description="Time and memory of attention with positions, for posenc and its peers. Each result is first compared "
        "with the float64 reference; a wrong one is reported and not timed. Ratios are to PyTorch's attention without "
        "positions in the same rounds; the median of the rounds counts.",
    )
    add = parser.add_argument
    add("--suite", choices=("attention", "hf", "uses"), default="attention", help="hf: whole transformers models, as they "
        "are and accelerated; takes --device, --repeats and --out, writes hf-DEVICE.json. uses: layers, models, decoding and "
        "windows at everyday sizes, each beside the best code that does the same without posenc; takes --device, --only, "
        "--missing, --seconds, --part, --warm, --merge, --list and --out, writes uses-DEVICE.json")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="float32; on cuda bfloat16")
    add("--encodings", nargs="+", metavar="WORKLOAD", help="which workloads (those of the published run); --list names all")  # fmt: skip
    add("--lengths", nargs="+", type=int, metavar="TOKENS", help="512 1024 2048 4096; on cuda 4096 16384. Three or more "
        "give the exponents of growth: --lengths 512 1024 2048 4096 8192 16384")  # fmt: skip
    add("--peers", nargs="+", metavar="PEER", help="which peers (all that run on the device)")
    add("--repeats", type=int, default=7, help="rounds of a median (7); slow contenders do fewer, at least 2")
    add("--forward-only", action="store_true", help="no training steps")
    add("--patience", type=float, default=10.0, metavar="SECONDS", help="skip a contender that would take longer "
        "than this for one run, extrapolated from the previous length (10)")  # fmt: skip
    add("--out", default="out/bench", help="folder for results.json and results.png (out/bench); results there of the "
        "same machine are kept")  # fmt: skip
    add("--list", action="store_true", help="name the workloads and the peers; with --suite uses its cells")
    add("--only", nargs="+", metavar="PATTERN", help="uses: the cells whose names match or contain one of these")
    add("--missing", action="store_true", help="uses: only cells without a result in the file")
    add("--seconds", type=float, metavar="SECONDS", help="uses: start no cell after this time (cuda: 450); cells without a "
        "result come first, then what misses its goal, then the oldest")  # fmt: skip
    add("--part", metavar="K/N", help="uses: every Nth cell from the Kth on")
    add("--warm", type=int, default=0, metavar="PROCESSES", help="uses: first compile what the cells need, in so many "
        "processes")  # fmt: skip
    add("--merge", nargs="+", metavar="FILE", help="uses: measure nothing, make one file of these results")
    given = parser.parse_args(arguments)

    import torch

    if given.suite == "hf":
        from . import accelerated

        models = [name for name in accelerated.WHOLE if ("×" in name) == (given.device == "cuda")]
        out = str(Path(given.out) / f"hf-{given.device}.json")
        accelerated.main(["--device", given.device, "--times", str(given.repeats), "--out", out, "--models", *models])
        return 0

    if given.suite == "uses":
        if given.device == "cuda" and not torch.cuda.is_available() and not given.list and not given.merge:
            parser.error("--device cuda, but PyTorch finds no GPU")
        from . import uses_suite

        path = Path(given.out) / f"uses-{given.device}.json"
        return uses_suite.main(
            given.device, path, only=given.only, missing=given.missing, limit=given.seconds, listed=given.list,
            part=given.part, merged=given.merge, processes=given.warm,
        )  # fmt: skip

    from . import report
    from .run import PEERS, run
    from .workloads import LENGTHS, SETS, WORKLOADS

    if given.list:
        print("workloads:", ", ".join(WORKLOADS))
        for device, names in SETS.items():
            print(f"measured on {device} unless named: {', '.join(names)}")
        print("peers:", ", ".join(f"{name} {peer.version() or '(not installed)'}" for name, peer in PEERS.items()))
        return 0
    for kind, wanted, known in (("workload", given.encodings, WORKLOADS), ("peer", given.peers, PEERS)):
        unknown = [name for name in wanted or () if name not in known]
        if unknown:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    lengths = given.lengths or LENGTHS[given.device]
    if min(lengths) < 1 or given.repeats < 2 or given.patience <= 0:
        parser.error("--lengths must be at least 1, --repeats at least 2 and --patience more than 0")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but PyTorch finds no GPU")
    dtype = getattr(torch, given.dtype or ("float32" if given.device == "cpu" else "bfloat16"))

    path = Path(given.out) / "results.json"
    old = report.load(path)
    with report.progress(keeps_lines=False) as tick:

        def keep(result: dict) -> None:
            report.save(report.merged(old, result), path)

        peers = given.peers or [name for name, peer in PEERS.items() if given.device in peer.devices]
        result = run(
            given.encodings or SETS[given.device], lengths, peers, device=given.device, dtype=dtype,
            repeats=given.repeats, train=not given.forward_only, patience=given.patience, tick=tick, keep=keep,
        )  # fmt: skip
    result = report.merged(old, result)
    report.plot(result, path.with_suffix(".png"))
    report.print_table(result)
    print(f"\nwrote {path} and {path.with_suffix('.png')}")
    return 0
