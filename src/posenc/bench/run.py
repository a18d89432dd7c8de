"""Compare every contender with the float64 reference, then measure those that are correct, fit and are fast enough."""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..functional import attend
from . import libraries, peers
from .measure import (
    OtherProcesses,
    compare_with_base,
    free_bytes,
    machine,
    peak_bytes,
    release,
    seconds,
    time_interleaved,
    try_capture,
)
from .workloads import WORKLOADS, Attention, Case, Problem, make_case

PEERS: dict[str, peers.Peer] = {
    peer.name: peer
    for peer in (
        peers.Plain("plain", "cpu"),
        peers.Plain("flash attention", "cuda", "FLASH_ATTENTION"),
        peers.Plain("cudnn", "cuda", "CUDNN_ATTENTION"),
        peers.Ours(),
        peers.DenseBias(),
        peers.Eager(),
        peers.Flex(),
        libraries.XTransformers(),
        libraries.Transformers(),
        libraries.FlashDeberta(),
        libraries.DisentangledFlash(),
        libraries.TurboT5(),
    )
}
CHECKED = 640
"""Length at which results are compared: past every clip and bucket of the workloads except relative_logits' extent."""
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHARE = 0.6
"""Share of the free memory that a contender may be expected to need."""
BUSY = 0.1
"""Share of the cores in use by other processes above which a measurement counts as disturbed."""
AGAIN = 30.0
"""A disturbed measurement is repeated if it took at most this many seconds."""
BUDGET = {"cpu": 6.0, "cuda": 0.4}
"""Seconds of one contender's rounds at one length and pass."""


@dataclass
class State:
    """A contender's results on a workload so far."""

    notes: dict[str, str] = field(default_factory=dict)  # by pass: why it is not timed at any length
    last: dict[str, tuple[int, float, int]] = field(default_factory=dict)  # by pass: length, seconds, bytes

    def growth(self, kind: str, case: Case) -> float:
        """How many times more scores the case has than one sequence at the last length."""
        length = self.last[kind][0]
        return (case.length * case.queries * case.batch) / (length * min(length, case.queries))

    def expected(self, kind: str, case: Case) -> float:
        """Seconds, if time grows with the scores."""
        return self.last[kind][1] * self.growth(kind, case)

    def reason_to_skip(self, kind: str, case: Case, patience: float) -> str | None:
        """Why this length would take too much memory or time, extrapolated from the last one."""
        length, took, held = self.last[kind]
        more = self.growth(kind, case)
        if held * more > SHARE * free_bytes(case.device):
            return (
                f"would need about {held * more / 2**30:.0f} GiB, by its {held / 2**20:.0f} MiB at {length} tokens; "
                f"{free_bytes(case.device) / 2**30:.0f} GiB are free"
            )
        if took * more > patience:
            return f"would take about {took * more:.0f} s a run, by its {took:.2g} s at {length} tokens"
        return None


def check(peer: peers.Peer, problem: Problem, truth: dict[str, tuple], kinds: list[str]) -> State:
    """Compare output and gradients with the float64 reference; measure the time and memory of one run."""
    case = problem.case
    reasons = {kind: peer.refuses(case, kind) for kind in kinds}
    state = State({kind: reason for kind, reason in reasons.items() if reason is not None})
    if "forward" in state.notes:
        return state
    try:
        attention = peer.make(problem)
        for kind in kinds:
            if kind in state.notes:
                continue
            names, exact = truth["plain" if peer.ceiling else "positions"]
            found = results(attention, problem, kind, positions=not peer.ceiling)
            error = find_error(names, found, exact, TOLERANCE[case.dtype])
            if error is not None:
                state.notes[kind] = f"wrong: {error}"
                if kind == "forward":
                    state.notes["training"] = state.notes[kind]
                    break
                continue
            call = step(attention, problem, kind)
            held = peak_bytes(call, case.device) + peer.kept(attention)
            state.last[kind] = case.length, seconds(call, case.device) / case.batch, held // case.batch
    except Exception as raised:  # a peer's own failure is a result to report
        for kind in kinds:
            state.notes.setdefault(kind, failure(raised))
    return state


def reference(problem: Problem, train: bool) -> dict[str, tuple[list[str], list[Tensor]]]:
    """Names and float64 values of output and gradients, without positions and with them."""
    exact = problem.exact()
    causal = problem.case.workload.causal
    names = ["output", "gradient of q", "gradient of k", "gradient of v"]
    kind = "training" if train else "forward"

    def plain(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal and problem.case.workload.queries is None)

    def full(q, k, v):
        return attend(q, k, v, exact.plan(), causal=causal, engine="reference")

    leaves = [f"gradient of {name}" for name, _ in exact.leaves()]
    return {
        "plain": (names, results(plain, exact, kind, positions=False)),
        "positions": (names + leaves, results(full, exact, kind, positions=True)),
    }


