"""The rotation of queries and keys compared with a copy of them: verified, then timed.

    python -m posenc.bench.rotate [--device cuda|cpu] [--out FILE.json] [--only D64,partial] [--compile]

A copy (`copy_`) reads and writes exactly the bytes that a rotation must, so copy time / rotation time is the share of
the copy's bandwidth. Every case is first compared with float64, gradients too; a wrong one is not timed. On CUDA a graph
of several calls is replayed (device time without launch overhead) over tensors several times larger than the L2 cache,
copy and rotation interleaved; on a CPU single calls are timed, and the copy is `clone()`. "usual" is rotate-half as in
most models, x * cos + rotate_half(x) * sin, in x's dtype. "step" is forward and backward, compared with two copies.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..core import files
from ..core.rotation import Layout, rotate_both, rotate_by_formula
from .measure import capture_graph, machine, seconds, time_interleaved

CALLS = 8  # in a graph


@dataclass(frozen=True)
class Case:
    """Queries of `heads` heads and keys of `kv_heads`; `rows`: views of [B, L, H, D], the layout of projections."""

    size: int = 128
    layout: Layout = "half"
    dtype: str = "bfloat16"
    width: int | None = None
    rows: bool = False
    batch: int = 4
    length: int = 4096
    heads: int = 32
    kv_heads: int = 8

    @property
    def name(self) -> str:
        part = "" if self.width is None else f" partial R{self.width}"
        rows = " [B,L,H,D]" if self.rows else ""
        return f"{self.layout} {self.dtype} B{self.batch} L{self.length} D{self.size}{part}{rows}"

    def inputs(self, device: str, batch: int | None = None, length: int | None = None):
        """q, k, cos, sin."""
        batch, length = batch or self.batch, length or self.length
        dtype, made = getattr(torch, self.dtype), []
        for heads in (self.heads, self.kv_heads):
            shape = (batch, length, heads, self.size) if self.rows else (batch, heads, length, self.size)
            x = torch.randn(shape, device=device, dtype=dtype)
            made.append(x.transpose(1, 2) if self.rows else x)
        pairs = (self.width or self.size) // 2
        angle = torch.arange(length, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, pairs, device=device)
        return *made, angle.cos()[None], angle.sin()[None]


def cases(device: str) -> list[Case]:
    if device == "cpu":
        kinds: list[tuple[Layout, bool, int | None]] = [
            ("half", False, None), ("interleaved", False, None), ("half", True, None), ("half", False, 64),
        ]  # fmt: skip
        return [
            # 64 MiB of queries: fresh pages each time; the allocator sometimes keeps smaller blocks
            Case(layout=layout, dtype=dtype, batch=1 if dtype == "float32" else 2, rows=rows, width=width)
            for dtype in ("float32", "bfloat16")
            for layout, rows, width in kinds
        ]
    return [
        *(Case(layout=layout) for layout in LAYOUTS), *(Case(layout=layout, size=64, batch=8) for layout in LAYOUTS),
        Case(rows=True), Case(rows=True, layout="interleaved"), Case(rows=True, size=64, batch=8),
        Case(dtype="float16"), *(Case(layout=layout, dtype="float32") for layout in LAYOUTS),
        Case(size=80, batch=6), Case(size=80, batch=6, layout="interleaved"), Case(size=96, batch=6),
        *(Case(size=256, layout=layout, batch=2) for layout in LAYOUTS),
        *(Case(width=64, layout=layout) for layout in LAYOUTS), Case(size=80, width=32, batch=6),
        Case(size=64, width=16, batch=8), Case(rows=True, width=64), Case(kv_heads=32),
        Case(batch=1, length=512, rows=True), Case(batch=64, length=1, rows=True),
    ]  # fmt: skip


LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


# ---- correctness ----------------------------------------------------------------------------------------------------
def find_error(case: Case, device: str) -> str | None:
    """Compare the case's result and gradients with float64 at a small awkward length; None if all are close."""
    q, k, cos, sin = case.inputs(device, batch=2, length=min(case.length, 331))
    eps = torch.finfo(q.dtype).eps
    q, k = q.requires_grad_(), k.requires_grad_()
    exact_q, exact_k = (x.detach().double().requires_grad_() for x in (q, k))
    out = rotate_both(q, k, cos, sin, case.layout)
    exact = [rotate_by_formula(x, cos.double(), sin.double(), case.layout) for x in (exact_q, exact_k)]
    grads = [torch.randn_like(x) for x in out]
    found = [*out, *torch.autograd.grad(out, (q, k), grads)]
    exact += torch.autograd.grad(exact, (exact_q, exact_k), [g.double() for g in grads])
    for name, a, b in zip(("q", "k", "q's gradient", "k's gradient"), found, exact, strict=True):
        excess = ((a.double() - b).abs() - 0.75 * eps * b.abs()).max().item()
        if not excess <= 2e-6:
            return f"{name} is off by {excess:.1e}"
    return None


