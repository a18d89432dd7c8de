"""BlockScores: the scores of a block of query rows against all their keys, materialised as a stack of matrices.

1. The base row. In a far field every key of a row gets the same table row. Subtract that row, the base, from the whole
   table: far keys then add nothing, and only the band needs a lookup. What the base adds is constant along a row of
   scores, so it is one more channel of the matrix product, and so is the far field on the other side:

       table   b b b t1 t2 t3 c c      =   b   +   0 0 0 t1-b t2-b t3-b c-b c-b
                                         base       far    band        far right

       s = [scale q, 1, base, right - base] · [k, padding, 1, is far right]  +  (band - base)  +  (decay_q - decay_k)

2. The band as a view. With a row stride of one more, the diagonals of the scores are columns. A table adds to columns and
   a gradient sums them, without a copy. Margin columns (0), whose scores are -inf, keep the view inside the memory:

       scores   a b c . . 0 0       band view   a b c
                . d e f . 0 0                   d e f
                . . g h 0 0 0                   g h 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import block_sizes
from .band import BandGeometry, ScoreTile
from .band_mask import KeyTableScores, bias_by_distance
from .head_block import NEG_INF, HeadBlock
from .matmul import is_large, matmul_into
from .skewed_buffer import padded_stride

MIN_EXPONENT = -87.0
"""exp of anything less is a subnormal float32, which makes matrix products slow; steep biases give many."""
MAX_BASE_SPAN = 16.0
"""A bias table whose values lie this close together may have its base subtracted: the rounding is that of such scores."""


def find_base(band: BandGeometry) -> tuple[int | None, bool]:
    """The table row to subtract from the others (None: no far field), and whether there is a second far field on the right."""
    left, right = band.has_far_fields
    if left or right:
        return (0 if left else -1), left and right and band.lo < band.hi
    return None, False


def choose_block_rows(band: BandGeometry) -> int:
    """Query rows of a block, all blocks of nearly one size."""
    most = block_sizes.SCORE_ROWS
    if band.k_length <= block_sizes.SHORT_KEYS:
        most = min(block_sizes.SHORT_ROWS, max(32, band.k_length // 4))
    return -(-band.q_length // -(-band.q_length // most))


class Buffers:
    """Memory that head blocks reuse one after the other."""

    def __init__(self, like: Tensor):
        self.like = like
        self.flat: dict[str, Tensor] = {}

    def block(self, name: str, heads: int, rows: int, keys: int) -> Tensor:
        """[X, R, K], uninitialised."""
        stride = padded_stride(keys) if is_large((heads, rows, keys)) else keys
        if name not in self.flat or self.flat[name].numel() < heads * rows * stride:
            self.flat[name] = self.like.new_empty(heads * rows * stride)
        return self.flat[name].as_strided((heads, rows, keys), (rows * stride, stride, 1))


class RowBlock(NamedTuple):
    """Rows [i0, i1) and their visible keys [j0, j1). Scores [X, R, K] are of the columns [start, stop), margins included."""

    i0: int
    i1: int
    j0: int
    j1: int
    start: int
    stop: int
    table_rows: slice | None  # those of the band that occur

    @property
    def rows(self) -> slice:
        return slice(self.i0, self.i1)

    @property
    def keys(self) -> slice:
        return slice(self.j0, self.j1)

    @property
    def tile(self) -> ScoreTile:
        return ScoreTile(self.i0, self.i1, self.j0, self.j1, 0)

    @property
    def visible(self) -> slice:
        """The columns of the visible keys."""
        return slice(self.j0 - self.start, self.j1 - self.start)


@lru_cache(maxsize=8)
def _outside_limits(
    rows: int, keys: int, first: int, left: int | None, right: int | None, device: torch.device
) -> Tensor:
    """[rows, keys], True outside the limits. first: the slot distance of the first row and the first key."""
    steps = torch.arange(keys, device=device) + first - torch.arange(rows, device=device)[:, None]
    outside = torch.zeros_like(steps, dtype=torch.bool)
    if left is not None:
        outside |= steps < -left
    if right is not None:
        outside |= steps > right
    return outside


@lru_cache(maxsize=4)
def _triangle(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, rows - 1]: 1 from the diagonal on."""
    return torch.ones(rows, rows - 1, dtype=dtype, device=device).triu_()


