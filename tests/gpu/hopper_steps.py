"""Training steps through `attend` on a Hopper GPU, beside cuDNN's attention without positions in the same run.

    python -m tests.gpu.hopper_steps --out FILE.json [--only t5,rope,masks] [--seconds 60] [--models] [--warm]

A step is the forward and the backward pass with every gradient, tables included, replayed as one CUDA graph. `auto` chooses the
engine, as for a user. Before any time, output and gradients are compared with float64 at 700 tokens (tests.gpu.kernel_plans).
--warm: compiles all of it in short calls, so that nothing is compiled while times are taken.
--models: training steps of T5-base and DeBERTa-v3-base of 4 x 4096 tokens, with and without their dropout; beside them the originals', and
those of the same models with cuDNN's attention without positions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from posenc import attend
from posenc.bench.measure import seconds
from tests.gpu import kernel_plans
from tests.gpu.hopper import make_masks, time_graph

SHAPES = (
    (4, 16, 16, 4096, 64, False), (4, 16, 16, 4096, 64, True), (1, 16, 16, 16384, 64, False), (1, 16, 16, 16384, 64, True),
    (2, 32, 32, 8192, 128, True), (4, 16, 16, 4096, 128, False), (2, 32, 8, 8192, 128, True),
    (8, 12, 12, 2048, 64, False), (8, 12, 12, 2048, 64, True), (16, 12, 12, 1024, 64, False), (16, 12, 12, 1024, 64, True),
)  # fmt: skip
PLANS = {
    "t5": kernel_plans.t5, "rope": kernel_plans.rope, "alibi": kernel_plans.alibi, "clipped": kernel_plans.clipped,
    "rope triton": kernel_plans.rope,
}  # fmt: skip
"""rope triton: by that engine, where `auto` takes PyTorch's attention."""
MASKED = ("t5 padding", "t5 causal padding", "t5 causal documents", "t5 documents", "t5 window")


def cells(only, numbers=()):
    """(shape, plan, masks)"""
    for name in PLANS:
        for number, shape in enumerate(SHAPES):
            if (not only or name in only) and (not numbers or number in numbers):
                yield shape, name, ""
    for masked in MASKED:
        name, _, masks = masked.partition(" ")
        if not only or "masks" in only:
            yield SHAPES["causal" in masks], name, masks


def measure(shape, name, masks, warm=False):
    batch, heads, kv_heads, length, size, causal = shape
    if warm:
        batch, heads, kv_heads, length = 1, heads // kv_heads, 1, 4096
    q = torch.randn(batch, heads, length, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(batch, kv_heads, length, size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))  # fmt: skip
    g = torch.randn_like(q)

    def plain():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    plan = PLANS[name](heads, length, size, causal)
    options = {"causal": causal, "engine": "triton" if "triton" in name else "auto"} | (
        make_masks(masks, batch, length, length, timed=True) if masks else {}
    )
    leaves = [tensor for _, tensor in plan.tensors() if tensor.requires_grad]
    if warm:
        torch.autograd.grad(attend(q, k, v, plan, **options), (q, k, v, *leaves), g)
        torch.cuda.synchronize()
        return {"compiled": (shape, name, masks)}
    base = times(plain, (q, k, v), g)  # each time: the card's clock follows its temperature
    forward, step = times(lambda: attend(q, k, v, plan, **options), (q, k, v, *leaves), g)
    return {"shape": shape, "plan": f"{name} {masks}".strip(), "cudnn": base, "ours": (forward, step),
            "ratios": (round(forward / base[0], 3), round(step / base[1], 3))}  # fmt: skip


def times(run, leaves, g):
    """Milliseconds of a forward pass and of a step."""
    with torch.no_grad():
        forward = time_graph(run)
    return round(forward, 4), round(time_graph(lambda: torch.autograd.grad(run(), leaves, g)), 4)


def model_step(name, way, dropout):
    """Milliseconds of a training step of 4 x 4096 tokens. way: "posenc", "original", or "no positions", which is the accelerated model with
    cuDNN's attention without its terms."""
    from posenc import hf
    from posenc.bench.models import WHOLE
    from posenc.hf import interface, layer

    with torch.device("cuda"):
        model, inputs = WHOLE[name]()
        model = model.to(torch.bfloat16).train()
    if not dropout:
        for module in model.modules():
            for attribute in ("p", "dropout", "dropout_prob", "drop_prob"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
    if way != "original":
        hf.accelerate(model)
    ids, calls = inputs["input_ids"].cuda(), []

    def plain(q, k, v, plan, dropout=0.0, **options):
        calls.append(1)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    def step():
        model.zero_grad(set_to_none=True)
        model(ids).last_hidden_state.float().pow(2).mean().backward()

    before = layer.attend, interface.attend
    if way == "no positions":
        layer.attend = interface.attend = plain
    try:
        step()
        assert way != "no positions" or len(calls) == model.config.num_hidden_layers, f"{len(calls)} calls"
        ms = 1e3 * statistics.median(seconds(step, "cuda") for _ in range(5))
    finally:
        layer.attend, interface.attend = before
    return {
        "model": name,
        "way": way,
        "dropout": dropout,
        "ms": round(ms, 2),
        "GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--shapes", type=lambda text: [int(x) for x in text.split(",")], default=[], help="numbers of SHAPES"
    )
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--checked", action="store_true", help="tests.gpu.gluon_backward has passed before")
    args = parser.parse_args()
    began, rows = time.monotonic(), []

    def keep(run, *given):
        if time.monotonic() - began > args.seconds:
            return
        try:
            rows.append(run(*given))
        except Exception as error:
            rows.append({"what": repr(given)[:200], "failed": f"{type(error).__name__}: {str(error)[:300]}"})
        torch.cuda.empty_cache()
        print(json.dumps(rows[-1]), f"{time.monotonic() - began:.0f} s", flush=True)
        Path(args.out).write_text(json.dumps(rows, indent=1))

    if args.models:
        for name in ("T5-base, 4 × 4096", "DeBERTa-v3-base, 4 × 4096"):
            for way, dropout in product(("posenc", "no positions", "original"), (False, True)):
                if not args.only or name in args.only:
                    torch.cuda.reset_peak_memory_stats()
                    keep(model_step, name, way, dropout)
        return
    if args.warm:
        from posenc.engines import gluon

        gluon.FEWEST = 1
        for shape, name, masks in cells(args.only, args.shapes):
            keep(measure, shape, name, masks, True)
        return
    names = [name for name in PLANS if not args.only or name in args.only or (name == "t5" and "masks" in args.only)]
    wrong = {name: 0.0 if args.checked else kernel_plans.largest_error(PLANS[name]) for name in names}
    print("errors at 700 tokens", wrong, flush=True)
    for shape, name, masks in cells(args.only, args.shapes):
        if wrong.get(name, 1.0) < 2e-2:
            keep(measure, shape, name, masks)


if __name__ == "__main__":
    main()
