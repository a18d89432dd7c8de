"""One small transformer: pre-norm blocks of attention and an MLP. Only the positional encoding varies.

tokens ─ embedding ─(+ absolute position)─ [ x + attention(norm(x)) ─ x + mlp(norm(x)) ] × layers ─ norm ─ logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import posenc

from . import build_encoding

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class Block(nn.Module):
    def __init__(self, attention: nn.Module, width: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.attention = attention
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        masks = {} if key_mask is None else {"key_mask": key_mask}
        x = x + self.attention(self.norm_1(x), **masks)
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """`encoding` is a specification such as rope:base=500000; `longest` is the longest training input, the length of a
    learned table."""

    def __init__(
        self, encoding: str, *, vocabulary: int, width: int, heads: int, layers: int, causal: bool, longest: int,
        seed: int = 0, engine: str = "auto", context: ContextParallel | None = None,
    ):  # fmt: skip
        super().__init__()
        self.width, self.causal = width, causal
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # absolute positions enter once, at the input
            self.encoding, attention = build_encoding.build_attention(
                encoding, width=width, heads=heads, layers=layers, causal=causal, longest=longest, engine=engine, context=context
            )  # fmt: skip
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(one, width) for one in attention)
            self.norm = nn.LayerNorm(width, bias=False)
            self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Initialise every weight outside the encoding from the seed: models with other encodings start equal."""
        position = {id(p) for p in build_encoding.position_parameters(self)}
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if id(parameter) in position or parameter.dim() < 2:
                continue
            std = self.width**-0.5 if "embedding" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down.weight")):
                std *= (2 * len(self.blocks)) ** -0.5
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """tokens [B, L] -> logits [B, L, vocabulary].

        Where processes share each sequence, tokens are this one's part, at `positions`; key_mask is False for padding,
        which no causal query sees.
        """
        x = self.embedding(tokens) * self.width**0.5
        if self.encoding is not None:
            x = self.encoding.embed(x, posenc.Positions(tokens.shape[1] if positions is None else positions))
        for block in self.blocks:
            x = block(x, None if self.causal else key_mask)
        return self._logits(self.norm(x))

    def _logits(self, x: Tensor) -> Tensor:
        """The head. On a GPU its rows are filled up to a multiple of 8: matrix products of other sizes are several times slower."""
        weight = self.head.weight
        more = -weight.shape[0] % 8
        if not x.is_cuda or not more:
            return self.head(x)
        padded = nn.functional.pad(weight, (0, 0, 0, more))
        return nn.functional.linear(x, padded)[..., : weight.shape[0]]

    def extend(self, encoding: str, extension: str, longest: int) -> None:
        """Apply a context extension in every layer; the weights do not change."""
        for block in self.blocks:
            attention: Any = block.attention
            attention.encoding = build_encoding.build_extended(
                encoding, extension, width=self.width, heads=attention.heads, longest=longest
            ).to(self.embedding.weight.device)
