"""The fused backward kernel in several configurations beside the present pair and cuDNN: checked, then timed, on one GPU.

    python -m tests.gpu.fused_backward [--out FILE.json] [--only tma]

Each configuration is a process of its own: all compile and check their gradients at the same time, then they are timed one
after another (medians of replayed CUDA graphs: a step less its forward pass).
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
    "64x64 4w 2s": {"tile": (64, 64, 4, 2)},
    "64x64 4w 3s": {"tile": (64, 64, 4, 3)},
    "64x64 4w 2s r168": {"tile": (64, 64, 4, 2), "registers": 168},
    "64x64 4w 2s rows": {"tile": (64, 64, 4, 2), "flip": False},
    "64x64 4w 2s ptr": {"tile": (64, 64, 4, 2), "tma": False},
    "64x128 8w 2s": {"tile": (64, 128, 8, 2)},
    "64x128 8w 3s": {"tile": (64, 128, 8, 3)},
    "64x128 8w 2s rows": {"tile": (64, 128, 8, 2), "flip": False},
    "64x128 8w 2s rows ptr": {"tile": (64, 128, 8, 2), "flip": False, "tma": False},
    "64x128 8w 2s r128": {"tile": (64, 128, 8, 2), "registers": 128},
    "64x64 4w 2s loads": {"tile": (64, 64, 4, 2), "loads": True},
    "64x64 4w 2s loads r168": {"tile": (64, 64, 4, 2), "loads": True, "registers": 168},
    "64x128 8w 2s loads": {"tile": (64, 128, 8, 2), "loads": True},
    "D128 pair": {"fused": False, "size": 128},
    "D128 cuDNN": {"size": 128},
    "D128 64x64 8w 2s": {"tile": (64, 64, 8, 2), "size": 128},
    "D128 64x128 8w 2s": {"tile": (64, 128, 8, 2), "size": 128},
}
TIMED = {
    64: [("t5", 4, 16, 4096, False), ("t5", 4, 16, 4096, True), ("none", 4, 16, 4096, False), ("none", 4, 16, 4096, True), ("alibi", 4, 16, 4096, False),
         ("t5", 1, 16, 16384, False)],
    128: [("t5", 4, 16, 4096, True), ("none", 4, 16, 4096, False)],
}  # fmt: skip


def child(name):
    import torch

    from posenc import Plan, Positions, attend
    from posenc.bench import gpu
    from posenc.engines.triton import schedule
    from tests.gpu import cases
    from tests.plans import plan_of

    config = CONFIGS[name]
    size = config.get("size", 64)
    library = name.endswith("cuDNN")
    schedule.fused_backward = config.get("fused", True)
    schedule.FLIP, schedule.MAXNREG = config.get("flip", True), config.get("registers")
    schedule.TMA_LOADS = config.get("loads", False)
    if "tile" in config:
        schedule.HOPPER["backward", size] = schedule.Tile(*config["tile"])
    if "tma" in config:
        schedule.uses_tma = lambda device: config["tma"]

    def say(**what):
        print("RESULT " + json.dumps(what), flush=True)

    if not library:
        torch.manual_seed(0)
        worst = {}
        for slots, options in (
            (("bias",), {}), (("bias",), {"causal": True}), (("slopes",), {}), ((), {"causal": True}), ((), {}),
            (("bias",), {"key_mask": torch.arange(500, device="cuda")[None] < 447}),
        ):  # fmt: skip
            q, k, v = cases.tensors(1, 4, 2, 333, 500, size, torch.bfloat16)
            key = f"{'+'.join(slots)} {','.join(options)}"
            try:
                worst[key] = cases.check(q, k, v, cases.tame(plan_of(slots, q, k, v, reach=(60, 70))), **options)
            except AssertionError as error:
                worst[key] = str(error)[:300]
        say(checked=worst)
    say(ready=True)
    sys.stdin.readline()
    for plan_name, batch, heads, length, causal in TIMED[size]:
        if library and plan_name != "none" and size == 64 and length == 4096:
            continue
        torch.manual_seed(0)
        shape = (batch, heads, length, size)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
        g = torch.randn_like(q)
        leaves = [q, k, v]
        if library:

            def run(q=q, k=k, v=v, causal=causal):
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            make = gpu.PLANS[plan_name][0] if plan_name != "none" else lambda h, n, d, c: Plan(Positions(n))
            plan = make(heads, length, size, causal)
            leaves += [x for _, x in plan.tensors()]
            run = partial(attend, q, k, v, plan, causal=causal, engine="triton")

        def step(run=run, leaves=leaves, g=g):
            torch.autograd.grad(run(), leaves, g)

        with torch.no_grad():
            forward = gpu.time_graph(run)
        ms = gpu.time_graph(step) - forward
        say(timed=[plan_name, batch, heads, length, size, causal], ms=ms)


class Child:
    def __init__(self, name):
        self.name, self.lines, self.found = name, queue.Queue(), {"config": CONFIGS[name], "checked": {}, "ms": {}}
        command = [sys.executable, "-m", "tests.gpu.fused_backward", "--child", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def follow(self, until, seconds):
        """Read results until one has this name; False where the process ended or took too long."""
        end = time.monotonic() + seconds
        rest = []
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                self.found["failed"] = f"nothing for {seconds} s"
                return False
            if line is None:
                if until or not self.found["ms"]:
                    self.found["failed"] = "".join(rest)[-1500:]
                return not until
            if not line.startswith("RESULT "):
                rest.append(line)
                continue
            what = json.loads(line[7:])
            if "checked" in what:
                self.found["checked"] = what["checked"]
            if "timed" in what:
                self.found["ms"][" ".join(map(str, what["timed"]))] = what["ms"]
            if until in what:
                return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        return child(args.child)
    children = [Child(name) for name in CONFIGS if any(part in name for part in args.only.split(","))]
    began = time.monotonic()
    ready = [one for one in children if one.follow("ready", max(100 - (time.monotonic() - began), 1))]
    for one in ready:
        one.process.stdin.write("\n")
        one.process.stdin.flush()
        one.follow("", 20)
    for one in children:
        one.process.kill()
    found = {one.name: one.found for one in children}
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found.items():
        worst = one["checked"].values()
        errors = [x for x in worst if isinstance(x, str)]
        numbers = max([x for x in worst if not isinstance(x, str)], default=0)
        print(f"{name:24} worst {numbers:.2f} of its budget, {len(errors)} wrong {errors[:1]} {one.get('failed', '')[-300:]}")
    for key in dict.fromkeys(key for one in found.values() for key in one["ms"]):
        print(key)
        for name, one in found.items():
            if key in one["ms"]:
                print(f"    {name:24} {one['ms'][key]:8.3f} ms")


if __name__ == "__main__":
    main()
