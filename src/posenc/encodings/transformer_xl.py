"""Relative encodings that project a sinusoid of the distance: Transformer-XL (and Conformer), XLNet."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core import index
from ..core.encoding import Encoding
from ..core.errors import OptionError
from ..core.formulas import head_size
from ..core.index import Index, Sparse
from ..core.memo import Memo, may_keep, rows_of_run
from ..core.options import require_bool, require_choice, require_int, require_number, require_table
from ..core.plan import Lookup, Plan
from ..core.positions import Positions
from ..core.projection import project_heads
from .absolute import Layout, sinusoid

SAME_OR_NOT = Index(-1, 1, rows=(1, 0, 1), n=2, axis=1)
"""Row 0 for tokens of one segment, row 1 for others."""


def _waves(
    rows: Index | Sparse, size: int, base: float, layout: Layout, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The sinusoid of i - j for the distance j - i of every row, [n, size]."""
    with torch.inference_mode(False), torch.no_grad():
        return sinusoid(-rows.distances_on(device), size, base=base, layout=layout).to(dtype)


def beyond_shift(bias: Tensor, shift: Tensor) -> Tensor:
    """bias - shift, float32 or better: a plan's queries carry `shift`, so (q + bias)·table is a query_shift of the difference."""
    return (bias if bias.dtype == torch.float64 else bias.float()) - shift


_memo = Memo(most=16, numbers=1 << 25)
"""The layers of a model use the same waves one after another, and a training loop the same in every step: up to 8192 tokens of 1024 channels."""


