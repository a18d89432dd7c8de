"""Check every contender against the float64 reference, then measure those that are right."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..dispatch import attend
from .measure import medians, peak_bytes
from .peers import PEERS, Peer
from .workloads import WORKLOADS, Workload

CHECKED = 384
"""Length at which results are compared: past every clip and bucket of the workloads but the last few of deberta."""
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def machine(device: str) -> dict:
    """What the numbers belong to."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    found = {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def wrong(peer: Peer, workload: Workload, device: str, dtype: torch.dtype) -> str | None:
    """How far a peer's output or gradients are from the float64 reference, where that is too far; else None."""
    length = CHECKED
    scheme = workload.make(device, dtype)
    exact = workload.make(device, torch.float64)
    exact.load_state_dict({name: tensor.double() for name, tensor in scheme.state_dict().items()})
    q, k, v, g = workload.inputs(length, device, dtype)
    q64, k64, v64, g64 = (x.double() for x in (q, k, v, g))
    if peer.name == "plain":
        causal = workload.causal and workload.queries is None
        truth = _results(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal), q64, k64, v64, g64)
    else:
        plan = exact.plan(workload.where(length))
        truth = _results(
            lambda q, k, v: attend(q, k, v, plan, causal=workload.causal, engine="reference"), q64, k64, v64, g64
        )
    train = peer.trains and workload.queries is None
    ours = _results(peer.make(workload, scheme, length), q, k, v, g, train=train)
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, a, b in zip(names, ours, truth):
        if not a.isfinite().all():
            return f"{name} is not finite"
        error = ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        if error > TOLERANCE[dtype]:
            return f"{name} is off by {error:.1%}"
    return None


def _results(attention, q, k, v, g, train: bool = True) -> list[Tensor]:
    if not train:
        with torch.no_grad():
            return [attention(q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def forward(attention, q, k, v) -> Callable[[], object]:
    def call():
        with torch.no_grad():
            attention(q, k, v)

    return call


def training(attention, scheme, q, k, v, g) -> Callable[[], object]:
    def call():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        for parameter in scheme.parameters():
            parameter.grad = None
        attention(*leaves).backward(g)

    return call


def run(
    workloads: Iterable[str],
    lengths: Iterable[int],
    peers: Iterable[str],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    repeats: int = 5,
    train: bool = True,
    tick: Callable[[str], None] = lambda text: None,
) -> dict:
    """{"machine", "versions", "when", "records": [{workload, peer, length, pass, seconds, ratio, bytes, note}]}"""
    peers = list(peers)
    contenders = [PEERS[name] for name in dict.fromkeys(["plain", *peers])]
    versions = {peer.name: peer.version() for peer in contenders}
    records = []
    for name in workloads:
        workload = WORKLOADS[name]
        notes: dict[str, str] = {}
        for peer in contenders:
            tick(f"checking {peer.name} on {name}")
            if versions[peer.name] is None:
                notes[peer.name] = "not installed"
                continue
            reason = peer.refuses(workload, CHECKED)
            if reason is None:
                try:
                    reason = wrong(peer, workload, device, dtype)
                    reason = None if reason is None else f"wrong: {reason}"
                except Exception as error:  # a peer's own failure is a result to report
                    reason = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
            if reason is not None:
                notes[peer.name] = reason
        for length in lengths:
            records += _length(workload, length, contenders, notes, device, dtype, repeats, train, tick)
    return {
        "machine": machine(device),
        "versions": versions,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": "B1 H8 D64",
        "records": records,
    }


def _length(workload, length, contenders, notes, device, dtype, repeats, train, tick) -> list[dict]:
    q, k, v, g = workload.inputs(length, device, dtype)
    passes = ["forward"] + (["training"] if train and workload.queries is None else [])
    records = []
    for kind in passes:
        calls = {}
        for peer in contenders:
            note = notes.get(peer.name) or peer.refuses(workload, length)
            if note is None and kind == "training" and not peer.trains:
                note = "has no backward pass here"
            if note is not None:
                records.append(_record(workload, peer, length, kind, note=note))
                continue
            scheme = workload.make(device, dtype)
            attention = peer.make(workload, scheme, length)
            calls[peer.name] = (
                forward(attention, q, k, v) if kind == "forward" else training(attention, scheme, q, k, v, g)
            )
        tick(f"{workload.name}, {length} tokens, {kind}")
        inner = 20 if workload.queries else 1
        repeated = {name: _times(call, inner) for name, call in calls.items()}
        seconds = medians(repeated, repeats, device)
        for name, call in calls.items():
            records.append(
                _record(
                    workload,
                    PEERS[name],
                    length,
                    kind,
                    seconds=seconds[name] / inner,
                    ratio=seconds[name] / seconds["plain"],
                    bytes=peak_bytes(call, device),
                )
            )
    return records


def _times(call, count):
    if count == 1:
        return call

    def many():
        for _ in range(count):
            call()

    return many


def _record(workload, peer, length, kind, **more) -> dict:
    return {"workload": workload.name, "peer": peer.name, "length": length, "pass": kind, **more}
