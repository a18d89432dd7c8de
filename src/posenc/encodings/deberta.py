"""Disentangled attention: DeBERTa v1, v2 and v3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core import index
from ..core.encoding import Encoding, Host
from ..core.errors import OptionError
from ..core.formulas import head_size
from ..core.index import Index
from ..core.options import require_bool, require_choice, require_int, require_number, require_table
from ..core.plan import Lookup, Plan
from ..core.positions import Positions
from ..core.projection import project_heads


class DeBERTa(Encoding):
    """Content-to-position and position-to-content scores (He et al. 2020, arXiv:2006.03654).

        s = [ q_i·k_j + q_i·K_r[δ(i-j)] + k_j·Q_r[δ(i-j)] ] / sqrt(t d),   t = 1 + number of terms
        δ(D) = clamp(D + k, 0, 2k - 1)        K_r = P W_kr,  Q_r = P W_qr,  P [2k, d_model]

    projections="own"     the layer's own W_kr (no bias) and W_qr (bias): v1; own_key_bias adds v2's key bias
    projections="shared"  the attention layer's k_proj and q_proj, biases included: v2 and v3; `plan` needs host
    buckets=n             logarithmic buckets up to max_distance (v2, v3: 256 and 512); None: plain clip (v1)
    normalise             LayerNorm on P (v2, v3)
    sign="checkpoint"     p2c looks up δ(i-j), as the released code does; "paper" looks up δ(j-i)
    table, norm           P and its LayerNorm, passed in to be shared by the layers

    Raises OptionError for options that contradict each other, ValueError where shared projections have no host.

        >>> layer = posenc.Attention(64, 4, encoding=posenc.DeBERTa(d_model=64, heads=4, max_distance=16))
        >>> layer.encoding.table.shape, layer(torch.randn(1, 8, 64)).shape
        (torch.Size([32, 64]), torch.Size([1, 8, 64]))
    """

    def __init__(
        self, *, d_model: int, heads: int, head_dim: int | None = None, max_distance: int = 512, buckets: int | None = None,
        terms: Sequence[str] = ("c2p", "p2c"), projections: Literal["own", "shared"] = "own", own_key_bias: bool = False,
        normalise: bool = False, norm_eps: float = 1e-7, sign: Literal["checkpoint", "paper"] = "checkpoint",
        dropout: float = 0.0, table: nn.Parameter | None = None, norm: nn.LayerNorm | None = None, std: float = 0.02,
    ):  # fmt: skip
        super().__init__()
        active = (terms,) if isinstance(terms, str) else tuple(terms) if isinstance(terms, Sequence) else ()
        if active not in (("c2p",), ("p2c",), ("c2p", "p2c"), ("p2c", "c2p")):
            raise OptionError(f"terms={terms!r} must be 'c2p', 'p2c' or both")
        require_choice("projections", projections, ("own", "shared"))
        require_choice("sign", sign, ("checkpoint", "paper"))
        require_bool("own_key_bias", own_key_bias)
        require_bool("normalise", normalise)
        require_number("norm_eps", norm_eps, least=0.0)
        require_number("dropout", dropout, least=0.0, below=1.0)
        require_number("std", std, least=0.0)
        for name, given, kind in (("table", table, nn.Parameter), ("norm", norm, nn.LayerNorm)):
            if given is not None and not isinstance(given, kind):
                raise OptionError(f"{name} must be an nn.{kind.__name__}, got {type(given).__name__}")
        if own_key_bias and projections == "shared":
            raise OptionError("own_key_bias needs projections='own'; shared projections use the layer's biases")
        if norm is not None and not normalise:
            raise OptionError("norm was given but normalise=False; give normalise=True")
        head_dim = head_size(d_model, heads, head_dim)
        self.heads, self.head_dim, self.std, self.dropout = heads, head_dim, std, dropout
        self.active, self.projections, self.sign = active, projections, sign
        require_int("max_distance", max_distance, least=1)
        size = max_distance if buckets is None else buckets
        farthest = None if buckets is None else max_distance
        self.index = index.deberta_buckets(size, farthest)
        self.back_index = index.deberta_buckets(size, farthest, reversed_sign=True)
        self._own_table = table is None
        require_table("the table", 2 * size, d_model)
        require_table("a projection", d_model, heads * head_dim)
        self.table = nn.Parameter(torch.empty(2 * size, d_model)) if table is None else table
        if tuple(self.table.shape) != (2 * size, d_model):
            wanted = [2 * size, d_model]
            raise OptionError(f"table must be [2 × {size}, d_model] = {wanted}, got {list(self.table.shape)}")
        self.norm = (nn.LayerNorm(d_model, eps=norm_eps) if norm is None else norm) if normalise else None
        width = heads * head_dim
        own = projections == "own"
        self.pos_key = nn.Linear(d_model, width, bias=own_key_bias) if own and "c2p" in active else None
        self.pos_query = nn.Linear(d_model, width) if own and "p2c" in active else None
        self.reset_parameters()

    @classmethod
    def from_hf(cls, config: Any, *, table: nn.Parameter | None = None, norm: nn.LayerNorm | None = None) -> DeBERTa:
        """The options of transformers' DeBERTa v1, v2 or v3, from a model's configuration.

        The tables are new unless given; `posenc.hf.to_posenc` copies the weights of a layer.
        """
        first = config.model_type == "deberta"
        shared = not first and getattr(config, "share_att_key", False)
        buckets = -1 if first else getattr(config, "position_buckets", -1)
        norms = "none" if first else getattr(config, "norm_rel_ebd", "none")
        farthest = getattr(config, "max_relative_positions", -1)
        own_size = None if first else getattr(config, "attention_head_size", None)
        return cls(
            d_model=config.hidden_size, heads=config.num_attention_heads,
            head_dim=own_size or config.hidden_size // config.num_attention_heads,
            max_distance=farthest if farthest > 0 else config.max_position_embeddings,
            buckets=buckets if buckets > 0 else None, terms=config.pos_att_type,
            projections="shared" if shared else "own", own_key_bias=not first and not shared,
            normalise="layer_norm" in [part.strip() for part in norms.lower().split("|")], norm_eps=config.layer_norm_eps,
            dropout=config.hidden_dropout_prob, table=table, norm=norm,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        if self._own_table:
            nn.init.normal_(self.table, std=self.std)
        for projection in (self.pos_key, self.pos_query):
            if projection is not None:
                nn.init.normal_(projection.weight, std=self.std)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        key, query = self._projections(host)
        back = self.index if self.sign == "checkpoint" else self.back_index
        if back is self.index:
            own, rows = index.restrict(self.index, positions, self.table)
            back = own
        else:  # one projection serves both
            own, rows = self.index, slice(None)
        table: Tensor = self.table
        if self.norm is not None or (self.dropout and self.training):
            table, rows = table if rows == slice(None) else table[rows], slice(None)
            table = table if self.norm is None else self.norm(table)
            if self.dropout and self.training:
                table = nn.functional.dropout(table, self.dropout)
        k_r, q_r = project_terms(table, self.active, key, query, self.heads, rows)
        return plan_disentangled(positions, self.head_dim, len(self.active), own, k_r, q_r, back)

    def _projections(self, host: Host | None):
        if self.projections == "own":
            return self.pos_key, self.pos_query
        if host is None:
            raise ValueError(
                "projections='shared' projects the table with the layer's own k_proj and q_proj; "
                "give plan(positions, host=attention)"
            )
        for projection in (host.k_proj, host.q_proj):
            width = getattr(projection, "out_features", self.heads * self.head_dim)
            if width != self.heads * self.head_dim:
                raise ValueError(
                    f"a projection to {width} channels does not fit {self.heads} heads of {self.head_dim}; "
                    "deberta needs as many key heads as query heads"
                )
        return host.k_proj, host.q_proj


def project_terms(
    table: Tensor, terms: Sequence[str], key: Any, query: Any, heads: int, rows: slice
) -> tuple[Tensor | None, Tensor | None]:
    """K_r and Q_r of rows of the table, by the modules `key` and `query`, where "c2p" and "p2c" are among the terms."""
    projections = {name: by for name, by in (("c2p", key), ("p2c", query)) if name in terms}
    projected = dict(zip(projections, project_heads(table, tuple(projections.values()), heads, rows), strict=True))
    return projected.get("c2p"), projected.get("p2c")


def plan_disentangled(
    positions: Positions, head_dim: int, terms: int, rows: Index | None, k_r: Tensor | None, q_r: Tensor | None,
    back: Index | None = None,
) -> Plan:  # fmt: skip
    """K_r and Q_r, [heads, n, head_dim] each or None, as a plan; `back` is the index of Q_r, by default that of K_r."""
    back = rows if back is None else back
    lookups: list[Lookup] = []
    if rows is not None and rows == back and (k_r is not None or q_r is not None):
        lookups = [Lookup(rows, dot_query=k_r, dot_key=q_r)]
    elif rows is not None and back is not None:
        lookups = [] if k_r is None else [Lookup(rows, dot_query=k_r)]
        lookups += [] if q_r is None else [Lookup(back, dot_key=q_r)]
    return Plan(positions, lookups=tuple(lookups), scale=(head_dim * (1 + terms)) ** -0.5)