def _kept_waves(
    rows: Index, size: int, base: float, layout: Layout, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`_waves`, kept; those of a decoding step are a slice of a block that serves the next steps."""

    def make(start: int, count: int) -> tuple[Tensor, ...]:
        return (_waves(Index(start, start + count - 1), size, base, layout, device, dtype),)

    return rows_of_run(_memo, rows.lo, rows.span, (size, base, layout, device, dtype), size, make)[0]


class TransformerXL(Encoding):
    """Content and position scores with two learned biases (Dai et al. 2019, arXiv:1901.02860).

        s = [ (q + u)·k_j + (q + v)·W_R R(i - j) ] / sqrt(d)

    R is the sinusoid of the distance i - j, d_model wide, [sin, cos] halves (layout="interleaved": Conformer's).
    u, v [heads, head_dim] are content_bias and position_bias, which may be passed in to be shared by the layers; W_R
    is position_proj, the layer's own. `clamp_length` gives
    distances past it the row of clamp_length. causal=True leaves out the rows of future keys, which must be masked.
    Memory of past states: Attention(..., memory=...), or longer keys than queries in `Positions`.

    Raises OptionError for sizes that do not fit.

        >>> encoding = posenc.TransformerXL(d_model=64, heads=4)
        >>> encoding.plan(posenc.Positions(8)).lookups[0].dot_query.shape  # [H, n, D]: distances -7 to 7
        torch.Size([4, 15, 16])
    """

    def __init__(
        self, *, d_model: int, heads: int, head_dim: int | None = None, causal: bool = False, clamp_length: int | None = None,
        base: float = 10000.0, layout: Literal["concatenated", "interleaved"] = "concatenated", dropout: float = 0.0,
        content_bias: nn.Parameter | None = None, position_bias: nn.Parameter | None = None, std: float = 0.02,
    ):  # fmt: skip
        super().__init__()
        require_choice("layout", layout, ("concatenated", "interleaved"))
        require_bool("causal", causal)
        if clamp_length is not None:
            require_int("clamp_length", clamp_length, least=1)
        require_number("base", base, above=0.0)
        require_number("dropout", dropout, least=0.0, below=1.0)
        require_number("std", std, least=0.0)
        head_dim = head_size(d_model, heads, head_dim)
        require_table("W_R", d_model, heads * head_dim)
        self.d_model, self.heads, self.head_dim = d_model, heads, head_dim
        self.causal, self.clamp_length, self.base, self.layout, self.dropout, self.std = (
            causal, clamp_length, base, layout, dropout, std,
        )  # fmt: skip
        shape = (heads, head_dim)
        biases = {"content_bias": content_bias, "position_bias": position_bias}
        self._own = [name for name, given in biases.items() if given is None]
        self.content_bias = _shared("content_bias", content_bias, shape)
        self.position_bias = _shared("position_bias", position_bias, shape)
        self.position_proj = nn.Linear(d_model, heads * head_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in self._own:
            nn.init.normal_(getattr(self, name), std=self.std)
        nn.init.normal_(self.position_proj.weight, std=self.std)

    def check_causal(self, causal: bool) -> str | None:
        if self.causal and not causal:
            return (
                f"a causal {type(self).__name__} gives every later key the row of distance 0, and this layer is not "
                "causal; give the encoding causal=False, or the layer causal=True"
            )
        return super().check_causal(causal)

    def index(self, positions: Positions) -> Index | Sparse:
        """A row for each distance of these positions, clamped to clamp_length."""
        return index.exact(positions, most=self.clamp_length, future=not self.causal)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        return Plan(positions, shift=self.content_bias, lookups=(self._positions(positions, self.index(positions)),))

    def _positions(self, positions: Positions, rows: Index | Sparse) -> Lookup:
        weight = self.position_proj.weight
        real = type(weight) is nn.Parameter and may_keep(weight.device)  # a fake tensor must not be kept
        facts = (self.d_model, self.base, self.layout, weight.device, weight.dtype)
        # sparse rows differ from plan to plan
        waves = _kept_waves(rows, *facts) if real and isinstance(rows, Index) else _waves(rows, *facts)
        if self.dropout and self.training:
            waves = nn.functional.dropout(waves, self.dropout)
        (table,) = project_heads(waves, (self.position_proj,), self.heads)
        return Lookup(rows, dot_query=table, query_shift=beyond_shift(self.position_bias, self.content_bias))


class XLNet(TransformerXL):
    """Transformer-XL with signed distances and a segment term (Yang et al. 2019, arXiv:1906.08237).

        s = [ (q + u)·k_j + (q + v)·W_R R(i - j) + (q + w)·g[segment_i != segment_j] ] / sqrt(d)

    w is segment_bias, g segment_table [2, heads, head_dim]; u, v and W_R as in TransformerXL.
    Segments are axis 1 of the positions (Positions(..., more=[(s_q, s_k)]) or Attention(..., segments=s)); without them
    the term is absent. attn_type="uni" leaves out future keys' rows. bi_data=True reads the second half of the batch
    with negated positions (pre-training on reversed text); it needs the batch size, so `plan` needs x.

    Raises OptionError for sizes that do not fit, ValueError for bi_data without x or with an odd batch.

        >>> posenc.XLNet(d_model=64, heads=4).segment_table.shape
        torch.Size([2, 4, 16])
    """

    axes = 2

    def __init__(
        self, *, d_model: int, heads: int, head_dim: int | None = None, attn_type: Literal["bi", "uni"] = "bi",
        bi_data: bool = False, clamp_length: int | None = None, base: float = 10000.0, dropout: float = 0.0,
        content_bias: nn.Parameter | None = None, position_bias: nn.Parameter | None = None,
        segment_bias: nn.Parameter | None = None, std: float = 0.02,
    ):  # fmt: skip
        require_choice("attn_type", attn_type, ("bi", "uni"))
        require_bool("bi_data", bi_data)
        # Negated positions give the past positive distances, so bi_data needs both sides of the table.
        super().__init__(
            d_model=d_model, heads=heads, head_dim=head_dim, causal=attn_type == "uni" and not bi_data,
            clamp_length=clamp_length, base=base, dropout=dropout,
            content_bias=content_bias, position_bias=position_bias, std=std,
        )  # fmt: skip
        self.attn_type, self.bi_data = attn_type, bi_data
        if segment_bias is None:
            self._own.append("segment_bias")
        self.segment_bias = _shared("segment_bias", segment_bias, (heads, self.head_dim))
        self.segment_table = nn.Parameter(torch.empty(2, heads, self.head_dim))
        self._own.append("segment_table")
        self.reset_parameters()

    @classmethod
    def from_hf(cls, source: Any) -> XLNet:
        """The options of transformers' XLNet: of a configuration or of an attention layer, which knows its sizes alone.

        The parameters are new; `posenc.hf.to_posenc` copies the weights of a layer.
        """
        clamp = getattr(source, "clamp_len", -1)
        return cls(
            d_model=source.d_model, heads=source.n_head, head_dim=source.d_head, attn_type=getattr(source, "attn_type", "bi"),
            bi_data=getattr(source, "bi_data", False), clamp_length=clamp if clamp > 0 else None,
        )  # fmt: skip

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        if self.bi_data:
            positions = self._both_ways(positions, x)
        lookups = [self._positions(positions, self.index(positions))]
        if len(positions.q_axes) > 1:
            table, shift = self.segment_table.transpose(0, 1), beyond_shift(self.segment_bias, self.content_bias)
            lookups.append(Lookup(SAME_OR_NOT, dot_query=table, query_shift=shift))
        return Plan(positions, shift=self.content_bias, lookups=tuple(lookups))

    def _both_ways(self, positions: Positions, x: Tensor | None) -> Positions:
        if x is None:
            raise ValueError("bi_data=True reverses the second half of the batch; give plan(positions, x=input)")
        batch = x.shape[0]
        if batch % 2:
            raise ValueError(f"bi_data=True needs an even batch (forward half, backward half), got {batch} rows")
        sign = torch.ones(batch, 1, dtype=torch.int64, device=x.device)
        sign[batch // 2 :] = -1
        lo, hi = positions.reach
        q, k = positions.q_positions(x.device) * sign, positions.k_positions(x.device) * sign
        return Positions(q, k, more=positions.further, reach=(min(lo, -hi), max(hi, -lo)))


def _shared(name: str, given: nn.Parameter | None, shape: tuple[int, int]) -> nn.Parameter:
    if given is None:
        return nn.Parameter(torch.empty(shape))
    if not isinstance(given, nn.Parameter):
        raise OptionError(f"{name} must be an nn.Parameter [heads, head_dim], got {type(given).__name__}")
    if tuple(given.shape) != shape:
        raise OptionError(f"{name} must have shape [heads, head_dim] = {list(shape)}, got {list(given.shape)}")
    return given