class BlockScores:
    """The scores of one head block, X matrices: its heads for each of its batch rows. rows: query rows of a block."""

    def __init__(
        self, q: Tensor, k: Tensor, head_block: HeadBlock, band: BandGeometry, scale: float, buffers: Buffers, rows: int,
    ):  # fmt: skip
        at, kv, terms = (head_block.batch, head_block.heads), (head_block.batch, head_block.kv_heads), head_block.terms
        self.head_block, self.band, self.scale, self.buffers, self.block_rows = head_block, band, scale, buffers, rows
        self.q = self.stack_heads(q[at])
        self.heads = self.q.shape[0]
        self.k = self.stack_keys(k[kv])
        self.states = self.q if terms.states is None else terms.states
        self.base, self.far_right = find_base(band)
        self.bias, self.table_q, self.table_v = map(self._subtract_base, (terms.bias, terms.table_q, terms.table_v))
        row = torch.zeros_like(self.q[..., 0])
        span = 0.0 if terms.bias is None else float(terms.bias.amax() - terms.bias.amin())
        # less a base that is much lower (-1e4, -inf as a mask) the near biases would lose their digits
        self.adds_bias_apart = self.base is not None and not span <= MAX_BASE_SPAN
        constants = replace(head_block, terms=terms._replace(bias=None)) if self.adds_bias_apart else head_block
        channels = self._constant_channels(row, constants.row_constant, self.states, scale)
        self.q_extended = torch.cat([self.q * scale, torch.stack([torch.ones_like(row), *channels], -1)], -1)
        padding = head_block.padding_of(0, band.k_length)
        self.k_extended = self._extend_keys(
            self.k, self.k.new_zeros(1, 1, band.k_length) if padding is None else padding
        )
        self.extended_keys = [self.k_extended]
        self.far_right_start = 0  # keys from here on are marked as far right
        self.has_steep_scores = span > -MIN_EXPONENT
        self.decay: tuple[Tensor, Tensor] | None = None
        if terms.decay_q is not None and terms.decay_k is not None:
            self.has_steep_scores = (
                self.has_steep_scores or float(terms.decay_k.amax() - terms.decay_k.amin()) > -MIN_EXPONENT
            )
            self.decay = (
                terms.decay_q[..., None],
                self._extend_keys(self.stack_keys(terms.decay_k[None, ..., None]))[..., 0].unsqueeze(1),
            )
        self.key_scores: KeyTableScores | None = None
        if terms.table_k is not None:
            a, c = head_block.keys
            self.key_scores = KeyTableScores(head_block, band, self.k[:, a:c], like=self.q)

    def blocks(self) -> Iterator[RowBlock]:
        """Blocks of all rows that have a visible key."""
        for i in range(0, self.band.q_length, self.block_rows):
            end = min(i + self.block_rows, self.band.q_length)
            j0, j1 = self.band.visible_keys(i, end, *self.head_block.keys)
            if j0 < j1:
                block = self.make_block(i, end, j0, j1)
                if self.far_right:
                    self.mark_far_right(block)
                yield block

    def make_block(self, i0: int, i1: int, j0: int, j1: int) -> RowBlock:
        band = self.band
        slot = band.offset + band.k_length - band.q_length  # r of slot distance 0
        lowest, highest = j0 - (i1 - 1) + band.offset, j1 - 1 - i0 + band.offset
        lowest = max(lowest, band.lo + int(self.base == 0))
        highest = min(highest, band.hi - int(self.base == -1 or self.far_right))
        if band.left is not None:
            lowest = max(lowest, slot - band.left)
        if band.right is not None:
            highest = min(highest, slot + band.right)
        nothing = self.bias is None and self.table_q is None and self.table_v is None
        if nothing or lowest > highest:
            return RowBlock(i0, i1, j0, j1, j0, j1, None)
        start, stop = i0 + lowest - band.offset, i1 + highest - band.offset
        return RowBlock(
            i0, i1, j0, j1, min(j0, start), max(j1, stop), slice(lowest - band.lo, highest - band.lo + 1)
        )  # fmt: skip

    def padded_columns(self, block: RowBlock) -> slice:
        """The block's columns in operands with margins at both ends."""
        return slice(block.start + self.block_rows - 1, block.stop + self.block_rows - 1)

    def scores(self, block: RowBlock) -> Tensor:
        """[X, R, K], in memory that the next block reuses."""
        scores = self.buffers.block("scores", self.heads, block.i1 - block.i0, block.stop - block.start)
        if self.decay is not None:  # the difference first: each alone is as large as the sequence is long
            torch.sub(self.decay[0][:, block.rows], self.decay[1][:, :, self.padded_columns(block)], out=scores)
        matmul_into(
            self.q_extended[:, block.rows],
            self.k_extended[:, self.padded_columns(block)],
            scores,
            add=self.decay is not None,
        )
        if self.key_scores is not None:
            self.key_scores.add_to(scores[:, :, block.visible], block.tile, self.scale)
        self.add_band(scores, block, self.states, self.table_q, self.scale)
        if self.adds_bias_apart:
            self.add_bias(scores, block)
        elif block.table_rows is not None and self.bias is not None:
            self.band_view(scores, block).add_(self.bias[:, None, block.table_rows])
        self.add_far_right(scores, block, self.q_extended)
        self.mask_limits(scores, block)
        return scores

    def probabilities(self, block: RowBlock) -> Tensor:
        """[X, R, K], in the memory of the scores. A block has all visible keys of its rows, so they are normalised here and do
        not depend on a rounded log-sum-exp. Fully masked rows give zeros.
        """
        scores = self.softmax(self.scores(block))
        if bool(scores[..., 0].sum().isnan()):  # a fully masked row, or NaN in the input
            scores = self.scores(block)
            hidden = scores.amax(-1, keepdim=True) == NEG_INF
            scores = self.softmax(scores.masked_fill_(hidden, 0.0)).masked_fill_(hidden, 0.0)
        return scores

    def softmax(self, scores: Tensor) -> Tensor:
        """In place, the gaps between rows included: PyTorch's kernel needs contiguous memory."""
        if self.has_steep_scores:
            self.drop_subnormal(scores.sub_(scores.amax(-1, keepdim=True)))
        (heads, rows, keys), stride = scores.shape, scores.stride(1)
        whole = scores.as_strided((heads, rows, stride), (rows * stride, stride, 1))
        whole[:, :, keys:] = NEG_INF
        torch.softmax(whole, -1, out=whole)
        return scores

    def exponentiate(self, scores: Tensor) -> Tensor:
        """exp, in place."""
        return (self.drop_subnormal(scores) if self.has_steep_scores else scores).exp_()

    def drop_subnormal(self, scores: Tensor) -> Tensor:
        return torch.nn.functional.threshold(scores, MIN_EXPONENT, NEG_INF, inplace=True)

    def mask_limits(self, scores: Tensor, block: RowBlock) -> None:
        """-inf outside the limits, in the columns that are masked for some row."""
        band = self.band
        if not band.is_limited:
            return
        ca, cc = band.fully_visible_keys(block.i0, block.i1, block.start, block.stop)
        for first, last in ((block.start, min(ca, block.stop)), (max(cc, block.start), block.stop)):
            if first < last:  # overwritten, not added: NaN would stay NaN
                outside = self.outside_limits(block, first, last)
                scores[:, :, first - block.start : last - block.start].masked_fill_(outside, NEG_INF)

    def inside_limits(self, block: RowBlock) -> Tensor | None:
        """[R, visible keys], True inside the limits; None without any."""
        return ~self.outside_limits(block, block.j0, block.j1) if self.band.is_limited else None

    def outside_limits(self, block: RowBlock, first: int, last: int) -> Tensor:
        """[R, last - first]: the rows and some keys, True outside the limits."""
        band = self.band
        step = first - block.i0 - (band.k_length - band.q_length)
        return _outside_limits(block.i1 - block.i0, last - first, step, band.left, band.right, self.q.device)

    # ---- the band -----------------------------------------------------------------------------------------------
    def band_view(self, scores: Tensor, block: RowBlock) -> Tensor:
        """[X, R, n]: diagonals as columns, a view."""
        assert block.table_rows is not None
        first = block.i0 + block.table_rows.start + self.band.lo - self.band.offset - block.start
        shape = (*scores.shape[:2], block.table_rows.stop - block.table_rows.start)
        return scores.as_strided(shape, (scores.stride(0), scores.stride(1) + 1, 1), scores.storage_offset() + first)

    def add_band(
        self, scores: Tensor, block: RowBlock, states: Tensor, table: Tensor | None, scale: float = 1.0
    ) -> None:
        """The band's scores += scale states·table"""
        if block.table_rows is None or table is None:
            return
        states, table = states[:, block.rows], table[:, block.table_rows]
        dots = self.buffers.block("dots", self.heads, states.shape[1], table.shape[1])
        matmul_into(states, table, dots)
        self.band_view(scores, block).add_(dots, alpha=scale)

    def add_bias(self, scores: Tensor, block: RowBlock) -> None:
        """All scores += bias[r], without a base."""
        rows, keys = scores.shape[1:]
        table = bias_by_distance(
            self.head_block, self.band, self.band.first_distance(block.i1, block.start), rows + keys - 1, scores
        )
        for x, to in enumerate(scores):  # a window of distances for each row, the last row's first
            to += table[x % table.shape[0]].unfold(0, keys, 1).flip(0)

    # ---- the far field on the right, where there is one on the left too -----------------------------------------
    def mark_far_right(self, block: RowBlock) -> None:
        """Set the channel of the keys that are far right for all rows of the block; `add_far_right` does the rest."""
        margin = self.block_rows - 1
        edge = min(max(block.i1 - 1 + self.band.hi - self.band.offset, -margin), self.band.k_length + margin)
        for wide in self.extended_keys:
            wide[:, self.far_right_start : margin + edge, -1] = 0.0
        self.far_right_start = margin + edge

    def far_right_columns(self, block: RowBlock) -> tuple[slice, Tensor, slice]:
        """The columns that are far right for some rows, a triangle of ones where they are, and those that are it for all."""
        rows = block.i1 - block.i0
        first = block.i0 + self.band.hi - self.band.offset
        a, c = (min(max(x, block.start), block.stop) for x in (first, first + rows - 1))
        triangle = _triangle(rows, self.q.dtype, self.q.device)[:, a - first : c - first]
        return slice(a - block.start, c - block.start), triangle, slice(c - block.start, None)

    def add_far_right(self, scores: Tensor, block: RowBlock, wide: Tensor) -> None:
        if self.far_right:
            some, triangle, _ = self.far_right_columns(block)
            scores[:, :, some].addcmul_(wide[:, block.rows, -1:], triangle)

    def sum_far_right(self, scores: Tensor, block: RowBlock) -> Tensor:
        """[X, R, 1]"""
        some, triangle, every = self.far_right_columns(block)
        return (scores[:, :, some] * triangle).sum(-1, keepdim=True) + scores[:, :, every].sum(-1, keepdim=True)

    # ---- operands -----------------------------------------------------------------------------------------------
    def stack_heads(self, x: Tensor) -> Tensor:
        """[batch, heads, L, D] as [X, L, D], float32 or better."""
        return x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)

    def stack_keys(self, x: Tensor) -> Tensor:
        """[batch, Hkv, Lk, D] as [X, Lk, D], zeros at padding between real keys: it may hold NaN."""
        x = self.stack_heads(x)
        x = x if x.shape[0] == self.heads else x.repeat_interleave(self.heads // x.shape[0], 0)
        return (
            x if self.head_block.padding is None else x.masked_fill((self.head_block.padding == NEG_INF)[:, None], 0.0)
        )

    def _subtract_base(self, table: Tensor | None) -> Tensor | None:
        """[X, n, ..]"""
        if table is None:
            return None
        if self.base is not None:
            table = table - table.select(1, self.base).unsqueeze(1)
        return table.expand(self.heads, *table.shape[1:])

    def _constant_channels(self, row: Tensor, constant, *given) -> list[Tensor]:
        """Channels of the rows: row plus base, and where there is a far field on the right too, right - base."""
        if self.base is None:
            return [row]
        base = constant(self.base, *given)
        row = row if base is None else row + base
        if not self.far_right:
            return [row]
        right = constant(-1, *given)
        return [row, torch.zeros_like(row) if right is None else (right - base).expand(row.shape)]

    def _extend_keys(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """[X, margin + Lk + margin, D + channels], margin = rows - 1. Margins and padding have -inf as their padding channel."""
        a, c = self.head_block.keys
        margin, size = self.block_rows - 1, x.shape[2]
        channels = 1 + int(columns is not None) + int(self.far_right)
        wide = x.new_zeros(x.shape[0], x.shape[1] + 2 * margin, size + channels)
        wide[:, margin + a : margin + c, :size] = x[:, a:c]
        wide[:, :, size:] = 1.0
        if columns is not None:
            wide[:, :, size] = NEG_INF
            wide[:, margin + a : margin + c, size] = columns[:, 0, a:c]
        return wide
