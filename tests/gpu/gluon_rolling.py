"""The Gluon backward pass with a content term over every distance (Transformer-XL) on a Hopper GPU: checked against float64, then timed.

    python -m tests.gpu.gluon_rolling --out FILE.json [--only causal,step] [--skip check,time] [--seconds 80] [--pair]
    python -m tests.gpu.gluon_rolling --profile [--seconds 20]        which kernels a training step of the encoding launches, and their times

Jobs run in processes of their own, as in tests/gpu/hopper.py. Times are replayed graphs: of the backward pass with all that belongs to it, of its two
kernels alone, of the Triton pair (--pair), and of a whole step through `attend`, beside cuDNN's without positions.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import product
from pathlib import Path

from tests.gpu import gluon_calls, hopper

FLAGS = (("", "causal"), ("window", "band"), ("padding", "causal padding"), ("causal documents",), ("all",))
LENGTHS = ((600, 600), (1, 1), (65, 65), (129, 200), (1000, 1000), (1300, 700), (2500, 2500))
ROWS = (  # batch, heads, length, masks
    (4, 16, 4096, ""), (4, 16, 4096, "causal"), (1, 16, 16384, ""), (1, 16, 16384, "causal"), (8, 12, 2048, ""), (8, 12, 2048, "causal"),
    (16, 12, 1024, ""), (16, 12, 1024, "causal"), (16, 12, 512, ""), (16, 12, 512, "causal"), (4, 16, 4096, "no bias"), (4, 16, 4096, "padding"),
)  # fmt: skip
LONGEST_PAIR = 2048  # the Triton pair is timed up to this length, with --pair
SCHEDULES = ({"turns": False}, {"key_turns": False})


DEPTHS = ((4, 6, False), (5, 6, True), (4, 8, True), (3, 5, True))  # stages, ring and turns of the forward pass


def checks(only):
    groups = []
    for bias, flags in product((True, False), FLAGS):  # a group compiles one variant
        if bias or flags[0] == "":
            groups.append([
                {"kind": "check", "name": f"{'bias' if bias else 'no bias'} {masks} {lq}x{lk}", "bias": bias, "masks": masks, "lq": lq, "lk": lk}
                for (lq, lk), masks in product(LENGTHS, flags)
            ])  # fmt: skip
    groups += [
        [{"kind": "check", "name": f"step {masks}", "step": True, "masks": masks}]
        for masks in ("", "causal", "padding")
    ]
    return gluon_calls.chosen(groups, only)


def timings(only, pair, variants):
    jobs = []
    for number, (batch, heads, length, masks) in enumerate(ROWS):
        name = f"B{batch} H{heads} L{length} | {masks}"
        jobs.append({"kind": "time", "name": name, "batch": batch, "heads": heads, "length": length, "masks": masks, "schedules": variants and number == 0, "kernels": number < 2,
                     "pair": pair and length <= LONGEST_PAIR})  # fmt: skip
    return [job for (job,) in gluon_calls.chosen([[job] for job in jobs], only)]


def warm_ups(jobs):
    """Padding, no bias or neither: each is a variant, and so is each schedule; the pair has its own for each length."""
    small = [{**job, "kind": "warm", "name": f"compile {job['name']}", "batch": 1, "heads": 2, "length": min(job["length"], 2304)} for job in jobs]  # fmt: skip
    found = {
        ("padding" in job["masks"], "no bias" in job["masks"], job["pair"] and job["length"]): job
        for job in reversed(small)
    }
    variants = [{"schedule": x} for x in SCHEDULES] + [{"depth": x} for x in DEPTHS]
    return [[job] for job in found.values()], [
        [{**job, **x}] for job in small[:1] if job["schedules"] for x in variants
    ]


# ---- in a process of its own ------------------------------------------------------------------------------------------
def make_plan(heads, lq, lk, bias):
    import torch

    from posenc import Lookup, Plan, Positions, index

    positions = Positions((max(lk - lq, 0), lq), lk)
    spot = index.exact(positions)
    table = (torch.randn(heads, spot.n, 64, device="cuda", dtype=torch.bfloat16) / 4).requires_grad_()
    bias = torch.randn(heads, spot.n, device="cuda").requires_grad_() if bias else None
    return Plan(positions, lookups=(Lookup(spot, dot_query=table, bias=bias),))


def release(enabled=True):
    from posenc.engines import gluon

    gluon._failures[:] = [] if enabled else ["the pair is asked for"]
    gluon.FEWEST = gluon.SHORTEST = 1
    gluon.give_up = gluon_calls.fail


class Call(gluon_calls.Call):
    release = staticmethod(release)

    def __init__(self, batch, heads, kv_heads, lq, lk, masks, bias=True, timed=False):
        import torch

        plan = partial(make_plan, heads, lq, lk, bias and "no bias" not in masks)
        super().__init__(batch, heads, kv_heads, lq, lk, 64, masks, torch.bfloat16, plan, timed)

    def refuse(self, *given):
        from posenc.engines import gluon

        return gluon.refuse_rolling_backward(*given)

    def run_forward(self, depth):
        import torch

        from posenc.engines.gluon.rolling_launch import Depth, run_forward

        with torch.no_grad():
            run_forward(self.launch, self.x, self.num, self.scale, self.out, self.lse, Depth(*depth))

    def run_kernel(self, name, schedule=None):
        """One kernel, and what prepares it."""
        import torch

        from posenc.engines.gluon import rolling_backward_launch

        def launch(kernel, *args, **options):
            if kernel.__name__ in ("prepare", "prepare_rolling", "split_bias", name):
                self.launch(kernel, *args, **options)

        grads = [torch.empty_like(y) for y in (self.q, self.k, self.v)]
        schedule = rolling_backward_launch.RollingSchedule(**(schedule or {}))
        with torch.no_grad():
            rolling_backward_launch.run_backward(launch, self.do, None, self.out, self.lse, self.x, self.num, self.scale, *grads, schedule)  # fmt: skip


def check(job):
    if job.get("step"):
        from posenc.engines.gluon import rolling_backward_launch

        release()
        return gluon_calls.check_step(partial(make_plan, 2, 2300, 2300, True), job["masks"], rolling_backward_launch)
    return Call(4 if job["lq"] < 900 else 1, 4, 2, job["lq"], job["lk"], job["masks"], job["bias"]).check()


def make_call(job):
    return Call(job["batch"], job["heads"], job["heads"], job["length"], job["length"], job["masks"], timed=True)


def warm_up(job):
    call = make_call(job)
    if "depth" in job:
        call.run_forward(job["depth"])
        return {}
    if "schedule" in job:
        call.run_kernel(kernel_of(job["schedule"]), job["schedule"])
        return {}
    call.run()
    if job["pair"]:
        call.run(True)
    return {}


def kernel_of(schedule):
    return "backward_rolling_keys" if any("key" in name for name in schedule) else "backward_rolling"


def measure(job):
    found = {}
    try:
        for name, x in times(job):
            found[name] = round(x, 4)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error.__context__ or error)[:300]}"
    if "step" in found:
        found["ratios"] = [round(found[x] / found[f"cudnn_{x}"], 3) for x in ("forward", "step")]
    return found


def times(job):
    """(name, milliseconds or MB), the most important ones first."""
    import torch

    from posenc import attend

    call = make_call(job)
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    # not call.plan: what call.x holds was made of its tables on another stream, which a captured backward pass must not wait for
    plan = make_plan(job["heads"], job["length"], job["length"], "no bias" not in job["masks"])

    def plain():
        return gluon_calls.plain_attention(q, k, v, "causal" in job["masks"])

    def ours():
        return attend(q, k, v, plan, **call.masks)

    leaves = (q, k, v, *(x for _, x in plan.tensors()))
    with torch.no_grad():
        yield "cudnn_forward", hopper.time_graph(plain)
        yield "forward", hopper.time_graph(ours)
    yield "cudnn_step", hopper.time_graph(lambda: torch.autograd.grad(plain(), (q, k, v), call.do))
    yield "step", hopper.time_graph(lambda: torch.autograd.grad(ours(), leaves, call.do))
    for is_pair in (False, True) if job["pair"] else (False,):
        name = "pair" if is_pair else "backward"
        call.run(is_pair)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call.run(is_pair)
        yield f"{name}_MB", (torch.cuda.max_memory_allocated() - before) >> 20
        yield name, hopper.time_graph(lambda: call.run(is_pair))  # noqa: B023
    release()
    for kernel in ("backward_rolling", "backward_rolling_keys", "sum_tables", "none") if job["kernels"] else ():
        yield kernel, hopper.time_graph(lambda: call.run_kernel(kernel))  # noqa: B023
    for schedule in SCHEDULES if job["schedules"] else ():
        yield str(schedule), hopper.time_graph(lambda: call.run_kernel(kernel_of(schedule), schedule))  # noqa: B023
    for depth in DEPTHS if job["schedules"] else ():
        yield f"forward {depth}", hopper.time_graph(lambda: call.run_forward(depth))  # noqa: B023


def profile(seconds):
    """The kernels of a step of TransformerXL, its projection included: microseconds and launches."""
    import torch
    from torch.profiler import ProfilerActivity

    from posenc import Positions, TransformerXL, attend

    began = time.monotonic()
    for batch, heads, length, causal in (
        (4, 16, 4096, False),
        (4, 16, 4096, True),
        (16, 12, 512, False),
        (1, 16, 16384, False),
    ):
        if time.monotonic() - began > seconds:
            break
        encoding = TransformerXL(d_model=64 * heads, heads=heads, causal=causal).to("cuda", torch.bfloat16)
        q, k, v = (
            x.requires_grad_()
            for x in hopper.make_tensors(batch, heads, heads, length, length, 64, torch.bfloat16, "transposed")
        )
        g, leaves = torch.randn_like(q), (q, k, v, *encoding.parameters())

        def step():
            out = attend(q, k, v, encoding.plan(Positions(length)), causal=causal)  # noqa: B023
            return torch.autograd.grad(out, leaves, g)  # noqa: B023

        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        events = [x for x in record.key_averages() if x.device_time_total]
        print(
            f"B{batch} H{heads} L{length} {'causal' if causal else ''}: {sum(x.device_time_total for x in events) / 5:.0f} µs of kernels",
            flush=True,
        )
        for x in sorted(events, key=lambda x: -x.device_time_total)[:24]:
            print(f"  {x.device_time_total / 5:9.1f} µs {x.count / 5:5.1f} x  {x.key[:110]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--skip", default="")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--pair", action="store_true", help="time the Triton pair too, which compiles for long")
    parser.add_argument("--warm", action="store_true", help="compile what is timed, and nothing else")
    parser.add_argument("--variants", action="store_true", help="time other schedules too")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile(args.seconds)
        return
    if args.work:
        hopper.work(check, measure, warm_up)
        return
    hopper.Worker.module = "tests.gpu.gluon_rolling"
    hopper.STALL.update(check=40.0, time=25.0, warm=40.0)
    began = time.monotonic()

    def save():
        if args.out:
            Path(args.out).write_text(json.dumps({"checks": checked, "times": timed}, indent=1))

    checked, timed = hopper.Answers(save), hopper.Answers(save)
    jobs = timings(args.only, args.pair, args.variants)
    if "check" not in args.skip:  # what is timed is compiled beside them
        share = 1.0 if "time" in args.skip or args.warm else 0.5
        kernels, schedules = warm_ups(jobs)
        tested = [] if args.warm else checks(args.only)
        hopper.run_all(kernels + tested + schedules, args.workers, began + share * args.seconds, checked)
    jobs = [] if "time" in args.skip or args.warm else jobs
    hopper.run_all([[job] for job in jobs], 1, began + args.seconds, timed)
    save()
    gluon_calls.print_checks(checked, time.monotonic() - began)
    for x in timed:
        print(x["name"], {a: b for a, b in x.items() if a not in ("name", "seconds")})


if __name__ == "__main__":
    main()
