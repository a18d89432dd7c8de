"""The fused engine: one forward kernel and a backward pair for any plan, on CUDA devices.

Importable without Triton; the kernels are loaded when something runs.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from importlib.util import find_spec
from math import log

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.plan import Plan
from .. import further_axes as axes
from . import tiles

INSTALLED = find_spec("triton") is not None
OLDEST = (3, 6)  # older releases cannot compile the kernels (named tuples as arguments, chained conditions)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's own switch puts its kernels on the CPU, as the tests do. Like Triton's, it is looked at once: asking for
a variable that is not there takes longer than all else that a call on a CPU has to ask here."""
WIDEST = 256  # head size


def _version() -> tuple[int, int]:
    """Triton's version, without importing it; builds under another name pass for new."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        found = None
    return OLDEST if found is None else (int(found[1]), int(found[2]))


VERSION = _version()


def refuses(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> str | None:
    if not INSTALLED:
        return "Triton is not installed"
    if VERSION < OLDEST:
        return f"its kernels need Triton {OLDEST[0]}.{OLDEST[1]} or newer, found {VERSION[0]}.{VERSION[1]}"
    if not q.is_cuda and not INTERPRETED:
        return f"its kernels run on CUDA devices, the tensors are on {q.device.type}"
    if q.is_cuda and torch.version.hip is None and tiles.capability(q.device) < (8, 0):
        return "its kernels need compute capability 8.0 or newer"
    if q.dtype not in DTYPES:
        return f"its kernels compute in bfloat16, float16 or float32, not {q.dtype}"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"head sizes go to {WIDEST}, got {max(q.shape[3], v.shape[3])}"
    if plan.pair is not None:
        return "the plan has a pair function, which no kernel can call"
    if any(map(axes.further, plan.lookups)):
        reason = axes.refuses(q, v, plan, WIDEST)
        if reason is not None:
            return reason
    if mask.extra is not None and mask.extra.requires_grad:
        return "the additive mask needs a gradient; put a learned bias into the plan instead"
    return None


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float, with_lse: bool = False):
    from .lower import lower
    from .ops import INPUTS, Numbers, attend

    finish = None
    if any(map(axes.further, plan.lookups)):
        q, k, v, plan, finish = axes.widen(q, k, v, plan)
    low = lower(q, k, plan, mask, dropout)
    numbers = Numbers(
        low.offset, low.left, low.right, low.lo, low.hi,
        *low.bias_span, *low.rows_span, *low.cols_span, *low.mass_span, low.queries,
    )  # fmt: skip
    tensors = [getattr(low, name) for name in INPUTS[3:]]
    out, lse, _ = attend(q, k, v, *tensors, list(numbers), low.scale, dropout)
    out = out if finish is None else finish(out)
    if not with_lse:
        return out
    lse = lse[..., : q.shape[2]]  # base 2, +inf for a query that sees nothing
    return out, torch.where(lse == float("inf"), float("-inf"), lse * log(2.0))
