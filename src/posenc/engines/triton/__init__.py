"""The triton engine: one fused forward kernel and a backward pair for any plan, on CUDA devices.

    arguments     LoweredPlan -> tensors and integers          launch        buffers and launches
    ops           operators and autograd                       schedule      tile sizes, warps, stages
    prepared      equal calls as one autograd function         tables        rows of distances, and their gradients
    forward, backward_q, backward_k, preprocess                the attention kernels, made of
        masking         which tiles a block visits, which pairs are visible
        scores          the terms of a score                   band_layout   content terms, one number per token and distance
        bf16x3, diagonals, dropout, tiles                      arithmetic
    band_products products of bands with tables                padding       bounds of the real keys
    alignment     head sizes and strides                       pair          functions of both positions, block by block
    decode, decode_launch, decode_schedule, decode_step        a few queries over many keys, without gradients

This package can be imported without Triton; the kernels are loaded when a call runs.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from importlib.util import find_spec
from math import log

import torch
from torch import Tensor

from ...core.torch_modes import transform_reason
from .. import dense_bias, further_axes
from ..lowering import LoweredPlan
from .device import capability

INSTALLED = find_spec("triton") is not None
OLDEST = (3, 6)  # older releases cannot compile the kernels (named tuples as arguments)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets its kernels on the CPU, as in tests. Read once, as by Triton itself: reading a variable that is
not set takes longer than everything else that a call on a CPU does here."""
WIDEST = 256  # head size


def _version() -> tuple[int, int]:
    """Triton's version, without importing it; builds under another name count as new."""
    try:
        match = re.match(r"(\d+)\.(\d+)", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        match = None
    return OLDEST if match is None else (int(match[1]), int(match[2]))


VERSION = _version()


def device_reason(device: torch.device) -> str | None:
    """Why no Triton kernel runs on a device, or None."""
    if not INSTALLED:
        return "Triton is not installed"
    if VERSION < OLDEST:
        return f"its kernels need Triton {OLDEST[0]}.{OLDEST[1]} or newer, found {VERSION[0]}.{VERSION[1]}"
    on_cuda = device.type == "cuda"
    if not on_cuda and not INTERPRETED:
        return f"its kernels run on CUDA devices, the tensors are on {device.type}"
    if on_cuda and torch.version.hip is None and capability(device) < (8, 0):
        return "its kernels need compute capability 8.0 or newer"
    return None


def supports(lowered: LoweredPlan) -> str | None:
    facts = lowered.facts
    reason = device_reason(facts.device)
    if reason is not None:
        return reason
    if facts.dtype not in DTYPES:
        return f"its kernels compute in bfloat16, float16 or float32, not {facts.dtype}"
    if max(facts.head_dim, facts.value_dim) > WIDEST:
        return f"head sizes go to {WIDEST}, got {max(facts.head_dim, facts.value_dim)}"
    if facts.pair:
        return _pair_reason(lowered)
    if facts.further_axes:
        reason = further_axes.supports(facts, lowered.plan, WIDEST)
        if reason is not None:
            return reason
    if facts.mask == "learned":
        return "the additive mask needs a gradient; put a learned bias into the plan instead"
    return None


def _pair_reason(lowered: LoweredPlan) -> str | None:
    """Why a plan's pair function, made a dense bias of each block of queries (pair.py), does not run."""
    facts = lowered.facts
    if facts.reads_distance or facts.further_axes or facts.decay or facts.scale != "number":
        return "the plan has a pair function beside other terms; put all of them into the function"
    if facts.dropout:
        return "the plan has a pair function, whose blocks have no dropout"
    if 0 in (facts.batch, facts.q_length, facts.k_length):
        return "a tensor is empty"
    return transform_reason()


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    from . import decode_launch, prepared
    from .alignment import pad_heads
    from .arguments import kernel_arguments
    from .ops import attend

    if lowered.facts.pair:
        from . import pair

        return pair.run(q, k, v, lowered)
    if dense_bias.is_worth(lowered):
        from . import pair

        return pair.run_dense(q, k, v, lowered, dense_bias.make_bias(q, lowered, torch.float32))
    if decode_launch.applies(lowered.facts):
        return decode_launch.run(q, k, v, lowered)
    call = prepared.find(q, k, v, lowered)
    if call is not None:
        return call.run(lowered.plan, lowered.mask, prepared.collect(q, k, v, lowered.plan, lowered.mask))
    finish = None
    if lowered.facts.further_axes:
        q, k, v, lowered, finish = further_axes.widen(q, k, v, lowered)
    inputs, numbers, scale = kernel_arguments(q, k, v, lowered)
    size = v.shape[3]
    out, lse, _ = attend(pad_heads(inputs), numbers, scale, lowered.dropout)
    out = out if out.shape[3] == size else out[..., :size]
    out = out if finish is None else finish(out)
    if not lowered.facts.return_lse:
        return out, None
    lse = lse[..., : q.shape[2]]  # base 2, +inf for a fully masked query
    return out, torch.where(lse == float("inf"), float("-inf"), lse * log(2.0))