def results(attention: Attention, problem: Problem, kind: str, positions: bool) -> list[Tensor]:
    """The output, and for a training step the gradients of q, k, v and of the encoding's parameters."""
    if kind == "forward":
        with torch.no_grad():
            return [attention(problem.q, problem.k, problem.v)]
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = attention(*leaves)
    if positions:
        leaves += [tensor for _, tensor in problem.leaves()]
    gradients = torch.autograd.grad(out, leaves, problem.g, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(a) if b is None else b for a, b in zip(leaves, gradients))]


def find_error(names: list[str], found: list[Tensor], exact: list[Tensor], tolerance: float) -> str | None:
    """The first tensor that is too far from the reference, relative in norm; None if all are close.

    Some learned vectors cannot change the output (a bias that shifts all scores of a query), and their gradients are
    noise around zero: a gradient counts against the typical one of the encoding's where that is larger.
    """
    typical = max((b.norm().item() / b.numel() ** 0.5 for b in exact[4:]), default=0.0)
    for number, (name, a, b) in enumerate(zip(names, found, exact)):
        if not a.isfinite().all():
            return f"{name} is not finite"
        size = max(b.norm().item(), 1e-30, typical * b.numel() ** 0.5 if number > 3 else 0.0)
        error = (a.double() - b).norm().item() / size
        if error > tolerance:
            return f"{name} is off by {error:.1%}"
    return None


def step(attention: Attention, problem: Problem, kind: str) -> Callable[[], object]:
    """One forward pass, or one training step: forward and all gradients."""
    if kind == "forward":

        def forward():
            with torch.no_grad():
                attention(problem.q, problem.k, problem.v)

        return forward
    learned = [tensor for _, tensor in problem.leaves()]
    inputs = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def training():
        torch.autograd.grad(attention(*inputs), inputs + learned, problem.g, allow_unused=True)

    return training


