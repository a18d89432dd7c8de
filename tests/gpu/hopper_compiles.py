"""Compiles every variant of the Gluon kernels for Hopper, without a GPU, and inspects the machine code.

    python -m tests.gpu.hopper_compiles [--backward] [--out FILE.json]        with a tested Triton (posenc.engines.gluon.TESTED)

For each variant: registers, bytes spilled, shared memory, CPU seconds, instructions of a far and of a near tile and how many of
them touch local memory. It fails where

- ptxas serialises products (its warnings C7510 to C7519),
- a uniform register may be read before it is set (uniform_registers.py). ptxas 12.8 did this with a descriptor of the queries
  that differed from block to block (two buffers for them): the first tiles of a text gave wrong scores, if they were near.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.runtime import driver

from posenc.engines import gluon
from posenc.engines.gluon import (
    backward_launch,
    content_launch,
    launch,
    rolling_backward_launch,
    rolling_launch,
    window_launch,
)
from posenc.engines.triton import launcher
from posenc.engines.triton.arguments import FAR, Inputs, Numbers
from posenc.engines.triton.band_layout import make_band
from tests.gpu.compiles import Target, spent
from tests.gpu.uniform_registers import find_unset

TERMS = {
    "none": (), "bias": ("bias",), "slopes": ("slopes",), "bias and slopes": ("bias", "slopes"), "none, short": ("short",),
    "bias, short": ("bias", "short"), "slopes, short": ("slopes", "short"), "bias and slopes, short": ("bias", "slopes", "short"),
}  # fmt: skip
"""short: two consumers, in the forward pass."""
CONTENT = {
    "content": ("table",), "content and bias": ("table", "bias"), "content of 16 states": ("table", "states"),
    "content over every distance": ("table", "bias", "every"), "content of both": ("table", "key_table"),
    "wide content of both": ("table", "key_table", "wide"),
}  # fmt: skip
"""every: by rolling.py, rolling_backward.py or, with keys, rolling_backward_keys.py, which have near tiles only."""
CONTENT_BACKWARD = {
    "content": ("table",), "content of the keys": ("key_table",), "content of both": ("table", "key_table"),
    "content and values": ("table", "value"), "wide content": ("table", "wide"), "wide content of both": ("table", "key_table", "wide"),
    "content over every distance": ("table", "bias", "every"), "content over every distance, dk and dv": ("table", "bias", "every", "keys"),
}  # fmt: skip
"""wide: spans with whole tiles within them."""
DOCUMENTS = ("doc_q", "doc_k", "doc_q_keys", "doc_k_queries")
MASKS = {
    "": (), "window": (), "padding": ("key_mask", "key_bounds"), "documents": DOCUMENTS,
    "window, padding and documents": ("key_mask", "key_bounds", *DOCUMENTS),
}  # fmt: skip
"""Causality is no variant: a limit on the right is a number."""
LENGTH = 576  # of texts for which three consumers run
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_variant(size, terms, masks, window, backward, dtype=torch.bfloat16):
    q = torch.empty(1, 2, LENGTH, size, dtype=dtype)
    width = row_width(size, terms)
    ids = torch.empty(1, LENGTH, dtype=torch.int32)
    tensors = {
        "bias": torch.empty(2, 9), "slopes": torch.empty(2), "key_bounds": torch.empty(1, 3, dtype=torch.int32), "doc_q": ids, "doc_k": ids,
        "key_mask": torch.empty(1, LENGTH, dtype=torch.uint8), "doc_q_keys": torch.empty(1, LENGTH, 2, dtype=torch.int32),
        "doc_k_queries": torch.empty(1, LENGTH, 2, dtype=torch.int32),
        "table": torch.empty(2, 9, width, dtype=dtype), "states": torch.empty(1, 2, LENGTH, width, dtype=dtype),
        "key_table": torch.empty(2, 9, size, dtype=dtype), "value": torch.empty(2, 9, size, dtype=dtype),
    }  # fmt: skip
    lo, hi = (-4, 4) if set(terms) - {"short"} else (FAR, FAR)
    reach = 300 if "wide" in terms else 4
    spans = {"bias_lo": -4, "bias_hi": 4, "rows_lo": -reach, "rows_hi": reach, "cols_lo": -reach, "cols_hi": reach}
    numbers = Numbers(right=0, left=100 if window else -1, lo=lo, hi=hi, wide=int("wide" in terms), **spans)
    made = []

    def record(kernel, programs, *args, **constants):
        began = spent()
        compiled = launcher.compile_kernel(kernel, args, constants)
        made.append((compiled, spent() - began))

    inputs = Inputs(q, q, q, **{x: tensors[x] for x in (*terms, *masks) if x in tensors})
    lse = torch.empty(1, 2, LENGTH)
    band = make_band(q, 2, -4, 4, 0, 0, LENGTH)._replace(ends=torch.empty(1, 2, 2, LENGTH), rows=LENGTH)
    if backward and "every" not in terms and set(terms) & {"table", "key_table", "value"}:
        rows, cols, mass = (band if x in terms else None for x in ("table", "key_table", "value"))
        content_launch.run_backward(
            record, q, None, q, lse, inputs, numbers, 0.125, q, q, q, rows, cols, mass, rows, cols
        )
        return next(one for one in made if one[0].metadata.name == "backward_content")
    if backward and "every" in terms:
        rolling_backward_launch.run_backward(record, q, None, q, lse, inputs, numbers, 0.125, q, q, q)
        name = "backward_rolling_keys" if "keys" in terms else "backward_rolling"
        return next(one for one in made if one[0].metadata.name == name)
    if backward:
        backward_launch.run_backward(record, q, None, q, lse, inputs, numbers, 0.125, q, q, q, True, True)
        return made[1]  # between what runs before and after it
    way = rolling_launch if "every" in terms else window_launch if "table" in terms else launch
    options = {"cols": band} if "key_table" in terms else {}
    if "short" in terms:
        options["tile"] = launch.choose_tile(size, 128)
    way.run_forward(record, inputs, numbers, 0.125, q, lse, **options)
    return made[-1]


def row_width(size, terms):
    return 16 if "states" in terms else size


def count_products(size, terms, backward):
    """Products of 16 channels or keys in a far and in a near tile."""
    far = (16 if size == 64 else 20) if backward else 12
    if "every" in terms:  # one of them, or with keys two, for the bias
        far = 26 if "keys" in terms else 21 if backward else 13
    if backward or "table" not in terms or "every" in terms:
        return far, far
    width = row_width(size, terms)
    keys = window_launch.choose_tile(size, width, "states" in terms, "key_table" in terms).keys
    far = 8 if size == keys == 64 else far
    return far, far + (keys // 64 + 1) * max(width, 32) // 16


def inspect(compiled, products, per_consumer, consumers):
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        log = run("ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", cubin)
        code = run("cuobjdump", "-sass", cubin)
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", code, re.M)]
    loops = tile_loops(lines, products, per_consumer * consumers)
    return {
        "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "shared": compiled.metadata.shared,
        "far": max((instructions(lines, loop) for loop in loops[: per_consumer - 1]), default=0),
        "near": instructions(lines, loops[per_consumer - 1]),
        "local": max(instructions(lines, loop, "LDL", "STL") for loop in loops),
        "faults": sorted(set(re.findall(r"\((C75\d\d)\)", log))) + find_unset(lines),
    }


def run(tool, *args):
    done = subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def tile_loops(lines, counts, expected):
    """First and last address of the loops with as many products (far, near) of a consumer, in order: over far tiles (in the backward pass on the
    right, then on the left), over near ones."""
    loops = []
    for at, text in lines:
        target = jump(text)
        if target is not None and target < at < target + 0x18000:
            inside = [x for a, x in lines if target <= a <= at]
            if sum("HGMMA" in x for x in inside) in counts and any("EX2" in x for x in inside):
                loops.append((target, at))
    length = lambda x: x[1] - x[0]  # noqa: E731
    # of loops that overlap, the shortest: others jump back from behind one
    loops = [x for x in loops if not any(x[0] <= y[1] and y[0] <= x[1] and length(y) < length(x) for y in loops)]
    assert len(loops) == expected, f"{len(loops)} loops"
    return loops


def jump(text):
    found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
    return int(found[1], 16) if found else None


def instructions(lines, loop, *names):
    inside = [text for at, text in lines if loop[0] <= at <= loop[1]]
    return sum(any(name in text for name in names) for text in inside) if names else len(inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    args = parser.parse_args()
    if gluon.VERSION not in gluon.TESTED:
        sys.exit(f"the kernel is tested with Triton {', '.join(gluon.TESTED)}, found {gluon.VERSION}")
    driver.set_active(Target(90))
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    rows, failed = [], 0
    print("size | terms | masks | registers | spilled | shared | seconds | far, near, local | faults")
    every = TERMS | (CONTENT_BACKWARD if args.backward else CONTENT)
    for size, (name, terms), (mask, masks) in product(gluon.SIZES, every.items(), MASKS.items()):
        if not all(part in f"{size} {name} | {mask}" for part in args.only):
            continue
        if "every" in terms and size not in rolling_launch.DEPTHS:
            continue
        if args.backward and "short" in terms:
            continue
        per_consumer = 1 if "every" in terms else 3 if args.backward else 2
        consumers = 2 if args.backward or "short" in terms else 3
        compiled, seconds = compile_variant(size, terms, masks, "window" in mask, args.backward)
        row = {
            "size": size,
            "terms": name,
            "masks": mask,
            **inspect(compiled, count_products(size, terms, args.backward), per_consumer, consumers),
            "seconds": round(seconds, 1),
        }
        row["consumer"] = launch.REGISTERS[0]
        if args.backward and "every" in terms:
            schedule = rolling_backward_launch.RollingSchedule()
            row["consumer"] = (schedule.key_registers if "keys" in terms else schedule.registers)[0]
        elif args.backward:
            row["consumer"] = (
                (content_launch if name in CONTENT_BACKWARD else backward_launch).SCHEDULES[size].registers[0]
            )
        rows.append(row)
        failed += bool(row["faults"])
        print(f"{size} | {name} | {mask} | {row['consumer']} | {row['spilled']} | {row['shared']} | {seconds:.1f} | "
              f"{row['far']}, {row['near']}, {row['local']} | {'; '.join(row['faults']) or '-'}", flush=True)  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps({"triton": triton.__version__, "variants": rows}, indent=1) + "\n")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
