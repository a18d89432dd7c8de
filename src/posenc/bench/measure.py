"""Time and memory of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """The most memory that tensors made inside the call held at once."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    held = most = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def medians(calls: dict[str, Callable[[], object]], repeats: int, device: str = "cpu", tick=lambda: None) -> dict:
    """Median seconds of each, taken in turns so that a slow moment of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            seconds[name].append(time.perf_counter() - start)
            tick()
    return {name: statistics.median(values) for name, values in seconds.items()}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
