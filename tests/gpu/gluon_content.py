"""The Gluon backward pass with content terms on a Hopper GPU: checked against float64, then timed beside cuDNN's and the Triton pair.

    python -m tests.gpu.gluon_content --out FILE.json [--only shaw,step] [--skip check,time] [--seconds 110]

Jobs run in processes of their own, as in tests/gpu/hopper.py. Times are replayed graphs: of the backward pass alone with all that belongs to
it (bands, products with tables), ours and the pair's; and of a whole step through `attend`, beside cuDNN's without positions.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path

from tests.gpu import hopper

TERMS = ("shaw", "values", "keys", "deberta", "logits", "biased")
FLAGS = (("", "causal"), ("window", "band"), ("padding", "causal padding"), ("documents", "causal documents"), ("all",))
LENGTHS = ((1, 1), (65, 65), (129, 200), (1000, 1000), (1300, 700), (2500, 2500))
ROWS = (  # batch, heads, length, size, terms and masks
    (4, 16, 4096, 64, "shaw"), (4, 16, 4096, 64, "deberta"), (4, 16, 4096, 64, "values"), (4, 16, 4096, 128, "logits causal"),
    (4, 16, 4096, 64, "shaw causal"), (1, 16, 16384, 64, "shaw"), (1, 16, 16384, 64, "deberta"), (4, 16, 4096, 128, "shaw"),
    (4, 16, 4096, 64, "values causal"), (1, 16, 16384, 64, "shaw causal"), (8, 12, 2048, 64, "shaw"), (8, 12, 2048, 64, "deberta"),
    (4, 16, 4096, 64, "shaw padding"), (4, 16, 4096, 64, "deberta padding"), (4, 16, 4096, 128, "shaw causal"), (16, 12, 1024, 64, "deberta"),
)  # fmt: skip


def checks(only):
    groups = []
    for size, terms, flags in product((64, 128), TERMS, FLAGS):  # a group compiles one variant
        if size == 128 and (terms, flags[0]) not in (
            ("shaw", ""),
            ("logits", ""),
            ("deberta", ""),
            ("values", ""),
            ("shaw", "padding"),
            ("shaw", "all"),
        ):
            continue
        if terms in ("keys", "biased", "logits", "values") and flags[0] not in ("", "padding"):
            continue
        group = []
        for masks, (lq, lk) in product(flags, LENGTHS):
            label = f"{terms} {masks} {size} {lq}x{lk}"
            group.append({"kind": "check", "name": label, "terms": terms, "masks": masks, "size": size, "lq": lq, "lk": lk,
                          "dtype": "float16" if terms == "biased" else "bfloat16"})  # fmt: skip
        groups.append(group)
    for terms, masks in product(("shaw", "values", "deberta"), ("", "causal", "padding")):
        groups.append(
            [{"kind": "check", "name": f"step {terms} {masks}", "step": True, "terms": terms, "masks": masks}]
        )
    wanted = lambda job: not only or any(part in job["name"] for part in only)  # noqa: E731
    groups = [[job for job in group if wanted(job)] for group in groups]
    return [group for group in groups if group]


def timings(only, pair):
    jobs = []
    for batch, heads, length, size, what in ROWS:
        terms, _, masks = what.partition(" ")
        name = f"B{batch} H{heads} L{length} D{size} | {what}"
        jobs.append({"kind": "time", "name": name, "batch": batch, "heads": heads, "length": length, "size": size, "terms": terms, "masks": masks, "pair": pair})  # fmt: skip
    return [job for job in jobs if not only or any(part in job["name"] for part in only)]


def warm_ups(jobs):
    found = {}
    for job in jobs:
        key = tuple(job[x] for x in ("terms", "masks", "size"))
        found[key] = {**job, "kind": "warm", "name": f"compile {key}", "batch": 1, "heads": 2, "length": 2304}
    return [[job] for job in found.values()]


# ---- in a process of its own ------------------------------------------------------------------------------------------
def make_plan(terms, heads, lq, lk, size, causal, dtype):
    import torch

    from posenc import Lookup, Plan, Positions, index

    positions = Positions((max(lk - lq, 0), lq), lk)

    def rows(spot, width=size):
        return (torch.randn(heads, spot.n, width, device="cuda", dtype=dtype) / 4).requires_grad_()

    spot = index.clip(64, 64)
    if terms == "logits":
        spot = index.Index(-1024, 0) if causal else index.clip(600, 300)
        states = torch.randn(1, heads, lq, 16, device="cuda", dtype=dtype).requires_grad_()
        lookup = Lookup(spot, dot_query=rows(spot, 16), states=states)
    elif terms == "deberta":
        spot = index.deberta_buckets(256, 512)
        lookup = Lookup(spot, dot_query=rows(spot), dot_key=rows(spot))
    elif terms == "keys":
        lookup = Lookup(spot, dot_key=rows(spot))
    elif terms == "values":
        lookup = Lookup(spot, dot_query=rows(spot), add_value=rows(spot))
    elif terms == "biased":
        lookup = Lookup(spot, dot_query=rows(spot), bias=torch.randn(heads, spot.n, device="cuda").requires_grad_())
    else:
        lookup = Lookup(spot, dot_query=rows(spot))
    return Plan(positions, lookups=(lookup,))


def release(enabled=True):
    """Every length and size by the content kernels, or by the Triton engine's."""
    from posenc.engines import gluon

    gluon.FEWEST = gluon.SHORTEST_BACKWARD = gluon.SHORTEST = 1
    gluon.SHORTEST_CONTENT_BACKWARD = 1 if enabled else 1 << 30
    gluon.SHORTEST_CONTENT = 1
    gluon.WIDE_OF_128 = True
    gluon.give_up = fail


