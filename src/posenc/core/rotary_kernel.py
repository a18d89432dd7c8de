# mypy: ignore-errors
"""apply_rotary on CUDA in one pass: every number is read once and written once, queries and keys in one launch.

The pairs of a head are numbered through, L * pairs of them, and cut into tiles of BLOCK, so that no thread idles whatever
the head size. A program loads the phases of its tile once and rotates that tile of GROUP heads:

    pair number    0 1 2 | 3 4 5 | 6 7 8 | ..        3 pairs per position
    tile           0 0 0   0 1 1   1 1 2 ..          BLOCK = 4
    channels that are not rotated (REST per position) are copied alongside, REST_TILE of them by each tile
"""

import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launches

NOTHING = nullcontext()
current_device = getattr(torch._C, "_cuda_getDevice", lambda: None)
"""torch.cuda.current_device without checking that CUDA is initialised."""
WHOLE = (512, 2, 2)
PARTIAL = (128, 2, 1)
"""(pairs of a tile; heads that share one load of the phases, at most; warps), where all channels are rotated and where some
are not: the best of `python -m tests.gpu.sweep_rotary` on an H200."""


@triton.jit
def _rotate_tile(
    x, out, batch, tile, group, c, s, x_batch, x_head, x_row, out_batch, out_head, out_row, length,
    PAIRS: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, REST_WIDE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate one tile of GROUP heads of x by the phases c, s [BLOCK] into out."""
    for step in tl.static_range(GROUP):
        head = group * GROUP + step
        source = x + batch * x_batch + head * x_head
        target = out + batch * out_batch + head * out_head
        if REST > 0:  # channels that are not rotated; of the same positions, where a tile has whole positions
            lane = tl.arange(0, REST_WIDE)
            at = tile * REST_TILE + lane
            rest_row, rest_channel = at // REST, 2 * PAIRS + at % REST
            rest_valid = (rest_row < length) & (lane < REST_TILE)
            rest = tl.load(source + rest_row * x_row + rest_channel, mask=rest_valid)
        if HALF:
            flat = tile * BLOCK + tl.arange(0, BLOCK)
            row, pair = flat // PAIRS, flat % PAIRS
            valid = row < length
            a = tl.load(source + row * x_row + pair, mask=valid, other=0.0).to(c.dtype)
            b = tl.load(source + row * x_row + pair + PAIRS, mask=valid, other=0.0).to(c.dtype)
            tl.store(target + row * out_row + pair, (a * c - b * s).to(out.dtype.element_ty), mask=valid)
            tl.store(target + row * out_row + pair + PAIRS, (a * s + b * c).to(out.dtype.element_ty), mask=valid)
        else:
            flat = tile * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
            row, channel = flat // (2 * PAIRS), flat % (2 * PAIRS)
            valid = row < length
            both = tl.load(source + row * x_row + channel, mask=valid, other=0.0).to(c.dtype)
            a, b = tl.split(tl.reshape(both, (BLOCK, 2)))
            rotated = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (2 * BLOCK,))
            tl.store(target + row * out_row + channel, rotated.to(out.dtype.element_ty), mask=valid)
        if REST > 0:
            tl.store(target + rest_row * out_row + rest_channel, rest, mask=rest_valid)


@triton.jit(do_not_specialize=["length", "tiles", "q_groups", "groups"])
def _rotate_kernel(
    q, q_out, q_batch, q_head, q_row, q_out_batch, q_out_head, q_out_row,
    k, k_out, k_batch, k_head, k_row, k_out_batch, k_out_head, k_out_row,
    cos, sin, phase_batch, length, tiles, q_groups, groups,
    PAIRS: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, REST_WIDE: tl.constexpr, BLOCK: tl.constexpr,
    Q_GROUP: tl.constexpr, K_GROUP: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each tile, group of heads (q's before k's) and batch row; ROWS_FIRST: neighbouring programs take
    neighbouring tiles, else neighbouring heads."""
    program = tl.program_id(0)
    if ROWS_FIRST:
        tile, group, batch = program % tiles, program // tiles % groups, program // tiles // groups
    else:
        tile, group, batch = program // groups % tiles, program % groups, program // groups // tiles
    tile, group, batch = tile.to(tl.int64), group.to(tl.int64), batch.to(tl.int64)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    valid = at // PAIRS < length
    c = tl.load(cos + batch * phase_batch + at, mask=valid, other=0.0).to(PRECISION)
    s = tl.load(sin + batch * phase_batch + at, mask=valid, other=0.0).to(PRECISION)
    if INVERSE:
        s = -s
    if group < q_groups:  # always, if there is one tensor
        _rotate_tile(q, q_out, batch, tile, group, c, s, q_batch, q_head, q_row, q_out_batch, q_out_head, q_out_row, length,
              PAIRS, REST, REST_TILE, REST_WIDE, BLOCK, Q_GROUP, HALF)  # fmt: skip
    else:
        _rotate_tile(k, k_out, batch, tile, group - q_groups, c, s, k_batch, k_head, k_row, k_out_batch, k_out_head, k_out_row,
              length, PAIRS, REST, REST_TILE, REST_WIDE, BLOCK, K_GROUP, HALF)  # fmt: skip


def rotate_tensors(
    tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, layout: str, inverse: bool = False
):
    """One or two tensors [B, H, L, D] of one length and head size, rotated by cos, sin [B or 1, L, pairs]; each result has the
    strides of its input. inverse: rotated by the negative angles.
    """
    key = _describe(tensors, cos, sin, layout, inverse)
    ready = _ready.get(key)
    if ready is not None:
        return ready.run(tensors, cos, sin)
    given = (*tensors, cos, sin)
    tensors = tuple([x if x.stride(-1) == 1 else x.contiguous() for x in tensors])
    q, k = tensors[0], tensors[-1]
    batch, _, length, size = q.shape
    pairs = cos.shape[-1]
    if pairs == 0:
        return tuple(x.clone() for x in tensors)
    made = tuple([torch.empty_like(x) for x in tensors])
    outs = tuple([out if out.stride(-1) == 1 else out.contiguous() for out in made])  # an expanded x keeps its strides
    if not (q.numel() and k.numel()):
        return outs
    cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out = outs[0], outs[-1]
    shape = _shape_of(size, pairs, q.shape[1], k.shape[1], WHOLE if size == 2 * pairs else PARTIAL)
    groups = shape.q_groups + (shape.k_groups if len(tensors) == 2 else 0)
    strides = (*q.stride()[:3], *q_out.stride()[:3], *k.stride()[:3], *k_out.stride()[:3])
    phase_stride = 0 if cos.shape[0] == 1 else cos.stride(0)
    # neighbouring programs should touch neighbouring memory: [B, L, H, D] has the heads of a position side by side
    rows_first, tiles = strides[1] >= strides[2], -(-length * pairs // shape.constants[4])
    double = q.dtype == torch.float64 or cos.dtype == torch.float64
    constants = (*shape.constants, layout == "half", inverse, rows_first, tl.float64 if double else tl.float32)
    args = (
        q, q_out, *strides[:6], k, k_out, *strides[6:], cos, sin, phase_stride, length, tiles, shape.q_groups, groups, *constants,
    )  # fmt: skip
    if launches.INTERPRETED:
        _rotate_kernel[(tiles * groups * batch,)](*args, num_warps=shape.warps)
        return outs
    variant = (
        "rotate", q.device, q.dtype, k.dtype, cos.dtype, sin.dtype, shape, layout, inverse, rows_first,
        launches.describe_variant((*strides, phase_stride), (q, q_out, k, k_out, cos, sin)),
    )  # fmt: skip
    with launches.on_device(q.device):
        launches.launch_known(variant, lambda: _compile(args, shape.warps), tiles * groups * batch, q.device, args)
    if all(map(operator.is_, (*given, *made), (*tensors, cos, sin, *outs))):
        found = launches.find_known(variant)
        if found is not None:
            if len(_ready) >= 1024:
                _ready.clear()
            _ready[key] = Ready(*found, tiles * groups * batch, args, outs, layout, inverse)
    return outs


def _describe(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, layout: str, inverse: bool):
    """Everything on which a launch depends, besides the addresses."""
    facts = [layout, inverse, cos.get_device(), cos.shape, cos.stride(), cos.dtype, sin.shape, sin.stride(), sin.dtype]
    facts += (cos.data_ptr() & 15, sin.data_ptr() & 15)
    for x in tensors:
        facts += (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15)
    return tuple(facts)


def find_ready(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, layout: str) -> "Ready | None":
    """The launch of an earlier rotation like this one."""
    return _ready.get(_describe(tensors, cos, sin, layout, False))


class Ready:
    """A launch for tensors of known shapes and strides: only addresses are new."""

    def __init__(
        self, launch: Callable, between: tuple, programs: int, args: tuple, outs: tuple[torch.Tensor, ...], layout: str, inverse: bool
    ):  # fmt: skip
        self.launch, self.between, self.programs, self.device = launch, between, programs, outs[0].device
        self.index, self.layout, self.inverse = self.device.index, layout, inverse
        self.allocate = launches.find_allocation(self.device)
        self.layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in outs]
        self.q_strides, self.k_strides, self.rest = args[2:8], args[10:16], args[18:]
        self.gradients: dict[tuple, Ready] = {}
        """The launches that rotate gradients back, by the strides of these."""

    def run(self, tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        allocate = self.allocate
        with NOTHING if self.index in (None, current_device()) else torch.cuda.device(self.device):
            if allocate is None:
                outs = tuple([torch.empty_like(x) for x in tensors])
            else:
                outs = tuple([allocate(*layout) for layout in self.layouts])
            self.launch(
                self.programs, 1, 1, torch._C._cuda_getCurrentRawStream(self.index), *self.between,
                tensors[0].data_ptr(), outs[0].data_ptr(), *self.q_strides, tensors[-1].data_ptr(), outs[-1].data_ptr(),
                *self.k_strides, cos.data_ptr(), sin.data_ptr(), *self.rest,
            )  # fmt: skip
        return outs

    def rotate_back(self, grads: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor):
        """The gradients of `run`, of the same shapes as its results, by the same phases."""
        key = tuple([fact for x in grads for fact in (x.stride(), x.dtype, x.data_ptr() & 15)])
        ready = self.gradients.get(key)
        if ready is not None:
            return ready.run(grads, cos, sin)
        found = rotate_tensors(grads, cos, sin, self.layout, not self.inverse)
        ready = _ready.get(_describe(grads, cos, sin, self.layout, not self.inverse))
        if ready is not None and len(self.gradients) < 16:
            self.gradients[key] = ready
        return found


_ready: dict[tuple, Ready] = {}


def _compile(args: tuple, warps: int):
    return launches.compile_kernel(_rotate_kernel, args, {"num_warps": warps})


class _Shape(NamedTuple):
    """What a launch takes from the numbers of heads and channels."""

    q_groups: int  # programs for the heads of a tile
    k_groups: int
    warps: int
    constants: tuple[int, ...]  # PAIRS to K_GROUP


@lru_cache(maxsize=256)
def _shape_of(size: int, pairs: int, q_heads: int, k_heads: int, programs: tuple[int, int, int]) -> _Shape:
    rest = size - 2 * pairs
    block, max_group, warps = programs
    rest_tile = triton.cdiv(triton.cdiv(block * rest, pairs), 16) * 16
    wide = triton.next_power_of_2(max(rest_tile, 1))
    q_group, k_group = _largest_divisor(q_heads, max_group), _largest_divisor(k_heads, max_group)
    return _Shape(
        q_heads // q_group, k_heads // k_group, warps, (pairs, rest, rest_tile, wide, block, q_group, k_group)
    )


def _largest_divisor(heads: int, most: int) -> int:
    """The largest divisor of `heads` up to `most`: programs with that many heads need no mask."""
    return max(group for group in range(1, most + 1) if heads % group == 0)