def failure(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "ran out of memory"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"fails: {type(error).__name__}: {lines[0].strip()[:120] if lines else ''}"


def run(
    workloads: Iterable[str], lengths: Iterable[int], names: Iterable[str], *, device: str = "cpu",
    dtype: torch.dtype = torch.float32, repeats: int = 5, train: bool = True, patience: float = 10.0,
    tick: Callable[[str, float], None] = lambda text, done: None, keep: Callable[[dict], None] = lambda result: None,
) -> dict:  # fmt: skip
    """{"machine", "versions", "when", "records": [{workload, peer, length, pass, seconds, ratio, ...} or {..., note}]}

    `tick` is called with a description and the finished share; `keep` with the result so far, after each workload.
    """
    lengths = sorted(set(lengths))
    ceilings = [name for name, peer in PEERS.items() if peer.ceiling and device in peer.devices]
    contenders = [PEERS[name] for name in dict.fromkeys([*ceilings, *names])]
    versions = {peer.name: peer.version() for peer in contenders}
    chosen = [WORKLOADS[name] for name in workloads]
    weights = {(w.name, n): (1.0 if w.queries is None else 1e-3) * n * n for w in chosen for n in lengths}
    whole, done = sum(weights.values()), 0.0
    records: list[dict] = []
    result = {
        "machine": machine(device), "versions": versions, "when": _now(), "device": device,
        "dtype": str(dtype).removeprefix("torch."), "ceilings": ceilings, "records": records,
    }  # fmt: skip
    for workload in chosen:
        states = {}
        kinds = ["forward"] + (["training"] if train and workload.queries is None else [])
        tick(f"checking {workload.name}", done / whole)
        case = make_case(workload, CHECKED, device, dtype)
        small = Problem(replace(case, batch=min(2, case.batch)))
        truth = reference(small, "training" in kinds)
        for peer in contenders:
            tick(f"checking {peer.name} on {workload.name}", done / whole)
            if versions[peer.name] is None:
                states[peer.name] = State(dict.fromkeys(kinds, "not installed"))
            elif device not in peer.devices:
                states[peer.name] = State(dict.fromkeys(kinds, f"runs on {' and '.join(peer.devices)} only"))
            else:
                states[peer.name] = check(peer, small, truth, kinds)
            about = {"workload": workload.name, "peer": peer.name, "length": None}
            records += [{**about, "pass": kind, "note": note} for kind, note in states[peer.name].notes.items()]
        for length in lengths:
            if workload.longest is None or length <= workload.longest:
                case = make_case(workload, length, device, dtype)
                tick(f"{workload.name}, {length} tokens", done / whole)
                records += _measure_length(case, contenders, states, kinds, ceilings[0], repeats, patience)
            done += weights[workload.name, length]
        result["when"] = _now()
        keep(result)
    tick("done", 1.0)
    return result


def _measure_length(case: Case, contenders, states, kinds, base: str, repeats: int, patience: float) -> list[dict]:
    """Every contender at one length, both passes."""
    problem = Problem(case)
    made: dict[str, Attention] = {}
    records = []
    for kind in kinds:
        calls: dict[str, Callable[[], object]] = {}
        held: dict[str, int] = {}
        rough: dict[str, float] = {}
        notes: dict[str, str] = {}
        for peer in contenders:
            state = states[peer.name]
            if kind in state.notes:
                continue
            note = state.reason_to_skip(kind, case, patience)
            if note is None and peer.name != base and base in notes:
                note = f"not compared: {base} {notes[base]}"
            if note is None:
                try:
                    if peer.name not in made:
                        made[peer.name] = peer.make(problem)
                    call = step(made[peer.name], problem, kind)
                    if state.expected(kind, case) < 1.0:  # longer calls are warmed up by the run that counts bytes
                        call()
                    began = time.perf_counter()
                    held[peer.name] = peak_bytes(call, case.device) + peer.kept(made[peer.name])
                    rough[peer.name] = time.perf_counter() - began
                    calls[peer.name] = call
                except Exception as error:  # a peer's own failure is a result to report
                    note = failure(error)
                    release(case.device)
            if note is not None:
                notes[peer.name] = note
                records.append(_record(case, peer.name, kind, note=note))
        if base not in calls:
            continue
        busy, timed = _least_disturbed(calls, rough, repeats, case.device)
        for name, result in timed.items():
            if isinstance(result, str):
                records.append(_record(case, name, kind, note=result))
                continue
            taken, against, more = result
            took, ratio, spread = compare_with_base(taken, against)
            states[name].last[kind] = case.length, took / case.batch, held[name] // case.batch
            found: dict = {"seconds": took, "ratio": ratio, "spread": spread, "rounds": len(taken), "bytes": held[name]}
            found |= {"busy": busy, "when": _now(), **more, **PEERS[name].detail(problem)}
            records.append(_record(case, name, kind, **found))
        release(case.device)
    return records


def _least_disturbed(calls, rough, repeats: int, device: str) -> tuple[float, dict[str, tuple | str]]:
    """The least disturbed of up to two attempts, and the share of the cores that other processes used."""
    ceilings = [name for name in calls if PEERS[name].ceiling]
    best: tuple[float, dict[str, tuple | str]] = (math.inf, {})
    for _ in range(2):
        others, began = OtherProcesses(), time.monotonic()
        timed = _time_contenders(calls, rough, ceilings, repeats, device)
        best = min(best, (round(others.share(), 3), timed), key=lambda attempt: attempt[0])
        if best[0] <= BUSY or time.monotonic() - began > AGAIN:
            break
    return best


def _time_contenders(calls, rough, ceilings: list[str], repeats: int, device: str) -> dict[str, tuple | str]:
    """By contender: its seconds, the first ceiling's in the same rounds, and what else to record; or why it has none.

    posenc is interleaved with the ceilings only, and each other peer with the first ceiling alone: after a peer that fills gigabytes, the
    next call of any contender is slow, and graphs keep their memory. On a GPU the seconds are those of replayed graphs; "launched" is the
    median of calls from Python.
    """
    base = ceilings[0]
    first = [name for name in calls if name in ceilings or name == "posenc"]
    found: dict[str, tuple | str] = {}
    for group in [
        *([base, name] for name in calls if name not in first),
        first,
    ]:  # the ceilings keep their record of the last one
        try:
            found |= _time_group({name: calls[name] for name in group}, rough, base, repeats, device, group is first)
        except Exception as error:  # such as memory, which a graph needs more of than a call
            found |= dict.fromkeys(first if group is first else group[1:], failure(error))
        if device != "cpu":
            release(device)
    return {name: found[name] for name in calls}


def _time_group(calls, rough, base: str, repeats: int, device: str, also_launched: bool) -> dict[str, tuple | str]:
    more: dict[str, dict] = {name: {} for name in calls}
    replays = dict(calls)
    if device != "cpu":
        pool = torch.cuda.graph_pool_handle()
        # one pool for all: they are replayed one after another, and their outputs are not used
        captured = {name: try_capture(call, pool) for name, call in calls.items()}
        replays = {name: captured[name] or call for name, call in calls.items()}
        launched = time_interleaved(calls, rough, 5, BUDGET[device], device) if also_launched else {}
        for name in calls:
            more[name]["graph"] = captured[name] is not None
            if name in launched:
                more[name]["launched"] = statistics.median(launched[name])
    taken = time_interleaved(replays, rough, repeats, BUDGET[device], device)
    return {name: (taken[name], taken[base], more[name]) for name in calls}


def _record(case: Case, peer: str, kind: str, **more) -> dict:
    return {
        "workload": case.workload.name, "peer": peer, "length": case.length, "pass": kind, "batch": case.batch,
        "heads": case.heads, "size": case.size, **more,
    }  # fmt: skip


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