def fail(error):
    raise error


class Call:
    """One backward pass, with what it needs."""

    def __init__(self, batch, heads, kv_heads, lq, lk, size, terms, masks, dtype, timed=False):
        import torch

        from posenc.engines.triton import launch, launcher

        release()
        self.masks = hopper.make_masks(masks, batch, lq, lk, timed)
        self.q, self.k, self.v = hopper.make_tensors(batch, heads, kv_heads, lq, lk, size, dtype, "transposed")
        self.plan = make_plan(terms, heads, lq, lk, size, "causal" in masks, dtype)
        self.x, self.num, self.scale = hopper.prepare(self.q, self.k, self.v, self.plan, **self.masks)
        self.do = torch.randn_like(self.q)
        self.launch = launcher.launch
        with torch.no_grad():
            self.out, self.lse, self.mass = launch.run_forward(self.launch, self.x, self.num, self.scale, 0.0)

    def run(self, is_pair=False):
        """The gradients, by name."""
        import torch

        from posenc.engines import gluon
        from posenc.engines.triton.arguments import GRADIENTS
        from posenc.engines.triton.launch import _without_joined_bias, run_backward
        from posenc.engines.triton.ops import finish_gradient

        release(not is_pair)
        if not is_pair:
            reason = gluon.refuse_content_backward(
                _without_joined_bias(self.x, self.num), self.num, self.scale, 0.0, self.do
            )
            assert reason is None, reason
        wanted = {name: getattr(self.x, name) is not None for name in GRADIENTS}
        with torch.no_grad():
            found = run_backward(self.launch, self.do, None, self.out, self.lse, self.mass, self.x, self.num, self.scale, 0.0, wanted)  # fmt: skip
            return {
                name: finish_gradient(self.launch, y, getattr(self.x, name)) for name, y in zip(GRADIENTS, found) if y is not None
            }  # fmt: skip