# ---- time ----------------------------------------------------------------------------------------------------
def time_all(calls: dict, device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each call, all of them measured in every round; on CUDA in replayed graphs of CALLS calls."""
    inner = 1 if device == "cpu" else CALLS
    runs = calls if device == "cpu" else {name: capture_graph(call, calls=CALLS) for name, call in calls.items()}
    for run in runs.values():
        run()
    rough = {name: seconds(run, device) for name, run in runs.items()}
    taken = time_interleaved(runs, rough, rounds, math.inf, device)
    return {name: statistics.median(found) / inner for name, found in taken.items()}


def usual(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def measure(case: Case, device: str, compiled: bool) -> dict:
    q, k, cos, sin = case.inputs(device)
    q_to, k_to = torch.empty_like(q), torch.empty_like(k)
    g, h = torch.randn_like(q), torch.randn_like(k)
    q_leaf, k_leaf = (x.detach().requires_grad_() for x in (q, k))

    def copy():
        if device == "cpu":  # both allocate their output: fresh pages cost as much as the copy
            return q.clone(), k.clone()
        return q_to.copy_(q), k_to.copy_(k)

    def step():
        torch.autograd.grad(rotate_both(q_leaf, k_leaf, cos, sin, case.layout), (q_leaf, k_leaf), (g, h))

    def two_copies():
        copy()
        copy()

    calls = {
        "copy": copy,
        "posenc": lambda: rotate_both(q, k, cos, sin, case.layout),
        "copies": two_copies,
        "step": step,
    }
    if case.layout == "half" and case.width is None:
        full = [torch.cat((x, x), dim=-1).to(q.dtype)[:, None] for x in (cos, sin)]
        calls["usual"] = lambda: (usual(q, *full), usual(k, *full))
    if compiled:
        formula = lambda: [rotate_by_formula(x, cos, sin, case.layout) for x in (q, k)]  # noqa: E731
        calls["compiled"] = torch.compile(formula)
    times = time_all(calls, device, rounds=9 if device == "cpu" else 12)
    moved = 2 * sum(x.numel() * x.element_size() for x in (q, k))
    row = {"case": case.name, **asdict(case), "bytes": moved, "seconds": times}
    row["copy_gb_s"] = moved / times["copy"] / 1e9
    row["of_copy"] = {name: times["copy"] / times[name] for name in times if name not in ("copy", "copies", "step")}
    row["of_copy"]["step"] = times["copies"] / times["step"]
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="write the results here, as JSON")
    parser.add_argument("--only", help="cases whose name contains one of these texts, separated by commas")
    parser.add_argument("--compile", action="store_true", help="time the formula under torch.compile too")
    args = parser.parse_args(arguments)
    report: dict = {"machine": machine(args.device), "rows": []}
    print(json.dumps(report["machine"]), flush=True)
    texts = args.only.split(",") if args.only else [""]
    status = 0
    print(f"{'case':52} {'copy GB/s':>9}   of the copy's bandwidth", flush=True)
    for case in cases(args.device):
        if not any(text in case.name for text in texts):
            continue
        if error := find_error(case, args.device):
            row, status = dict[str, Any](case=case.name, wrong=error), 1
            print(f"{case.name:52} WRONG, not timed: {error}", flush=True)
        else:
            row = measure(case, args.device, args.compile)
            shares = "  ".join(f"{name} {share:.0%}" for name, share in row["of_copy"].items())
            print(f"{case.name:52} {row['copy_gb_s']:9.0f}   {shares}", flush=True)
        report["rows"].append(row)
        if args.out:
            files.write_json(args.out, report)
    return status


if __name__ == "__main__":
    sys.exit(main())
