"""Tiles, warps, stages and shares of the keys for the decoding kernel, on a GPU: where decode_schedule.py has its numbers from.

python -m tests.gpu.sweep_decode [--out FILE.json] [--only none,t5] [--bandwidth 4.8e12]
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from posenc import Lookup, Plan, Positions, Rotation, attend, index
from posenc.bench.measure import capture_graph, machine
from posenc.engines.triton import decode_schedule

SHAPES = {
    "1x1024": (1, 32, 8, 1024, 128), "16x4096": (16, 32, 8, 4096, 128), "64x8192": (64, 32, 8, 8192, 128),
    "8x512 T5": (8, 12, 12, 512, 64),
}  # fmt: skip


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


PLANS = {"none": none, "alibi": alibi, "t5": t5, "clipped": clipped, "shaw": shaw, "rope": rope}


def make_step(make, shape):
    """attend over random keys as a function without arguments, compared with float64 for two batch rows."""
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
    assert wrong < 2e-2, f"off by {wrong:.1e}, relative in norm"
    return step


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


TILES = {
    128: ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 3)),
    64: ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3)),
}
"""Head size -> keys, warps, stages."""


@torch.no_grad()
def sweep(names: list[str], bandwidth: float, out: str | None) -> None:
    """Each tile with several numbers of shares, for each shape; the best three are printed."""
    chosen = decode_schedule.choose_decode_tile, decode_schedule.choose_decode_shares
    report: dict = {"card": machine("cuda"), "rows": []}
    began = time.time()
    for shape_name, shape in SHAPES.items():
        batch, _, kv_heads, keys, size = shape
        memory = 2 * batch * kv_heads * keys * size * 2 / bandwidth * 1e6
        for name in names:
            step = make_step(PLANS[name], shape)
            found = {"as chosen": time_device(step, 0.05)}
            for tile in TILES[size]:
                most = max(1, keys // tile[0])
                for shares in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
                    programs = batch * kv_heads * shares
                    if shares > most or not 64 <= programs <= 4400:
                        continue
                    whole = decode_schedule.DecodeTile(16, *tile, 1)
                    decode_schedule.choose_decode_tile = lambda *args, whole=whole: whole
                    decode_schedule.choose_decode_shares = lambda *args, shares=shares: shares
                    try:
                        found[f"{tile} shares {shares}"] = time_device(step, 0.02)
                    except Exception as error:  # more shared memory than the device has
                        found[f"{tile} shares {shares}"] = float("inf")
                        print(f"  {tile} {shares}: {type(error).__name__}", flush=True)
            decode_schedule.choose_decode_tile, decode_schedule.choose_decode_shares = chosen
            best = sorted(found.items(), key=lambda item: item[1])[:4]
            print(f"{shape_name} {name}: memory {memory:.1f}, as chosen {found['as chosen']:.1f} us", flush=True)
            print("   " + "; ".join(f"{what} {taken:.1f}" for what, taken in best) + f"  ({time.time() - began:.0f} s)")
            report["rows"].append({"shape": shape_name, "plan": name, "memory": memory, "device": found})
            if out:
                Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", default="none,t5")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second (4.8e12: an H200)")
    args = parser.parse_args()
    sweep(args.only.split(","), args.bandwidth, args.out)
