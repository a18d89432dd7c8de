"""The schedule of each kernel: tile sizes, warps and pipeline stages by head size, dtype and what the plan contains.

The numbers come from measurements (docs/triton-log.md); at run time they are read from tables, nothing is tuned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .device import capability


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int  # pipeline stages of the loop over far tiles
    band_stages: int = 1  # of the loops over tiles in the band and general tiles, which load table entries too
    general: int = 0  # keys (backward_k: queries) of a general tile; 0: as many as of a far tile


WIDTHS = (64, 128, 256)  # the largest head size of each tile below
HOPPER = {
    "forward": (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)),
    "backward_q": (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 32, 4, 1)),
    "backward_k": (Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), Tile(32, 64, 4, 1)),
}
# By what a plan contains (`Inputs.kind`), and the head size: loading content terms takes registers, dot_key terms take more of them.
HOPPER_KINDS = {
    # a tile of the mask, up to 32 KiB, goes through shared memory too: small tiles leave room for three, and for two programs
    "dense": {
        ("forward", 64): Tile(64, 64, 4, 3, 3),
        ("forward", 128): Tile(128, 64, 8, 3, 3),
        ("backward_q", 64): Tile(64, 32, 4, 3, 3),
        ("backward_q", 128): Tile(64, 32, 4, 3, 3),
        ("backward_k", 128): Tile(64, 64, 4, 3),
    },
    "dense bias": {("forward", 64): Tile(64, 64, 4, 3)},  # loaded ahead, the table's numbers make it 2.4 times as long
    "bias": {("forward", 64): Tile(64, 128, 4, 3)},
    # a general tile of 128 keys that loads the bias and masks or dropout spills registers
    "masked bias": {("forward", 64): Tile(64, 128, 4, 3, 1, 64)},
    "content": {
        ("forward", 64): Tile(64, 128, 4, 3, 3, 64),
        ("forward", 128): Tile(64, 64, 4, 3, 2),
        ("backward_q", 64): Tile(64, 64, 4, 3, 2),
        ("backward_q", 128): Tile(64, 32, 4, 3, 2),
        ("backward_k", 64): Tile(64, 64, 4, 3, 2),
        ("backward_k", 128): Tile(32, 64, 4, 3, 2),
        # pipelined although it is not faster: see alignment.py
        ("forward", 256): Tile(64, 32, 4, 2, 2),
        ("backward_q", 256): Tile(64, 32, 4, 2, 2),
        ("backward_k", 256): Tile(32, 64, 4, 2, 2),
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
    "forward": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    "backward_q": (Tile(64, 64, 4, 2), Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
    "backward_k": (Tile(32, 64, 4, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
}
# Exact float32 products are unrolled into multiply-adds: larger tiles take minutes to compile.
SINGLE = (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))
BAND = Tile(64, 64, 4, 3)  # tokens and distances of the products of band_products.py
BAND_WIDE = Tile(64, 128, 4, 3)
EVERYDAY_STEPS = (1, 8)  # choose_row_step for texts of less than 2048 tokens
MIN_PROGRAMS = 1024  # programs of table_from_band that fill a device
WIDE = 256  # distances of a span from which on whole tiles lie within a band
INTERPRETED = Tile(16, 16, 4, 1, 2)
"""Small, so that short sequences already have far tiles, band tiles and edges."""
INTERPRETED_BANDS = Tile(16, 32, 4, 1)


def cdiv(number: int, unit: int) -> int:
    """ceil(number / unit). Calling Triton's function on the host takes microseconds."""
    return -(-number // unit)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def choose_tile(
    kernel: str, size: int, dtype: torch.dtype, device: torch.device, q_length: int, kind: str = "plain"
) -> Tile:  # fmt: skip
    """The tile of forward, backward_q or backward_k. size: the larger head size; kind: what the plan contains, `Inputs.kind`."""
    if device.type != "cuda":
        return INTERPRETED
    number = 0 if size <= 64 else 1 if size <= 128 else 2
    if dtype == torch.float32:
        return SINGLE[number]
    hopper = capability(device)[0] in (9, 10)  # 12.x has the shared memory of 8.6
    width, tile = WIDTHS[number], (HOPPER if hopper else SMALL)[kernel][number]
    if hopper and kind != "plain":
        for like in (kind,) if kind.endswith("bias") or kind == "dense" else ("content", kind):
            tile = HOPPER_KINDS[like].get((kernel, width), tile)
    if kernel == "forward" and q_length <= 16:
        return Tile(16, 128 if width <= 128 and hopper else 32, 4, tile.stages)
    return tile


def choose_band_tile(size: int, wide: bool, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tokens and distances of band_from_states; size: of the states; wide: spans of many tiles."""
    if device.type != "cuda":
        return INTERPRETED_BANDS
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if size <= 128 else Tile(16, 16, 4, 1)
    if size > 128:
        return Tile(64, 32, 4, 1)
    return BAND_WIDE if size <= 64 and wide else BAND


def choose_states_tile(size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tokens and distances of states_from_band; size: of the table's rows."""
    if device.type != "cuda":
        return INTERPRETED_BANDS
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if size <= 128 else Tile(16, 16, 4, 1)
    return BAND_WIDE if size <= 64 else BAND if size <= 128 else Tile(64, 32, 4, 2)


def choose_table_tile(size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tokens and distances of table_from_band; size: of the states."""
    if device.type != "cuda":
        return INTERPRETED_BANDS
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if size <= 64 else Tile(16, 16, 4, 1)
    return BAND_WIDE if size <= 128 else Tile(32, 64, 4, 2)


def choose_row_step(tokens: int, device: torch.device) -> int:
    """Every how many-th row of a band forms one matrix (band_products.py): 16 write whole sectors of 32 bytes, 8 have more rows,
    and 1 fills the tiles of short texts (DeBERTa's step at 64 x 128 tokens: 1.02 ms against 1.42; at 16 x 512 1.86 with 8, 2.02)."""
    short, long = (256, 2048) if device.type == "cuda" else (24, 64)
    return 16 if tokens >= long else 8 if tokens > short else 1


def choose_table_parts(programs: int, device: torch.device) -> int:
    """Into how many partial sums to split a table's gradient: few are quicker to reduce, many fill the device.
    programs: how many there are for each part."""
    if device.type != "cuda":
        return 2
    return next((parts for parts in (1, 2, 4) if parts * programs >= MIN_PROGRAMS), 8)


def choose_splits(programs: int, k_length: int, tile: Tile, device: torch.device) -> int:
    """Into how many shares to split the keys, so that a few queries still fill the device (flash-decoding)."""
    if device.type != "cuda":
        return 3 if k_length > 2 * tile.keys else 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // max(programs, 1), k_length // (2 * tile.keys), 64))
