"""Encodings beside the kernels of others, and tables over a grid by each way of computing them, in one run each.

    python -m tests.gpu.encoding_peers [--out FILE.json] [--only fox,path,grids] [--length 2048] [--seconds 60]

Peers: flash-linear-attention's forgetting attention, stick-breaking and PaTH (fla-core), x-transformers' CoPE; what is not
installed is left out, with the reason. Milliseconds, bfloat16, medians of alternate runs; `difference` is the largest of the
outputs (CoPE's is x-transformers' own: it counts gates in bfloat16). Grids: bfloat16 queries, a table in float32 as under autocast (`dense` bias; `one by one`: with the kernels that read each pair's row
for itself), and the table rounded to bfloat16 for PyTorch's attention.
"""

import argparse
import json
import time
import warnings

import torch

import posenc
from posenc import Positions
from posenc.core.encoding import Kept
from posenc.engines import dense_bias
from tests.gpu.encodings import HEADS, SIZE, measure


def fox(length, device):
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    q, k, v = make(length, device)
    gates = torch.nn.functional.logsigmoid(torch.randn(4, length, HEADS, device=device)).requires_grad_()
    encoding = posenc.FoX(d_model=HEADS * SIZE, heads=HEADS).to(device)

    def ours():
        return posenc.attend(*map(swap, (q, k, v)), encoding.plan(Positions(length), kept=Kept(gates)), causal=True)

    return ours, lambda: swap(first(parallel_forgetting_attn(q, k, v, gates)))


def stick_breaking(length, device):
    from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn

    q, k, v = make(length, device)
    ours = lambda: posenc.contextual.stick_breaking(*map(swap, (q, k, v)))[0]  # noqa: E731
    return ours, lambda: swap(first(parallel_stickbreaking_attn(q, k, v)))


def path(length, device):
    from fla.ops.path_attn import parallel_path_attn

    q, k, v = make(length, device)
    w = torch.nn.functional.normalize(torch.randn(4, length, HEADS, SIZE, device=device), dim=-1).requires_grad_()
    beta = torch.rand(4, length, HEADS, device=device).requires_grad_()
    ours = lambda: posenc.contextual.path(*map(swap, (q, k, v, w)), beta.transpose(1, 2))  # noqa: E731
    return ours, lambda: swap(first(parallel_path_attn(q, k, v, w, beta)))


def cope(length, device):
    from x_transformers.x_transformers import CoPE

    q, k, v = make(length, device)
    theirs = CoPE(SIZE, HEADS, 64).to(device, torch.bfloat16)
    torch.nn.init.normal_(theirs.pos_emb)
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def dense():
        logits = (swap(q) @ swap(k).mT * SIZE**-0.5).masked_fill(future, -torch.finfo(torch.bfloat16).max)
        scores = (logits + theirs(swap(q), logits)).masked_fill(future, float("-inf"))
        return scores.softmax(-1) @ swap(v)

    return lambda: posenc.contextual.cope(*map(swap, (q, k, v)), theirs.pos_emb), dense


PEERS = {"fox": fox, "stick_breaking": stick_breaking, "path": path, "cope": cope}


def make(length, device):
    """q, k, v [B, L, H, D]"""
    shape = (4, length, HEADS, SIZE)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def swap(x):
    return x.transpose(1, 2)


def first(x):
    return x[0] if isinstance(x, tuple) else x


def compare(ways, device, rounds=10):
    """Milliseconds of each way, and the largest difference of any from the first."""
    with torch.no_grad():
        outs = [way().float() for way in ways.values()]
    found = {"difference": max((out - outs[0]).abs().max().item() for out in outs[1:])}
    for kind in ("forward", "training"):
        taken = measure(device, ways, rounds, kind == "training")
        found[kind] = {label: round(1e3 * seconds, 3) for label, seconds in taken.items()}
    return found


GRIDS = {  # batch, heads, head size, window, class token, causal
    "windows 7x7": (2048, 4, 32, (7, 7), False, False),
    "windows 16x16": (128, 8, 32, (16, 16), False, False),
    "14x14 and a class token": (32, 12, 64, (14, 14), True, False),
    "32x32 and a class token": (4, 16, 64, (32, 32), True, False),
    "64x32 causal": (4, 8, 64, (64, 32), False, True),
}


def grid(name, device):
    batch, heads, size, window, class_token, causal = GRIDS[name]
    length = window[0] * window[1] + class_token
    encoding = posenc.GridBias(heads=heads, window=window, class_token=class_token, std=0.5).to(device)
    rounded = posenc.GridBias(heads=heads, window=window, class_token=class_token).to(device, torch.bfloat16)
    rounded.load_state_dict(encoding.state_dict())
    q, k, v = (torch.randn(batch, heads, length, size, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))  # fmt: skip

    def auto(given=encoding):
        return posenc.attend(q, k, v, given.plan(Positions(length)), causal=causal)

    def one_by_one():
        kept, dense_bias.is_worth = dense_bias.is_worth, lambda lowered: False
        try:
            return auto()
        finally:
            dense_bias.is_worth = kept

    def plain():
        return posenc.attend(q, k, v, causal=causal)

    def dense():
        kept, dense_bias.LEAST = dense_bias.LEAST, 1
        try:
            return auto()
        finally:
            dense_bias.LEAST = kept

    ways = {"dense": dense, "one by one": one_by_one, "rounded": lambda: auto(rounded)}
    engine = posenc.explain(q, k, v, rounded.plan(Positions(length)), causal=causal).engine
    found = compare(ways, device)
    found["engine of rounded"] = engine
    for kind in ("forward", "training"):
        found[kind] |= {f"no {k}": round(1e3 * s, 3) for k, s in measure(device, {"positions": plain}, 8, kind == "training").items()}  # fmt: skip
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="posenc computes dense scores")
    began, results = time.monotonic(), {}
    only = given.only.split(",") if given.only else [*PEERS, "grids"]
    work = [(name, lambda name=name: compare(dict(zip(("ours", "theirs"), PEERS[name](given.length, given.device))), given.device)) for name in PEERS if name in only]  # fmt: skip
    work += [(f"grid {name}", lambda name=name: grid(name, given.device)) for name in GRIDS if "grids" in only]
    for name, run in work:
        if time.monotonic() - began > given.seconds:
            results[name] = "left out: no time"
            continue
        torch.manual_seed(0)
        try:
            results[name] = run()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:400]
        print(name, json.dumps(results[name]), flush=True)
        if given.out:
            with open(given.out, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
