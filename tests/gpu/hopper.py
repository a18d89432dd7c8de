"""The Gluon forward pass on a Hopper GPU: checked against float64, then timed beside cuDNN and the triton kernels.

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
LENGTHS = (1, 63, 64, 65, 127, 129, 191, 193, 1000, 4096)
TERMS = ("t5", "none", "alibi", "both", "shaw", "logits", "xl")
CONTENT = ("shaw", "logits", "xl")
MASKS = ("", "causal", "window", "band", "padding", "causal padding", "documents", "causal documents", "all")
STALL = {"check": 75.0, "time": 45.0, "warm": 75.0}  # seconds for one job, compilation included


# ---- what is checked and timed ----------------------------------------------------------------------------------------
def checks(only):
    """Jobs in groups that share their compiled variants."""
    groups = []
    for size, terms, masks in product((64, 128), TERMS, MASKS):
        name = f"{terms} {masks or 'open'} {size}"
        every = shapes(terms, bool(masks)) if masks in ("", "causal") else masked_shapes(terms)
        common = {"kind": "check", "terms": terms, "masks": masks, "size": size, "dtype": "bfloat16"}
        jobs = [{**common, "name": f"{name} {'x'.join(map(str, shape))}", "shape": shape} for shape in every]
        if masks:
            jobs.append({**common, "name": f"{name} NaN", "what": "nan", "shape": (2, 4, 2, 700, 700, 0, "plain")})
        groups.append(jobs)
        if terms == "xl":
            groups.append([{**job, "kernel": "window", "name": f"window {job['name']}"} for job in jobs])
    clip = {"kind": "check", "terms": "clip", "masks": "causal", "size": 64, "dtype": "float16"}
    groups.append([{**clip, "name": f"clip float16 {shape}", "shape": shape} for shape in shapes("clip", True)])
    groups.append([{"kind": "check", "name": "2^31 elements", "what": "large"}])
    steps = [
        *product(("t5", "alibi", "both"), ("", "causal")),
        *(("t5", masks) for masks in ("window", "padding", "documents", "all")),
        *product(CONTENT, ("", "causal")),
    ]
    groups += [
        [{"kind": "check", "what": "step", "name": f"step {terms} {masks}", "terms": terms, "masks": masks}]
        for terms, masks in steps
    ]
    groups = [[job for job in group if not only or any(part in job["name"] for part in only)] for group in groups]
    return [group for group in groups if group]


def shapes(terms, causal):
    """(batch, heads, kv_heads, queries, keys, first query, layout)"""
    few = terms in ("none", "alibi")
    yield from ((1, 2, 2, length, length, 0, "plain") for length in (LENGTHS[::3] if few else LENGTHS))
    yield 2, 4, 2, 1000, 1000, 0, "transposed"
    yield 1, 4, 1, 700, 1300, 600, "packed"
    yield 2, 2, 2, 1300, 700, 0, "plain"
    if terms in ("t5", "both"):
        yield 1, 2, 1, 1500, 1500, 37, "wide span"


def masked_shapes(terms):
    for lq, lk in ((1, 1), (65, 65), (129, 200), (1000, 1000), (1300, 700), (3000, 3000)):
        yield 4, 2, 1, lq, lk, max(lk - lq, 0), "starts" if lq == 1000 and terms not in CONTENT else "plain"


def timings(only):
    jobs = []

    def add(shape, *terms):
        batch, heads, length, size = shape
        for one in terms:
            name, _, masks = one.partition(" ")
            about = f"B{batch} H{heads} L{length} D{size} | {one}"
            jobs.append({"kind": "time", "name": about, "shape": shape, "terms": name, "masks": masks, "size": size})

    add((4, 16, 4096, 64), "t5", "t5 causal", "alibi", "alibi causal", "none", "none causal")
    add((2, 32, 8192, 128), "t5 causal", "alibi causal", "none causal")
    add((1, 16, 16384, 64), "t5", "t5 causal")
    add((4, 16, 4096, 128), "t5", "t5 causal", "alibi", "alibi causal")
    add(
        (4, 16, 4096, 64),
        "t5 padding",
        "t5 causal padding",
        "t5 documents",
        "t5 causal documents",
        "t5 window",
        "alibi window",
    )
    add((2, 32, 8192, 128), "t5 causal documents", "t5 causal padding", "t5 window", "alibi causal documents")
    add((4, 16, 4096, 64), "shaw", "shaw causal", "logits causal")
    add((4, 16, 4096, 64), "xl", "xl causal", "xl padding")
    add((1, 16, 16384, 64), "shaw", "shaw causal", "xl", "xl causal")
    add((4, 16, 1024, 64), "xl", "xl causal")
    add((4, 16, 4096, 128), "shaw", "shaw causal", "logits", "logits causal")
    add((16, 12, 512, 64), "shaw", "shaw causal")
    add((16, 12, 2048, 64), "t5 causal", "t5 padding")
    for shape in ((16, 12, 1024, 64), (32, 12, 512, 64)):
        add(shape, "t5", "t5 causal", "t5 padding", "t5 documents", "t5 window", "alibi causal")
    add((4, 12, 512, 64), "t5", "t5 causal")  # the fewest blocks
    add((1, 12, 2048, 64), "t5", "t5 causal")
    add((1, 32, 2048, 128), "t5", "t5 causal")
    return [job for job in jobs if not only or any(part in job["name"] for part in only)]


def warm_ups(jobs):
    """The same kernels on short tensors, so that nothing is compiled while times are taken."""
    found = {(job["terms"], job["masks"], job["size"]): job for job in jobs}
    return [
        [{**job, "kind": "warm", "name": f"compile {key}", "shape": (1, job["shape"][1], 256, job["size"])}]
        for key, job in found.items()
    ]


# ---- in a process of its own ------------------------------------------------------------------------------------------
def work(check, measure, warm_up):
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

    if layout == "starts":
        start = start - 13 * torch.arange(4, device="cuda")
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

    def content(spot, width, states=False, bias=False):
        given = torch.randn(1, heads, lq, width, device="cuda", dtype=torch.bfloat16) if states else None
        rows = torch.randn(heads, spot.n, width, device="cuda", dtype=torch.bfloat16) / 4
        return Lookup(spot, dot_query=rows, states=given, bias=table(spot.n) if bias else None)

    return {
        "t5": lambda: Plan(positions, lookups=lookups, scale=1.0 if size == 64 else None), "clip": lambda: Plan(positions, lookups=lookups),
        "none": lambda: Plan(positions), "alibi": lambda: Plan(positions, slopes=slopes),
        "both": lambda: Plan(positions, lookups=lookups, slopes=slopes),
        "shaw": lambda: Plan(positions, lookups=(content(index.clip(64, 64), size, bias=lq % 2 == 1),)),
        "logits": lambda: Plan(positions, lookups=(content(index.Index(-1024, 0), 16, states=True),)),
        "xl": lambda: Plan(positions, lookups=(content(index.exact(positions), size, bias=True),)),
    }[terms]()  # fmt: skip


def make_masks(masks, batch, lq, lk, timed=False):
    """Options of `attend`. timed: what training has, an eighth of padding and four packed texts; else awkward ones."""
    import torch

    at, last = torch.arange(lk, device="cuda"), torch.arange(lq, device="cuda") + (lk - lq)
    options = {}
    if "causal" in masks:
        options["causal"] = True
    if masks in ("window", "all"):
        options["window"] = (1023, 0) if timed else (max(lk // 5, 1), 0)
    if masks == "band":
        options["window"] = (70, 200)
    if "padding" in masks or masks == "all":  # on the right, on the left, with gaps, of a whole row
        rows = (at < 0.7 * lk, at >= 0.3 * lk, at % 7 != 3, at < 0)
        options["key_mask"] = (at < 7 * lk // 8)[None] if timed else torch.stack([rows[b % 4] for b in range(batch)])
    if "documents" in masks or masks == "all":
        step = max(lk // 4, 1) if timed else max(lk // 3 - 5, 1)
        ids = (last.clamp(0) // step)[None].repeat(batch, 1), (at // step)[None].repeat(batch, 1)
        if not timed and batch > 1:  # the last row's are in no order, that before has a document without keys
            ids[1][-2].copy_(ids[1][-2] // 2 * 2)
            ids[0][-1].copy_(torch.randint(3, (lq,), device="cuda"))
            ids[1][-1].copy_(torch.randint(3, (lk,), device="cuda"))
        options["documents"] = ids
    return options


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


def prepare(q, k, v, plan, causal=False, **masks):
    """What the triton engine's operator is given."""
    from posenc.core.mask import make_mask
    from posenc.engines.lowering import lower_plan
    from posenc.engines.triton import launcher
    from posenc.engines.triton.arguments import kernel_arguments

    return kernel_arguments(
        q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, causal=causal, **masks)), launch=launcher.launch
    )


