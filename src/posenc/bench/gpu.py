"""The triton engine and PyTorch's attention without positions, on one GPU: verified, then timed.

    python -m posenc.bench.gpu [--out FILE.json] [--only t5,shaw]

Every plan is first compared with the float64 reference at a smaller length; a wrong one is not timed. Times are medians
of CUDA events in one run, replayed as CUDA graphs (`_eager`: launched from Python); the ceilings, PyTorch's
FlashAttention and cuDNN, have no positions.
`posenc bench --device cuda` measures FlexAttention and other peers.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from .. import Lookup, Plan, Positions, Rotation, attend
from ..core import files, index
from .measure import capture_graph, machine

SHAPES = [(4, 16, 4096, 64, False), (4, 16, 4096, 64, True), (1, 16, 16384, 64, False), (1, 16, 16384, 64, True)]
WIDE = [(4, 16, 4096, 128, True)]


def table(*shape, dtype=torch.float32):
    return (torch.randn(*shape, device="cuda", dtype=dtype) / 4).requires_grad_()


def t5(heads, length, size, causal):
    return Plan(
        Positions(length),
        lookups=(Lookup(index.log_buckets(32, 128, causal=causal), bias=table(heads, 32)),),
        scale=1.0,
    )


def clipped(heads, length, size, causal):
    return Plan(Positions(length), lookups=(Lookup(index.clip(128, 128), bias=table(heads, 257)),))


def alibi(heads, length, size, causal):
    return Plan(Positions(length), slopes=(torch.rand(heads, device="cuda") / 8).requires_grad_())


def shaw(heads, length, size, causal):
    return Plan(
        Positions(length), lookups=(Lookup(index.clip(64, 64), dot_query=table(1, 129, size, dtype=torch.bfloat16)),)
    )


def shaw_values(heads, length, size, causal):
    tables = (table(1, 129, size, dtype=torch.bfloat16) for _ in range(2))
    return Plan(
        Positions(length), lookups=(Lookup(index.clip(64, 64), dot_query=next(tables), add_value=next(tables)),)
    )


def deberta(heads, length, size, causal):
    buckets = index.deberta_buckets(256, 512)
    tables = [table(heads, buckets.n, size, dtype=torch.bfloat16) for _ in range(2)]
    return Plan(
        Positions(length), lookups=(Lookup(buckets, dot_query=tables[0], dot_key=tables[1]),), scale=(3 * size) ** -0.5
    )


def relative_logits(heads, length, size, causal):
    states = torch.randn(4, heads, length, 16, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bank = F.pad(torch.randn(1, 1024, 16, device="cuda", dtype=torch.bfloat16) / 4, (0, 0, 1, 0)).requires_grad_()
    return Plan(Positions(length), lookups=(Lookup(index.Index(-1024, 0), dot_query=bank, states=states),))


def transformer_xl(heads, length, size, causal):
    distances = index.exact(Positions(length))
    content = table(heads, distances.n, size, dtype=torch.bfloat16)
    return Plan(Positions(length), lookups=(Lookup(distances, dot_query=content, bias=table(heads, distances.n)),))


def xlnet(heads, length, size, causal):
    """The same with two segments."""
    plain = transformer_xl(heads, length, size, causal)
    parts = (torch.arange(length, device="cuda") > length // 3).long()
    same_or_not = index.Index(-1, 1, rows=(1, 0, 1), n=2, axis=1)
    segments = Lookup(same_or_not, bias=table(heads, 2), dot_query=table(heads, 2, size, dtype=torch.bfloat16))
    return Plan(Positions(length, length, more=[(parts, parts, (0, 1))]), lookups=(*plain.lookups, segments))


def packed(heads, length, size, causal):
    """T5's table with a position for each token: four texts in a row."""
    ids = (torch.arange(length, device="cuda") % max(length // 4, 1)).int()
    return Plan(Positions(ids), lookups=t5(heads, length, size, causal).lookups, scale=1.0)


def rope(heads, length, size, causal):
    angle = torch.outer(torch.arange(length, device="cuda"), 1e4 ** -torch.linspace(0, 1, size // 2, device="cuda"))[
        None
    ]
    return Plan(Positions(length), rotate=Rotation((angle.cos(), angle.sin()), (angle.cos(), angle.sin())))


PLANS = {
    "t5": (t5, SHAPES), "clipped": (clipped, SHAPES), "alibi": (alibi, SHAPES), "shaw": (shaw, SHAPES),
    "shaw + values": (shaw_values, SHAPES), "relative logits": (relative_logits, WIDE),
    "deberta": (deberta, SHAPES[:3:2]), "rope": (rope, SHAPES), "transformer_xl": (transformer_xl, SHAPES[:3:2]),
    "xlnet": (xlnet, SHAPES[:1]), "packed t5": (packed, SHAPES[:2]),
}  # fmt: skip


def four_documents(length):
    """Four packed texts."""
    return {"documents": (torch.arange(length, device="cuda") * 4 // length)[None]}


PLANS["t5 in four texts"] = (t5, SHAPES[:2])
MASKS = {"t5 in four texts": four_documents}


def largest_error(make, masks=None) -> float:
    """The largest error of output and gradients against float64, relative in norm, in bfloat16 at length 700."""
    torch.manual_seed(0)
    if make in (relative_logits, rope):  # causal only; the states of relative_logits have a batch of 4
        return error(make(2, 700, 64, True), 4 if make is relative_logits else 1, 2, 700, 64, True)
    kwargs = masks(700) if masks else {}
    return max(error(make(2, 700, 64, causal), 1, 2, 700, 64, causal, **kwargs) for causal in (False, True))


def error(plan, batch, heads, length, size, causal, **masks) -> float:
    inputs = [torch.randn(batch, heads, length, size, device="cuda", dtype=torch.bfloat16) / 2 for _ in range(3)]
    g = torch.randn_like(inputs[2])
    leaves = [tensor for _, tensor in plan.tensors()]
    results = []
    for engine, dtype in (("reference", torch.float64), ("triton", torch.bfloat16)):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        out = attend(q, k, v, plan, causal=causal, engine=engine, **masks)
        results.append([out, *torch.autograd.grad(out, [q, k, v, *leaves], g.to(dtype))])
    return max(((b.double() - a.double()).norm() / a.double().norm()).item() for a, b in zip(*results, strict=True))


def time_step(run, inputs, g) -> dict[str, float]:
    """Milliseconds forward, forward + backward, and the peak memory of a training step in MB beyond its inputs."""

    def step():
        torch.autograd.grad(run(), inputs, g)

    with torch.no_grad():
        forward = do_bench(run, warmup=15, rep=60, return_mode="median")
        forward_graph = time_graph(run)
    both = do_bench(step, warmup=15, rep=80, return_mode="median")
    both_graph = time_graph(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    times = {"forward": forward_graph, "both": both_graph, "forward_eager": forward, "both_eager": both}
    return {**times, "peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}


def time_graph(run) -> float:
    """Milliseconds as a CUDA graph: device time without launch overhead, for posenc and the ceilings alike."""
    return do_bench(capture_graph(run), warmup=15, rep=60, return_mode="median")


def plain(backend, q, k, v, causal, g):
    with sdpa_kernel(backend):
        return time_step(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), g)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", default=",".join(PLANS))
    args = parser.parse_args()
    began = time.time()
    report: dict = {"card": machine("cuda"), "date": time.strftime("%Y-%m-%d"), "rows": [], "errors": {}}
    names = args.only.split(",")
    for name in names:
        report["errors"][name] = wrong = largest_error(PLANS[name][0], MASKS.get(name))
        print(f"{name:16} error {wrong:.1e}  ({time.time() - began:.0f} s)", flush=True)
    for shape in dict.fromkeys(shape for name in names for shape in PLANS[name][1]):
        batch, heads, length, size, causal = shape
        q, k, v = (
            torch.randn(batch, heads, length, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        g = torch.randn_like(q)
        ceilings = {
            "FlashAttention": plain(SDPBackend.FLASH_ATTENTION, q, k, v, causal, g),
            "cuDNN": plain(SDPBackend.CUDNN_ATTENTION, q, k, v, causal, g),
        }
        print(f"B{batch} H{heads} L{length} D{size} {'causal' if causal else 'bidirectional'}", flush=True)
        flash = ceilings["FlashAttention"]
        results = dict(ceilings)
        for name in names:
            make, shapes = PLANS[name]
            if shape not in shapes:
                continue
            if report["errors"][name] > 2e-2:
                print(f"  {name} is wrong and was not timed", flush=True)
                continue
            plan = make(heads, length, size, causal)
            leaves = [tensor for _, tensor in plan.tensors()]
            masks = MASKS[name](length) if name in MASKS else {}
            run = partial(attend, q, k, v, plan, causal=causal, engine="triton", **masks)
            results[name] = time_step(run, [q, k, v, *leaves], g)
        for name, result in results.items():
            result["forward_over_flash"] = result["forward"] / flash["forward"]
            result["both_over_flash"] = result["both"] / flash["both"]
            result["extra_mb"] = result["peak_mb"] - flash["peak_mb"]
            print(
                f"  {name:20} {result['forward']:7.3f} {result['both']:7.3f} ms (eager {result['both_eager']:.3f})   x Flash {result['forward_over_flash']:.2f}"
                f" {result['both_over_flash']:.2f}   extra {result['extra_mb']:6.0f} MB",
                flush=True,
            )
        report["rows"].append({"shape": shape, "results": results})
        if args.out:
            files.write_json(args.out, report)


if __name__ == "__main__":
    main()
