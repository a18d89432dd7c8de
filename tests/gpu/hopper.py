"""The Gluon forward pass on a Hopper GPU: checked against float64, then timed beside cuDNN, FlashAttention and the triton kernels.

    python -m tests.gpu.hopper --out FILE.json [--only t5,none] [--skip check,time] [--seconds 170]

Jobs run in processes of their own, which are killed when a job takes too long; the next job goes on in a new one. Checks run side by
side, since each variant takes seconds to compile; timings run alone.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 63, 64, 65, 127, 129, 1000, 4096)
TILES = {
    "128": (128, 4),
    "128 free": (128, 4, False),
    "128 16 heads": (128, 4, True, 16),
    "64": (64, 4),
    "64 free": (64, 4, False),
    "64 16 heads": (64, 4, True, 16),
}
"""Keys, stages, turns, heads: launch.Tile."""
BY_SIZE = {64: ["128", "128 free", "128 16 heads"], 128: ["64", "64 free", "64 16 heads"]}
STALL = {"check": 75.0, "time": 45.0, "warm": 75.0}  # seconds for one job, compilation included


# ---- what is checked and timed ----------------------------------------------------------------------------------------
def checks(only):
    """Jobs in groups that share their compiled variants: (tile, terms, causal, size, dtype)."""
    groups = []
    for terms, causal in product(("t5", "none", "alibi", "both"), (False, True)):
        for tile in ("128", "128 free") if terms == "t5" else ("128",):
            groups.append([case(tile, terms, causal, 64, "bfloat16", *more) for more in shapes(terms, causal)])
        if terms != "none":
            groups.append([case("64", terms, causal, 128, "bfloat16", *more) for more in shapes(terms, causal)])
        for size, tile in ((64, "128"), (128, "64")):
            groups.append([case(tile, terms, causal, size, "bfloat16", *more) for more in padded_shapes()])
    groups.append([case("128", "clip", True, 64, "float16", *more) for more in shapes("clip", True)])
    steps = [{"kind": "check", "name": f"step {terms} {causal}", "step": True, "terms": terms, "causal": causal}
             for terms, causal in product(("t5", "alibi", "both"), (False, True))]  # fmt: skip
    groups += [[step] for step in steps]
    groups = [[job for job in group if not only or any(part in job["name"] for part in only)] for group in groups]
    return [group for group in groups if group]


def shapes(terms, causal):
    """(batch, heads, kv_heads, queries, keys, first query, layout)"""
    yield from ((1, 2, 2, length, length, 0, "plain") for length in LENGTHS)
    yield 2, 4, 2, 1000, 1000, 0, "transposed"
    yield 1, 4, 1, 700, 1300, 600, "packed"
    yield 2, 2, 2, 1300, 700, 0, "plain"
    yield 1, 2, 2, 64, 2000, 1936, "plain"
    if terms in ("t5", "both"):
        yield 1, 2, 1, 1500, 1500, 37, "wide span"


def padded_shapes():
    for lq, lk in ((1, 1), (65, 65), (129, 200), (1000, 1000), (4096, 4096), (1300, 700)):
        yield 4, 2, 1, lq, lk, max(lk - lq, 0), "padded"


def case(tile, terms, causal, size, dtype, batch, heads, kv_heads, lq, lk, start, layout):
    name = f"{terms}{' causal' if causal else ''} {size} {dtype} {batch}x{heads}/{kv_heads} {lq}x{lk}+{start} {layout} [{tile}]"
    return {
        "kind": "check", "name": name, "tile": tile, "terms": terms, "causal": causal, "size": size, "dtype": dtype, "batch": batch,
        "heads": heads, "kv_heads": kv_heads, "lq": lq, "lk": lk, "start": start, "layout": layout,
    }  # fmt: skip


def timings(only):
    jobs = []
    for batch, heads, length, size, causal in (
        (4, 16, 4096, 64, False), (4, 16, 4096, 64, True), (2, 32, 8192, 128, True), (1, 16, 16384, 64, False),
        (1, 16, 16384, 64, True), (4, 16, 4096, 128, True), (4, 16, 4096, 128, False), (16, 12, 1024, 64, False),
        (16, 12, 2048, 64, True), (32, 12, 512, 64, False), (64, 12, 256, 64, False), (64, 12, 128, 64, False), (8, 12, 512, 64, False),
        (4, 12, 512, 64, True), (1, 12, 1024, 64, False), (1, 12, 2048, 64, True), (1, 32, 2048, 128, True), (2, 12, 1024, 64, False),
    ):  # fmt: skip
        shape = {"batch": batch, "heads": heads, "length": length, "size": size, "causal": causal, "kind": "time"}
        about = f"B{batch} H{heads} L{length} D{size}{' causal' if causal else ''}"
        jobs.append({**shape, "name": f"{about} | peers", "tile": None, "terms": "t5"})
        is_first = (batch, length) in ((4, 4096), (2, 8192))
        tiles = {"t5": BY_SIZE[size] if is_first else BY_SIZE[size][:2], "none": [], "alibi": []}
        if is_first:
            tiles["none"], tiles["alibi"] = BY_SIZE[size][:2], BY_SIZE[size][:1]
        for terms, names in tiles.items():
            for tile in names:
                if "heads" in tile and not causal:
                    continue
                jobs.append({**shape, "name": f"{about} | {terms} [{tile}]", "tile": tile, "terms": terms})
        if length >= 512:
            jobs.append(
                {**jobs[-1], "name": f"{about} | t5 padded", "tile": BY_SIZE[size][0], "terms": "t5", "padded": True}
            )
    return [job for job in jobs if not only or any(part in job["name"] for part in only)]


def warm_ups(jobs):
    """The same kernels on short tensors, so that nothing is compiled while times are taken."""
    found = {}
    for job in jobs:
        if job["tile"] is not None:
            key = (*(job[x] for x in ("tile", "terms", "causal", "size")), job.get("padded"))
            found[key] = {**job, "kind": "warm", "name": f"compile {key}", "batch": 1, "length": 256}
    return [[job] for job in found.values()]


# ---- in a process of its own ------------------------------------------------------------------------------------------
def work():
    """Runs the jobs that come as lines of JSON, and answers each with a line."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    for line in sys.stdin:
        job = json.loads(line)
        began = time.monotonic()
        try:
            torch.manual_seed(0)
            answer = {"check": check, "time": measure, "warm": warm_up}[job["kind"]](job)
            torch.cuda.synchronize()
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
        torch.cuda.empty_cache()
        print(
            "ANSWER " + json.dumps({"name": job["name"], **answer, "seconds": round(time.monotonic() - began, 1)}),
            flush=True,
        )


