"""Training steps through `attend` on a Hopper GPU, beside cuDNN's attention without positions in the same run.

    python -m tests.gpu.hopper_steps --out FILE.json --goals [--warm 12]           every row that has a goal
    python -m tests.gpu.hopper_steps --out FILE.json [--only t5,rope,masks] [--shapes 0,2] [--seconds 60] [--models]
    python -m tests.gpu.hopper_steps --out FILE.json --packed [--seconds 60]       texts of equal and of unequal lengths in a row

A step is the forward and the backward pass with every gradient, tables included, as one CUDA graph; ours and cuDNN's are replayed in turns, as
the card's clock follows its temperature. `auto` chooses the engine, as for a user. Before any time, output and gradients are compared with float64
at 700 tokens (tests.gpu.kernel_plans), unless --checked.
--warm N: N processes compile all of it first, in calls of few heads, so that nothing is compiled while times are taken.
--models: training steps of T5-base and DeBERTa-v3-base of 4 x 4096 tokens, with and without their dropout; beside them the originals', and
those of the same models with cuDNN's attention without positions.
--packed: t5 over documents, and microseconds by kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from posenc import attend
from posenc.bench.measure import capture_graph, seconds
from posenc.core.mask import make_mask
from tests.gpu import kernel_plans
from tests.gpu.hopper import make_masks

SHAPES = (
    (4, 16, 16, 4096, 64, False), (4, 16, 16, 4096, 64, True), (1, 16, 16, 16384, 64, False), (1, 16, 16, 16384, 64, True),
    (2, 32, 32, 8192, 128, True), (4, 16, 16, 4096, 128, False), (2, 32, 8, 8192, 128, True), (4, 16, 16, 4096, 128, True),
    (8, 12, 12, 2048, 64, False), (8, 12, 12, 2048, 64, True), (16, 12, 12, 1024, 64, False), (16, 12, 12, 1024, 64, True),
)  # fmt: skip
PLANS = {
    "t5": kernel_plans.t5, "clipped": kernel_plans.clipped, "alibi": kernel_plans.alibi, "rope": kernel_plans.rope,
    "shaw": kernel_plans.shaw, "shaw values": kernel_plans.shaw_values, "deberta": kernel_plans.deberta,
    "transformer_xl": kernel_plans.transformer_xl, "logits": kernel_plans.relative_logits, "t5 tokens": kernel_plans.packed,
    "rope triton": kernel_plans.rope,
}  # fmt: skip
"""t5 tokens: with a position for each token. rope triton: by that engine, where `auto` takes PyTorch's attention."""
MASKED = ("t5 padding", "t5 causal padding", "t5 causal documents", "t5 documents", "t5 window")
GOALS: dict[tuple[str, int], tuple[float, float]] = {  # (plan, number of the shape): forward and step over cuDNN's
    **{(plan, 0): (1.0, 1.05) for plan in ("t5", "clipped", "alibi")}, **{(plan, 1): (1.05, 1.08) for plan in ("t5", "clipped", "alibi")},
    **{(plan, 2): (0.95, 1.0) for plan in ("t5", "clipped", "alibi")}, **{(plan, 3): (0.98, 1.02) for plan in ("t5", "clipped", "alibi")},
    ("rope", 0): (1.05, 1.05), ("shaw", 0): (1.1, 1.15), ("shaw", 2): (1.05, 1.08), ("shaw values", 0): (1.4, 1.4),
    ("deberta", 0): (1.6, 1.8), ("deberta", 2): (1.3, 1.35), ("transformer_xl", 0): (1.7, 2.2), ("transformer_xl", 2): (1.7, 2.2),
    ("logits", 7): (1.4, 1.5), **{(plan, 4): (1.05, 1.1) for plan in ("t5", "alibi", "rope")},
    ("t5 tokens", 0): (1.15, 1.15), **{(masked, int("causal" in masked)): (1.15, 1.15) for masked in MASKED},
}  # fmt: skip
"""With masks: over cuDNN's time without them, times the share of its pairs that are visible."""


def cells(only, numbers=(), goals=False):
    """(shape, plan, masks)"""
    for name in PLANS:
        for number, shape in enumerate(SHAPES):
            asked = (not only or name in only) and (not numbers or number in numbers)
            if asked and (not goals or (name, number) in GOALS):
                yield shape, name, ""
    for masked in MASKED:
        name, _, masks = masked.partition(" ")
        if not only or "masks" in only:
            yield SHAPES["causal" in masks], name, masks


