"""The Gluon kernels under compute-sanitizer: a small case of each kind of variant, by memcheck, racecheck and synccheck.

    python -m tests.gpu.sanitize [--seconds 55] [--tools memcheck,racecheck,synccheck] [--kernels forward | backward | content | rolling]

The tools run side by side; each prints its lines as they come, and a summary stands at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
CASES = (
    (64, "t5", ""), (64, "t5", "causal"), (64, "alibi", "causal padding"), (64, "both", "documents"), (64, "none", "window"),
    (128, "t5", "causal"), (128, "alibi", ""), (128, "both", "all"), (64, "shaw", "causal"), (64, "xl", ""), (128, "logits", "all"),
)  # fmt: skip
BACKWARD = (
    (64, "t5", "", "base"), (64, "t5", "causal", "base"), (64, "none", "window", "late"), (64, "both", "documents", "late"),
    (64, "alibi", "causal padding", "base"), (128, "t5", "causal", "base"), (128, "alibi", "", "base"), (128, "both", "all", "base"),
)  # fmt: skip


CONTENT = (
    (64, "shaw", ""), (64, "values", "causal"), (64, "keys", "padding"), (64, "deberta", ""), (64, "deberta", "all"), (64, "logits", "causal"),
    (64, "biased", ""), (128, "shaw", "all"), (128, "deberta", "causal"), (128, "values", ""),
)  # fmt: skip
"""The backward pass with content terms, and the forward pass before it."""


def work_content() -> None:
    import torch

    from tests.gpu.gluon_content import Call

    for size, terms, masks in CONTENT:
        grads = Call(2, 2, 1, 700, 700, size, terms, masks, torch.bfloat16).run()
        torch.cuda.synchronize()
        is_finite = all(x.isfinite().all() for x in grads.values())
        print(f"ran {size} {terms} {masks}: {'finite' if is_finite else 'NOT FINITE'}", flush=True)


def work_rolling() -> None:
    import torch

    from tests.gpu.gluon_rolling import Call

    for masks in ("", "causal", "padding", "all"):
        grads = Call(4, 2, 1, 450, 450, masks).run()
        torch.cuda.synchronize()
        print(f"ran every distance {masks}: {'finite' if all(x.isfinite().all() for x in grads.values()) else 'NOT FINITE'}", flush=True)  # fmt: skip


def work_backward() -> None:
    import torch

    from tests.gpu.gluon_backward import Call

    for size, terms, masks, variant in BACKWARD:
        call = Call(4, 2, 450, 450, 0, torch.bfloat16, terms, "causal" in masks, "", variant, size, 1, masks)
        grads = call.run()
        torch.cuda.synchronize()
        is_finite = all(x.isfinite().all() for x in grads if x is not None)
        print(
            f"ran {size} {terms} {masks} [{variant}]: {'finite' if is_finite else 'NOT FINITE'}",
            flush=True,
        )


def work() -> None:
    import torch

    from tests.gpu import hopper

    for size, terms, masks in CASES:
        q, k, v = hopper.make_tensors(4, 2, 1, 450, 450, size, torch.bfloat16, "")
        plan = hopper.make_plan(terms, 2, 450, 450, 0, size, "causal" in masks)
        out, _, _ = hopper.run(*hopper.prepare(q, k, v, plan, **hopper.make_masks(masks, 4, 450, 450)))
        torch.cuda.synchronize()
        print(f"ran {size} {terms} {masks}: {'finite' if out.isfinite().all() else 'NOT FINITE'}", flush=True)


def watch(tool: str, seconds: float, results: dict[str, str], kernels: str) -> None:
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "7",
        sys.executable,
        "-u",
        "-m",
        "tests.gpu.sanitize",
        "--work",
        "--kernels",
        kernels,
    ]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    for shown, line in enumerate(process.stdout):
        if shown < 60 or line.startswith(
            ("ran ", "=========     ERROR", "========= ERROR")
        ):  # a fault may print thousands of lines
            print(tool, line.rstrip()[:300], flush=True)
    timer.cancel()
    results[tool] = {0: "clean", 7: "FAULTS", -9: "out of time"}.get(
        process.wait(), f"exit status {process.returncode}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--tools", default="memcheck,racecheck,synccheck")
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--kernels", choices=("forward", "backward", "content", "rolling"), default="forward")
    args = parser.parse_args()
    if args.work:
        {"forward": work, "backward": work_backward, "content": work_content, "rolling": work_rolling}[args.kernels]()
        return
    results: dict[str, str] = {}
    threads = [
        threading.Thread(target=watch, args=(tool, args.seconds, results, args.kernels))
        for tool in args.tools.split(",")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(results, flush=True)
    sys.exit(any(result != "clean" for result in results.values()))


if __name__ == "__main__":
    main()
