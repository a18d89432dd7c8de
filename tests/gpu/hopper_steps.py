"""Training steps through `attend` on a Hopper GPU, beside cuDNN's attention without positions in the same run.

    python -m tests.gpu.hopper_steps --out FILE.json [--only t5,rope,masks] [--seconds 60] [--models] [--warm]

A step is the forward and the backward pass with every gradient, tables included, replayed as one CUDA graph. `auto` chooses the
engine, as for a user. Before any time, output and gradients are compared with float64 at 700 tokens (tests.gpu.kernel_plans).
--warm: compiles all of it in short calls, so that nothing is compiled while times are taken.
--models: training steps of T5-base and DeBERTa-v3-base of 4 x 4096 tokens, with and without their dropout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
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
)  # fmt: skip
PLANS = {"t5": kernel_plans.t5, "rope": kernel_plans.rope, "alibi": kernel_plans.alibi, "clipped": kernel_plans.clipped}
MASKED = ("t5 padding", "t5 causal padding", "t5 causal documents", "t5 documents", "t5 window")


def cells(only):
    """(shape, plan, masks)"""
    for name in PLANS:
        for shape in SHAPES:
            if not only or name in only:
                yield shape, name, ""
    for masked in MASKED:
        name, _, masks = masked.partition(" ")
        if not only or "masks" in only:
            yield SHAPES["causal" in masks], name, masks


def measure(shape, name, masks, ceilings, warm=False):
    batch, heads, kv_heads, length, size, causal = shape
    if warm:
        batch, heads, kv_heads, length = 1, heads // kv_heads, 1, 4096
    q = torch.randn(batch, heads, length, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(batch, kv_heads, length, size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))  # fmt: skip
    g = torch.randn_like(q)

    def plain():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    if shape not in ceilings and not warm:
        ceilings[shape] = times(plain, (q, k, v), g)
    plan = PLANS[name](heads, length, size, causal)
    options = {"causal": causal} | (make_masks(masks, batch, length, length, timed=True) if masks else {})
    leaves = [tensor for _, tensor in plan.tensors() if tensor.requires_grad]
    if warm:
        torch.autograd.grad(attend(q, k, v, plan, **options), (q, k, v, *leaves), g)
        torch.cuda.synchronize()
        return {"compiled": (shape, name, masks)}
    forward, step = times(lambda: attend(q, k, v, plan, **options), (q, k, v, *leaves), g)
    base = ceilings[shape]
    return {"shape": shape, "plan": f"{name} {masks}".strip(), "cudnn": base, "ours": (forward, step),
            "ratios": (round(forward / base[0], 3), round(step / base[1], 3))}  # fmt: skip


def times(run, leaves, g):
    """Milliseconds of a forward pass and of a step."""
    with torch.no_grad():
        forward = time_graph(run)
    return round(forward, 4), round(time_graph(lambda: torch.autograd.grad(run(), leaves, g)), 4)


def model_step(name, dropout):
    """Milliseconds of a training step of 4 x 4096 tokens, accelerated."""
    from posenc import hf
    from posenc.hf.measure_models import WHOLE

    model, inputs = WHOLE[name]()
    model = model.to("cuda", torch.bfloat16).train()
    if not dropout:
        for module in model.modules():
            if hasattr(module, "p"):
                module.p = 0.0
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
    hf.accelerate(model)
    ids = inputs["input_ids"].cuda()

    def step():
        model.zero_grad(set_to_none=True)
        model(ids).last_hidden_state.float().pow(2).mean().backward()

    step()
    return {
        "model": name,
        "dropout": dropout,
        "ms": round(1e3 * statistics.median(seconds(step, "cuda") for _ in range(5)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--checked", action="store_true", help="tests.gpu.gluon_backward has passed before")
    args = parser.parse_args()
    began, rows, ceilings = time.monotonic(), [], {}

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
            for dropout in (False, True):
                if not args.only or name in args.only:
                    keep(model_step, name, dropout)
        return
    if args.warm:
        from posenc.engines import gluon

        gluon.FEWEST = 1
        for shape, name, masks in cells(args.only):
            keep(measure, shape, name, masks, ceilings, True)
        return
    names = [name for name in PLANS if not args.only or name in args.only or (name == "t5" and "masks" in args.only)]
    wrong = {name: 0.0 if args.checked else kernel_plans.largest_error(PLANS[name]) for name in names}
    print("errors at 700 tokens", wrong, flush=True)
    for shape, name, masks in cells(args.only):
        if wrong.get(name, 1.0) < 2e-2:
            keep(measure, shape, name, masks, ceilings)


if __name__ == "__main__":
    main()
