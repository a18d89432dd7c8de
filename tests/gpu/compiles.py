"""Compiles, without a GPU, every kernel that the GPU's tests and benchmarks would launch.

    python -m tests.gpu.compiles [--arch 90] [--jobs 2] [--only fuzz,bench] [--list]

The host's side of the triton engine runs with tensors that pretend to be on a GPU (`meta` ones at the benchmarks' sizes);
launches are recorded as Triton would specialise them, and each distinct kernel is compiled to machine code. The report
lists kernels that do not compile, need more shared memory than the device has, spill registers, or compile slowly.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests import seeds
from tests.gpu.elsewhere import Elsewhere, use_tiles_of

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""The most shared memory that a block may have, in bytes, by architecture."""


class Target:
    """The part of a driver that the compiler needs."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


class Pointer:
    """What Triton reads of a tensor: its dtype, and its address in memory aligned like CUDA's."""

    def __init__(self, x: torch.Tensor):
        self.dtype, self.at = x.dtype, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return self.at


def pointers(x):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        return type(x)(*map(pointers, x)) if hasattr(x, "_fields") else tuple(map(pointers, x))
    return x


class Recorder:
    """Every distinct kernel (kernel, signature, constants, attributes, options), and the cases that launch it."""

    def __init__(self):
        self.kernels, self.cases, self.case = {}, {}, ""

    def launch(self, kernel, *args, grid, warmup=False, **options):
        return self.run(kernel, *map(pointers, args), grid=grid, warmup=True, **options)

    def note(self, kernel, key, signature, device, constants, options, attributes, warmup):
        self.kernels.setdefault((kernel.__name__, key), (kernel, signature, constants, attributes, options))
        self.cases.setdefault((kernel.__name__, key), []).append(self.case)


def pretend(arch: int) -> Recorder:
    from posenc.engines.triton import launcher, ops

    recorder = Recorder()
    launcher.current_stream = lambda device: 0
    driver.set_active(Target(arch))
    recorder.run = JITFunction.run
    JITFunction.run = lambda kernel, *args, **options: recorder.launch(kernel, *args, **options)
    JITFunction._do_compile = lambda *args, **options: recorder.note(*args, **options)

    use_tiles_of(arch)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    autocast = torch.autocast
    torch.autocast = lambda device, **options: autocast("cpu" if device == "meta" else device, **options)

    # Nothing is computed: zeros stand for the results.
    forward, backward = ops.forward, ops.backward
    ops.forward = lambda *args: tuple(x.zero_() for x in forward(*args))
    ops.backward = lambda *args: [x.zero_() for x in backward(*args)]
    return recorder


def train(q, k, v, plan, leaves=(), **options):
    """A forward pass alone, and a training step."""
    from posenc import attend

    q, k, v = (x.detach() for x in (q, k, v))
    with torch.no_grad():
        attend(q, k, v, plan, engine="triton", **options)
    leaves = [x for x in [*leaves, *(tensor for _, tensor in plan.tensors())] if x.requires_grad]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, plan, engine="triton", **options)
    torch.autograd.grad(out, [q, k, v, *leaves], torch.empty_like(out), allow_unused=True)


def from_cases(recorder, only):
    """All of tests.gpu.cases; nothing is compared."""
    from tests import budget
    from tests.gpu import cases

    cases.check = train
    budget.expect = lambda *args, **options: (defaultdict(lambda: None), defaultdict(lambda: None))
    budget.assert_within = lambda *args: None
    torch.compile = lambda function, **options: function
    torch.testing.assert_close, torch.equal = lambda *args, **options: None, lambda *args: True
    needs_device = {"compile without graph breaks", "a CUDA graph replays", "offsets past two billion elements"}
    for name, case in cases.CASES.items():
        if name in needs_device or not wanted(name, only):
            continue
        recorder.case = name
        torch.manual_seed(seeds.of(name))
        with Elsewhere("cpu"):
            case()
    with Elsewhere("meta"):
        for name, case in device_cases(cases).items():
            if wanted(name, only):
                recorder.case = name
                case()


