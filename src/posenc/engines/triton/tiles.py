"""Known-good tiles: block sizes, warps and pipeline stages for each kernel, head size and precision.

Chosen by measurement (docs/triton-log.md), looked up at run time: nothing is tuned while a model runs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int  # of the loop over far tiles
    band_stages: int = 1  # of the loop over general tiles: their look-ups would be staged too
    band: int = 0  # keys (backward_k: queries) of a general tile; 0: as many as of a far one
    amid: int = 0  # the same for a tile within the bands


# (kernel, largest head size it serves) -> tile.
HOPPER = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(64, 64, 4, 3),
    ("forward", 256): Tile(64, 32, 4, 2),
    ("backward_q", 64): Tile(64, 64, 4, 3),
    ("backward_q", 128): Tile(64, 32, 4, 3),
    ("backward_q", 256): Tile(64, 32, 4, 1),
    ("backward_k", 64): Tile(64, 64, 4, 3),
    ("backward_k", 128): Tile(32, 64, 4, 3),
    ("backward_k", 256): Tile(32, 64, 4, 1),
}
# The same by what a plan has (`Inputs.kind`): the look-ups of content terms need registers, keys' own terms more of them.
HOPPER_KINDS = {
    "bias": {("forward", 64): Tile(64, 128, 4, 3)},
    "masked bias": {
        ("forward", 64): Tile(64, 128, 4, 3, 1, 64)
    },  # a tile of 128 keys with look-ups and masks, or dropout, spills
    "content": {
        ("forward", 64): Tile(64, 128, 4, 3, 3, 64),
        ("forward", 128): Tile(64, 64, 4, 3, 2),
        ("backward_q", 64): Tile(64, 64, 4, 3, 2),
        ("backward_q", 128): Tile(64, 32, 4, 3, 2),
        ("backward_k", 64): Tile(64, 64, 4, 3, 2),
        ("backward_k", 128): Tile(32, 64, 4, 3, 2),
    },
    "keys": {("forward", 64): Tile(64, 64, 4, 3, 3), ("backward_k", 64): Tile(64, 64, 4, 3, 2, 32)},
    "wide content": {
        ("forward", 64): Tile(64, 64, 4, 3, 3, 32),
        ("forward", 128): Tile(64, 64, 4, 3, 2, 32),
        ("backward_q", 64): Tile(64, 64, 4, 3, 3, 32),
        ("backward_q", 128): Tile(64, 32, 4, 3, 3),
        ("backward_k", 64): Tile(64, 64, 4, 3, 3, 32),
        ("backward_k", 128): Tile(32, 64, 4, 3, 3),
    },
    "wide keys": {
        ("forward", 64): Tile(64, 64, 4, 3, 3),
        ("backward_q", 64): Tile(64, 64, 4, 3, 2, 32),
        ("backward_k", 64): Tile(64, 64, 4, 3, 2, 32),
    },
}
SMALL = {
    ("forward", 64): Tile(64, 64, 4, 2),
    ("forward", 128): Tile(64, 32, 4, 2),
    ("forward", 256): Tile(32, 32, 4, 1),
    ("backward_q", 64): Tile(64, 64, 4, 2),
    ("backward_q", 128): Tile(32, 32, 4, 1),
    ("backward_q", 256): Tile(32, 16, 4, 1),
    ("backward_k", 64): Tile(32, 64, 4, 2),
    ("backward_k", 128): Tile(32, 32, 4, 1),
    ("backward_k", 256): Tile(16, 32, 4, 1),
}
# Exact float32 products are unrolled into plain multiply-adds: larger tiles take minutes to compile.
SINGLE = {64: Tile(32, 32, 4, 1), 128: Tile(32, 16, 4, 1), 256: Tile(16, 16, 4, 1)}
SPREAD = Tile(64, 64, 4, 3)
SPREAD_WIDE = Tile(64, 128, 4, 3)
GATHER = Tile(64, 128, 4, 3)
COLLECT = Tile(64, 128, 4, 3)
ENOUGH = 1024  # programs of `collect` that fill a device
WIDE = 256  # distances, from where on whole tiles lie within a band
INTERPRETED = Tile(16, 16, 4, 1, 2)
"""Small, so that short sequences already have far tiles, band tiles and edges."""
INTERPRETED_BANDS = Tile(16, 32, 4, 1)


def cdiv(number: int, unit: int) -> int:
    """Triton's own, called here, takes microseconds."""
    return -(-number // unit)


def power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def capability(device: torch.device) -> tuple[int, int]:
    """A device's; PyTorch's own takes microseconds."""
    return torch.cuda.get_device_capability(device) if torch.compiler.is_compiling() else _capability(device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def choose(
    kernel: str, size: int, dtype: torch.dtype, device: torch.device, q_length: int, kind: str = "plain"
) -> Tile:  # fmt: skip
    """The tile of one kernel for the larger of the head sizes; `kind`: what the plan has, see `Inputs.kind`."""
    if device.type != "cuda":
        return INTERPRETED
    width = 64 if size <= 64 else 128 if size <= 128 else 256
    if dtype == torch.float32:
        return SINGLE[width]
    hopper = capability(device)[0] in (9, 10)  # 12.x has the shared memory of 8.6
    tile = (HOPPER if hopper else SMALL)[kernel, width]
    if hopper and kind != "plain":
        for like in (kind,) if kind.endswith("bias") else ("content", kind):
            tile = HOPPER_KINDS[like].get((kernel, width), tile)
    if kernel == "forward" and q_length <= 16:
        return Tile(16, 128 if width <= 128 and hopper else 32, 4, tile.stages)
    return tile


def choose_spread(size: int, span: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tokens and distances of the product that makes a band; `size`: of the states."""
    if device.type != "cuda":
        return INTERPRETED_BANDS
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if size <= 128 else Tile(16, 16, 4, 1)
    if size > 128:
        return Tile(64, 32, 4, 1)
    return SPREAD_WIDE if size <= 64 and span > WIDE else SPREAD


def each(tokens: int, device: torch.device) -> int:
    """How many matrices a band is written or read as: 16 write memory's pieces of 32 bytes, 8 have more rows."""
    return 16 if tokens >= (2048 if device.type == "cuda" else 64) else 8


def choose_gather(size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tokens and distances of the product of a band with a table; `size`: of the table's rows."""
    if device.type != "cuda":
        return INTERPRETED_BANDS
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if size <= 128 else Tile(16, 16, 4, 1)
    return GATHER if size <= 64 else Tile(64, 64, 4, 3) if size <= 128 else Tile(64, 32, 4, 2)


def choose_collect(size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tokens and distances of the product that makes a table's gradient; `size`: of the states."""
    if device.type != "cuda":
        return INTERPRETED_BANDS
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if size <= 64 else Tile(16, 16, 4, 1)
    return COLLECT if size <= 128 else Tile(32, 64, 4, 2)


def parts(programs: int, device: torch.device) -> int:
    """Into how many parts to split the sums of a table's gradient, for so many programs each: few parts are few sums to
    write and to read, many fill the device."""
    if device.type != "cuda":
        return 2
    return next((parts for parts in (1, 2, 4) if parts * programs >= ENOUGH), 8)


def splits(programs: int, k_length: int, tile: Tile, device: torch.device) -> int:
    """Into how many shares to split the keys so that a few queries still fill the device."""
    if device.type != "cuda":
        return 3 if k_length > 2 * tile.keys else 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // max(programs, 1), k_length // (2 * tile.keys), 64))
