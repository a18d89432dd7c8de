"""The Gluon backward pass with content terms on a Hopper GPU: checked against float64, then timed beside cuDNN's and the Triton pair.

    python -m tests.gpu.gluon_content --out FILE.json [--only shaw,step] [--skip check,time] [--seconds 110]

Jobs run in processes of their own, as in tests/gpu/hopper.py. Times are replayed graphs: of the backward pass alone with all that belongs to
it (bands, products with tables), ours and the pair's; and of a whole step through `attend`, beside cuDNN's without positions.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import product
from pathlib import Path

from tests.gpu import gluon_calls, hopper

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
            if terms == "logits" and lk < 512:  # tiles would reach beyond the bands: the kernel refuses the call
                continue
            label = f"{terms} {masks} {size} {lq}x{lk}"
            group.append({"kind": "check", "name": label, "terms": terms, "masks": masks, "size": size, "lq": lq, "lk": lk,
                          "dtype": "float16" if terms == "biased" else "bfloat16"})  # fmt: skip
        groups.append(group)
    for terms, masks in product(("shaw", "values", "deberta"), ("", "causal", "padding")):
        groups.append(
            [{"kind": "check", "name": f"step {terms} {masks}", "step": True, "terms": terms, "masks": masks}]
        )
    return gluon_calls.chosen(groups, only)


def timings(only, pair):
    jobs = []
    for batch, heads, length, size, what in ROWS:
        terms, _, masks = what.partition(" ")
        name = f"B{batch} H{heads} L{length} D{size} | {what}"
        jobs.append({"kind": "time", "name": name, "batch": batch, "heads": heads, "length": length, "size": size, "terms": terms, "masks": masks, "pair": pair})  # fmt: skip
    return [job for (job,) in gluon_calls.chosen([[job] for job in jobs], only)]


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
    gluon.give_up = gluon_calls.fail


class Call(gluon_calls.Call):
    release = staticmethod(release)

    def __init__(self, batch, heads, kv_heads, lq, lk, size, terms, masks, dtype, timed=False):
        plan = partial(make_plan, terms, heads, lq, lk, size, "causal" in masks, dtype)
        super().__init__(batch, heads, kv_heads, lq, lk, size, masks, dtype, plan, timed)

    def refuse(self, *given):
        from posenc.engines import gluon

        return gluon.refuse_content_backward(*given)


def check(job):
    import torch

    if job.get("step"):
        from posenc.engines.gluon import content_launch

        release()
        plan = partial(make_plan, job["terms"], 2, 2300, 2300, 64, "causal" in job["masks"], torch.bfloat16)
        return gluon_calls.check_step(plan, job["masks"], content_launch)
    batch, dtype = 2 if job["lq"] < 2000 else 1, getattr(torch, job["dtype"])
    call = Call(batch, 4, 2, job["lq"], job["lk"], job["size"], job["terms"], job["masks"], dtype)
    return call.check(by_atomics=("q", "states"))


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
        return gluon_calls.plain_attention(q, k, v, causal)

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
    gluon_calls.print_checks(checked, time.monotonic() - began)
    for x in timed:
        print(f"{x['name']:45} " + " ".join(f"{a} {x[a]}" for a in ("ours", "gathered", "kernel", "pair", "window (64, 4, 1)", "window (64, 4, 2)", "forward", "step", "cudnn_forward", "cudnn_step", "ratio", "failed", "left out") if a in x))  # fmt: skip


if __name__ == "__main__":
    main()
