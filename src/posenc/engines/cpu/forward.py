"""The forward pass: tiles of PyTorch's fused attention, merged by their log-sum-exp.

    far tiles    no mask: what is constant along a row is added to the row's log-sum-exp afterwards
    band tiles   without content, the mask is a Hankel view of the bias table, O(R + K) numbers
                 with content, the mask is a skewed buffer of R × K numbers

The Hankel view: in reverse order of the queries (i' = R - 1 - i) the distance is a function of i' + j, so the bias table by
distance with strides (1, 1) is the whole mask, and nothing is copied:

    table [R + K - 1]   t0 t1 t2 t3 t4         mask [R, K]   t0 t1 t2      last query
                                                             t1 t2 t3
                                                             t2 t3 t4      first query
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tables import add
from . import block_sizes, short_forward
from .band import BandGeometry, ScoreTile
from .band_mask import KeyTableScores, count_visible, fill_skewed, hankel_mask
from .head_block import NEG_INF, HeadBlock, split_heads
from .matmul import is_large
from .skewed_buffer import SkewedBuffer, clear_corners, fold
from .terms import Terms

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def forward(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: BandGeometry, scale: float, split: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv] in q's dtype, log-sum-exp [B, H, Lq] in float32 or better (0 for fully masked queries).

    split: far keys get separate tiles even without content, and the third result is the log-sum-exp of the keys far
    left (-inf: none), which the gradient of the bias needs. Otherwise it is empty.
    """
    if short_forward.applies(q, terms, band):
        out, lse = short_forward.forward(q, k, v, terms, band, scale)
        return out, lse, lse.new_empty(0)
    precision = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=precision, device=q.device)
    far_left = torch.full_like(lse, NEG_INF) if split else lse.new_empty(0)
    q, k, v = pad_head_sizes(q, k, v)
    buffer = None  # shared by all head blocks
    rows = max(i1 - i0 for i0, i1 in band.blocks())
    if terms.table_v is not None:  # its band tiles are small
        rows = min(rows, block_sizes.EDGE_BLOCK)
    width = rows + band.hi - band.lo + 2 * block_sizes.MIN_FAR_KEYS  # of a band tile
    for head_block in split_heads(q, k, terms, memory=block_sizes.FORWARD_MEMORY, rows=rows, width=width):
        runner = TileRunner(q, k, v, head_block, band, scale, buffer, split)
        at = (head_block.batch, head_block.heads)
        for i0, i1 in band.blocks():
            o, s, far = runner.run_block(i0, i1)
            out[at][:, :, i0:i1] = o[..., : out.shape[3]]
            lse[at][:, :, i0:i1] = s
            if split and far is not None:
                far_left[at][:, :, i0:i1] = far
        buffer = runner.buffer
    return out, lse, far_left


