"""The forward pass: tiles of PyTorch's fused attention, joined by their log-sums.

    far tiles    no mask at all: what is constant along a row is added to the row's log-sum afterwards
    band tiles   content-free: a Hankel view of the bias table, O(R + K) numbers, is the mask
                 otherwise: a skewed buffer of R × K numbers is the mask

The Hankel view: with the queries in reverse order the bias is a function of i' + j, so a table [n] with strides
(1, 1) is the whole [R, K] mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import short, sizes
from .band import Band, Tile
from .mask import KeyDots, hankel, skewed
from .products import one_by_one
from .skew import Skew, clear_corners, fold
from .slab import NEVER, Slab, add, slabs
from .terms import Terms

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def forward(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: Band, scale: float, split: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv] in q's dtype, log-sums [B, H, Lq] in float32 or better (0 where nothing is seen).

    split: far keys get tiles of their own even where no content enters, and the third result is the log-sums of
    those far left (-inf: none), which the bias's gradient needs. Otherwise it is empty.
    """
    if short.applies(q, terms, band):
        out, sums = short.forward(q, k, v, terms, band, scale)
        return out, sums, sums.new_empty(0)
    precision = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    sums = torch.empty(q.shape[:3], dtype=precision, device=q.device)
    left = torch.full_like(sums, NEVER) if split else sums.new_empty(0)
    q, k, v = one_size(q, k, v)
    buffer = None  # the slabs share it
    rows = max(i1 - i0 for i0, i1 in band.blocks())
    if terms.table_v is not None:  # its band tiles are small
        rows = min(rows, sizes.SMALL)
    width = rows + band.hi - band.lo + 2 * sizes.FAR  # of a band tile
    for slab in slabs(q, k, terms, memory=sizes.FORWARD, rows=rows, width=width):
        tiles = Tiles(q, k, v, slab, band, scale, buffer, split)
        at = (slab.rows, slab.heads)
        for i0, i1 in band.blocks():
            o, s, far = tiles.block(i0, i1)
            out[at][:, :, i0:i1] = o[..., : out.shape[3]]
            sums[at][:, :, i0:i1] = s
            if split and far is not None:
                left[at][:, :, i0:i1] = far
        buffer = tiles.buffer
    return out, sums, left