def device_cases(cases):
    """The attention calls of the cases that need a device for other reasons."""
    from posenc import Plan, Positions

    def compiled():
        train(*cases.tensors(1, 2, 2, 512, 512, 64, torch.bfloat16), cases.shaw_values(512, 64), causal=True)

    def graph():
        q, k, v = cases.tensors(1, 4, 2, 1, 3000, 64, torch.bfloat16)
        train(q, k, v, Plan(Positions((2999, 1), 3000), slopes=torch.rand(4, device="cuda")), causal=True)

    def offsets():
        k = torch.empty(70_000, 1, 40_000, dtype=torch.bfloat16, device="cuda")[None, :, 0, :64].unsqueeze(1)
        q = torch.randn(1, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
        plan = Plan(Positions((70_000 - 64, 64), 70_000), slopes=torch.tensor([0.001], device="cuda"))
        train(q, k, k, plan, causal=True)

    return {"compile": compiled, "graph": graph, "offsets": offsets}


def from_kernel_plans(recorder, only):
    from tests.gpu.kernel_plans import PLANS

    for name, (make, shapes) in PLANS.items():
        for batch, heads, length, size, causal in [*shapes, (1, 2, 700, 64, False), (4, 2, 700, 64, True)]:
            recorder.case = f"kernel plan {name} {length}{' causal' if causal else ''}"
            if not wanted(recorder.case, only) or (name == "relative logits" and batch != 4):
                continue
            with Elsewhere("meta"):
                q, k, v = (torch.empty(batch, heads, length, size, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
                train(q, k, v, make(heads, length, size, causal), causal=causal)


def from_bench(recorder, only):
    """posenc bench --device cuda: every workload at both lengths, and at the length where results are checked."""
    from posenc.bench.workloads import WORKLOADS, Problem, make_case

    for workload in WORKLOADS.values():
        for length in (256, 512, 1024, 4096, 16384):
            recorder.case = f"bench {workload.name} {length}"
            if not wanted(recorder.case, only) or length > (workload.longest or length):
                continue
            for dtype in (torch.bfloat16, torch.float32) if length == 1024 else (torch.bfloat16,):
                with Elsewhere("meta"):
                    problem = Problem(make_case(workload, length, "cuda", dtype))
                    leaves = [leaf for _, leaf in problem.leaves()]
                    train(problem.q, problem.k, problem.v, problem.plan(), leaves, causal=workload.causal)


def from_hf(recorder, only):
    """T5 and DeBERTa at their widths, with one layer; bfloat16, with dropout."""
    from posenc import hf
    from posenc.bench import models

    for make in (models.t5, models.deberta):
        recorder.case = f"hf {make.__name__}"
        if not wanted(recorder.case, only):
            continue
        with Elsewhere("cpu"):
            model, inputs = make(2, 256, layers=1)
            hf.accelerate(model.to("cuda", torch.bfloat16))
            ids = inputs["input_ids"].to("cuda")
            with torch.no_grad():
                model.eval()(ids[:1])
                model(ids)
            model.train()(ids).last_hidden_state.float().square().mean().backward()


def from_families(recorder, only):
    """tests.hf.test_gpu's models, in both its dtypes."""
    from posenc import hf
    from tests.hf import test_gpu
    from tests.hf.cases import CASES
    from tests.hf.compare import run

    for name, make in CASES.items():
        recorder.case = f"family {name}"
        if wanted(recorder.case, only):
            for dtype in (torch.float32, torch.bfloat16):
                model, (inputs, mask) = make()
                run(hf.accelerate(model.to(dtype).eval()), test_gpu.moved(inputs, "cpu", dtype), mask)


def from_lab(recorder, only):
    """The lab's model at the paper preset's width: a training step, and a test of one longer sequence."""
    from posenc.lab.model import Transformer

    for name in ("none", "rope", "alibi", "t5", "clipped", "shaw", "transformer_xl", "deberta"):
        recorder.case = f"lab {name}"
        if not wanted(recorder.case, only):
            continue
        model = Transformer(name, vocabulary=256, width=384, heads=6, layers=1, causal=True, longest=128)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.zeros(2, 128, dtype=torch.long)).sum().backward()
            with torch.no_grad():
                model(torch.zeros(1, 256, dtype=torch.long))


def from_corners(recorder, only):
    """Every pair of slots; head sizes; masks; and sizes of one, which Triton compiles as constants."""
    import itertools

    from posenc import Index, Lookup, Plan, Positions, attend
    from tests.gpu.cases import SLOTS, tame, tensors
    from tests.plans import plan_of

    def case(name, slots, shape, dtype=torch.bfloat16, reach=(60, 70), positions=None, **options):
        recorder.case = f"corner {name}"
        if wanted(recorder.case, only):
            with Elsewhere("cpu"):
                q, k, v = tensors(*shape, dtype)
                train(q, k, v, tame(plan_of(slots, q, k, v, positions, reach=reach)), **options)

    for number, slots in enumerate(itertools.combinations(SLOTS, 2)):
        case(" + ".join(slots), slots, (1, 2, 1 + number % 2, 130, 130, 64), causal=number % 3 == 0)
    mixed = ("bias", "dot_query", "dot_key", "add_value", "slopes", "decay", "scale")
    for size in (16, 24, 32, 48, 80, 96, 112, 128, 160, 192, 256):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for slots in (("bias",), ("dot_query", "add_value"), ("dot_query", "dot_key"), mixed):
                if dtype == torch.bfloat16 or (size in (16, 80, 128, 256) and (slots == mixed or size == 256)):
                    case(f"{size} {dtype} {'+'.join(slots)}", slots, (1, 2, 1, 130, 130, size), dtype)
    for slots in (("bias",), ("dot_query", "dot_key"), ("add_value", "slopes")):
        for heads, lq, lk in ((1, 1, 1), (1, 1, 300), (2, 1, 2000), (1, 2, 1), (1, 17, 1)):
            case(f"{heads} {lq} {lk} {slots}", slots, (1, heads, 1, lq, lk, 64), reach=(1, 1))
        for reach in ((0, 0), (-1, 1), (16, 16), (0, 1), (1, 0)):
            case(f"reach {reach} {slots}", slots, (1, 2, 1, 70, 70, 64), reach=reach, causal=True)
        rows = torch.ones(2, 150, dtype=torch.bool)
        documents = torch.arange(150)[None].expand(2, 150) // 60
        masks = {"key_mask": rows, "documents": documents, "mask": torch.randn(2, 1, 150, 150)}
        for mask, value in {**masks, "bool": rows[:, None, None], "column": torch.randn(150, 1)}.items():
            options = {mask if mask in masks else "mask": value}
            case(f"{mask} {slots}", slots, (2, 2, 2, 150, 150, 64), **options)
        for rate in (0.1, 0.5):
            case(f"dropout {slots}", slots, (2, 2, 2, 150, 150, 64), dropout=rate)
        case(f"tokens {slots}", slots, (1, 2, 2, 150, 150, 64), positions=Positions(documents[:1]))
        case(f"starts {slots}", slots, (2, 2, 2, 150, 150, 64), positions=Positions((torch.tensor([1, 0]), 150), 150))
    for size, dtype in ((64, torch.bfloat16), (128, torch.float16), (48, torch.float32)):
        recorder.case = f"corner shifts {size} {dtype}"
        if wanted(recorder.case, only):
            with Elsewhere("cpu"):
                q, k, v = tensors(1, 2, 2, 130, 130, size, dtype)
                shift, other, table = (
                    torch.randn(shape).requires_grad_() for shape in ((2, size), (2, size), (2, 259, size))
                )
                exact = Lookup(Index(-129, 129), dot_query=table.to(dtype), query_shift=other)
                train(q, k, v, Plan(Positions(130), shift=shift.to(dtype), lookups=(exact,)))
                for keys in (130, 2000):  # decoding makes the rows of the first itself
                    _, k, v = tensors(1, 2, 1, 1, keys, size, dtype)
                    rows = Lookup(
                        Index(1 - keys, 0), dot_query=torch.randn(2, keys, size, dtype=dtype), query_shift=other
                    )
                    with torch.no_grad():
                        shifted = Plan(Positions((keys - 1, 1), keys), shift=shift.to(dtype), lookups=(rows,))
                        attend(q[:, :, :1].detach(), k.detach(), v.detach(), shifted, engine="triton")
    recorder.case = "corner nothing"
    if wanted(recorder.case, only):
        with Elsewhere("cpu"):
            q, k, v = tensors(1, 1, 1, 1, 1, 64, torch.bfloat16)
            train(q, k, v, Plan(Positions(1)))
            train(
                q,
                k,
                v,
                Plan(
                    Positions(1),
                    lookups=(Lookup(Index(1, 1), bias=torch.zeros(1, 1), dot_query=torch.zeros(1, 1, 64)),),
                ),
            )


def from_projections(recorder, only):
    """Tables that linear layers project: two with a bias and without, one alone, widths that 16 does not divide."""
    from torch import nn

    from posenc.core import projection

    for size, dtype in ((768, torch.bfloat16), (512, torch.float16), (100, torch.bfloat16)):
        recorder.case = f"projection {size} {dtype}"
        if wanted(recorder.case, only):
            for biases in ((False, True), (True, True), (False,)):
                linears = [nn.Linear(size, size, bias=bias, dtype=dtype) for bias in biases]
                weights = [x for linear in linears for x in (linear.weight, linear.bias)]
                rows = torch.randn(255, size, dtype=dtype, requires_grad=len(biases) == 2)
                outs = projection._apply(4, 0, 255, rows, *weights)
                torch.autograd.grad(outs, [linears[0].weight], [torch.zeros_like(x) for x in outs])
                outs = projection._apply(4, 0, 255, rows, *weights)
                leaves = [x for linear in linears for x in linear.parameters()] + [rows] * rows.requires_grad
                torch.autograd.grad(outs, leaves, [torch.zeros_like(x) for x in outs])


def from_pair(recorder, only):
    """Functions of both positions: head sizes, dtypes, a bias for all heads or rows and one for each."""
    from posenc import Plan, Positions
    from tests.gpu.cases import tensors

    for size, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (80, torch.float16), (256, torch.bfloat16),
                        (64, torch.float32), (256, torch.float32)):  # fmt: skip
        recorder.case = f"pair {size} {dtype}"
        if wanted(recorder.case, only):
            for rows, heads in ((1, 4), (2, 1)):
                with Elsewhere("cpu"):
                    weight = torch.zeros(rows, heads, 1, 1, requires_grad=True)
                    plan = Plan(Positions(300), pair=lambda p_q, p_k, w=weight: w.expand(-1, -1, len(p_q), len(p_k)))
                    train(*tensors(2, 4, 2, 300, 300, size, dtype), plan, [weight], causal=True)


def from_contextual(recorder, only):
    """Stick-breaking attention, contextual counts and PaTH: head sizes, dtypes, masks."""
    from posenc.contextual import operators, path_operators

    for size, dtype, masked in ((64, torch.bfloat16, False), (128, torch.bfloat16, True), (80, torch.float16, False),
                                (256, torch.bfloat16, False), (64, torch.float32, True), (256, torch.float32, False)):  # fmt: skip
        recorder.case = f"contextual {size} {dtype}"
        if wanted(recorder.case, only):
            q, k, v = (torch.empty(2, heads, 300, size, dtype=dtype) for heads in (4, 2, 2))
            masks = (
                (torch.ones(2, 300, dtype=torch.bool), torch.zeros(1, 300, dtype=torch.long))
                if masked
                else (None, None)
            )
            for counts in (None, torch.empty(2, 4, 300, 64)):
                out, rest = operators.forward(q, k, v, counts, *masks, 0.1, True)
                d_left = rest if masked and counts is None else None
                operators.backward(q, d_left, q, k, v, counts, *masks, out, rest, 0.1, True)
            if size <= 64 or (size <= 128 and dtype == torch.bfloat16):
                beta, total = torch.empty(2, 2, 300), torch.empty(2, 4, 300, dtype=torch.double) if masked else None
                given = q, k, v, k, beta, total, *masks
                path_operators.backward(q, *given, path_operators.forward(*given, 0.1), 0.1)


def from_rotation(recorder, only):
    """rotate_tensors: both layouts, partial rotations, grouped heads, one tensor and two, both directions."""
    from posenc.core.rotary_kernel import rotate_tensors

    recorder.case = "rotation"
    if not wanted(recorder.case, only):
        return
    for size, pairs, dtype in ((64, 32, torch.bfloat16), (128, 64, torch.float16), (80, 40, torch.bfloat16),
                               (96, 12, torch.bfloat16), (64, 32, torch.float32), (32, 8, torch.float64)):  # fmt: skip
        q, k = (torch.empty(2, 300, heads, size, dtype=dtype, device="meta").transpose(1, 2) for heads in (16, 1))
        phases = torch.empty(1, 300, pairs, device="meta")
        for layout in ("half", "interleaved"):
            rotate_tensors((q, k), phases, phases, layout)
            rotate_tensors((q.contiguous(),), phases, phases, layout, inverse=True)


def from_counted(recorder, only):
    """Vectors of positions that count real tokens."""
    from posenc.core.counted_kernel import add_counted

    recorder.case = "counted"
    if not wanted(recorder.case, only):
        return
    for width, dtype in ((512, torch.bfloat16), (96, torch.float16), (4096, torch.float32), (33, torch.bfloat16)):
        x, rows = (torch.empty(*shape, width, dtype=dtype, device="meta") for shape in ((2, 300), (512,)))
        add_counted(x, rows, torch.empty(2, 400, dtype=torch.bool, device="meta"))


def from_network(recorder, only):
    """FIRE's network: heads and hidden numbers below, at and above what a program takes at once."""
    from posenc.core import scalar_network_kernel

    recorder.case = "network"
    if not wanted(recorder.case, only):
        return
    for heads, hidden in ((6, 32), (8, 32), (16, 32), (32, 64), (1, 5)):
        x, grad = torch.empty(5000, device="meta"), torch.empty(heads, 5000, device="meta")
        weights = [torch.empty(size, device="meta") for size in (hidden, hidden, (heads, hidden), heads)]
        scalar_network_kernel.forward(x, *weights)
        scalar_network_kernel.gradients(x, grad, *weights)


def from_decode(recorder, only):
    """A few queries over many keys: the benchmark's shapes, slots, masks, head sizes and dtypes."""
    from posenc import Positions, attend
    from tests.plans import plan_of, tensors

    def case(name, slots, shape, dtype=torch.bfloat16, positions=None, **options):
        recorder.case = f"decode {name} {'+'.join(slots)}"
        if wanted(recorder.case, only):
            with Elsewhere("meta"), torch.no_grad():
                q, k, v = tensors(*shape, dtype=dtype, device="cuda")
                plan = plan_of(slots, q, k, v, positions, reach=(64, 64))
                attend(q, k, v, plan, causal=True, engine="triton", **options)

    for shape in (
        (1, 32, 8, 1, 1024, 128),
        (16, 32, 8, 1, 4096, 128),
        (64, 32, 8, 1, 8192, 128),
        (8, 12, 12, 1, 512, 64),
    ):
        for slots in ((), ("bias",), ("slopes",), ("dot_query",)):
            case(shape, slots, shape)
    for number, slots in enumerate(
        (("bias", "slopes"), ("states", "scale"), ("decay",), ("bias", "dot_query", "scale", "decay"))
    ):
        lq, dtype = (1, 3, 8, 16)[number], (torch.bfloat16, torch.float16)[number % 2]
        case(lq, slots, (2, 8, 2, lq, 1000, 64), dtype)
        real = torch.ones(2, 1000, dtype=torch.bool, device="meta")
        case(f"padded {lq}", slots, (2, 8, 2, lq, 1000, 64), dtype, key_mask=real)
        case(f"masked {lq}", slots, (2, 8, 2, lq, 1000, 64), dtype, mask=real[:, None, None], return_lse=True)
        starts = torch.zeros(2, dtype=torch.int64, device="meta")
        case(f"starts {lq}", slots, (2, 8, 2, lq, 1000, 64), dtype, Positions((starts, lq), 1000), window=100)
        case(f"single {lq}", slots, (2, 8, 2, lq, 1000, 64), torch.float32)
    for size in (16, 24, 80, 96, 192, 256):
        for dtype in (torch.bfloat16, torch.float32):
            case(f"{size} {dtype}", ("bias", "dot_query"), (2, 8, 2, 2, 1000, size), dtype, return_lse=True)


def wanted(name, only):
    return not only or any(part in name for part in only)


SOURCES = [
    from_cases,
    from_kernel_plans,
    from_bench,
    from_hf,
    from_families,
    from_projections,
    from_lab,
    from_corners,
    from_pair,
    from_contextual,
    from_rotation,
    from_counted,
    from_network,
    from_decode,
]


def compile_one(number):
    """-> (seconds, shared bytes, registers, bytes spilled) or an error's text."""
    kernel, signature, constants, attributes, options = TODO[number]
    target = driver.active.get_current_target()
    began = spent()
    try:
        made = triton.compile(
            kernel.ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__
        )
    except Exception as error:
        return number, f"{type(error).__name__}: {str(error)[-700:]}"
    return number, (spent() - began, made.metadata.shared, *resources(made.asm["cubin"]))


def spent() -> float:
    """CPU seconds of this process and of the assembler's."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def resources(cubin: bytes) -> tuple[int, int]:
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))


TODO: list = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, choices=SHARED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--list", action="store_true", help="record, compile nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recorder = pretend(args.arch)
    began = time.monotonic()
    for source in SOURCES:
        source(recorder, args.only)
        print(
            f"{source.__name__[5:]}: {len(recorder.kernels)} kernels so far ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    keys = list(recorder.kernels)
    if not keys:
        sys.exit(f"no case has {' or '.join(args.only)} in its name")
    TODO.extend(recorder.kernels.values())
    if args.list:
        for key in keys:
            print(key[0], ", ".join(dict.fromkeys(recorder.cases[key]))[:200])
        return
    results, failed = {}, 0
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for number, result in pool.imap_unordered(compile_one, range(len(keys))):
            results[number] = result
            about = f"{keys[number][0]} for {', '.join(dict.fromkeys(recorder.cases[keys[number]]))}"[:160]
            if isinstance(result, str):
                failed += 1
                print(f"FAILED  {about}\n    {result}", flush=True)
                continue
            seconds, shared, registers, spilled = result
            over = shared > SHARED[args.arch]
            failed += over
            word = "TOO BIG" if over else "spills " if spilled else "slow   " if seconds > 8 else None
            if word:
                print(
                    f"{word} {about}: {shared} bytes shared, {registers} registers, {spilled} spilled, {seconds:.1f} s",
                    flush=True,
                )
    fine = [x for x in results.values() if not isinstance(x, str)]
    print(
        f"{len(fine)} of {len(keys)} compiled for sm_{args.arch} with Triton {triton.__version__}; slowest {max(x[0] for x in fine):.1f} s, "
        f"median {sorted(x[0] for x in fine)[len(fine) // 2]:.1f} s, most shared memory {max(x[1] for x in fine)} bytes; {failed} failed"
    )
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
