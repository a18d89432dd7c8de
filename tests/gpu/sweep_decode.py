"""Tiles, warps, stages and shares of the keys for the decoding kernel, on a GPU: where decode_schedule.py has its numbers from.

python -m tests.gpu.sweep_decode [--out FILE.json] [--only none,t5] [--bandwidth 4.8e12]
"""

import argparse
import json
import time
from pathlib import Path

import torch

from posenc.bench.decode import SCHEMES, SHAPES, make_step, time_device
from posenc.bench.gpu import machine
from posenc.engines.triton import decode_schedule

TILES = {
    128: ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 3)),
    64: ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3)),
}
"""Head size -> keys, warps, stages."""


@torch.no_grad()
def sweep(names: list[str], bandwidth: float, out: str | None) -> None:
    """Each tile with several numbers of shares, for each shape; the best three are printed."""
    chosen = decode_schedule.choose_decode_tile, decode_schedule.choose_decode_shares
    report: dict = {"card": machine(), "rows": []}
    began = time.time()
    for shape_name, shape in SHAPES.items():
        batch, _, kv_heads, keys, size = shape
        memory = 2 * batch * kv_heads * keys * size * 2 / bandwidth * 1e6
        for name in names:
            step, _, _ = make_step(SCHEMES[name], shape)
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
            report["rows"].append({"shape": shape_name, "scheme": name, "memory": memory, "device": found})
            if out:
                Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", default="none,t5")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second (4.8e12: an H200)")
    args = parser.parse_args()
    sweep(args.only.split(","), args.bandwidth, args.out)
