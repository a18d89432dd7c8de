"""The schedule of the decoding kernel: tile sizes, warps and stages, and into how many shares to split the keys.

Plain arithmetic on sizes; the numbers come from `python -m tests.gpu.sweep_decode`.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from .device import capability
from .schedule import cdiv, next_power_of_2


class DecodeTile(NamedTuple):
    rows: int  # queries times query heads of a key head, at least 16 for the tensor cores
    keys: int
    warps: int
    stages: int
    resident: int  # programs that a multiprocessor holds at once


MOST_QUERIES = 16
"""More queries than these run on the forward kernel."""
MOST_ROWS = 64
MOST_SHARES = 64
START = 3
"""What a program costs beside its keys, in tiles: its first loads, and the end of its pipeline."""
MERGE = 4
"""What merging shares costs, in tiles."""

# largest head size -> keys, warps, stages, resident; 64 keys at least, for Hopper's products of 64 rows
HOPPER = {64: (64, 4, 4, 3), 128: (64, 4, 3, 2), 256: (64, 4, 2, 1)}
HOPPER_WIDE = {64: (128, 4, 3, 2), 128: (128, 8, 3, 1)}
SMALL = {64: (64, 4, 3, 2), 128: (64, 4, 2, 1), 256: (32, 4, 2, 1)}
SINGLE = {64: (32, 4, 2, 2), 128: (16, 4, 2, 2), 256: (16, 8, 1, 1)}  # float32: exact products unroll
INTERPRETED = (16, 4, 1, 1)
FILLED = 0.7
"""Share of the device from which key heads fill it by themselves, in whole waves of one program on each multiprocessor. Then each
program reads all keys of a head, by wide tiles; otherwise narrow tiles let two programs share a multiprocessor, and shares of the
keys make more programs."""


@lru_cache(maxsize=1024)
def choose_decode_tile(
    rows: int, size: int, dtype: torch.dtype, device: torch.device, heads: int
) -> DecodeTile:  # fmt: skip
    """rows: queries times query heads of a key head; size: the larger head size; heads: key heads of all batch rows."""
    block = min(max(next_power_of_2(rows), 16), MOST_ROWS)
    if device.type != "cuda":
        return DecodeTile(16, *INTERPRETED)
    width = 64 if size <= 64 else 128 if size <= 128 else 256
    if dtype == torch.float32:
        return DecodeTile(16, *SINGLE[width])
    hopper = capability(device)[0] in (9, 10)
    keys, warps, stages, resident = (HOPPER if hopper else SMALL)[width]
    if block > 16:  # lookups of more rows take shared memory too
        return DecodeTile(block, keys, warps, 2, 1)
    if hopper and width in HOPPER_WIDE and heads / (cdiv(heads, processors(device)) * processors(device)) >= FILLED:
        keys, warps, stages, resident = HOPPER_WIDE[width]
    return DecodeTile(block, keys, warps, stages, resident)


def choose_decode_shares(programs: int, keys: int, tile: DecodeTile, device: torch.device) -> int:
    """programs: how many there are for each share; keys: that a program would visit without shares."""
    tiles = cdiv(keys, tile.keys)
    if device.type != "cuda":
        return min(3, tiles) or 1
    return count_shares(programs, tiles, tile.resident * processors(device))


@lru_cache(maxsize=1024)
def count_shares(programs: int, tiles: int, slots: int) -> int:
    """The shares for which waves of `slots` programs at once take the least time."""
    best, least = 1, float("inf")
    for shares in range(1, max(min(tiles, MOST_SHARES), 1) + 1):
        waves = cdiv(programs * shares, slots)
        time = waves * (cdiv(tiles, shares) + START) + (MERGE if shares > 1 else 0)
        if time < least:
            best, least = shares, time
    return best


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