def check(job):
    import torch

    from tests import budget

    if job.get("step"):
        return check_step(job)
    dtype = getattr(torch, job["dtype"])
    call = Call(
        2 if job["lq"] < 2000 else 1, 4, 2, job["lq"], job["lk"], job["size"], job["terms"], job["masks"], dtype
    )
    expected, allowed = budget.expect(call.q, call.k, call.v, call.plan, call.do, **call.masks)
    first = call.run()
    for _ in range(3):
        now = call.run()
        same = {name: torch.equal(first[name], now[name]) for name in first if name not in ("q", "states")}
        assert all(same.values()) or any(x.isnan().any() for x in now.values()), f"different bits: {same}"
    results = {name: first.pop(name) for name in "qkv"}
    results["out"] = call.out
    for name, gradient in first.items():
        getattr(call.x, name).backward(gradient, retain_graph=True)
    results |= {name: x.grad for name, x in call.plan.tensors()}
    worst = {name: float(budget.excess(x, expected[name], allowed[name])) for name, x in results.items()}
    bad = {name: x for name, x in worst.items() if not x <= 1.0}
    if bad:
        nans = {name: int(results[name].isnan().sum()) for name in bad}
        return {"failed": f"of its budget: {worst}; NaN: {nans}"}
    return {"worst": max(worst.values())}


def check_step(job):
    """Through `attend`, with every gradient, four times: the second call is recorded, the third replays."""
    import torch

    from posenc import attend
    from posenc.engines.gluon import content_launch
    from tests import budget

    release()
    q, k, v = (x.requires_grad_() for x in hopper.make_tensors(1, 2, 1, 2300, 2300, 64, torch.bfloat16, "transposed"))
    plan = make_plan(job["terms"], 2, 2300, 2300, 64, "causal" in job["masks"], torch.bfloat16)
    masks = hopper.make_masks(job["masks"], 1, 2300, 2300)
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    g = torch.randn_like(q)
    expected, allowed = budget.expect(q, k, v, plan, g, **masks)
    calls, run = [], content_launch.run_backward
    content_launch.run_backward = lambda *args, **options: calls.append(1) or run(*args, **options)

    def step():
        out = attend(q, k, v, plan, engine="triton", **masks)
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)))

    worst = 0.0
    for _ in range(4):
        for name, ours in step().items():
            worst = max(worst, float(budget.excess(ours, expected[name], allowed[name])))
    assert calls, "the kernel was not used"
    return {"worst": worst} if worst <= 1.0 else {"failed": f"{worst} of a budget"}


def make_call(job):
    import torch

    return Call(job["batch"], job["heads"], job["heads"], job["length"], job["length"], job["size"], job["terms"], job["masks"], torch.bfloat16, True)  # fmt: skip


def warm_up(job):
    call = make_call(job)
    call.run()
    if job["pair"]:
        call.run(True)
    if call.x.table is not None:
        time_gathered(call)
    if call.x.key_table is not None:
        time_windows(call)
    return {}


def measure(job):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from posenc import attend
    from posenc.engines.gluon.backward_prepare import prepare_content
    from posenc.engines.gluon.content_backward import backward_content

    call = make_call(job)
    launch = call.launch

    def only(kernel, *args, **options):
        if kernel in (prepare_content, backward_content):
            launch(kernel, *args, **options)

    call.run()
    found = {"ours": hopper.time_graph(call.run)}
    if call.x.table is not None:
        found["gathered"] = time_gathered(call)
    if job["pair"]:
        found["pair"] = hopper.time_graph(lambda: call.run(True))
        release()
    if call.x.key_table is not None:
        found |= time_windows(call)
    call.launch = only
    found["kernel"] = hopper.time_graph(call.run)
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    causal = "causal" in job["masks"]
    # not call.plan: what call.x holds was made of its tables on another stream, which a captured backward pass must not wait for
    plan = make_plan(job["terms"], job["heads"], job["length"], job["length"], job["size"], causal, torch.bfloat16)

    def plain():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def step(forward, leaves):
        return hopper.time_graph(lambda: torch.autograd.grad(forward(), leaves, call.do))

    with torch.no_grad():
        found["cudnn_forward"] = hopper.time_graph(plain)
        found["forward"] = hopper.time_graph(lambda: attend(q, k, v, plan, **call.masks))
    found["cudnn_step"] = step(plain, (q, k, v))
    found["step"] = step(lambda: attend(q, k, v, plan, **call.masks), (q, k, v, *(x for _, x in plan.tensors())))
    found = {name: round(ms, 4) for name, ms in found.items()}
    return {**found, "ratio": round(found["step"] / found["cudnn_step"], 3)}