def pad_head_sizes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One head size for all, as the kernel requires (zeros change no product), with contiguous channels."""
    size = tensors[0].shape[3]
    if all(x.shape[3] == size and x.stride(3) == 1 for x in tensors):
        return tensors
    size = max(x.shape[3] for x in tensors)
    padded = (x if x.shape[3] == size else torch.nn.functional.pad(x, (0, size - x.shape[3])) for x in tensors)
    return tuple(x if x.stride(3) == 1 else x.contiguous() for x in padded)


class TileRunner:
    """Runs the tiles of one head block."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, head_block: HeadBlock, band: BandGeometry, scale: float,
        buffer: SkewedBuffer | None, split: bool,
    ):  # fmt: skip
        self.head_block, self.band, self.scale = head_block, band, scale
        self.split = split or head_block.needs_dense_mask
        # a Hankel view needs the queries in reverse order
        self.reverse = not head_block.needs_dense_mask and (head_block.terms.bias is not None or band.is_limited)
        self.q = q[head_block.batch, head_block.heads]
        self.k = k[head_block.batch, head_block.kv_heads]
        self.v = v[head_block.batch, head_block.kv_heads]
        self.precision = torch.promote_types(q.dtype, torch.float32)
        self.heads = head_block.heads.stop - head_block.heads.start
        self.key_scores = None
        if head_block.terms.table_k is not None and head_block.keys[0] < head_block.keys[1]:
            keys = self.precise_keys(*head_block.keys)[..., : head_block.terms.table_k.shape[2]]
            self.key_scores = KeyTableScores(head_block, band, keys, like=keys)
        self.buffer = buffer

    def run_block(self, i0: int, i1: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows [i0, i1): their output and log-sum-exp, and the log-sum-exp of the far left tile."""
        tiles = self.band.tiles(
            i0, i1, *self.head_block.keys, far=self.split, fine=self.head_block.terms.table_v is not None
        )
        if self.head_block.terms.decay_k is not None:
            tiles = [part for tile in tiles for part in self.split_decaying(tile)]
        reverse = self.reverse and i1 - i0 > 1
        q = self.q[:, :, i0:i1]
        if reverse:
            q = q.flip(2)
        if len(tiles) == 1 and tiles[0][:2] == (i0, i1):
            out, lse = self.run_tile(tiles[0], q)
            far_left = lse if tiles[0].kind < 0 else None
            return self._restore_order(out, lse, far_left) if reverse else (out, lse, far_left)
        out = torch.zeros(q.shape, dtype=self.precision, device=q.device)
        lse = torch.full(q.shape[:3], NEG_INF, dtype=self.precision, device=q.device)
        far_left, done = None, i0  # rows up to `done` have results of a tile
        for tile in tiles:
            rows = slice(i1 - tile.i1, i1 - tile.i0) if reverse else slice(tile.i0 - i0, tile.i1 - i0)
            o, s = self.run_tile(tile, q[:, :, rows])
            far_left = s if tile.kind < 0 else far_left
            s = self.mark_fully_masked(s, tile)
            if tile.i0 < done:
                self.merge_tile(out[:, :, rows], lse[:, :, rows], o, s)
            else:
                out[:, :, rows], lse[:, :, rows] = o, s
                done = tile.i1
        lse.masked_fill_(lse.isneginf(), 0.0)
        return self._restore_order(out, lse, far_left) if reverse else (out, lse, far_left)

    def split_decaying(self, tile: ScoreTile) -> list[ScoreTile]:
        """The tile; a far tile whose decays have no base is cut into band tiles that a skewed buffer holds."""
        if not tile.kind or self.head_block.decay_base(tile) is not None:
            return [tile]
        size = max(tile.i1 - tile.i0, block_sizes.MIN_FAR_KEYS)
        return [tile._replace(j0=j, j1=min(j + size, tile.j1), kind=0) for j in range(tile.j0, tile.j1, size)]

    def _restore_order(self, out: Tensor, lse: Tensor, far_left: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Undo the reverse order of the queries."""
        return out.flip(2), lse.flip(2), None if far_left is None else far_left.flip(2)

    def merge_tile(self, out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        """Merge the results of other keys for the same rows into out and lse."""
        total = torch.logaddexp(lse, more_lse)
        safe = total.masked_fill(total == NEG_INF, 0.0)
        out.mul_((lse - safe).exp_().unsqueeze(-1)).addcmul_(
            more.to(self.precision), (more_lse - safe).exp_().unsqueeze(-1)
        )
        lse.copy_(total)

    def run_tile(self, tile: ScoreTile, q: Tensor) -> tuple[Tensor, Tensor]:
        if tile.kind:
            return self.run_far_tile(tile, q)
        if not self.head_block.needs_dense_mask:
            return self.attend(tile, q, hankel_mask(self.head_block, self.band, tile, q))
        if self.head_block.terms.table_v is None:
            return self.attend(tile, q, self.build_mask(tile)[None])
        return self.attend_with_values(tile)

    def run_far_tile(self, tile: ScoreTile, q: Tensor) -> tuple[Tensor, Tensor]:
        end = 0 if tile.kind < 0 else -1
        terms = self.head_block.terms
        mask = None
        base = None if terms.decay_q is None else self.head_block.decay_base(tile)
        if self.head_block.needs_dense_mask:
            keys = self.precise_keys(tile.j0, tile.j1) if terms.table_k is not None else self.k
            if terms.table_k is not None:
                keys = keys[..., : terms.table_k.shape[2]]
            mask = self.head_block.column_constants(end, keys, tile, self.scale, base)
            if mask is not None:
                mask = mask.to(self.precision)[None].expand(1, self.heads, tile.i1 - tile.i0, tile.j1 - tile.j0)
        out, lse = self.attend(tile, q, mask)
        constant = self.head_block.row_constant(end, self.states(tile), self.scale)
        if terms.decay_q is not None and base is not None:
            constant = add(constant, (terms.decay_q[:, tile.i0 : tile.i1] - base).to(self.precision))
        if constant is not None:
            lse = lse + constant
        if terms.table_v is not None:
            out = out.to(self.precision)
            out[..., : terms.table_v.shape[2]] += terms.table_v[:, end, None]
        return out, lse

    def attend_with_values(self, tile: ScoreTile) -> tuple[Tensor, Tensor]:
        """A tile whose values have a positional part: it needs the probabilities, summed by distance."""
        table = self.head_block.terms.table_v
        assert table is not None
        rows, keys = tile.i1 - tile.i0, tile.j1 - tile.j0
        scores = self.build_mask(tile)
        q = self.q[0, :, tile.i0 : tile.i1].to(self.precision)
        k, v = self.precise_keys(tile.j0, tile.j1), self.precise(self.v, tile.j0, tile.j1)
        scores.baddbmm_(q, k.transpose(1, 2), alpha=self.scale)
        m_i = scores.amax(-1, keepdim=True)
        m_i.masked_fill_(m_i == NEG_INF, 0.0)
        p = scores.sub_(m_i).exp_()
        l_i = p.sum(-1, keepdim=True)
        l_i.masked_fill_(l_i == 0.0, 1.0)
        out = p @ v
        assert self.buffer is not None
        distances = self.buffer.distances(self.heads, rows, keys)
        r0 = self.band.first_distance(tile.i1, tile.j0)
        for s in range(0, rows, block_sizes.SKEW_ROWS):
            e = min(s + block_sizes.SKEW_ROWS, rows)
            count = keys + e - s - 1
            table_rows = self.band.table_rows(r0 + rows - e, count)
            chunk = distances[:, s:e, rows - e : rows - e + count]
            clear_corners(chunk, keys)
            binned = fold(chunk, table_rows)
            out[:, s:e, : table.shape[2]] += binned @ table[:, table_rows.first : table_rows.last]
        return (out / l_i)[None], (m_i + l_i.log()).squeeze(-1)[None]

    # ---- operands -----------------------------------------------------------------------------------------------
    def build_mask(self, tile: ScoreTile) -> Tensor:
        """What the band adds to the scores, [X, R, K], in the skewed buffer."""
        rows, keys = tile.i1 - tile.i0, tile.j1 - tile.j0
        if self.buffer is None or not self.buffer.holds(self.heads, rows, keys):
            like = torch.empty(0, dtype=self.precision, device=self.q.device)
            self.buffer = SkewedBuffer(self.heads, rows, keys, like)
        fill_skewed(self.buffer, self.head_block, self.band, tile, self.states(tile), self.scale)
        scores = self.buffer.scores(self.heads, rows, keys)
        terms, padding = self.head_block.terms, self.head_block.padding_of(tile.j0, tile.j1)
        if padding is not None:
            scores.add_(padding)
        if terms.decay_q is not None and terms.decay_k is not None:
            c_q, c_k = terms.decay_q[:, tile.i0 : tile.i1, None], terms.decay_k[:, None, tile.j0 : tile.j1]
            step = 1 if is_large(scores) else self.heads
            # their difference first: each alone is as large as the sequence is long
            for x in range(0, self.heads, step):
                scores[x : x + step].add_(c_q[x : x + step] - c_k[x : x + step])
        if self.key_scores is not None:
            self.key_scores.add_to(scores, tile, self.scale)
        return scores

    def states(self, tile: ScoreTile) -> Tensor:
        if self.head_block.terms.states is not None:
            return self.head_block.terms.states[:, tile.i0 : tile.i1]
        table = self.head_block.terms.table_q
        q = self.q[0, :, tile.i0 : tile.i1].to(self.precision)
        return q if table is None else q[..., : table.shape[2]]

    def attend(self, tile: ScoreTile, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = self.k[:, :, tile.j0 : tile.j1], self.v[:, :, tile.j0 : tile.j1]
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=self.scale)

    def precise(self, x: Tensor, j0: int, j1: int) -> Tensor:
        x = x[0, :, j0:j1].to(self.precision)
        return x if x.shape[0] == self.heads else x.repeat_interleave(self.heads // x.shape[0], 0)

    def precise_keys(self, j0: int, j1: int) -> Tensor:
        return self.precise(self.k, j0, j1)

    def mark_fully_masked(self, lse: Tensor, tile: ScoreTile) -> Tensor:
        """-inf for rows that see no key of a tile; the kernel returns 0 there, which would count when tiles are merged."""
        band, padding = self.band, self.head_block.padding
        if padding is None:  # the first row sees least on the right, the last one least on the left
            slot = band.k_length - band.q_length
            first_sees = band.right is None or tile.i0 + slot + band.right >= tile.j0
            last_sees = band.left is None or tile.i1 - 1 + slot - band.left < tile.j1
            if first_sees and last_sees:
                return lse
        count = count_visible(band, tile, None if padding is None else padding == 0, lse.device)
        return lse.masked_fill((count.flip(0) if self.reverse else count) <= 0, NEG_INF)
