"""Compiles the triton engine's kernels for an H200 where there is no GPU: what the interpreter lets pass, a compiler may not.

    python tests/engines/triton_compiles.py [NAME ...]

Triton gets a driver that knows its target and cannot run anything; every launch ends after the compiler (ptxas included).
"""

import sys
import time

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines import triton as engine
from posenc.engines.lowering import lower_plan
from posenc.engines.triton import schedule

LENGTH, HEADS = 256, 2


class Target:
    """As much of a driver as the compiler asks for."""

    class utils:
        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def pretend():
    """Launches compile and nothing else; tiles are those of an H200."""
    run, compiled = JITFunction.run, []

    def compile_only(self, *args, **options):
        options.pop("warmup", None)
        kernel = run(self, *args, warmup=True, **options)
        assert kernel.asm["cubin"]
        compiled.append(self.__name__)
        return kernel

    def on_cuda(chosen):
        def choose(*args, **options):
            return chosen(*(torch.device("cuda") if isinstance(x, torch.device) else x for x in args), **options)

        return choose

    driver.set_active(Target())
    JITFunction.run = compile_only
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    for name in ("choose_tile", "choose_band_tile", "choose_states_tile", "choose_table_tile"):
        setattr(schedule, name, on_cuda(getattr(schedule, name)))
    schedule.choose_splits = lambda *args: 1
    return compiled


def table(*shape):
    return torch.randn(*shape, requires_grad=True)


def plans(size):
    """Name -> lookups and other slots: together every kernel, every slot, and states narrower than a head.

    "tokens" is asked with token positions, "masked" with padding and documents.
    """
    clip, states = index.clip(64, 64), table(1, HEADS, LENGTH, 16)
    return {
        "bias": dict(lookups=(Lookup(index.log_buckets(32, 128, causal=False), bias=table(HEADS, 32)),), slopes=table(2)),
        "masked": dict(lookups=(Lookup(clip, bias=table(HEADS, 129)),)),
        "values": dict(lookups=(Lookup(clip, dot_query=table(1, 129, size), add_value=table(1, 129, size)),)),
        "states": dict(lookups=(Lookup(clip, dot_query=table(HEADS, 129, 16), states=states),)),
        "keys": dict(lookups=(Lookup(clip, dot_query=table(HEADS, 129, size), dot_key=table(HEADS, 129, size)),)),
        "tokens": dict(lookups=(Lookup(clip, table(HEADS, 129), table(1, 129, size), add_value=table(1, 129, size)),)),
    }  # fmt: skip


CASES = [
    ("bias", 64, torch.bfloat16),
    ("masked", 64, torch.bfloat16),
    ("values", 64, torch.bfloat16),
    ("states", 128, torch.bfloat16),
    ("keys", 80, torch.float16),
    ("keys", 16, torch.float32),
    ("tokens", 64, torch.bfloat16),
]


def check(name, size, dtype, compiled):
    q, k, v = (torch.randn(1, HEADS, LENGTH, size).to(dtype).requires_grad_() for _ in range(3))
    positions = Positions(torch.arange(LENGTH) // 2) if name == "tokens" else Positions(LENGTH)
    plan = Plan(positions, **plans(size)[name])
    masked = name == "masked"
    padding = torch.ones(1, LENGTH, dtype=torch.bool) if masked else None
    ids = torch.zeros(1, LENGTH, dtype=torch.int64) if masked else None
    mask = make_mask(q, k, causal=True, window=None, key_mask=padding, documents=ids, mask=None)
    before = len(compiled)
    out, _ = engine.run(q, k, v, lower_plan(q, k, v, plan, mask))
    out.sum().backward()
    return compiled[before:]


if __name__ == "__main__":
    compiled = pretend()
    for name, size, dtype in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        began = time.monotonic()
        kernels = check(name, size, dtype, compiled)
        assert {"forward", "backward_q", "backward_k"} <= set(kernels), kernels
        print(
            f"{name}, head size {size}, {dtype}: {', '.join(kernels)} in {time.monotonic() - began:.0f} s", flush=True
        )
    print("compiled")
