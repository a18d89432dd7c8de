"""The bias of a tile, loaded 16 bytes at a time.

A tile of scores needs bias[r] for r = j - i + offset: row i begins one element before row i - 1, so that three of four rows
begin at an address that is not a multiple of 16 bytes, and every element would be a load of its own. Four copies of the bias,
each shifted by one element, give every row an aligned beginning:

    copy 0    b0 b1 b2 b3|b4 b5 b6 b7|b8 ..            row i     needs b4 b5 b6 b7   ->   copy 0 at 4
    copy 1    .. b0 b1 b2|b3 b4 b5 b6|b7 ..            row i+1   needs b3 b4 b5 b6   ->   copy 1 at 4
    copy 2    .. .. b0 b1|b2 b3 b4 b5|b6 ..            row i+2   needs b2 b3 b4 b5   ->   copy 2 at 4
    copy 3    .. .. .. b0|b1 b2 b3 b4|b5 ..            row i+3   needs b1 b2 b3 b4   ->   copy 3 at 4
                                                       row i+4   needs b0 b1 b2 b3   ->   copy 0 at 0

The first and the last number are repeated on both sides of a copy, so that no distance needs a comparison with the span; a tile
that lies farther away is read where they are repeated.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from ...core.constants import constant
from .structs import Strips

MARGIN = 512  # elements before and after the span: more than two tiles
LONGEST = 4096  # distances: four copies of a longer bias would not stay in the caches


def make_strips(bias: Tensor, lo: int) -> Strips | None:
    """bias [H, n], float32, whose first distance is lo."""
    n = bias.shape[1]
    if n > LONGEST:
        return None
    columns = _columns(n)
    return Strips(bias.index_select(1, constant(columns, bias.device)), len(columns) // 4, lo)


@lru_cache(maxsize=64)
def _columns(n: int) -> tuple[int, ...]:
    """Which number of the bias stands in each column of the four copies."""
    pitch = (MARGIN + n + MARGIN + 15) // 16 * 16
    return tuple(min(max(x - copy - MARGIN, 0), n - 1) for copy in range(4) for x in range(pitch))


@triton.jit
def load_strips(strips, h, i, j, m0, n0, offset):
    """The bias of a tile whose first pair is (m0, n0), both multiples of 16; i and j broadcast against each other."""
    SPAN: tl.constexpr = 256  # tiles have at most 128 rows and 128 columns
    first = n0 - m0 + offset - strips.lo  # the number that the first pair needs
    first = tl.minimum(tl.maximum(first, -SPAN), strips.pitch - 1024 + SPAN)
    shift = (first + 1024) % 4
    row = (i - m0) + 4 - shift
    start = tl.multiple_of(first - shift + (512 + 4), 4)
    at = strips.ptr + h * (4 * strips.pitch) + (row % 4) * strips.pitch + (start - row // 4 * 4) + (j - n0)
    return tl.load(at)
