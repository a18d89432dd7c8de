"""Compiles every variant of the Gluon kernel for Hopper, without a GPU, and inspects the machine code.

    python -m tests.gpu.hopper_compiles [--out FILE.json]        with a tested Triton (posenc.engines.gluon.TESTED)

For each variant: registers, bytes spilled, shared memory, CPU seconds, instructions of a far and of a near tile and how many of
them touch local memory. It fails where

- ptxas serialises products (its warnings C7510 to C7519),
- near tiles read a uniform register that is only set where there are far tiles. ptxas 12.8 did this with a descriptor of the queries
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
from posenc.engines.gluon import launch, window_launch
from posenc.engines.triton import launcher
from posenc.engines.triton.arguments import FAR, Inputs, Numbers
from tests.gpu.compiles import Target, spent

TERMS = {
    "none": (), "bias": ("bias",), "slopes": ("slopes",), "bias and slopes": ("bias", "slopes"), "content": ("table",),
    "content and bias": ("table", "bias"), "content of 16 states": ("table", "states"),
}  # fmt: skip
MASKS = {
    "": (), "window": (), "padding": ("key_mask", "key_bounds"), "documents": ("doc_q", "doc_k", "doc_q_keys"),
    "window, padding and documents": ("key_mask", "key_bounds", "doc_q", "doc_k", "doc_q_keys"),
}  # fmt: skip
"""Causality is no variant: a limit on the right is a number."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_variant(size, terms, masks, window, dtype=torch.bfloat16):
    """The compiled kernel, its CPU seconds, and how many products of 16 channels or keys a near tile has."""
    q = torch.empty(1, 2, 512, size, dtype=dtype)
    width = 16 if "states" in terms else size
    ids = torch.empty(1, 512, dtype=torch.int32)
    tensors = {
        "bias": torch.empty(2, 9), "slopes": torch.empty(2), "key_bounds": torch.empty(1, 3, dtype=torch.int32), "doc_q": ids, "doc_k": ids,
        "key_mask": torch.empty(1, 512, dtype=torch.uint8), "doc_q_keys": torch.empty(1, 512, 2, dtype=torch.int32),
        "table": torch.empty(2, 9, width, dtype=dtype), "states": torch.empty(1, 2, 512, width, dtype=dtype),
    }  # fmt: skip
    span = (
        {"lo": -4, "hi": 4, "bias_lo": -4, "bias_hi": 4, "rows_lo": -4, "rows_hi": 4}
        if terms
        else {"lo": FAR, "hi": FAR}
    )
    numbers = Numbers(right=0, left=100 if window else -1, **span)
    made = []

    def record(kernel, programs, *args, **constants):
        began = spent()
        compiled = launcher.compile_kernel(kernel, args, constants)
        made.append((compiled, spent() - began))

    inputs = Inputs(q, q, q, **{x: tensors[x] for x in (*terms, *masks)})
    products = 12
    if "table" in terms:
        window_launch.run_forward(record, inputs, numbers, 0.125, q, torch.empty(1, 2, 512))
        chunks = window_launch.choose_tile(size, width, "states" in terms).keys // 64 + 1
        products += chunks * max(width, 32) // 16
    else:
        launch.run_forward(record, inputs, numbers, 0.125, q, torch.empty(1, 2, 512))
    return *made[-1], products


def inspect(compiled, products=12):
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        log = run("ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", cubin)
        code = run("cuobjdump", "-sass", cubin)
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", code, re.M)]
    loops = tile_loops(lines, products)
    return {
        "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "shared": compiled.metadata.shared,
        "far": instructions(lines, loops[0]),
        "near": instructions(lines, loops[1]),
        "local": max(instructions(lines, loop, "LDL", "STL") for loop in loops),
        "faults": sorted(set(re.findall(r"\((C75\d\d)\)", log))) + find_faults(lines, loops),
    }


def run(tool, *args):
    done = subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def tile_loops(lines, near=12):
    """First and last address of the loops over far and over near tiles, of each consumer in turn. near: products of a near tile."""
    loops = []
    for at, text in lines:
        target = jump(text)
        products = sum("HGMMA" in x for a, x in lines if (target or at) <= a <= at)
        wanted = 12 if len(loops) % 2 == 0 else near  # of 16 columns or keys each
        if target is not None and target < at < target + 0xA000 and products == wanted:
            loops.append((target, at))
    assert loops and len(loops) % 2 == 0, "no pairs of loops over tiles found"
    return loops


def jump(text):
    found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
    return int(found[1], 16) if found else None


def instructions(lines, loop, *names):
    inside = [text for at, text in lines if loop[0] <= at <= loop[1]]
    return sum(any(name in text for name in names) for text in inside) if names else len(inside)


def find_faults(lines, loops):
    faults, begin = [], 0  # of the consumer's code
    for far, near in zip(loops[::2], loops[1::2], strict=True):
        skips = [(at, jump(text)) for at, text in lines if at < far[0] and far[1] < (jump(text) or 0) <= near[0]]
        branch, target = skips[-1]
        written = set().union(*(uniform(text)[0] for at, text in lines if branch < at < target))
        before = set().union(*(uniform(text)[0] for at, text in lines if begin <= at < branch))
        begin = near[1]
        known: set[int] = set()
        for at, text in lines:
            if target <= at <= near[1]:
                writes, reads = uniform(text)
                faults += [f"UR{x} at {at:x} is not set without far tiles" for x in (reads & written) - known - before]
                known |= writes | (reads & written)
    return faults


def uniform(text):
    """Uniform registers that an instruction writes, and those that it reads."""
    text = re.sub(r"^@!?\w+\s+", "", text.strip())
    name, numbers = text.split()[0], [int(x) for x in re.findall(r"\bUR(\d+)\b", text)]
    if not numbers:
        return set(), set()
    if "HGMMA" in name:
        return set(), set(range(numbers[0], numbers[0] + 4))
    if not re.match(r"(U|R2UR|S2UR)\S*\s+UR", text):
        return set(), set(numbers)
    wide = ".64" in name or "WIDE" in name
    return {numbers[0], numbers[0] + wide}, set(numbers[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    args = parser.parse_args()
    if gluon.VERSION not in gluon.TESTED:
        sys.exit(f"the kernel is tested with Triton {', '.join(gluon.TESTED)}, found {gluon.VERSION}")
    driver.set_active(Target(90))
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    rows, failed = [], 0
    print("size | terms | masks | registers | spilled | shared | seconds | far, near, local | faults")
    for size, (name, terms), (mask, masks) in product(gluon.SIZES, TERMS.items(), MASKS.items()):
        if not all(part in f"{size} {name} {mask}" for part in args.only):
            continue
        compiled, seconds, products = compile_variant(size, terms, masks, "window" in mask)
        row = {"size": size, "terms": name, "masks": mask, **inspect(compiled, products), "seconds": round(seconds, 1)}
        row["consumer"] = launch.REGISTERS[0]
        rows.append(row)
        failed += bool(row["faults"])
        print(f"{size} | {name} | {mask} | {row['consumer']} | {row['spilled']} | {row['shared']} | {seconds:.1f} | "
              f"{row['far']}, {row['near']}, {row['local']} | {'; '.join(row['faults']) or '-'}", flush=True)  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps({"triton": triton.__version__, "variants": rows}, indent=1) + "\n")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