def run(inputs, numbers, scale, kernel=None):
    import torch

    from posenc.engines import gluon
    from posenc.engines.gluon import launch, rolling_launch, window_launch
    from posenc.engines.triton import launcher

    out = inputs.q.new_empty(inputs.q.shape)
    lse = out.new_empty(*out.shape[:2], -(-out.shape[2] // 64) * 64, dtype=torch.float32)
    if inputs.table is None:
        return launch.run_forward(launcher.launch, inputs, numbers, scale, out, lse)
    is_rolling = inputs.states is None and out.shape[3] == 64 and gluon.spans_all(inputs, numbers)
    if is_rolling and kernel != "window":
        return rolling_launch.run_forward(launcher.launch, inputs, numbers, scale, out, lse)
    return window_launch.run_forward(launcher.launch, inputs, numbers, scale, out, lse)


def run_triton(inputs, numbers, scale):
    from posenc.engines import gluon
    from posenc.engines.triton import launch, launcher

    gluon.FEWEST = 1 << 30
    return launch.run_forward(launcher.launch, inputs, numbers, scale, 0.0)


def check(job):
    import torch

    from tests import budget

    if "what" in job:
        return {"step": check_step, "nan": check_nan, "large": check_large}[job["what"]](job)
    batch, heads, kv_heads, lq, lk, start, layout = job["shape"]
    q, k, v = make_tensors(batch, heads, kv_heads, lq, lk, job["size"], getattr(torch, job["dtype"]), layout)
    if job["terms"] == "t5" and job["size"] == 64:
        q = q / 8
    plan = make_plan(job["terms"], heads, lq, lk, start, job["size"], "causal" in job["masks"], layout)
    masks = make_masks(job["masks"], batch, lq, lk)
    given = prepare(q, k, v, plan, **masks)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    results = [run(*given, job.get("kernel")) for _ in range(10)]
    out, lse = results[0][0], results[0][1][..., :lq]
    for other in results[1:]:
        assert same_bits(out, other[0]) and same_bits(lse, other[1][..., :lq]), "different bits"
    torch.use_deterministic_algorithms(False)
    lse = torch.where(lse == float("inf"), float("-inf"), lse * 0.6931471805599453)
    expected, allowed = budget.expect(q, k, v, plan, **masks)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")
    return {"worst": max(budget.excess(a, expected[x], allowed[x]) for a, x in ((out, "out"), (lse, "lse")))}


def same_bits(a, b):
    import torch

    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_nan(job):
    """NaN and infinities in a key do not reach the queries to which it is masked."""
    import torch

    from posenc.core.mask import make_mask

    batch, heads, kv_heads, lq, lk, start, layout = job["shape"]
    q, k, v = make_tensors(batch, heads, kv_heads, lq, lk, job["size"], torch.bfloat16, layout)
    plan = make_plan(job["terms"], heads, lq, lk, start, job["size"], "causal" in job["masks"], layout)
    masks = make_masks(job["masks"], batch, lq, lk)
    visible = make_mask(q, k, **masks).allowed(lq, lk, q.device).expand(batch, 1, lq, lk)
    clean = run(*prepare(q, k, v, plan, **masks), job.get("kernel"))[0]
    for fault in (float("nan"), float("inf"), float("-inf")):
        for at in (3, 350, 500, 699):
            wild = k.clone()
            wild[:, :, at] = fault
            out = run(*prepare(q, wild, v, plan, **masks), job.get("kernel"))[0]
            sees = visible[:, 0, :, at][:, None, :, None].expand_as(out)
            assert same_bits(out[~sees], clean[~sees]), f"{fault} in key {at} reaches queries to which it is masked"
            assert fault == fault or out[sees].isnan().all(), f"NaN in key {at} is lost"
    return {}


def check_large(job):
    """More than 2^31 elements: the last batch rows against float64."""
    import torch

    from tests import budget

    batch, heads, length = 32800, 16, 64
    q, k, v = make_tensors(batch, heads, heads, length, length, 64, torch.bfloat16, "")
    plan = make_plan("t5", heads, length, length, 0, 128, True)
    out = run(*prepare(q, k, v, plan, causal=True))[0]
    ends = [torch.cat((x[:1], x[-1:])) for x in (q, k, v, out)]
    expected, allowed = budget.expect(*ends[:3], plan, causal=True)
    budget.assert_within(ends[3], expected["out"], allowed["out"], "out")
    return {"worst": budget.excess(ends[3], expected["out"], allowed["out"])}


def check_step(job):
    """Through `attend`, with every gradient."""
    import torch

    from posenc import attend
    from posenc.engines import gluon
    from tests import budget
    from tests.plans import mapped

    gluon.SHORTEST, gluon.FEWEST, gluon.SHORTEST_CONTENT = 1, 1, 1
    gluon.refuse_slower = lambda *given: None
    q, k, v = (x.requires_grad_() for x in make_tensors(4, 4, 2, 700, 700, 64, torch.bfloat16, ""))
    size = 64 if job["terms"] in CONTENT else 128
    plan = mapped(
        make_plan(job["terms"], 4, 700, 700, 0, size, "causal" in job["masks"]), lambda name, x: x.requires_grad_()
    )
    masks = make_masks(job["masks"], 4, 700, 700)
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    g = torch.randn_like(q)
    worst = 0.0
    expected, allowed = budget.expect(q, k, v, plan, g, **masks)
    for _ in range(4):  # the second call is recorded, the third replays
        out = attend(q, k, v, plan, engine="triton", **masks)
        results = {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)))}
        for name, ours in results.items():
            budget.assert_within(ours, expected[name], allowed[name], name)
            worst = max(worst, budget.excess(ours, expected[name], allowed[name]))
    return {"worst": worst}