def one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernel wants one head size (the smaller ones get zeros, which change no product), its numbers side by side."""
    size = tensors[0].shape[3]
    if all(x.shape[3] == size and x.stride(3) == 1 for x in tensors):
        return tensors
    size = max(x.shape[3] for x in tensors)
    padded = (x if x.shape[3] == size else torch.nn.functional.pad(x, (0, size - x.shape[3])) for x in tensors)
    return tuple(x if x.stride(3) == 1 else x.contiguous() for x in padded)


class Tiles:
    """Runs the tiles of one slab."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, slab: Slab, band: Band, scale: float, buffer: Skew | None, split: bool
    ):
        self.slab, self.band, self.scale = slab, band, scale
        self.split = split or slab.dense
        # a Hankel view is of queries in reverse order
        self.reverse = not slab.dense and (slab.terms.bias is not None or band.limited)
        self.q = q[slab.rows, slab.heads]
        self.k = k[slab.rows, slab.kv_heads]
        self.v = v[slab.rows, slab.kv_heads]
        self.precision = torch.promote_types(q.dtype, torch.float32)
        self.heads = slab.heads.stop - slab.heads.start
        self.key_dots = None
        if slab.terms.table_k is not None and slab.keys[0] < slab.keys[1]:
            keys = self.precise_keys(*slab.keys)[..., : slab.terms.table_k.shape[2]]
            self.key_dots = KeyDots(slab, band, keys, like=keys)
        self.buffer = buffer

    def block(self, i0: int, i1: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows [i0, i1): their output and log-sums, and the log-sums of the far left tile."""
        tiles = self.band.tiles(i0, i1, *self.slab.keys, far=self.split, fine=self.slab.terms.table_v is not None)
        if self.slab.terms.decay_k is not None:
            tiles = [part for tile in tiles for part in self.decaying(tile)]
        reverse = self.reverse and i1 - i0 > 1
        q = self.q[:, :, i0:i1]
        if reverse:
            q = q.flip(2)
        if len(tiles) == 1 and tiles[0][:2] == (i0, i1):
            out, sums = self.tile(tiles[0], q)
            left = sums if tiles[0].kind < 0 else None
            return self._forwards(out, sums, left) if reverse else (out, sums, left)
        out = torch.zeros(q.shape, dtype=self.precision, device=q.device)
        sums = torch.full(q.shape[:3], NEVER, dtype=self.precision, device=q.device)
        left, done = None, i0  # rows up to `done` have met a tile
        for tile in tiles:
            rows = slice(i1 - tile.i1, i1 - tile.i0) if reverse else slice(tile.i0 - i0, tile.i1 - i0)
            o, s = self.tile(tile, q[:, :, rows])
            left = s if tile.kind < 0 else left
            s = self.unseen(s, tile)
            if tile.i0 < done:
                self.join(out[:, :, rows], sums[:, :, rows], o, s)
            else:
                out[:, :, rows], sums[:, :, rows] = o, s
                done = tile.i1
        sums.masked_fill_(sums.isneginf(), 0.0)
        return self._forwards(out, sums, left) if reverse else (out, sums, left)

    def decaying(self, tile: Tile) -> list[Tile]:
        """The tile; in parts that a buffer holds, pair by pair, where it is a far one whose decay has no base."""
        if not tile.kind or self.slab.decay_base(tile) is not None:
            return [tile]
        size = max(tile.i1 - tile.i0, sizes.FAR)
        return [tile._replace(j0=j, j1=min(j + size, tile.j1), kind=0) for j in range(tile.j0, tile.j1, size)]

    def _forwards(self, out: Tensor, sums: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What was computed in reverse order."""
        return out.flip(2), sums.flip(2), None if left is None else left.flip(2)

    def join(self, out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
        """Into out and sums, the results of other keys for the same rows."""
        total = torch.logaddexp(sums, more_sums)
        safe = total.masked_fill(total == NEVER, 0.0)
        out.mul_((sums - safe).exp_().unsqueeze(-1)).addcmul_(
            more.to(self.precision), (more_sums - safe).exp_().unsqueeze(-1)
        )
        sums.copy_(total)

    def tile(self, tile: Tile, q: Tensor) -> tuple[Tensor, Tensor]:
        if tile.kind:
            return self.far(tile, q)
        if not self.slab.dense:
            return self.attend(tile, q, hankel(self.slab, self.band, tile, q))
        if self.slab.terms.table_v is None:
            return self.attend(tile, q, self.added(tile)[None])
        return self.weighed(tile)

    def far(self, tile: Tile, q: Tensor) -> tuple[Tensor, Tensor]:
        end = 0 if tile.kind < 0 else -1
        terms = self.slab.terms
        mask = None
        base = None if terms.decay_q is None else self.slab.decay_base(tile)
        if self.slab.dense:
            keys = self.precise_keys(tile.j0, tile.j1) if terms.table_k is not None else self.k
            if terms.table_k is not None:
                keys = keys[..., : terms.table_k.shape[2]]
            mask = self.slab.columns(end, keys, tile, self.scale, base)
            if mask is not None:
                mask = mask[None].expand(1, self.heads, tile.i1 - tile.i0, tile.j1 - tile.j0)
        out, sums = self.attend(tile, q, mask)
        constant = self.slab.row_constant(end, self.states(tile), self.scale)
        if terms.decay_q is not None and base is not None:
            constant = add(constant, terms.decay_q[:, tile.i0 : tile.i1] - base)
        if constant is not None:
            sums = sums + constant
        if terms.table_v is not None:
            out = out.to(self.precision)
            out[..., : terms.table_v.shape[2]] += terms.table_v[:, end, None]
        return out, sums

    def weighed(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Where values have a positional part the weights themselves are needed, summed by distance."""
        table = self.slab.terms.table_v
        assert table is not None
        rows, keys = tile.i1 - tile.i0, tile.j1 - tile.j0
        scores = self.added(tile)
        q = self.q[0, :, tile.i0 : tile.i1].to(self.precision)
        k, v = self.precise_keys(tile.j0, tile.j1), self.precise(self.v, tile.j0, tile.j1)
        scores.baddbmm_(q, k.transpose(1, 2), alpha=self.scale)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == NEVER, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        out = weights @ v
        assert self.buffer is not None
        distances = self.buffer.distances(self.heads, rows, keys)
        r0 = self.band.first_distance(tile.i1, tile.j0)
        for s in range(0, rows, sizes.CHUNK):
            e = min(s + sizes.CHUNK, rows)
            count = keys + e - s - 1
            pieces = self.band.pieces(r0 + rows - e, count)
            chunk = distances[:, s:e, rows - e : rows - e + count]
            clear_corners(chunk, keys)
            binned = fold(chunk, pieces)
            out[:, s:e, : table.shape[2]] += binned @ table[:, pieces.first : pieces.last]
        return (out / total)[None], (top + total.log()).squeeze(-1)[None]

    # ---- pieces -----------------------------------------------------------------------------------------------
    def added(self, tile: Tile) -> Tensor:
        """What the band adds to the scores, [X, R, K], in this slab's buffer."""
        rows, keys = tile.i1 - tile.i0, tile.j1 - tile.j0
        if self.buffer is None or not self.buffer.holds(self.heads, rows, keys):
            like = torch.empty(0, dtype=self.precision, device=self.q.device)
            self.buffer = Skew(self.heads, rows, keys, like)
        skewed(self.buffer, self.slab, self.band, tile, self.states(tile), self.scale)
        pairs = self.buffer.pairs(self.heads, rows, keys)
        terms, padding = self.slab.terms, self.slab.padding(tile.j0, tile.j1)
        if padding is not None:
            pairs.add_(padding)
        if terms.decay_q is not None and terms.decay_k is not None:
            c_q, c_k = terms.decay_q[:, tile.i0 : tile.i1, None], terms.decay_k[:, None, tile.j0 : tile.j1]
            step = 1 if one_by_one(pairs) else self.heads
            for x in range(
                0, self.heads, step
            ):  # their difference first: each alone is as large as the sequence is long
                pairs[x : x + step].add_(c_q[x : x + step] - c_k[x : x + step])
        if self.key_dots is not None:
            self.key_dots.add_to(pairs, tile, self.scale)
        return pairs

    def states(self, tile: Tile) -> Tensor:
        if self.slab.terms.states is not None:
            return self.slab.terms.states[:, tile.i0 : tile.i1]
        table = self.slab.terms.table_q
        q = self.q[0, :, tile.i0 : tile.i1].to(self.precision)
        return q if table is None else q[..., : table.shape[2]]

    def attend(self, tile: Tile, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = self.k[:, :, tile.j0 : tile.j1], self.v[:, :, tile.j0 : tile.j1]
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=self.scale)

    def precise(self, x: Tensor, j0: int, j1: int) -> Tensor:
        x = x[0, :, j0:j1].to(self.precision)
        return x if x.shape[0] == self.heads else x.repeat_interleave(self.heads // x.shape[0], 0)

    def precise_keys(self, j0: int, j1: int) -> Tensor:
        return self.precise(self.k, j0, j1)

    def unseen(self, sums: Tensor, tile: Tile) -> Tensor:
        """-inf for rows that see no key of a tile; the kernel says 0 there, which would count when tiles are joined."""
        band, holes = self.band, self.slab.holes
        if not band.limited and holes is None:
            return sums
        diagonal = band.k_length - band.q_length
        if holes is None:  # the first row sees least on the right, the last one least on the left
            right = band.right is None or tile.i0 + diagonal + band.right >= tile.j0
            left = band.left is None or tile.i1 - 1 + diagonal - band.left < tile.j1
            if right and left:
                return sums
        rows = torch.arange(tile.i0, tile.i1, device=sums.device) + diagonal
        first = rows.new_full(rows.shape, tile.j0) if band.left is None else (rows - band.left).clamp(tile.j0, tile.j1)
        last = (
            rows.new_full(rows.shape, tile.j1)
            if band.right is None
            else (rows + band.right + 1).clamp(tile.j0, tile.j1)
        )
        if holes is None:
            seen = last - first
        else:
            counted = torch.nn.functional.pad((holes == 0).cumsum(0), (1, 0))
            seen = counted[last] - counted[first]
        return sums.masked_fill((seen.flip(0) if self.reverse else seen) <= 0, NEVER)
