"""FIRE: a small network of the distance relative to the query's position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core import formulas, index
from ..core.encoding import Encoding
from ..core.options import WIDEST, require_int, require_number
from ..core.plan import Lookup, Plan
from ..core.positions import Positions, Run
from ..core.scalar_network import apply_network
from ..core.torch_modes import has_fake_tensors


class Fire(Encoding):
    """Functional interpolation of relative positions (Li et al. 2023, arXiv:2310.04418).

        s = q·k / sqrt(d) + MLP(φ(i - j) / φ(max(i, T)))_h,     φ(x) = ln(1 + |c x|),     T = |multiplier · threshold|

    MLP: 1 -> hidden, ReLU, hidden -> heads. c and the multiplier are learned, from 0.1 and 1. The network's input lies in
    [0, 1] at every length, so longer texts do not leave the range of training. i counts from 0, and padding and documents count their
    own tokens. Up to T the bias is a function of the distance, a table that engines run fast; past T it depends on the
    query's position too, and attention runs block by block.

    Raises OptionError for options out of range.

        >>> layer = posenc.Attention(64, 4, encoding="fire", causal=True)
        >>> layer(torch.randn(1, 10, 64)).shape  # [B, L, d_model]
        torch.Size([1, 10, 64])
    """

    absolute = True

    def __init__(
        self, *, heads: int, hidden: int = 32, threshold: float = 512.0, c: float = 0.1, eps: float = 1e-6
    ):  # fmt: skip
        super().__init__()
        require_int("heads", heads, least=1, most=WIDEST)
        require_int("hidden", hidden, least=1, most=WIDEST)
        self.threshold = require_number("threshold", threshold, above=0.0)
        self.eps = require_number("eps", eps, least=0.0)
        self.start = require_number("c", c)
        self.first, self.last = nn.Linear(1, hidden), nn.Linear(hidden, heads)
        self.c = nn.Parameter(torch.empty(()))
        self.multiplier = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.first.reset_parameters()
        self.last.reset_parameters()
        nn.init.constant_(self.c, self.start)
        nn.init.ones_(self.multiplier)

    def bias(self, distances: Tensor, at: Tensor | None = None) -> Tensor:
        """[heads, ..] of distances [..] to queries at positions `at` [..]; None: up to T."""
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        edge = (self.multiplier.to(dtype) * self.threshold).abs()
        reach = edge if at is None else torch.maximum(at.to(dtype), edge)
        c = self.c.to(dtype)
        part = formulas.fire_scale(distances.to(dtype), c, torch) / (formulas.fire_scale(reach, c, torch) + self.eps)
        weights = self.first.weight[:, 0], self.first.bias, self.last.weight, self.last.bias
        return apply_network(part, *(x.to(dtype) for x in weights))

    def terms(self, positions: Positions, *, x: Tensor | None = None, host=None) -> Plan:
        if self._is_near(positions):
            rows = index.exact(positions)
            return Plan(positions, lookups=(Lookup(rows, bias=self.bias(rows.distances_on(self.c.device))),))
        return Plan(positions, pair=self.pair)

    def pair(self, p_q: Tensor, p_k: Tensor) -> Tensor:
        """[B or 1, heads, lq, lk]: the plan's function of both positions."""
        distances = p_k[..., None, :] - p_q[..., :, None]
        bias = self.bias(distances, p_q[..., :, None]).movedim(0, -3)
        return bias if bias.dim() == 4 else bias[None]

    def _is_near(self, positions: Positions) -> bool:
        """Whether no query lies past T, so that the bias is a function of the distance. On a GPU reading T synchronises, so it is
        read once after each update; compiled code, which cannot read it, takes the general form."""
        side, device = positions.q, self.c.device
        if not isinstance(side, Run) or isinstance(side.start, Tensor) or torch.compiler.is_compiling():
            return False
        last = side.start + side.length - 1
        if device.type == "meta":
            return last <= self.threshold
        if torch._C._are_functorch_transforms_active():  # vmap reads no numbers
            return False
        if has_fake_tensors() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return False
        return last <= _read(self.multiplier) * self.threshold


_values = WeakTensorKeyDictionary()
"""Parameter on a GPU -> (its version, its value)."""


def _read(parameter: Tensor) -> float:
    """|parameter|, a single number."""
    if parameter.is_cpu or parameter.is_inference():
        return abs(float(parameter.detach()))
    known = _values.get(parameter)
    if known is None or known[0] != parameter._version:
        known = _values[parameter] = parameter._version, abs(float(parameter.detach()))
    return known[1]
