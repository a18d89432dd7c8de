"""The shape of the rotary kernel's programs on a GPU: where core/rotary_kernel.py has WHOLE and PARTIAL from.

python -m tests.gpu.sweep_rotary [whole|partial] [--out FILE.json]
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from posenc.bench.measure import capture_graph, machine, seconds
from posenc.bench.rotate import CALLS, Case
from posenc.core import rotary_kernel
from posenc.core.rotation import rotate_both

SWEPT = {
    "WHOLE": [Case(), Case(layout="interleaved"), Case(size=64, batch=8), Case(rows=True), Case(dtype="float32")],
    "PARTIAL": [
        Case(width=64, layout="interleaved"), Case(width=64, rows=True), Case(size=80, width=32, batch=6),
        Case(size=64, width=16, batch=8),
    ],
}  # fmt: skip
SHAPES = {
    "WHOLE": [
        (512, 1, 2), (512, 2, 2), (512, 4, 2), (1024, 1, 4), (1024, 2, 4), (1024, 4, 4), (1024, 8, 4), (2048, 1, 8),
        (2048, 2, 8), (2048, 2, 4), (4096, 2, 8),
    ],
    "PARTIAL": [
        (128, 1, 1), (128, 2, 1), (256, 1, 1), (256, 1, 2), (256, 2, 2), (512, 1, 2), (512, 1, 4), (512, 2, 2), (512, 2, 4),
        (1024, 1, 4), (1024, 2, 4), (1024, 1, 8),
    ],
}  # fmt: skip
"""(pairs, heads, warps) of the kernel's programs: all channels rotated (WHOLE) or some (PARTIAL)."""


def set_shape(kind: str, shape: tuple[int, int, int]) -> None:
    setattr(rotary_kernel, kind, shape)


def compile_for(kind: str, number: int, shape: tuple[int, int, int]) -> None:
    """Compile for a case into Triton's cache on disk (in another process: compiling takes longer than timing)."""
    set_shape(kind, shape)
    q, k, cos, sin = SWEPT[kind][number].inputs("cuda", batch=1, length=64)
    rotate_both(q, k, cos, sin, SWEPT[kind][number].layout)


def sweep(kinds: list[str]) -> dict:
    """The share of the copy's bandwidth for every shape and swept case; sets the kernel to the best shapes."""
    began = time.time()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(compile_for, kind, number, shape)
            for kind in kinds
            for shape in SHAPES[kind]
            for number in range(len(SWEPT[kind]))
        ]
        failed = [str(job.exception()) for job in jobs if job.exception() is not None]
    print(f"compiled {len(jobs)} in {time.time() - began:.0f} s, {len(failed)} failed {failed[:1]}", flush=True)
    return {kind: sweep_one(kind) for kind in kinds}


def sweep_one(kind: str) -> dict:
    print(
        f"{kind + ': (pairs, heads, warps)':50}" + " ".join(f"{'-'.join(map(str, shape)):>8}" for shape in SHAPES[kind])
    )
    found: dict[str, dict[str, float]] = {str(shape): {} for shape in SHAPES[kind]}
    for case in SWEPT[kind]:
        q, k, cos, sin = case.inputs("cuda")
        q_to, k_to = torch.empty_like(q), torch.empty_like(k)
        copy = capture_graph(lambda: (q_to.copy_(q), k_to.copy_(k)), calls=CALLS)  # noqa: B023
        for shape in SHAPES[kind]:
            set_shape(kind, shape)
            ours = capture_graph(lambda: rotate_both(q, k, cos, sin, case.layout), calls=CALLS)  # noqa: B023
            pairs = [(seconds(copy, "cuda"), seconds(ours, "cuda")) for _ in range(7)][1:]
            a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
            found[str(shape)][case.name] = a / b
        print(f"{case.name:50}" + " ".join(f"{share[case.name]:8.3f}" for share in found.values()), flush=True)
    best = max(SHAPES[kind], key=lambda shape: min(found[str(shape)].values()))
    print(f"best in its worst case: {best}", flush=True)
    set_shape(kind, best)
    return {"shapes": found, "best": best}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=("whole", "partial"), default=["whole", "partial"])
    parser.add_argument("--out")
    args = parser.parse_args()
    report = {"machine": machine("cuda"), "sweep": sweep([kind.upper() for kind in args.kinds])}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