def measure(shape, name, masks, warm=False):
    batch, heads, kv_heads, length, size, causal = shape
    if warm:
        heads, kv_heads, length = heads // kv_heads, 1, 4096
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

    def ours():
        return attend(q, k, v, plan, **options)

    if warm:
        torch.autograd.grad(ours(), (q, k, v, *leaves), g)
        with torch.no_grad():
            ours()
        torch.cuda.synchronize()
        return {"compiled": (shape, name, masks)}
    share = visible_share(q, k, causal, options) if masks else 1.0
    with torch.no_grad():
        forward = time_in_turns(plain, ours)
    step = time_in_turns(
        lambda: torch.autograd.grad(plain(), (q, k, v), g), lambda: torch.autograd.grad(ours(), (q, k, v, *leaves), g)
    )
    label = f"{name} {masks}".strip()
    goal = GOALS.get((label, SHAPES.index(shape)))
    return {"shape": shape, "plan": label, "cudnn": (forward[0], step[0]), "ours": (forward[1], step[1]), "share": round(share, 4),
            "ratios": tuple(round(x[1] / x[0] / share, 3) for x in (forward, step)), "goal": goal}  # fmt: skip


def visible_share(q, k, causal, options):
    """Of the pairs that cuDNN computes."""
    mask = make_mask(q, k, **{name: x for name, x in options.items() if name != "engine"})
    seen = torch.broadcast_to(mask.allowed(q.shape[2], k.shape[2], q.device), (*q.shape[:2], q.shape[2], k.shape[2]))
    pairs = q.shape[2] * (q.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
    return seen.count_nonzero().item() / (seen.shape[0] * seen.shape[1] * pairs)


def time_in_turns(*calls, count=5, repeats=10):
    """Milliseconds of each call: medians of replayed graphs, which take turns."""
    replays = [capture_graph(call, calls=count) for call in calls]
    times = [[] for _ in calls]
    for _ in range(repeats + 1):
        for replay, found in zip(replays, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / count)
    return [round(statistics.median(found[1:]), 4) for found in times]


# ---- packed texts --------------------------------------------------------------------------------------------------------
UNEQUAL = (
    (1999, 64, 700, 301, 1032), (130, 1700, 95, 1411, 260, 500), (2048, 777, 1271), (90, 85, 640, 1100, 310, 1500, 371),
)  # fmt: skip


def packed_ids(batch, length, is_equal):
    """int64 [batch, length], and the lengths of all texts."""
    rows, at = [], 0
    for _ in range(batch):
        row = []
        while sum(row) < length:
            row += (1024,) * 4 if is_equal else UNEQUAL[at % len(UNEQUAL)]
            at += 1
        assert sum(row) == length
        rows.append(row)
    ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return torch.stack(ids).cuda(), [n for row in rows for n in row]


def packed_call(batch, heads, length, causal, is_equal):
    ids, lengths = packed_ids(batch, length, is_equal)
    q, k, v = (
        torch.randn(batch, heads, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    plan = kernel_plans.t5(heads, length, 64, causal)
    leaves = (q, k, v, *(tensor for _, tensor in plan.tensors()))
    return q, k, v, plan, leaves, {"causal": causal, "documents": (ids, ids.clone())}, lengths


def packed_error(causal, is_equal):
    """The largest error of output and gradients against float64, relative in norm."""
    torch.manual_seed(0)
    q, k, v, plan, leaves, masks, _ = packed_call(2, 3, 4096, causal, is_equal)
    q, k = ((x.detach() / 3).requires_grad_() for x in (q, k))
    g = torch.randn_like(q)
    results = []
    for dtype, engine, calls in ((torch.float64, "reference", 1), (torch.bfloat16, "triton", 3)):
        x = [y.detach().to(dtype).requires_grad_() for y in (q, k, v)]
        for _ in range(calls):  # the second call is recorded, the third replays
            out = attend(*x, plan, engine=engine, **masks)
            found = [out, *torch.autograd.grad(out, [*x, *leaves[3:]], g.to(dtype))]
        results.append(found)
    return max(((b.double() - a.double()).norm() / a.double().norm()).item() for a, b in zip(*results))


def measure_packed(batch, length, causal, is_equal):
    q, k, v, plan, leaves, masks, lengths = packed_call(batch, 16, length, causal, is_equal)
    g = torch.randn_like(q)
    share = sum(n * (n + 1) for n in lengths) / (batch * length * (length + 1)) if causal else sum(n * n for n in lengths) / (batch * length**2)  # fmt: skip

    def plain():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ours():
        return attend(q, k, v, plan, **masks)

    def step():
        return torch.autograd.grad(ours(), leaves, g)

    with torch.no_grad():
        forward = time_in_turns(plain, ours)
    steps = time_in_turns(lambda: torch.autograd.grad(plain(), leaves[:3], g), step)
    about = f"B{batch} L{length} {'equal' if is_equal else 'unequal'}{' causal' if causal else ''}"
    return {"packed": about, "share": round(share, 4), "forward": forward, "step": steps, "kernels": by_kernel(step)}


def by_kernel(call, repeats=3):
    """Microseconds of a call's kernels, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(4):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = sorted((x for x in record.key_averages() if x.device_time_total), key=lambda x: -x.device_time_total)
    return {x.key[:60]: round(x.device_time_total / repeats, 1) for x in events[:9]}


def show_packed(rows):
    print("forward and step: cuDNN's ms, ours, and ours over cuDNN times the visible share; microseconds by kernel")
    for row in rows:
        if "packed" not in row:
            print(row)
            continue
        cells = [
            f"{cudnn:.3f} {ms:.3f} ({ms / cudnn / row['share']:.2f})" for cudnn, ms in (row["forward"], row["step"])
        ]
        kernels = ", ".join(f"{kernel} {us}" for kernel, us in row["kernels"].items())
        print(f"{row['packed']:26} {'   '.join(cells)}   {kernels}")


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
    parser.add_argument("--goals", action="store_true", help="the rows of GOALS, and no others")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument(
        "--part", type=lambda text: [int(x) for x in text.split("/")], help="of a process that compiles"
    )
    parser.add_argument("--checked", action="store_true", help="correctness was tested before")
    args = parser.parse_args()
    began, rows = time.monotonic(), []

    def keep(run, *given):
        if time.monotonic() - began > args.seconds:
            rows.append({"what": repr(given)[:200], "left out": "no time"})
        else:
            try:
                rows.append(run(*given))
            except Exception as error:
                reason = error.__context__ or error  # the end of a capture hides what went wrong in it
                rows.append({"what": repr(given)[:200], "failed": f"{type(reason).__name__}: {str(reason)[:300]}"})
        print(json.dumps(rows[-1]), f"{time.monotonic() - began:.0f} s", flush=True)
        Path(args.out).write_text(json.dumps(rows, indent=1))

    if args.models:
        for name in ("T5-base, 4 × 4096", "DeBERTa-v3-base, 4 × 4096"):
            for way, dropout in product(("posenc", "no positions", "original"), (False, True)):
                if not args.only or name in args.only:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    keep(model_step, name, way, dropout)
        return
    if args.packed:
        cases = list(product((True, False), (True, False)))
        wrong = {case: packed_error(*case) for case in cases}
        print("errors at 4096 tokens by (causal, equal)", wrong, flush=True)
        assert all(error < 2e-2 for error in wrong.values())
        for (batch, length), case in product(((4, 4096), (1, 16384)), cases):
            keep(measure_packed, batch, length, *case)
            torch.cuda.empty_cache()
        show_packed(rows)
        return
    wanted = list(cells(args.only, args.shapes, args.goals))
    if args.part:
        from posenc.engines import gluon

        gluon.FEWEST = 1
        for shape, name, masks in wanted[args.part[0] :: args.part[1]]:
            keep(measure, shape, name, masks, True)
        return
    if args.warm:
        compile_first(args.warm, args.seconds / 2)
    names = {name for _, name, _ in wanted}
    wrong = {name: 0.0 if args.checked else kernel_plans.largest_error(PLANS[name]) for name in names}
    print("errors at 700 tokens", wrong, flush=True)
    for shape, name, masks in wanted:
        if wrong[name] < 2e-2:
            keep(measure, shape, name, masks)
            if "CUDA error" in rows[-1].get("failed", ""):  # nothing runs in this process any more
                break
            torch.cuda.empty_cache()
    show(rows)


def compile_first(processes, limit):
    """What this command times, side by side."""
    given = sys.argv[1:]
    own = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.hopper_steps", *given, "--out", "/dev/null", "--part", f"{i}/{processes}"], stdout=subprocess.DEVNULL)
        for i in range(processes)
    ]  # fmt: skip
    until = time.monotonic() + limit
    for process in own:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()


def show(rows):
    for row in rows:
        if "ratios" in row:
            batch, heads, kv_heads, length, size, causal = row["shape"]
            shape = f"{batch}x{heads}{'' if kv_heads == heads else f'/{kv_heads}'}x{length}x{size}{' causal' if causal else ''}"
            forward, step = row["ratios"]
            goal = row["goal"]
            said = (
                ""
                if goal is None
                else f" goal {goal[0]} / {goal[1]}{'' if forward <= goal[0] else ', forward missed'}{'' if step <= goal[1] else ', step missed'}"
            )
            print(f"{row['plan']:20} {shape:26} {forward:.3f} / {step:.3f}{said}")
        else:
            print(row)


if __name__ == "__main__":
    main()
