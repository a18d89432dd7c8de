"""The fused backward kernel in several configurations beside the present pair and cuDNN: timed, then checked, on one GPU.

    python -m tests.gpu.fused_backward [--out FILE.json] [--seconds 90] [--only pair,64x128]

Each configuration is a process of its own; all compile at the same time, and are timed one after another as soon as they are
ready (medians of replayed CUDA graphs: a step less its forward pass). Every result is printed and written at once.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

CONFIGS = {
    "cuDNN": {},
    "pair": {"fused": False},
    "pair ahead2": {"fused": False, "ahead": 2},
    "64x64 4w 2s": {"tile": (64, 64, 4, 2)},
    "64x128 8w 2s": {"tile": (64, 128, 8, 2)},
    "64x128 8w 2s ahead1": {"tile": (64, 128, 8, 2), "ahead": 1},
    "64x64 4w 2s ahead2": {"tile": (64, 64, 4, 2), "ahead": 2},
    "64x128 8w 2s ahead2": {"tile": (64, 128, 8, 2), "ahead": 2},
    "64x128 8w 2s ahead1 ca": {"tile": (64, 128, 8, 2), "ahead": 1, "cache": ".ca"},
    "64x64 4w 2s r168": {"tile": (64, 64, 4, 2), "registers": 168},
    "64x128 8w 2s ahead1 rot": {"tile": (64, 128, 8, 2), "ahead": 1, "rotate": True},
    "64x64 4w 2s rot": {"tile": (64, 64, 4, 2), "rotate": True},
    "64x128 8w 2s rows": {"tile": (64, 128, 8, 2), "flip": False},
    "64x128 8w 3s ahead1": {"tile": (64, 128, 8, 3), "ahead": 1},
    "64x128 8w 2s ptr": {"tile": (64, 128, 8, 2), "tma": False},
}
SHAPES = [
    ("t5", 4, 16, 4096, False),
    ("none", 4, 16, 4096, False),
    ("t5", 4, 16, 4096, True),
    ("t5", 1, 16, 16384, False),
    ("check",),
]
SIZE = 64


def child(name, device="cuda"):
    import torch

    from posenc import Plan, Positions, attend
    from posenc.bench import gpu
    from posenc.engines.triton import schedule

    config = CONFIGS[name]
    library = name == "cuDNN"
    schedule.fused_backward = config.get("fused", True)
    schedule.FLIP, schedule.MAXNREG = config.get("flip", True), config.get("registers")
    schedule.TMA_LOADS, schedule.ROTATE = config.get("loads", False), config.get("rotate", False)
    schedule.PIPELINE, schedule.CACHE = config.get("ahead", 0), config.get("cache", "")
    if "tile" in config:
        schedule.HOPPER["backward", 64] = schedule.Tile(*config["tile"])
    if "tma" in config:
        schedule.uses_tma = lambda device: config["tma"]

    def functions(plan_name, batch, heads, length, causal):
        torch.manual_seed(0)
        q, k, v = (torch.randn(batch, heads, length, SIZE, device=device, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")  # fmt: skip
        g, leaves = torch.randn_like(q), [q, k, v]
        if library:

            def run():
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            make = gpu.PLANS[plan_name][0] if plan_name != "none" else lambda h, n, d, c: Plan(Positions(n))
            plan = make(heads, length, SIZE, causal)
            leaves += [x for _, x in plan.tensors()]
            run = partial(attend, q, k, v, plan, causal=causal, engine="triton")
        return run, lambda: torch.autograd.grad(run(), leaves, g)

    def time_graph(call):
        return gpu.do_bench(gpu.capture_graph(call), warmup=10, rep=40, return_mode="median")

    def check():
        from tests.gpu import cases
        from tests.plans import plan_of

        q, k, v = cases.tensors(1, 4, 4, 1000, 1000, SIZE, torch.bfloat16)
        return cases.check(q, k, v, cases.tame(plan_of(("bias",), q, k, v, reach=(60, 70))))

    def say(**what):
        print("RESULT " + json.dumps(what), flush=True)

    for shape in SHAPES:
        try:
            if shape[0] != "check":
                functions(shape[0], 1, 2, 1024, shape[-1])[1]()  # compiles
            say(ready=True)
            sys.stdin.readline()
            if shape[0] == "check":
                say(of_its_budget=0 if library else check())
                continue
            run, step = functions(*shape)
            with torch.no_grad():
                forward = time_graph(run)
            say(ms=time_graph(step) - forward, forward=forward)
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}"[:400])


class Child:
    def __init__(self, name, events):
        self.name, self.todo, self.ready, self.alive, self.tail = name, list(range(len(SHAPES))), False, True, []
        command = [sys.executable, "-m", "tests.gpu.fused_backward", "--child", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        threading.Thread(target=self.read, args=(events,), daemon=True).start()

    def read(self, events):
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                events.put((self, json.loads(line[7:])))
            else:
                self.tail = [*self.tail, line][-12:]
        events.put((self, None))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        return child(args.child)
    began, events, found = time.monotonic(), queue.Queue(), {}
    children = [Child(name, events) for name in CONFIGS if any(part in name for part in args.only.split(","))]

    def note(name, what, value):
        found.setdefault(name, {})[what] = value
        print(f"{time.monotonic() - began:5.1f} s  {what:28} {name:26} {value}", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1) + "\n")

    busy = None
    while any(one.alive and one.todo for one in children):
        waiting = [one for one in children if one.alive and one.ready and one.todo]
        if busy is None and waiting:
            busy = min(waiting, key=lambda one: one.todo[0])
            busy.process.stdin.write(f"{busy.todo[0]}\n")
            busy.process.stdin.flush()
        try:
            one, what = events.get(timeout=max(args.seconds - (time.monotonic() - began), 0.01))
        except queue.Empty:
            break
        if what is None:
            one.alive = False
            busy = None if busy is one else busy
            note(one.name, "ended", "".join(one.tail)[-600:])
        elif "ready" in what:
            one.ready = True
        else:
            one.ready, busy = False, None if busy is one else busy
            note(one.name, " ".join(map(str, SHAPES[one.todo.pop(0)])), what)
    for one in children:
        one.process.kill()
    for shape in SHAPES[:-1]:
        key = " ".join(map(str, shape))
        print(f"\n{key}: backward pass, ms")
        rows = [(one[key]["ms"], name) for name, one in found.items() if "ms" in one.get(key, {})]
        for ms, name in sorted(rows):
            print(f"    {name:26} {ms:7.3f}")


if __name__ == "__main__":
    main()
