"""Launch the Gluon kernel with a content term: tiles, padding and descriptors as in launch.py, and the band."""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton.arguments import Inputs, Numbers
from ..triton.band_layout import Band
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from .content import forward_content
from .kernel import CONSUMERS, NUMBERS, ROWS
from .launch import LOG2E, NO_LIMIT, REGISTERS, TILES, Tile, _describe, _rows
from .prepare import prepare


def run_forward(
    launch: Launch,
    x: Inputs,
    num: Numbers,
    scale: float,
    rows: Band,
    out: Tensor,
    lse: Tensor,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, None]:
    """launch.run_forward, with the row term."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length, group = k.shape[2], heads // k.shape[1]
    tile = tile or TILES[size]
    queries = ROWS.value * CONSUMERS.value
    count = -(-q_length // queries)

    batch_rows = 1 if x.key_mask is None and x.doc_q is None else batch
    tiles = lse.new_empty(batch_rows, count, NUMBERS.value, dtype=torch.int32)
    bits = None
    if x.key_mask is not None:
        bits = lse.new_empty(x.key_mask.shape[0], -(-k_length // tile.keys), 8, dtype=torch.int32)
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    programs = batch_rows * count, 0 if bits is None else bits.shape[0] * bits.shape[1]
    launch(
        prepare, sum(programs), tiles, programs[0], count, position_args(x), make_masks(x), q_length, k_length, num.offset, left, right,
        num.lo, num.hi, None, 0, 0, 0, None, 0, 0, 0, scale, bits, queries, tile.keys, 512,
    )  # fmt: skip

    masks, mask_rows = zip(*(_rows(y, lse) for y in (bits, x.doc_q, x.doc_k, x.doc_q_keys)), strict=True)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    section = min(tile.heads or batch * heads, batch * heads) if num.right == 0 else 1
    launch(
        forward_content, min(batch * heads * count, processors), _describe(q, ROWS.value), _describe(k, tile.keys), _describe(v, tile.keys),
        _describe(out, ROWS.value), lse, tiles, rows.ptr, rows.ends, rows.h, rows.pitch, rows.origin, rows.lo, rows.hi, *masks,
        scale * LOG2E, q_length, k_length, heads, group, batch * heads, section, NO_LIMIT if left is None else left,
        NO_LIMIT if right is None else right, 0 if batch_rows == 1 else count * NUMBERS.value, *mask_rows, num.lo, num.hi,
        STAGES=tile.stages, WINDOW=left is not None, PADDED=bits is not None, DOCS=x.doc_q is not None,
        CONSUMER_REGISTERS=REGISTERS[0], PRODUCER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    return out, lse, None
