"""The Gluon backward pass on a Hopper GPU: checked against float64, then timed beside cuDNN's and the Triton pair.

    python -m tests.gpu.gluon_backward --out FILE.json [--only base] [--skip check,time] [--seconds 140] [--variants late] [--workers 16] [--warm]

Jobs run in processes of their own, as in tests/gpu/hopper.py. Times are of the backward pass alone: ours and the pair's are replayed
graphs of their launches, sums of tables included; cuDNN's is a step less its forward pass.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path

from tests.gpu import hopper

VARIANTS: dict[str, dict] = {
    "base": {},
    "late": {"late": 1},
}
FLAGS = (("", "causal"), ("window", "band"), ("padding", "causal padding"), ("documents", "causal documents"), ("all",))
MASKED = tuple(
    (4, 2, 1, lq, lk, max(lk - lq, 0), "starts" if lq == 1000 else "plain")
    for lq, lk in ((1, 1), (65, 65), (129, 200), (1000, 1000), (1300, 700), (3000, 3000))
)
CHECKED = ("base", "late")
TERMS = ("t5", "none", "alibi", "both")
ROWS = (  # batch, heads, heads of keys, length, size, terms and masks, variants; cuDNN without them, and the pair with them
    (4, 16, 16, 4096, 64, "t5", ("cudnn", "base", "late")),
    (4, 16, 16, 4096, 64, "t5 causal", ("cudnn", "base", "late")),
    (4, 16, 16, 4096, 128, "t5", ("cudnn", "base")),
    (4, 16, 16, 4096, 64, "none", ("base", "late")),
    (1, 16, 16, 16384, 64, "t5 causal", ("cudnn", "base", "late")),
    (2, 32, 32, 8192, 128, "t5 causal", ("cudnn", "base")),
    (1, 16, 16, 16384, 64, "t5", ("cudnn", "base", "late")),
    (4, 16, 16, 4096, 64, "alibi", ("cudnn", "base")),
    (16, 12, 12, 1024, 64, "t5", ("pair", "base")),
    (8, 12, 12, 2048, 64, "t5 causal", ("pair", "base", "late")),
    (32, 12, 12, 512, 64, "t5", ("pair", "base")),
    (16, 12, 12, 1024, 64, "alibi causal", ("cudnn", "base")),
    (2, 32, 32, 8192, 128, "alibi causal", ("cudnn", "base")),
    (8, 16, 16, 1024, 128, "t5 causal", ("cudnn", "base")),
    (4, 16, 16, 4096, 64, "t5 causal documents", ("pair", "base")),
    (4, 16, 16, 4096, 64, "t5 window", ("pair", "base")),
    (4, 16, 16, 4096, 64, "t5 padding", ("pair", "base", "late")),
    (4, 16, 16, 4096, 64, "t5 documents", ("pair", "base")),
    (2, 32, 8, 8192, 128, "t5 causal", ("cudnn", "base")),
    (4, 16, 16, 4096, 64, "alibi causal", ("cudnn", "base")),
)  # fmt: skip
PEERS = ("cudnn", "pair")


def checks(only):
    groups = []
    for name, size, terms, causal in product(CHECKED, (64, 128), ("t5", "none", "clip"), (False, True)):
        if size == 128 and terms != "t5":
            continue
        dtype = "float16" if terms == "clip" else "bfloat16"
        shapes = [s for s in hopper.shapes("t5", causal) if s[1] == s[2] or s[6] != "plain"]
        group = []
        for batch, heads, _, lq, lk, start, layout in shapes:
            label = f"{terms}{' causal' if causal else ''} {size} {dtype} {batch}x{heads} {lq}x{lk}+{start} {layout} [{name}]"
            group.append({"kind": "check", "name": label, "variant": name, "terms": terms, "causal": causal, "dtype": dtype,
                          "batch": batch, "heads": heads, "lq": lq, "lk": lk, "start": start, "layout": layout, "size": size})  # fmt: skip
        groups.append(group)
    for name, size, terms, flags in product(CHECKED, (64, 128), TERMS, FLAGS):  # a group compiles one variant
        large = (("t5", "documents"), ("alibi", ""), ("none", "padding"), ("both", "all"))
        if size == 128 and (terms, flags[0]) not in large:
            continue
        group = []
        for masks, (batch, heads, kv_heads, lq, lk, start, layout) in product(flags, MASKED):
            label = f"masked {terms} {masks} {size} {batch}x{heads}/{kv_heads} {lq}x{lk}+{start} {layout} [{name}]"
            group.append({"kind": "check", "name": label, "variant": name, "terms": terms, "causal": "causal" in masks, "masks": masks,
                          "dtype": "bfloat16", "size": size, "batch": batch, "heads": heads, "kv_heads": kv_heads, "lq": lq, "lk": lk,
                          "start": start, "layout": layout})  # fmt: skip
        groups.append(group)
    for terms, masks in (
        *product(("t5", "none", "alibi"), ("", "causal")),
        ("t5", "causal documents"),
        ("both", "padding"),
    ):
        name = f"step {terms} {masks}"
        groups.append([{"kind": "check", "name": name, "step": True, "terms": terms, "masks": masks}])
    groups = [[job for job in group if not only or any(part in job["name"] for part in only)] for group in groups]
    return [group for group in groups if group]


def select(groups, variants):
    return [group for group in groups if not variants or group[0].get("variant") in variants]


def timings(only):
    jobs = []
    for batch, heads, kv_heads, length, size, what, variants in ROWS:
        terms, _, masks = what.partition(" ")
        about = f"B{batch} H{heads}{'' if heads == kv_heads else f'/{kv_heads}'} L{length} D{size} | {what}"
        for name in variants:
            jobs.append({
                "kind": "time", "name": f"{about} [{name}]", "variant": name, "batch": batch, "heads": heads, "kv_heads": kv_heads,
                "length": length, "size": size, "terms": terms, "masks": masks, "causal": "causal" in masks,
            })  # fmt: skip
    return [job for job in jobs if not only or any(part in job["name"] for part in only)]


def warm_ups(jobs):
    found = {}
    for job in jobs:
        key = tuple(job[x] for x in ("variant", "terms", "masks", "size"))
        if job["variant"] not in PEERS:  # causality is no variant of ours
            key = (*key[:2], job["masks"].replace("causal", "").strip(), key[3])
        found[key] = {
            **job,
            "kind": "warm",
            "name": f"compile {key}",
            "batch": 1,
            "heads": 2,
            "kv_heads": 1,
            "length": 1024,
        }
    return [[job] for job in found.values() if job["variant"] != "cudnn"]


# ---- in a process of its own ------------------------------------------------------------------------------------------
class Call:
    """One backward pass, with what it needs."""

    def __init__(
        self,
        batch,
        heads,
        lq,
        lk,
        start,
        dtype,
        terms,
        causal,
        layout,
        variant,
        size,
        kv_heads=0,
        masks="",
        timed=False,
    ):
        import torch

        from posenc.engines.gluon.backward_launch import SCHEDULES
        from posenc.engines.triton import launch, launcher

        self.masks = {"causal": causal} | hopper.make_masks(masks, batch, lq, lk, timed)
        self.q, self.k, self.v = hopper.make_tensors(batch, heads, kv_heads or heads, lq, lk, size, dtype, layout)
        if terms == "t5" and size == 64:
            self.q = self.q / 8
        self.plan = hopper.make_plan(terms, heads, lq, lk, start, size, causal, layout)
        for _, x in self.plan.tensors():
            x.requires_grad_()
        self.x, self.num, self.scale = hopper.prepare(self.q, self.k, self.v, self.plan, **self.masks)
        self.do = torch.randn_like(self.q)
        self.schedule = SCHEDULES[size]._replace(**VARIANTS.get(variant, {}))
        self.launch = launcher.launch
        with torch.no_grad():
            self.out, self.lse, _ = launch.run_forward(self.launch, self.x, self.num, self.scale, 0.0)

    def sum_bias(self, parts):
        import torch

        from posenc.engines.triton.tables import sum_parts

        return sum_parts(self.launch, parts, torch.empty_like(self.x.bias))

    def run(self, launch=None):
        """dq, dk, dv and the gradients of bias and slopes, or None."""
        import torch

        from posenc.engines.gluon.backward_launch import run_backward
        from posenc.engines.triton.launch import empty_in_order
        from posenc.engines.triton.tables import Parts

        grads = [empty_in_order(x, x.shape[3]) for x in (self.q, self.k, self.v)]
        with torch.no_grad():
            d_bias, d_slopes = run_backward(launch or self.launch, self.do, None, self.out, self.lse, self.x, self.num, self.scale, *grads, True, True, self.schedule)  # fmt: skip
            d_slopes = None if d_slopes is None else d_slopes.sum((0, 2, 3))
            return *grads, None if d_bias is None else self.sum_bias(Parts(d_bias, 1)), d_slopes

    def run_pair(self):
        import torch

        from posenc.engines import gluon
        from posenc.engines.triton.arguments import GRADIENTS
        from posenc.engines.triton.launch import run_backward

        gluon.SHORTEST_BACKWARD = 1 << 30
        has = {"bias": self.x.bias is not None, "slopes": self.x.slopes is not None}
        wanted = {name: has.get(name, name in ("q", "k", "v")) for name in GRADIENTS}
        with torch.no_grad():
            found = run_backward(self.launch, self.do, None, self.out, self.lse, None, self.x, self.num, self.scale, 0.0, wanted)  # fmt: skip
            grads = dict(zip(GRADIENTS, found))
            return grads if grads["bias"] is None else self.sum_bias(grads["bias"])


def check(job):
    import torch

    from tests import budget

    if job.get("step"):
        return check_step(job)
    call = Call(*(job[x] for x in ("batch", "heads", "lq", "lk", "start")), getattr(torch, job["dtype"]), job["terms"], job["causal"], job["layout"], job["variant"], job["size"], job.get("kv_heads", 0), job.get("masks", ""))  # fmt: skip
    expected, allowed = budget.expect(call.q, call.k, call.v, call.plan, call.do, **call.masks)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    first = None
    for _ in range(4):
        now = call.run()
        first = first or now
        same = [torch.equal(a, b) for a, b in zip(first[1:], now[1:]) if a is not None]
        assert all(same) or any(x.isnan().any() for x in now[1:] if x is not None), f"different bits: {same}"
    torch.use_deterministic_algorithms(False)
    results = dict(zip("qkv", first))
    if first[3] is not None:
        call.x.bias.backward(first[3])
    if first[4] is not None:
        call.x.slopes.backward(first[4])
    results |= {name: x.grad for name, x in call.plan.tensors()}
    worst = {name: float(budget.excess(x, expected[name], allowed[name])) for name, x in results.items()}
    bad = {name: x for name, x in worst.items() if not x <= 1.0}
    if bad:
        nans = {name: int(results[name].isnan().sum()) for name in bad}
        return {"failed": f"of its budget: {worst}; NaN: {nans}"}
    return {"worst": max(worst.values())}


def check_step(job):
    """Through `attend`, with every gradient; and the same bits in ten runs where deterministic algorithms are asked for."""
    import torch

    from posenc import attend
    from posenc.engines import gluon
    from posenc.engines.gluon import backward_launch
    from tests import budget

    gluon.FEWEST = gluon.SHORTEST_BACKWARD = 1
    q, k, v = (x.requires_grad_() for x in hopper.make_tensors(2, 2, 1, 4100, 4100, 64, torch.bfloat16, "transposed"))
    plan = hopper.make_plan(job["terms"], 2, 4100, 4100, 0, 128, "causal" in job["masks"])
    masks = hopper.make_masks(job["masks"], 2, 4100, 4100)
    leaves = {"q": q, "k": k, "v": v, **{name: x.requires_grad_() for name, x in plan.tensors()}}
    g = torch.randn_like(q)
    expected, allowed = budget.expect(q, k, v, plan, g, **masks)
    calls, run = [], backward_launch.run_backward
    backward_launch.run_backward = lambda *args, **options: calls.append(1) or run(*args, **options)
    worst = 0.0

    def step():
        out = attend(q, k, v, plan, engine="triton", **masks)
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)))

    for _ in range(4):  # the second call is recorded, the third replays
        for name, ours in step().items():
            worst = max(worst, float(budget.excess(ours, expected[name], allowed[name])))
    assert calls, "the kernel was not used"
    used = len(calls)
    torch.use_deterministic_algorithms(True)
    first = step()
    same = all(torch.equal(a, b) for _ in range(9) for a, b in zip(first.values(), step().values(), strict=True))
    torch.use_deterministic_algorithms(False)
    assert same and len(calls) == used, "the deterministic mode has other bits, or takes the kernel"
    return {"worst": worst} if worst <= 1.0 else {"failed": f"{worst} of a budget"}


def make_call(job):
    import torch

    return Call(job["batch"], job["heads"], job["length"], job["length"], 0, torch.bfloat16, job["terms"], job["causal"], "", job["variant"], job["size"], job["kv_heads"], job["masks"], True)  # fmt: skip


def warm_up(job):
    call = make_call(job)
    call.run_pair() if job["variant"] == "pair" else call.run()
    return {}


def measure(job):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from posenc.engines.gluon.backward import backward

    call = make_call(job)
    if job["variant"] == "pair":
        found = {"pair": hopper.time_graph(call.run_pair)}
    elif job["variant"] == "cudnn":
        q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
        causal = job["causal"] or "window" in job["masks"]

        def forward():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        forward_ms = hopper.time_graph(forward)
        step = hopper.time_graph(lambda: torch.autograd.grad(forward(), (q, k, v), call.do))
        found = {"cudnn": step - forward_ms, "cudnn_forward": forward_ms}
    else:
        call.run()
        torch.cuda.synchronize()

        def only(kernel, *args, **options):
            if kernel is backward:
                call.launch(kernel, *args, **options)

        found = {"ours": hopper.time_graph(call.run)}
        if job["variant"] == "base" and job["terms"] == "none":
            found["kernel"] = hopper.time_graph(lambda: call.run(launch=only))
    found = {name: round(ms, 4) for name, ms in found.items()}
    products = 10 * job["batch"] * job["heads"] * job["length"] ** 2 * job["size"] / (2 if job["causal"] else 1)
    ms = next(iter(found.values()))
    return {**found, "tflops": round(products / ms / 1e9)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--skip", default="")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=[])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--warm", action="store_true", help="compile what is timed, though nothing is timed now")
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    if args.work:
        hopper.work(check, measure, warm_up)
        return
    hopper.Worker.module = "tests.gpu.gluon_backward"
    hopper.STALL.update(check=90.0, time=25.0, warm=90.0)
    began = time.monotonic()

    def save(*_):
        if args.out:
            Path(args.out).write_text(json.dumps({"checks": list(checked), "times": list(timed)}, indent=1))

    checked, timed = hopper.Answers(save), hopper.Answers(save)
    if "check" not in args.skip:
        warm = warm_ups(timings(args.only)) if args.warm or "time" not in args.skip else []
        peers = [jobs for jobs in warm if jobs[0]["variant"] == "pair"]  # what compiles longest, then what others share
        others = [jobs for jobs in warm if jobs[0]["variant"] != "pair"]
        share = 1.0 if "time" in args.skip else 0.5
        hopper.run_all(
            peers + select(checks(args.only), args.variants) + others,
            args.workers,
            began + share * args.seconds,
            checked,
        )
        failed = [x for x in checked if "failed" in x]
        left = sum("left out" in x for x in checked)
        worst = max((x["worst"] for x in checked if "worst" in x), default=0)
        print(f"{len(checked) - len(failed) - left} passed, {len(failed)} failed, {left} left out; worst {worst:.2f} of a budget; "
              f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
        save()
    if "time" not in args.skip:
        hopper.run_all([[job] for job in timings(args.only)], 1, began + args.seconds, timed)
    save()
    for x in timed:
        print(f"{x['name']:75} " + " ".join(f"{a} {x[a]}" for a in ("cudnn", "pair", "ours", "kernel", "tflops", "failed", "left out") if a in x))  # fmt: skip
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