def time_gathered(call):
    """With no tiles of bands copied by TMA."""
    from posenc.engines.gluon import content_launch

    before = content_launch.SCHEDULES.copy()
    content_launch.SCHEDULES.update({size: one._replace(copied=0) for size, one in before.items()})
    try:
        return hopper.time_graph(call.run)
    finally:
        content_launch.SCHEDULES.update(before)


def time_windows(call):
    """The forward kernel alone, with other tiles."""
    import torch

    from posenc.engines.gluon import window_launch
    from posenc.engines.triton.launch import _make_cols

    cols = _make_cols(call.launch, call.x, call.num, call.x.kind(call.num), False)
    found = {}
    for tile in ((64, 4, 1), (64, 4, 2)):
        with torch.no_grad():
            found[f"window {tile}"] = hopper.time_graph(
                lambda: window_launch.run_forward(call.launch, call.x, call.num, call.scale, call.out, call.lse, window_launch.WindowTile(*tile), cols)  # noqa: B023
            )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--skip", default="")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--share", type=float, default=0.55, help="of the seconds, for checks and compilations")
    parser.add_argument("--pair", action="store_true", help="time the Triton pair too, which compiles for long")
    parser.add_argument("--warm", action="store_true", help="compile what is timed, though nothing is timed now")
    parser.add_argument("--lengths", help="of checks: 65x65,1300x700")
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    if args.work:
        hopper.work(check, measure, warm_up)
        return
    hopper.Worker.module = "tests.gpu.gluon_content"
    hopper.STALL.update(check=40.0, time=25.0, warm=40.0)
    began = time.monotonic()

    def save():
        if args.out:
            Path(args.out).write_text(json.dumps({"checks": checked, "times": timed}, indent=1))

    checked, timed = hopper.Answers(save), hopper.Answers(save)
    if "check" not in args.skip:
        warm = warm_ups(timings(args.only, args.pair)) if args.warm or "time" not in args.skip else []
        share = 1.0 if "time" in args.skip else args.share
        tested = checks(args.only)
        if args.lengths:
            keep = [f" {x}" for x in args.lengths.split(",")]
            tested = [
                [job for job in group if job.get("step") or job["name"].endswith(tuple(keep))] for group in tested
            ]
        hopper.run_all(warm + tested, 15, began + share * args.seconds, checked)
    if "time" not in args.skip:
        hopper.run_all([[job] for job in timings(args.only, args.pair)], 1, began + args.seconds, timed)
    save()
    failed = [x for x in checked if "failed" in x]
    left = sum("left out" in x for x in checked)
    worst = max((x["worst"] for x in checked if "worst" in x), default=0)
    for x in failed:
        print("FAILED", x["name"], x["failed"])
    print(f"{len(checked) - len(failed) - left} passed, {len(failed)} failed, {left} left out; worst {worst:.2f} of a budget; "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    for x in timed:
        print(f"{x['name']:45} " + " ".join(f"{a} {x[a]}" for a in ("ours", "gathered", "kernel", "pair", "window (64, 4, 1)", "window (64, 4, 2)", "forward", "step", "cudnn_forward", "cudnn_step", "ratio", "failed", "left out") if a in x))  # fmt: skip


if __name__ == "__main__":
    main()
