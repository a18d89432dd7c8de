"""Tiles of the kernels of posenc.contextual, and blocks of PaTH: milliseconds of each on this GPU.

    python -m tests.gpu.sweep_contextual [--out FILE.json] [--only stick_forward,path] [--compile 2/8] [--seconds 60]

bfloat16, 4 × 2048 tokens, 8 heads of 64. `ordinary` inputs are random; with `slow` ones shares and gates are about 0.01, so that no
walk ends early. --compile N/M compiles each M-th tile from the N-th on, for M processes that fill Triton's cache.
"""

import argparse
import json
import time

import torch

from posenc import contextual
from posenc.contextual import operators

SHAPE = (4, 8, 2048, 64)
TILES = {
    "forward": [(64, 64, 4), (64, 64, 8), (128, 64, 8), (64, 32, 4), (32, 64, 4), (128, 32, 4), (128, 32, 8)],
    "backward": [
        (64, 64, 8),
        (64, 64, 4),
        (64, 32, 4),
        (32, 64, 4),
        (32, 32, 4),
        (64, 32, 8),
        (128, 32, 8),
        (128, 64, 8),
    ],
}


def tensors(kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if kind == "slow":
        q[..., 0], k[..., 0] = 5.0, -8.0
    return q, k, v


def calls(kind):
    q, k, v = tensors(kind)
    found = {}
    for name, counts in (("stick", None), ("count", torch.randn(*SHAPE[:3], 64, device="cuda"))):
        given = q, k, v, counts, None, None
        made = operators.forward(*given, 0.125, True)
        found[f"{name}_forward"] = lambda given=given: operators.forward(*given, 0.125, True)
        found[f"{name}_backward"] = lambda given=given, made=made: operators.backward(
            q, None, *given, *made, 0.125, True
        )
    return found


def paths(block):
    q, k, v = (x.requires_grad_() for x in tensors("ordinary"))
    w = torch.nn.functional.normalize(torch.randn(SHAPE, device="cuda"), dim=-1).to(q.dtype).requires_grad_()
    beta = torch.rand(SHAPE[:3], device="cuda").to(q.dtype).requires_grad_()

    def forward():
        with torch.no_grad():
            return contextual.path(q, k, v, w, beta, block=block)

    return {"path": forward, "path step": lambda: contextual.path(q, k, v, w, beta, block=block).sum().backward()}


def milliseconds(call, rounds=8):
    call()
    taken = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return round(sorted(taken)[rounds // 2], 3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="stick_forward,stick_backward,count_forward,count_backward,path")
    parser.add_argument("--compile", default="")
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    began, found = time.monotonic(), {}
    choose = operators.choose_tile
    work = [
        (name, tile) for name in given.only.split(",") for tile in TILES.get(name.split("_")[-1], (32, 64, 128, 256))
    ]
    if given.compile:
        part, parts = map(int, given.compile.split("/"))
        work = work[part - 1 :: parts]
    for name, tile in work:
        if time.monotonic() - began > given.seconds:
            break
        for kind in ("ordinary", "slow"):
            operators.choose_tile = choose
            try:
                some = paths(tile) if name == "path" else {name: calls(kind)[name]}
                if name != "path":
                    operators.choose_tile = lambda *_, tile=tile: tile
                for label, call in some.items():
                    if given.compile:
                        call()
                        torch.cuda.synchronize()
                    else:
                        found[f"{label} {tile} {kind}"] = milliseconds(call)
            except Exception as error:
                found[f"{name} {tile} {kind}"] = f"{type(error).__name__}: {error}"[:200]
            if name == "path" or given.compile:
                break
        if given.out:
            with open(given.out, "w") as file:
                json.dump(found, file, indent=1)
    for label, taken in found.items():
        print(label, taken, flush=True)


if __name__ == "__main__":
    main()