def make_plan(terms, heads, lq, lk, start, size, causal, layout=""):
    import torch

    from posenc import Lookup, Plan, Positions, index

    positions = Positions((start, lq), lk)
    table = lambda n: torch.randn(heads, n, device="cuda")  # noqa: E731
    slopes = torch.rand(heads, device="cuda") / 8
    spot = index.clip(700, 500) if layout == "wide span" else index.log_buckets(32, 128, causal=causal)
    lookups = (Lookup(spot, bias=table(spot.n)),)
    if terms == "clip":
        lookups = (Lookup(index.clip(5, 300), bias=table(306)),)
    if terms == "both":
        apart = index.Index(3, 9)  # a span without distance 0
        spot = apart if layout in ("transposed", "packed") else spot
        lookups = (Lookup(spot, bias=table(spot.n)),)
    return {
        "t5": lambda: Plan(positions, lookups=lookups, scale=1.0 if size == 64 else None), "clip": lambda: Plan(positions, lookups=lookups),
        "none": lambda: Plan(positions), "alibi": lambda: Plan(positions, slopes=slopes),
        "both": lambda: Plan(positions, lookups=lookups, slopes=slopes),
    }[terms]()  # fmt: skip


def make_tensors(batch, heads, kv_heads, lq, lk, size, dtype, layout):
    import torch

    def make(h, length):
        if layout == "transposed":
            return torch.randn(batch, length, h, size, device="cuda", dtype=dtype).transpose(1, 2)
        if layout == "packed":
            return torch.randn(batch, length, h, 3 * size, device="cuda", dtype=dtype)[..., size : 2 * size].transpose(
                1, 2
            )
        return torch.randn(batch, h, length, size, device="cuda", dtype=dtype)

    return make(heads, lq), make(kv_heads, lk), make(kv_heads, lk)


def prepare(q, k, v, plan, causal, **masks):
    """What the triton engine's operator is given."""
    from posenc.core.mask import make_mask
    from posenc.engines.lowering import lower_plan
    from posenc.engines.triton.arguments import kernel_arguments

    return kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, causal=causal, **masks)))


