"""Time and memory of a call, the machine, and the load that other processes put on it."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def peak_bytes(call: Call, device: str = "cpu") -> int:
    """The most memory that tensors made inside the call held at once."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch 2.13 prints a line for each start and stop
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    held = most = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def free_bytes(device: str = "cpu") -> int:
    """Memory that can still be allocated without swapping."""
    if device == "cpu":
        import psutil

        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def seconds(call: Call, device: str = "cpu", inner: int = 1) -> float:
    """Seconds of one call, the mean of `inner` calls in a row; on a GPU between two CUDA events."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(inner):
            call()
        return (time.perf_counter() - start) / inner
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(inner):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / inner


def time_interleaved(
    calls: dict[str, Call], rough: dict[str, float], repeats: int, budget: float, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds of each contender, round by round, so that a slow moment of the machine affects all alike.

    Short calls (by their `rough` seconds) are repeated within a round. A contender that has used `budget` seconds stops
    after two rounds: lists may differ in length, and their entries belong to the first rounds.
    """
    enough = 0.02 if device == "cpu" else 0.004
    inner = {name: max(1, min(100, math.ceil(enough / rough[name]))) for name in calls}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats):
        for name, call in calls.items():
            if number < 2 or sum(taken[name]) * inner[name] < budget:
                taken[name].append(seconds(call, device, inner[name]))
    return taken


def compare_with_base(taken: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median seconds, median ratio to the base within the same rounds, and the ratio's spread (half the quartiles')."""
    ratios = [a / b for a, b in zip(taken, base)]
    low, high = min(ratios), max(ratios)
    if len(ratios) >= 4:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(taken), statistics.median(ratios), (high - low) / 2


def capture_graph(call: Call, pool=None, calls: int = 1) -> Call:
    """`calls` calls as a CUDA graph that is replayed: device time without launch overhead."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(calls):
            call()
    return graph.replay


def try_capture(call: Call, pool) -> Call | None:
    """The same; None if the call cannot be captured."""
    try:
        return capture_graph(call, pool)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def release(device: str) -> None:
    """Return memory that nothing refers to."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def machine(device: str) -> dict:
    """The hardware and software of this run."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    found = {
        "cpu": cpu, "threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["triton"] = importlib.metadata.version("triton")
        query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
            found["driver"], found["memory"] = answer.split(", ")
        except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
            pass  # optional
    return found


class OtherProcesses:
    """The share of all cores that other processes have used since this object was created."""

    def __init__(self):
        self.start = self._now()

    def share(self) -> float:
        wall, busy, own = (b - a for a, b in zip(self.start, self._now()))
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        import psutil

        machine = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        own = 0.0
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            own += times.user + times.system
        total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
        return total, total - idle, own
