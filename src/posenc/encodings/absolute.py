"""Absolute encodings: a vector for each position, added to the input."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core import formulas
from ..core.constants import constant
from ..core.encoding import Encoding
from ..core.memo import STEP, Memo, may_keep, rows_of_run
from ..core.options import WIDEST, require_choice, require_int, require_number, require_table
from ..core.positions import Positions, Run
from ..core.torch_modes import has_fake_tensors

Layout = Literal["interleaved", "concatenated", "tensor2tensor"]


def sinusoid(positions: Tensor, size: int, *, base: float = 10000.0, layout: Layout = "interleaved") -> Tensor:
    """Sines and cosines of integer positions [..., L] -> [..., L, size], in float64 (float32 on MPS).

        interleaved     sin(p w0) cos(p w0) sin(p w1) ...      w_c = base^(-2c/size)
        concatenated    sin(p w0) sin(p w1) ... cos(p w0) ...  the same frequencies
        tensor2tensor   as concatenated, w_c = base^(-c/(n-1)), n = size // 2; an odd size ends in a zero

    Odd sizes have one more sine than cosines (except tensor2tensor).
    """
    spacing = "tensor2tensor" if layout == "tensor2tensor" else "paper"
    precision = torch.float32 if positions.device.type == "mps" else torch.float64
    frequencies = constant(formulas.inverse_frequencies(size, base, spacing=spacing), positions.device, precision)
    angles = positions.to(precision)[..., None] * frequencies
    sin, cos = angles.sin(), angles.cos()
    if layout == "tensor2tensor":
        return nn.functional.pad(torch.cat((sin, cos), dim=-1), (0, size % 2))
    if layout == "concatenated":
        return torch.cat((sin, cos[..., : size // 2]), dim=-1)
    return torch.stack((sin, cos), dim=-1).flatten(-2)[..., :size]


class Absolute(Encoding):
    """Adds `encode(positions)` to the input. In a stack, add it once: `embed` at the input, no encoding in the
    layers; an Attention layer with an absolute encoding adds it to its own input."""

    absolute = True

    def encode(self, positions: Tensor) -> Tensor:
        """[..., L] integer positions -> [..., L, d_model]."""
        raise NotImplementedError

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        if len(positions.q_axes) != 1:
            raise ValueError(f"absolute positions have one axis, got {len(positions.q_axes)}; give positions.axis(n)")
        ids = positions.q_positions(x.device)
        _not_negative(positions.q, ids)
        return x + self.encode(ids).to(x.dtype)

    def embed_below(self, x: Tensor, positions: Tensor, most: int) -> Tensor:
        table = self.rows_below(x, most)
        if table is None:
            return super().embed_below(x, positions, most)
        rows = nn.functional.embedding(positions, table)
        return x + (rows if rows.dtype == x.dtype else rows.to(x.dtype))


_vectors = Memo(most=64, numbers=1 << 22)
"""Sinusoids of runs, for other layers and later steps."""


class Sinusoidal(Absolute):
    """Fixed sines and cosines of the position (Vaswani et al. 2017, arXiv:1706.03762).

        x_p + [sin(p w_0), cos(p w_0), sin(p w_1), ...],   w_c = base^(-2c / d_model)

    layout="interleaved" is the paper's; "concatenated" has all sines first (Marian, RoFormer's table);
    "tensor2tensor" also spaces the frequencies as the code that trained the published models (Whisper).
    The vectors are computed from the positions, so there is no table and no maximum length.

    Raises OptionError for options out of range, ValueError for positions with several axes.

        >>> posenc.Sinusoidal(d_model=4).embed(torch.zeros(1, 2, 4), posenc.Positions(2))  # [B, L, d_model]
        tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                 [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    def __init__(self, *, d_model: int, base: float = 10000.0, layout: Layout = "interleaved"):
        super().__init__()
        require_choice("layout", layout, ("interleaved", "concatenated", "tensor2tensor"))
        require_int("d_model", d_model, least=2, most=WIDEST)
        require_number("base", base, above=0.0)
        self.d_model, self.base, self.layout = d_model, base, layout

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        run = positions.q
        known = isinstance(run, Run) and type(run.start) is int and len(positions.q_axes) == 1
        if not known or type(self).encode is not Sinusoidal.encode or not may_keep(x.device):
            return super().embed(x, positions)
        assert isinstance(run, Run)
        assert isinstance(run.start, int)
        _not_negative(run, x)
        return x + self._kept_rows(x, run.start, run.length)

    def embed_run(self, x: Tensor, start: int) -> Tensor:
        # before anything compares a traced length; a captured graph keeps rows of its own
        own = type(self)
        if not may_keep(x.device) or own.embed is not Sinusoidal.embed or own.encode is not Sinusoidal.encode:
            return super().embed_run(x, start)
        known = self.prepared().get("vectors")  # those of the call before: a key of all facts takes longer
        if known is not None:
            begin, rows, device, dtype = known
            row, length = start - begin, x.shape[1]
            if x.dtype is dtype and x.device == device and row >= 0 and row + length <= rows.shape[0]:
                return x + rows if length == rows.shape[0] else x + rows.narrow(0, row, length)
        row, length = start % STEP, x.shape[1]
        if row + length > STEP:
            return super().embed_run(x, start)
        first = start - row
        whole = self._kept_rows(x, first, STEP)
        rows = whole.narrow(0, row, length)
        # a text's rows alone, which its next batch takes as they are; of a token all that its next steps take
        kept = (first, whole) if length == 1 else (start, rows)
        self.prepared()["vectors"] = *kept, x.device, x.dtype
        return x + rows

    def rows_below(self, x: Tensor, most: int) -> Tensor | None:
        own = type(self)
        is_own = own.embed is Sinusoidal.embed and own.encode is Sinusoidal.encode
        return self._kept_rows(x, 0, STEP) if most <= STEP and is_own and may_keep(x.device) else None

    def _kept_rows(self, x: Tensor, start: int, length: int) -> Tensor:
        """[length, d_model], on x's device and in its dtype."""

        def make(first: int, count: int) -> tuple[Tensor, ...]:
            return (self.encode(Run(first, count).positions(x.device)).to(x.dtype),)

        key = (self.d_model, self.base, self.layout, x.device, x.dtype)
        return rows_of_run(_vectors, start, length, key, self.d_model, make)[0]

    def encode(self, positions: Tensor) -> Tensor:
        return sinusoid(positions, self.d_model, base=self.base, layout=self.layout)


class Learned(Absolute):
    """A learned vector for each position below `max_length` (BERT, GPT-2).

        x_p + table[p + offset]

    Undefined past max_length, so that raises; `resize` interpolates to another length. `offset` rows come before
    position 0 and are never resized (OPT has 2).

    Raises OptionError for options out of range, ValueError for a position past max_length.

        >>> posenc.Learned(max_length=512, d_model=64).table.shape  # [offset + max_length, d_model]
        torch.Size([512, 64])
    """

    def __init__(self, *, max_length: int, d_model: int, offset: int = 0, std: float = 0.02):
        super().__init__()
        require_int("max_length", max_length, least=1)
        require_int("d_model", d_model, least=1, most=WIDEST)
        require_int("offset", offset)
        require_number("std", std, least=0.0)
        require_table("the table", offset + max_length, d_model)
        self.max_length, self.offset, self.std = max_length, offset, std
        self.table = nn.Parameter(torch.empty(offset + max_length, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        run = positions.q
        if isinstance(run, Run) and isinstance(run.start, int):
            self._limit(run.start + run.length)
            if len(positions.q_axes) == 1 and run.start >= 0 and type(self).encode is Learned.encode:
                first = run.start + self.offset
                return x + self.table[first : first + run.length].to(x.dtype)
        return super().embed(x, positions)

    def embed_run(self, x: Tensor, start: int) -> Tensor:
        if type(self).embed is not Learned.embed or type(self).encode is not Learned.encode:
            return super().embed_run(x, start)
        table, length = self.table, x.shape[1]
        self._limit(start + length)
        rows = table.narrow(0, start + self.offset, length)
        return x + (rows if table.dtype == x.dtype else rows.to(x.dtype))

    def rows_below(self, x: Tensor, most: int) -> Tensor | None:
        own, table, offset = type(self), self.table, self.offset
        if most > table.shape[0] - offset or own.embed is not Learned.embed or own.encode is not Learned.encode:
            return None
        return table[offset:] if offset else table

    def encode(self, positions: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and positions.numel() and not (positions.is_meta or has_fake_tensors()):
            self._limit(int(positions.max()) + 1)
        return self.table[positions + self.offset]

    def resize(self, max_length: int) -> Learned:
        """Interpolate the table linearly to `max_length` positions, in place; returns self."""
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1")
        with torch.no_grad():
            head, rows = self.table[: self.offset], self.table[self.offset :]
            moved = nn.functional.interpolate(
                rows.t()[None].float(), size=max_length, mode="linear", align_corners=False
            )
            table = torch.cat((head, moved[0].t().to(rows.dtype)))
        self.table = nn.Parameter(table.contiguous(), requires_grad=self.table.requires_grad)
        self.max_length = max_length
        return self

    def _limit(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"learned positions end at max_length={self.max_length}, but the input reaches length {length}; "
                f"shorten it, call resize({length}), or use an encoding without a maximum length"
            )


def _not_negative(side: Run | Tensor, positions: Tensor) -> None:
    if isinstance(side, Run) and isinstance(side.start, int):
        lowest = side.start
    elif torch.compiler.is_compiling() or has_fake_tensors() or positions.is_meta or positions.numel() == 0:
        return
    else:
        lowest = int(positions.min())
    if lowest < 0:
        raise ValueError(
            f"absolute positions must be 0 or more, got {lowest}; for left padding use (cumsum(mask) - 1).clamp(min=0)"
        )
