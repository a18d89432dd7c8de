"""Peak memory since `reset`, beyond what was allocated before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

_before = 0


def reset(device: torch.device) -> None:
    global _before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _before = torch.cuda.memory_allocated(device)
        return
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # return freed memory that glibc keeps
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:  # Linux: reset the process's high-water mark
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        _before = -1
        return
    _before = process_bytes("VmRSS")


def peak(device: torch.device) -> int | None:
    """Bytes since `reset`, or None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - _before
    return None if _before < 0 else max(0, process_bytes("VmHWM") - _before)


def process_bytes(field: str) -> int:
    """Linux: bytes of this process ("VmRSS"), or their peak ("VmHWM"); 0 if the system does not say."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
