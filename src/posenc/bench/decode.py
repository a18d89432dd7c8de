"""Decoding on one GPU: one query over cached keys, beside PyTorch's attention without positions. Verified, then timed.

    python -m posenc.bench.decode [--out FILE.json] [--only none,t5] [--bandwidth 4.8e12]

Every scheme is first compared with the float64 reference; a wrong one is not timed. `device` is microseconds of a replayed CUDA
graph of several steps, `python` of steps launched from Python in a row, `host` what the processor spends on one of them where the
device is faster. `sdpa` is the faster of PyTorch's FlashAttention and cuDNN, without positions; `memory` is the time in which the
keys and values can be read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import Lookup, Plan, Positions, Rotation, attend
from ..core import files, index
from .gpu import machine
from .measure import capture_graph

SHAPES = {
    "1x1024": (1, 32, 8, 1024, 128), "16x4096": (16, 32, 8, 4096, 128), "64x8192": (64, 32, 8, 8192, 128),
    "8x512 T5": (8, 12, 12, 512, 64),
}  # fmt: skip
WRONG = 2e-2  # relative, in norm


def none(positions, heads, size):
    return Plan(positions)


def alibi(positions, heads, size):
    return Plan(positions, slopes=torch.rand(heads, device="cuda") / 8)


def t5(positions, heads, size):
    table = torch.randn(heads, 32, device="cuda")
    return Plan(positions, lookups=(Lookup(index.log_buckets(32, 128, causal=True), bias=table),))


def clipped(positions, heads, size):
    return Plan(positions, lookups=(Lookup(index.clip(128, 0), bias=torch.randn(heads, 129, device="cuda")),))


def shaw(positions, heads, size):
    table = torch.randn(1, 65, size, device="cuda", dtype=torch.bfloat16) / 4
    return Plan(positions, lookups=(Lookup(index.clip(64, 0), dot_query=table),))


def rope(positions, heads, size):
    """The query is rotated; cached keys are rotated already."""
    angle = torch.rand(1, 1, size // 2, device="cuda") * 6.28
    return Plan(positions, rotate=Rotation((angle.cos(), angle.sin()), None))


SCHEMES = {"none": none, "alibi": alibi, "t5": t5, "clipped": clipped, "shaw": shaw, "rope": rope}


def make_step(make, shape):
    """attend over random keys as a function without arguments, and its error against float64 for two batch rows."""
    batch, heads, kv_heads, keys, size = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, 1, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, keys, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plan = make(Positions((keys - 1, 1), keys), heads, size)
    step = partial(attend, q, k, v, plan, causal=True, engine="triton")
    with torch.no_grad():
        few_q, few_k, few_v = (x[:2].double() for x in (q, k, v))
        expected = attend(few_q, few_k, few_v, plan, causal=True, engine="reference")
        wrong = ((step()[:2].double() - expected).norm() / expected.norm()).item()
    return step, wrong, (q, k, v)


def time_device(call, seconds: float = 0.15) -> float:
    """Microseconds of one call inside a replayed CUDA graph of several: the median."""
    began = time.perf_counter()
    first = capture_graph(call)
    rough = _replay(first, 3)
    calls = max(1, min(20, int(4e-3 / rough)))
    replay = capture_graph(call, calls=calls) if calls > 1 else first
    taken: list[float] = []
    while len(taken) < 5 or (time.perf_counter() - began < seconds and len(taken) < 200):
        taken.append(_replay(replay, 1) / calls)
    return statistics.median(taken) * 1e6


def _replay(replay, times: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / times


def time_python(call, calls: int = 100) -> tuple[float, float]:
    """Microseconds of one of many calls in a row, until the device is done; and until the host is."""
    for _ in range(3):
        call()
    both = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        both.append(((time.perf_counter() - began) / calls * 1e6, host / calls * 1e6))
    return min(one for one, _ in both), min(host for _, host in both)


def time_sdpa(q, k, v) -> dict[str, float]:
    """PyTorch's attention without positions: the faster backend."""
    best: dict[str, float] = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            call = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            try:
                device = time_device(call)
                python, host = time_python(call)
            except RuntimeError:
                continue
        if not best or device < best["device"]:
            best = {"device": device, "python": python, "host": host}
    return best


@torch.no_grad()
def compare(names: list[str], bandwidth: float, out: str | None) -> None:
    report: dict = {"card": machine(), "date": time.strftime("%Y-%m-%d"), "rows": []}
    began = time.time()
    for shape_name, shape in SHAPES.items():
        batch, _, kv_heads, keys, size = shape
        memory = 2 * batch * kv_heads * keys * size * 2 / bandwidth * 1e6
        rows: dict[str, dict] = {}
        for name in names:
            step, wrong, tensors = make_step(SCHEMES[name], shape)
            if "sdpa" not in rows:
                rows["sdpa"] = time_sdpa(*tensors)
            rows[name] = {"error": wrong}
            if wrong < WRONG:
                python, host = time_python(step)
                rows[name] |= {"device": time_device(step), "python": python, "host": host}
            del step, tensors
        print(f"{shape_name}: memory {memory:.1f} us  ({time.time() - began:.0f} s)", flush=True)
        for name, row in rows.items():
            if "device" not in row:
                print(f"  {name:8} is wrong ({row['error']:.1e}) and was not timed", flush=True)
                continue
            row["over_memory"], row["over_sdpa"] = row["device"] / memory, row["device"] / rows["sdpa"]["device"]
            print(
                f"  {name:8} device {row['device']:7.1f} us  python {row['python']:7.1f}  host {row['host']:6.1f}   x memory "
                f"{row['over_memory']:.2f}  x sdpa {row['over_sdpa']:.2f}  error {row.get('error', 0.0):.1e}",
                flush=True,
            )
        report["rows"].append({"shape": shape_name, "sizes": shape, "memory": memory, "results": rows})
        if out:
            files.write(Path(out), (json.dumps(report, indent=1) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second (4.8e12: an H200)")
    args = parser.parse_args()
    compare((args.only or ",".join(SCHEMES)).split(","), args.bandwidth, args.out)


if __name__ == "__main__":
    main()