def run(inputs, numbers, scale, tile):
    import torch

    from posenc.engines.gluon import launch
    from posenc.engines.triton import launcher

    out = inputs.q.new_empty(inputs.q.shape)
    lse = out.new_empty(*out.shape[:2], -(-out.shape[2] // 64) * 64, dtype=torch.float32)
    return launch.run_forward(launcher.launch, inputs, numbers, scale, out, lse, launch.Tile(*TILES[tile]))


def check(job):
    import torch

    from tests import budget

    if job.get("step"):
        return check_step(job)
    dtype = getattr(torch, job["dtype"])
    q, k, v = make_tensors(
        job["batch"], job["heads"], job["kv_heads"], job["lq"], job["lk"], job["size"], dtype, job["layout"]
    )
    if job["terms"] == "t5" and job["size"] == 64:
        q = q / 8
    plan = make_plan(
        job["terms"], job["heads"], job["lq"], job["lk"], job["start"], job["size"], job["causal"], job["layout"]
    )
    masks = {}
    if job["layout"] == "padded":  # on the right, on the left, with gaps, of a whole row
        at = torch.arange(job["lk"], device="cuda")
        masks["key_mask"] = torch.stack((at < 0.7 * job["lk"], at >= 0.3 * job["lk"], at % 7 != 3, at < 0))
    given = prepare(q, k, v, plan, job["causal"], **masks)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    first = None
    for _ in range(10):
        out, lse, _ = run(*given, job["tile"])
        now = (out, lse[..., : job["lq"]])
        first = first or now
        assert all(torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip((first[0], first[1].contiguous()), now)), "different bits"  # fmt: skip
    torch.use_deterministic_algorithms(False)
    out, lse = first
    lse = torch.where(lse == float("inf"), float("-inf"), lse * 0.6931471805599453)
    expected, allowed = budget.expect(q, k, v, plan, causal=job["causal"], **masks)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")
    return {"worst": max(budget.excess(a, expected[x], allowed[x]) for a, x in ((out, "out"), (lse, "lse")))}


def check_step(job):
    """Through `attend`, with every gradient."""
    import torch

    from posenc import attend
    from posenc.engines import gluon
    from tests import budget
    from tests.plans import mapped

    gluon.SHORTEST, gluon.FEWEST = 1, 1
    q, k, v = (x.requires_grad_() for x in make_tensors(1, 4, 2, 1100, 1100, 64, torch.bfloat16, ""))
    plan = mapped(make_plan(job["terms"], 4, 1100, 1100, 0, 128, job["causal"]), lambda name, x: x.requires_grad_())
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    g = torch.randn_like(q)
    worst = 0.0
    expected, allowed = budget.expect(q, k, v, plan, g, causal=job["causal"])
    for _ in range(4):  # the second call is recorded, the third replays
        out = attend(q, k, v, plan, causal=job["causal"], engine="triton")
        results = {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)))}
        for name, ours in results.items():
            budget.assert_within(ours, expected[name], allowed[name], name)
            worst = max(worst, budget.excess(ours, expected[name], allowed[name]))
    return {"worst": worst}


