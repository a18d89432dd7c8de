"""Relative encodings that add one number per head and distance to the score: clipped, T5, ALiBi."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core import formulas, index
from ..core.constants import constant
from ..core.encoding import Encoding, Host
from ..core.options import WIDEST, require_bool, require_int, require_number, require_table
from ..core.plan import Lookup, Plan
from ..core.positions import Positions


class Clipped(Encoding):
    """A learned number for each clipped distance.

        s = q·k / sqrt(d) + b[h, clip(j - i, -left, right) + left]

    max_distance clips both sides; `left` and `right` override it (right=0 in a causal layer). The table is
    [heads, left + 1 + right], row 0 for keys `left` or more before the query; zeros at the start (NoPE) unless `std`
    is given.

    Raises OptionError for options out of range.

        >>> posenc.Clipped(heads=4, max_distance=8).table.shape
        torch.Size([4, 17])
    """

    steady_terms = True

    def __init__(
        self, *, heads: int, max_distance: int = 16, left: int | None = None, right: int | None = None,
        std: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        left = max_distance if left is None else left
        right = max_distance if right is None else right
        require_int("heads", heads, least=1, most=WIDEST)
        for name, distance in (("max_distance", max_distance), ("left", left), ("right", right)):
            require_int(name, distance)
        require_number("std", std, least=0.0)
        self.max_distance, self.left, self.right, self.std = max_distance, left, right, std
        self.index = index.clip(left, right)
        self.table = nn.Parameter(torch.empty(require_table("the table", heads, left + 1 + right)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std) if self.std else nn.init.zeros_(self.table)

    def terms(self, positions: Positions, *, x=None, host=None) -> Plan:
        return Plan(positions, lookups=(Lookup(self.index, bias=self.table),))


class T5(Encoding):
    """A learned number for each logarithmic bucket of distance (Raffel et al. 2019, arXiv:1910.10683).

        s = scale q·k + b[bucket(j - i), h]

        bidirectional, 32 buckets, max_distance 128:   j - i  -128 .. -91   -1  0   1 ..  91 .. 128
                                                       bucket         15     1  0  17 ..  31 ..  31

    The table is [buckets, heads], as in the checkpoints. T5 does not divide by sqrt(d): scale=1.0;
    scale=None divides (MPNet and other hosts). Causal gives all buckets to the past; future keys share
    bucket 0 and must be masked. The table starts at N(0, std), std = d_model^-0.5 where d_model is given; an
    unscaled layer's projections start as T5's do, with the missing 1/sqrt(d) in the queries.

    Raises OptionError for an odd number of buckets of both directions and for a max_distance within the exact
    buckets.

        >>> posenc.T5(heads=4).plan(posenc.Positions(8)).lookups[0].bias.shape  # [H, n]
        torch.Size([4, 32])
    """

    steady_terms = True

    def __init__(
        self, *, heads: int, d_model: int | None = None, buckets: int = 32, max_distance: int = 128,
        causal: bool = False, scale: float | None = 1.0, std: float | None = None,
    ):  # fmt: skip
        super().__init__()
        require_int("heads", heads, least=1, most=WIDEST)
        if d_model is not None:
            require_int("d_model", d_model, least=1, most=WIDEST)
        require_bool("causal", causal)
        if scale is not None:
            require_number("scale", scale)
        if std is None:
            std = 0.02 if d_model is None else d_model**-0.5
        require_number("std", std, least=0.0)
        self.buckets, self.max_distance, self.causal, self.scale, self.std = buckets, max_distance, causal, scale, std
        self.index = index.log_buckets(buckets, max_distance, causal=causal)
        self.table = nn.Parameter(torch.empty(require_table("the table", buckets, heads)))
        self.reset_parameters()

    @classmethod
    def from_hf(cls, source: Any, *, causal: bool | None = None) -> T5:
        """The options of transformers' T5, mT5, UMT5 or LongT5: of a configuration or of an attention layer.

        causal defaults to is_decoder, which a configuration of a whole encoder-decoder does not have for its decoder.
        The table is new; `posenc.hf.to_posenc` copies the weights of a layer.
        """
        return cls(
            heads=source.n_heads if hasattr(source, "n_heads") else source.num_heads, d_model=source.d_model,
            buckets=source.relative_attention_num_buckets, max_distance=source.relative_attention_max_distance,
            causal=source.is_decoder if causal is None else causal,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def terms(self, positions: Positions, *, x=None, host=None) -> Plan:
        return Plan(positions, lookups=(Lookup(self.index, bias=self.table.t()),), scale=self.scale)

    def check_causal(self, causal: bool) -> str | None:
        if causal and not self.causal:
            return (
                "half of this T5 table is for later keys, which a causal layer masks; "
                "give T5(causal=True, ...), whose buckets all describe the past, or encoding='t5'"
            )
        if self.causal and not causal:
            return (
                "a causal T5 puts every later key into bucket 0, and this layer is not causal; "
                "give T5(causal=False, ...), or the layer causal=True"
            )
        return None

    def reset_host(self, host: Host) -> None:
        if self.scale == 1.0:
            width = host.d_model**-0.5
            nn.init.normal_(host.q_proj.weight, std=width * host.head_dim**-0.5)
            nn.init.normal_(host.k_proj.weight, std=width)
            nn.init.normal_(host.v_proj.weight, std=width)
            nn.init.normal_(host.o_proj.weight, std=(host.heads * host.head_dim) ** -0.5)


class ALiBi(Encoding):
    """Penalise distance linearly (Press et al. 2021, arXiv:2108.12409).

        s = q·k / sqrt(d) - m_h |i - j|

    m_h = 2^(-8h/H) where H is a power of two; otherwise the authors' slopes of the power below, then every
    other slope of the power above. The form is symmetric, so it serves bidirectional attention too.
    `learnable` makes the slopes parameters, from the same values.

    Raises OptionError for fewer than 1 head.

        >>> posenc.ALiBi(heads=4).plan(posenc.Positions(8)).slopes  # [H]
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    steady_terms = True

    def __init__(self, *, heads: int, learnable: bool = False):
        super().__init__()
        require_int("heads", heads, least=1, most=WIDEST)
        self.start = formulas.alibi_slopes(heads)
        self.learnable = require_bool("learnable", learnable)
        if learnable:
            self.slopes = nn.Parameter(torch.empty(heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learnable:
            with torch.no_grad():
                self.slopes.copy_(torch.tensor(self.start, device=self.slopes.device))

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        if self.learnable:
            return Plan(positions, slopes=self.slopes)
        return Plan(positions, slopes=constant(self.start, self.device_of(positions, x)))
