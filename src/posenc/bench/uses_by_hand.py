"""Attention layers as one writes them by hand: PyTorch's attention and the usual dense code of each encoding.

Each class takes the weights of a `posenc.Attention`, so that both compute the same. What depends on the length alone (angles,
rows of tables, biases without gradient) is made once, at the start, for the longest text.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import Attention, Positions
from ..encodings.absolute import sinusoid


class Layer(nn.Module):
    """No positions. x [B, L, d_model]; `cached` continues keys and values [B, Hkv, longest, D] at `start`. Padding and documents become
    a boolean mask, joined with causality and window."""

    layer: Attention
    encoding: Any

    def __init__(self, layer: Attention, longest: int, trains: bool):
        super().__init__()
        # not as modules of its own, which nn.Module looks up last of all
        self.__dict__.update(layer=layer, encoding=layer.encoding)
        self.longest, self.trains = longest, trains
        weight = layer.q_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.scale: float | None = None
        self.past: list[Tensor] = []
        self.visible: Tensor | None = None
        self.limits = self.distances() <= 0 if layer.causal else None
        if layer.window is not None:
            left, right = layer.window if isinstance(layer.window, tuple) else (layer.window, layer.window)
            for side, away in ((left, -self.distances()), (right, self.distances())):
                if side is not None:
                    self.limits = away <= side if self.limits is None else self.limits & (away <= side)
        with torch.no_grad():
            self.make()

    def make(self) -> None:
        """What is made once."""

    def distances(self) -> Tensor:
        at = torch.arange(self.longest, device=self.device)
        return at[None, :] - at[:, None]

    def embed(self, x: Tensor, start: int) -> Tensor:
        return x

    def rotate(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, start: int) -> Tensor:
        layer, queries, keys = self.layer, q.shape[2], k.shape[2]
        mask, grouped = self.visible, layer.heads != layer.kv_heads
        causal = False
        if mask is None and layer.window is None and (queries == 1 or queries == keys):
            causal = layer.causal and queries > 1
        elif self.limits is not None and (queries > 1 or layer.window is not None):
            limits = self.limits[start : start + queries, :keys]
            mask = limits if mask is None else mask & limits
        return F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout(), causal, scale=self.scale, enable_gqa=grouped
        )

    def dropout(self) -> float:
        return self.layer.dropout if self.layer.training else 0.0

    def start_cache(self, batch: int) -> None:
        shape = (batch, self.layer.kv_heads, self.longest, self.layer.head_dim)
        self.past = [torch.empty(shape, device=self.device, dtype=self.dtype) for _ in range(2)]

    def forward(
        self, x: Tensor, start: int | None = None, key_mask: Tensor | None = None, documents: Tensor | None = None,
        context: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        layer, first = self.layer, start or 0
        self.visible = mask if key_mask is None else key_mask[:, None, None]
        if documents is not None:
            same = (documents[:, :, None] == documents[:, None])[:, None]
            self.visible = same if self.visible is None else self.visible & same
        batch, length, _ = x.shape
        x = self.embed(x, first)
        states, keys = (x, length) if context is None else (context, context.shape[1])
        q = layer.q_proj(x).view(batch, length, layer.heads, layer.head_dim).transpose(1, 2)
        k = layer.k_proj(states).view(batch, keys, layer.kv_heads, layer.head_dim).transpose(1, 2)
        v = layer.v_proj(states).view(batch, keys, layer.kv_heads, layer.head_dim).transpose(1, 2)
        q, k = self.rotate(q, k, first)
        if start is not None:
            end = start + length
            for cached, new in zip(self.past, (k, v)):
                cached[:, :, start:end] = new
            k, v = (cached[:, :, :end] for cached in self.past)
        out = self.attend(q, k, v, x, first)
        return layer.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Added(Layer):
    """sinusoidal, learned: vectors added to the input."""

    def make(self) -> None:
        if not hasattr(self.encoding, "table"):
            self.vectors = self.encoding.encode(torch.arange(self.longest, device=self.device)).to(self.dtype)

    def embed(self, x: Tensor, start: int) -> Tensor:
        vectors = self.encoding.table if hasattr(self.encoding, "table") else self.vectors
        return x + vectors[start : start + x.shape[1]]


class Rotary(Layer):
    """rope, xpos: x cos + rotate_half(x) sin with angles of the whole context in memory."""

    def make(self) -> None:
        rotation = self.encoding.rotation(Positions(self.longest))
        self.in_halves = rotation.layout == "half"
        repeat = (lambda a: torch.cat((a, a), -1)) if self.in_halves else (lambda a: a.repeat_interleave(2, -1))
        self.q_angles = [repeat(a)[0].to(self.device, self.dtype) for a in rotation.q]
        self.k_angles = [repeat(a)[0].to(self.device, self.dtype) for a in rotation.k]

    def swapped(self, x: Tensor) -> Tensor:
        if self.in_halves:
            a, b = x.chunk(2, -1)
            return torch.cat((-b, a), -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((-b, a), -1).flatten(-2)

    def rotate(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        at = slice(start, start + q.shape[2])
        (q_cos, q_sin), (k_cos, k_sin) = self.q_angles, self.k_angles
        q = q * q_cos[at] + self.swapped(q) * q_sin[at]
        k = k * k_cos[at] + self.swapped(k) * k_sin[at]
        return q, k


class Bias(Layer):
    """alibi, t5, clipped: a dense bias [H, L, L] as the mask of PyTorch's attention.

    Without gradients it is made once; a learned table is looked up in each step, once for each distance, or (by_pair) once for
    each pair with `embedding`.
    """

    by_pair = False

    def make(self) -> None:
        encoding = self.encoding
        self.scale = getattr(encoding, "scale", None)
        distances, has_table = self.distances(), hasattr(encoding, "table")
        self.learned = self.trains and has_table
        if not has_table:
            slopes = torch.tensor(encoding.start, device=self.device)
            self.kept = self.masked(-slopes[:, None, None] * distances.abs())
            return
        self.rows = encoding.index.lookup(distances)
        self.step_rows = encoding.index.lookup(torch.arange(1 - self.longest, self.longest, device=self.device))
        self.kept = self.masked(self.table()[:, self.rows].float())

    def table(self) -> Tensor:
        """[H, n]"""
        table = self.encoding.table
        return table.t() if table.shape[0] == self.encoding.index.n else table

    def masked(self, bias: Tensor) -> Tensor:
        if self.limits is not None:
            bias = bias.masked_fill(~self.limits, float("-inf"))
        return bias.to(self.dtype)[None]

    def bias(self, start: int, queries: int, keys: int) -> Tensor:
        if not self.learned:
            return self.kept[:, :, start : start + queries, :keys]
        if self.by_pair:
            found = F.embedding(self.rows[:queries, :keys], self.table().t()).permute(2, 0, 1)
        else:
            middle = self.longest - 1
            found = self.table().index_select(1, self.step_rows[middle - queries + 1 : middle + keys])
            found = found.unfold(1, keys, 1).flip(1)
        return self.masked(found)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, start: int) -> Tensor:
        bias = self.bias(start, q.shape[2], k.shape[2])
        if self.visible is not None:
            bias = bias.masked_fill(~self.visible, float("-inf"))
        grouped = self.layer.heads != self.layer.kv_heads
        return F.scaled_dot_product_attention(q, k, v, bias, self.dropout(), scale=self.scale, enable_gqa=grouped)


class BiasByPair(Bias):
    by_pair = True


class Content(Layer):
    """shaw, deberta, relative_logits: products with a table, gathered for each pair, added to the scores.

    fused: the sum is the mask of PyTorch's attention; else scores, softmax and sum are three steps.
    """

    fused = False

    def make(self) -> None:
        hidden = torch.zeros(self.longest, self.longest, device=self.device, dtype=self.dtype)
        self.hidden = hidden.masked_fill(self.distances() > 0, float("-inf")) if self.layer.causal else hidden
        self.make_rows()

    def make_rows(self) -> None:
        self.rows = self.encoding.index.lookup(self.distances())

    def added(self, q: Tensor, k: Tensor, x: Tensor, start: int) -> Tensor:
        """What stands beside q·k inside the scale, [B, H, Lq, Lk]."""
        raise NotImplementedError

    def factor(self) -> float:
        return self.layer.head_dim**-0.5

    def gathered(self, products: Tensor, start: int, keys: int) -> Tensor:
        """products [B, H, Lq, n]"""
        rows = self.rows[start : start + products.shape[2], :keys]
        return products.gather(-1, rows.expand(*products.shape[:2], -1, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, start: int) -> Tensor:
        added = self.added(q, k, x, start)
        hidden = self.hidden[start : start + q.shape[2], : k.shape[2]] if self.layer.causal else None
        if self.fused:
            mask = added * self.factor()
            mask = mask if hidden is None else mask + hidden
            mask = mask if self.visible is None else mask.masked_fill(~self.visible, float("-inf"))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.factor())
        scores = (q @ k.transpose(-1, -2) + added) * self.factor()
        scores = scores if hidden is None else scores + hidden
        scores = scores if self.visible is None else scores.masked_fill(~self.visible, float("-inf"))
        return scores.softmax(-1) @ v


class Shaw(Content):
    def added(self, q, k, x, start):
        return self.gathered(q @ self.encoding.keys[0].t(), start, k.shape[2])


class ShawByQuery(Content):
    """Shaw et al. §3.3: a row of the table for each pair, and a product for each query, over all texts and heads."""

    def added(self, q, k, x, start):
        rows = self.rows[start : start + q.shape[2], : k.shape[2]]
        return torch.einsum("bhid,ijd->bhij", q, F.embedding(rows, self.encoding.keys[0]))


class DeBERTa(Content):
    def factor(self) -> float:
        return (3 * self.layer.head_dim) ** -0.5

    def added(self, q, k, x, start):
        encoding, heads = self.encoding, self.layer.heads
        k_r, q_r = (
            project(encoding.table).view(-1, heads, self.layer.head_dim).permute(1, 2, 0)
            for project in (encoding.pos_key, encoding.pos_query)
        )
        to_positions = self.gathered(q @ k_r, start, k.shape[2])
        rows = self.rows[start : start + q.shape[2], : k.shape[2]].t()
        products = k @ q_r
        to_content = products.gather(-1, rows.expand(*products.shape[:2], -1, -1)).transpose(-1, -2)
        return to_positions + to_content


class RelativeLogits(Content):
    def added(self, q, k, x, start):
        encoding = self.encoding
        states = encoding.r_proj(x).view(*x.shape[:2], encoding.heads, encoding.d_rel).transpose(1, 2)
        bank = F.pad(encoding.bank.flip(1), (1, 1))
        return self.gathered(states @ bank, start, k.shape[2]) / self.factor()


class TransformerXL(Content):
    """The row of W_R R(i - j) of each distance, moved to its pair by the usual shift."""

    def make_rows(self) -> None:
        highest = 0 if self.encoding.causal else self.longest - 1
        distances = torch.arange(1 - self.longest, highest + 1, device=self.device)
        waves = sinusoid(-distances, self.layer.d_model, base=self.encoding.base, layout=self.encoding.layout)
        self.waves = waves.to(self.dtype)

    def attend(self, q, k, v, x, start):
        return super().attend(q + self.encoding.content_bias[:, None], k, v, x, start)

    def added(self, q, k, x, start):
        encoding, heads, keys, queries = self.encoding, self.layer.heads, k.shape[2], q.shape[2]
        first = self.longest - 1 - (start + queries - 1)  # of the last query to the first key
        waves = self.waves[first : first + queries + keys - 1]
        table = encoding.position_proj(waves).view(-1, heads, self.layer.head_dim).permute(1, 2, 0)
        q = q - encoding.content_bias[:, None] + encoding.position_bias[:, None]
        products = q @ table  # [B, H, Lq, r]: key j of query i stands at j - i + Lq - 1
        width = queries + keys - 1
        wide = F.pad(products, (0, width + 1 - products.shape[-1]))
        flat = wide.flatten(2)[:, :, queries - 1 : queries - 1 + queries * width]
        return flat.unflatten(2, (queries, width))[..., :keys]


def fused(kind: type[Content]) -> type[Content]:
    return type(f"Fused{kind.__name__}", (kind,), {"fused": True})


BY_HAND: dict[str, dict[str, type[Layer]]] = {
    "none": {"sdpa": Layer},
    "sinusoidal": {"sdpa": Added},
    "learned": {"sdpa": Added},
    "rope": {"rotary + sdpa": Rotary},
    "xpos": {"rotary + sdpa": Rotary},
    "alibi": {"dense bias + sdpa": Bias},
    "t5": {"dense bias + sdpa": Bias, "bias by pair + sdpa": BiasByPair},
    "clipped": {"dense bias + sdpa": Bias, "bias by pair + sdpa": BiasByPair},
    "shaw": {
        "dense": Shaw,
        "dense + sdpa": fused(Shaw),
        "by query": ShawByQuery,
        "by query + sdpa": fused(ShawByQuery),
    },
    "deberta": {"dense": DeBERTa, "dense + sdpa": fused(DeBERTa)},
    "transformer_xl": {"dense": TransformerXL, "dense + sdpa": fused(TransformerXL)},
    "relative_logits": {"dense": RelativeLogits, "dense + sdpa": fused(RelativeLogits)},
}
"""By encoding: the layers that one would write."""
CAUSAL = ("none", "sinusoidal", "learned", "rope", "xpos", "alibi", "relative_logits")
"""Encodings of decoders, whose layers are causal in every cell; the others are bidirectional except in decoding."""
