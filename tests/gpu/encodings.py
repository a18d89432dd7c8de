"""Every encoding on a GPU: which engine runs it, its error against float64, and its time beside plain attention.

    python -m tests.gpu.encodings [--out FILE.json] [--only fox,kerple] [--length 2048]
    TRITON_INTERPRET=1 python -m tests.gpu.encodings --device cpu --length 64      the same kernels, interpreted

A line for each encoding: engine; largest error of the output and of the gradients of q, k, v and the encoding's
parameters, relative to their size, in float32 (TF32 off) and bfloat16; forward and training time over attention without
positions of the same call, medians of alternate runs; flash-linear-attention's own kernel beside FoX, where it is installed.
"""

import argparse
import json
import statistics
import sys
import time

import torch

import posenc
from posenc import Positions
from posenc.encodings.registry import causal_options

OPTIONS = {
    "axial": {"columns": 32}, "grid_bias": {"window": (64, 32)}, "continuous_bias": {"window": (64, 32)},
    "decomposed": {"grid": (64, 32)}, "mixed_rope": {"columns": 32},
    "many_axes": {"axis_of": (0, 1, 2, 0), "text": True}, "tupe": {"max_length": 2048}, "relative_logits": {"max_distance": 256},
    "fire": {"threshold": 2048.0},
}  # fmt: skip
INPUT = ("sinusoidal", "sinusoidal_2d", "learned", "cape")  # nothing inside attention
HEADS, SIZE = 8, 64


def make(name, device):
    torch.manual_seed(0)
    options = {**causal_options(name), **OPTIONS.get(name, {})}
    encoding = posenc.create(name, d_model=HEADS * SIZE, heads=HEADS, **options)
    for parameter in encoding.parameters():
        if not parameter.any():  # zeros would hide a wrong look-up
            torch.nn.init.normal_(parameter, std=0.1)
    return encoding.to(device)


def run(encoding, attn, q, k, v, x, length, engine="auto"):
    plan = encoding.plan(Positions(length), x=x, host=attn)
    return posenc.attend(q, k, v, plan, causal=True, engine=engine)


def errors(name, device, length, dtype):
    encoding = make(name, device)
    attn = posenc.Attention(HEADS * SIZE, HEADS, encoding=encoding, causal=True).to(device)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    x = torch.randn(1, length, HEADS * SIZE, device=device)
    g = torch.randn(1, HEADS, length, SIZE, device=device)
    choice = posenc.explain(q, k, v, encoding.plan(Positions(length), x=x, host=attn), causal=True)
    leaves = [q, k, v, *(p for p in encoding.parameters())]
    out = run(encoding, attn, q, k, v, x, length)
    ours = [out, *torch.autograd.grad(out, leaves, g.to(dtype), allow_unused=True)]
    exact = posenc.attend(
        *(y.double() for y in (q, k, v)), encoding.plan(Positions(length), x=x, host=attn), causal=True, engine="reference"
    )  # fmt: skip
    theirs = [exact, *torch.autograd.grad(exact, leaves, g.double(), allow_unused=True)]
    pairs = [
        (mine.double(), wanted.double())
        for mine, wanted in zip(ours, theirs)
        if mine is not None and wanted is not None
    ]
    sizes = [wanted.square().mean().sqrt().item() for _, wanted in pairs]
    least = 5e-2 * max(sizes)  # a gradient that is zero in theory (a constant of all scores) has no size of its own
    worst = max(
        (mine - wanted).square().mean().sqrt().item() / max(size, least) for (mine, wanted), size in zip(pairs, sizes)
    )
    return choice.engine, worst


def times(name, device, length, rounds=10):
    encoding = make(name, device)
    attn = posenc.Attention(HEADS * SIZE, HEADS, encoding=encoding, causal=True).to(device)
    q, k, v = (
        torch.randn(4, HEADS, length, SIZE, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    x = torch.randn(4, length, HEADS * SIZE, device=device)
    none = posenc.NoPosition()
    found = {}
    for kind in ("forward", "training"):
        taken = {name: [], "none": []}
        for _ in range(rounds):
            for which, made in ((name, encoding), ("none", none)):
                torch.cuda.synchronize()
                start = time.perf_counter()
                with torch.set_grad_enabled(kind == "training"):
                    out = run(made, attn, q, k, v, x, length)
                    if kind == "training":
                        out.sum().backward()
                torch.cuda.synchronize()
                taken[which].append(time.perf_counter() - start)
        found[kind] = statistics.median(taken[name][2:]) / statistics.median(taken["none"][2:])
    return found


def fla_times(device, length):
    """FoX by flash-linear-attention's kernel and by ours, milliseconds of a training step of the attention alone."""
    try:
        from fla.ops.forgetting_attn import parallel_forgetting_attn
    except Exception as error:
        return {"fla": f"not installed here: {type(error).__name__}"}
    q, k, v = (
        torch.randn(4, length, HEADS, SIZE, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    gates = torch.nn.functional.logsigmoid(torch.randn(4, length, HEADS, device=device)).requires_grad_()
    from posenc.core.encoding import Kept

    fox = posenc.FoX(d_model=HEADS * SIZE, heads=HEADS).to(device)

    def ours():
        plan = fox.plan(Positions(length), kept=Kept(gates))
        return posenc.attend(*(y.transpose(1, 2) for y in (q, k, v)), plan, causal=True).transpose(1, 2)

    def theirs():
        out = parallel_forgetting_attn(q, k, v, gates)
        return out[0] if isinstance(out, tuple) else out

    with torch.no_grad():
        difference = (ours().float() - theirs().float()).abs().max().item()
    taken = {"ours": [], "fla": []}
    for _ in range(12):
        for label, call in (("ours", ours), ("fla", theirs)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call().sum().backward()
            torch.cuda.synchronize()
            taken[label].append(1e3 * (time.perf_counter() - start))
    return {**{label: statistics.median(some[2:]) for label, some in taken.items()}, "difference": difference}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device == "cpu":
        from tests.engines import interpreter

        interpreter.mend()
        global HEADS, SIZE
        HEADS, SIZE = 2, 16
    torch.backends.cuda.matmul.allow_tf32 = False
    names = [n for n in posenc.list_encodings() if n not in INPUT and (not given.only or n in given.only.split(","))]
    results, failed = {}, []
    for name in names:
        line = {}
        try:
            for dtype in (torch.float32, torch.bfloat16):
                line["engine"], line[str(dtype).removeprefix("torch.")] = errors(
                    name, given.device, given.length, dtype
                )
            if given.device == "cuda":
                line |= times(name, given.device, given.length)
                if name == "fox":
                    line["fla, ms"] = fla_times(given.device, given.length)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        results[name] = line
        limits = {"float32": 1e-4, "bfloat16": 3e-2}
        if "error" in line or line["engine"] in ("blocked", "reference") or any(line[d] > e for d, e in limits.items()):
            failed.append(name)
        print(name, json.dumps(line), flush=True)
        if given.out:
            with open(given.out, "w") as file:
                json.dump(results, file, indent=1)
    print("failed:", ", ".join(failed) or "none")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