def padding(job, length):
    """The last eighth of the keys is padding."""
    import torch

    return {"key_mask": torch.arange(length, device="cuda")[None] < 7 * length // 8} if job.get("padded") else {}


def warm_up(job):
    import torch

    heads, length, size = job["heads"], job["length"], job["size"]
    q, k, v = make_tensors(1, heads, heads, length, length, size, torch.bfloat16, "")
    plan = make_plan(job["terms"], heads, length, length, 0, size, job["causal"])
    run(*prepare(q, k, v, plan, job["causal"], **padding(job, length)), job["tile"])
    return {}


def measure(job):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from posenc import attend
    from posenc.engines import gluon

    batch, heads, length, size, causal = (job[x] for x in ("batch", "heads", "length", "size", "causal"))
    q, k, v = make_tensors(batch, heads, heads, length, length, size, torch.bfloat16, "")
    plan = make_plan(job["terms"], heads, length, length, 0, size, causal)

    def plain(backend):
        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    cudnn = plain(SDPBackend.CUDNN_ATTENTION)
    with torch.no_grad():
        before = time_graph(cudnn)
        if job["tile"] is None:
            gluon.FEWEST = 1 << 30
            found = {"flash": time_graph(plain(SDPBackend.FLASH_ATTENTION))}
            found["triton"] = time_graph(lambda: attend(q, k, v, plan, causal=causal, engine="triton"))
            masks = padding({"padded": True}, length)
            found["padded"] = time_graph(lambda: attend(q, k, v, plan, causal=causal, engine="triton", **masks))
        else:
            given = prepare(q, k, v, plan, causal, **padding(job, length))
            run(*given, job["tile"])
            torch.cuda.synchronize()
            found = {"ours": time_graph(lambda: run(*given, job["tile"]))}
        cudnn_ms = min(before, time_graph(cudnn))
    products = 4 * batch * heads * length * length * size / (2 if causal else 1)
    rates = {f"{name}_tflops": round(products / ms / 1e9) for name, ms in found.items()}
    ratios = {f"{name}_x": round(ms / cudnn_ms, 3) for name, ms in found.items()}
    return {"cudnn": round(cudnn_ms, 4), **{name: round(ms, 4) for name, ms in found.items()}, **ratios, **rates}


def time_graph(call, calls=5, repeats=12):
    """Milliseconds of a call: the median of replays."""
    import torch

    from posenc.bench.measure import capture_graph

    replay = capture_graph(call, calls=calls)
    replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return sorted(times)[len(times) // 2]


# ---- the parent -------------------------------------------------------------------------------------------------------
class Worker:
    """A process that answers jobs one at a time; a new one after a hang or a crash."""

    def __init__(self):
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.gpu.hopper", "--work"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self.read, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def read(process, lines):
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def ask(self, job, seconds):
        if self.process is None:
            self.start()
            seconds += 30  # for imports
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        until, last = time.monotonic() + seconds, []
        while True:
            try:
                line = self.lines.get(timeout=max(until - time.monotonic(), 0.01))
            except queue.Empty:
                self.stop()
                return {"name": job["name"], "failed": f"no answer in {seconds:.0f} s: a hang, or a slow compilation"}
            if line is None:
                self.stop()
                return {"name": job["name"], "failed": "the process died: " + " ".join(last[-3:])[:400]}
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
            last.append(line.strip())

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


def run_all(groups, workers, until, answers):
    todo: queue.Queue = queue.Queue()
    for group in groups:
        todo.put(group)

    def loop():
        worker = Worker()
        while True:
            try:
                group = todo.get_nowait()
            except queue.Empty:
                break
            broken = 0
            for job in group:
                if time.monotonic() > until or broken > 1:
                    answers.append(
                        {"name": job["name"], "left out": "no time" if broken < 2 else "its variant failed twice"}
                    )
                    continue
                answer = worker.ask(job, min(STALL[job["kind"]], until - time.monotonic() + 5))
                broken += worker.process is None
                if "failed" in answer and ("illegal" in answer["failed"] or "CUDA error" in answer["failed"]):
                    worker.stop()
                answers.append(answer)
                if "failed" in answer or job["kind"] == "time":
                    print(json.dumps(answer), flush=True)
        worker.stop()

    threads = [threading.Thread(target=loop) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--skip", default="")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    if args.work:
        work()
        return
    began = time.monotonic()
    checked, timed = [], []
    if "check" not in args.skip:
        warm = [] if "time" in args.skip else warm_ups(timings(args.only))
        run_all(checks(args.only) + warm, 14, began + 0.5 * args.seconds, checked)
        failed = [x for x in checked if "failed" in x]
        left = sum("left out" in x for x in checked)
        print(f"{len(checked) - len(failed) - left} checks passed, {len(failed)} failed, {left} left out; worst "
              f"{max((x['worst'] for x in checked if 'worst' in x), default=0):.2f} of a budget; {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    if "time" not in args.skip:
        run_all([[job] for job in timings(args.only)], 1, began + args.seconds, timed)
    if args.out:
        Path(args.out).write_text(json.dumps({"checks": checked, "times": timed}, indent=1))
    print(f"{'':52} {'cuDNN':>8} {'flash':>7} {'triton':>7} {'padded':>7} {'ours':>7}   x     TFLOP/s")
    for x in timed:
        if "cudnn" in x:
            cells = [f"{x[name]:.3f}" if name in x else "" for name in ("cudnn", "flash", "triton", "padded", "ours")]
            ratio = x.get("ours_x", x.get("triton_x", 0))
            print(
                f"{x['name']:52} {cells[0]:>8} {cells[1]:>7} {cells[2]:>7} {cells[3]:>7} {cells[4]:>7}  {ratio:.3f}  {x.get('ours_tflops', x.get('triton_tflops'))}"
            )
        else:
            print(f"{x['name']:52} {x.get('failed') or x.get('left out')}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