def warm_up(job):
    import torch

    batch, heads, length, size = job["shape"]
    q, k, v = make_tensors(batch, heads, heads, length, length, size, torch.bfloat16, "")
    plan = make_plan(job["terms"], heads, length, length, 0, size, "causal" in job["masks"])
    given = prepare(q, k, v, plan, **make_masks(job["masks"], batch, length, length, timed=True))
    run(*given)
    run_triton(*given)
    return {}


def measure(job):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads, length, size = job["shape"]
    causal = "causal" in job["masks"] or "window" in job["masks"]
    q, k, v = make_tensors(batch, heads, heads, length, length, size, torch.bfloat16, "")
    plan = make_plan(job["terms"], heads, length, length, 0, size, "causal" in job["masks"])

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    with torch.no_grad():
        given = prepare(q, k, v, plan, **make_masks(job["masks"], batch, length, length, timed=True))
        before = time_graph(cudnn)
        found = {"ours": time_graph(lambda: run(*given)), "triton": time_graph(lambda: run_triton(*given))}
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

    module = "tests.gpu.hopper"

    def __init__(self):
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", self.module, "--work"], cwd=ROOT, text=True,
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
                answer = worker.ask(job, min(STALL[job["kind"]], max(until - time.monotonic(), 0) + 3))
                broken += worker.process is None
                if "failed" in answer and ("illegal" in answer["failed"] or "CUDA error" in answer["failed"]):
                    worker.stop()
                answers.append(answer)
        worker.stop()

    threads = [threading.Thread(target=loop) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Answers(list):
    """Each is a line of the log at once, and all are in a file every few seconds, so that a stop loses nothing."""

    lock, written = threading.Lock(), 0.0

    def __init__(self, write):
        super().__init__()
        self.write = write

    def append(self, answer):
        with self.lock:
            super().append(answer)
            print(json.dumps(answer), flush=True)
            if time.monotonic() > Answers.written + 3:
                Answers.written = time.monotonic()
                self.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--skip", default="")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    if args.work:
        work(check, measure, warm_up)
        return

    def write():
        if args.out:
            Path(args.out).write_text(json.dumps({"checks": checked, "times": timed}, indent=1))

    began = time.monotonic()
    checked, timed = Answers(write), Answers(write)  # compilations for timings are among the first
    if "check" not in args.skip:
        warm = [] if "time" in args.skip else warm_ups(timings(args.only))
        share = 1.0 if "time" in args.skip else 0.65
        until = began + share * (args.seconds - 10)
        run_all(checks(args.only) + warm, 14, until, checked)
    if "time" not in args.skip:
        run_all([[job] for job in timings(args.only)], 1, began + args.seconds - 10, timed)
    write()
    failed = [x for x in checked if "failed" in x]
    left = sum("left out" in x for x in checked)
    passed = sum(not x["name"].startswith("compile ") for x in checked if "failed" not in x and "left out" not in x)
    print(f"{'':48} {'cuDNN':>8} {'ours':>8} {'triton':>8}   ours x triton x  TFLOP/s")
    for x in timed:
        if "cudnn" in x:
            print(f"{x['name']:48} {x['cudnn']:8.3f} {x['ours']:8.3f} {x['triton']:8.3f}   {x['ours_x']:.3f}  {x['triton_x']:.3f}    {x['ours_tflops']}")  # fmt: skip
        else:
            print(f"{x['name']:48} {x.get('failed') or x.get('left out')}")
    for x in failed:
        print("FAILED", x["name"], x["failed"])
    print(f"{passed} checks passed, {len(failed)} failed, {left} left out; worst "
          f"{max((x['worst'] for x in checked if 'worst' in x), default=0):.2f} of a budget; {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
