"""A temperature that depends on the position: it sharpens queries far into a long context, with any other encoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core import formulas
from ..core.encoding import Encoding, Host
from ..core.options import WIDEST, require_choice, require_int, require_number
from ..core.plan import Plan
from ..core.positions import Positions
from .wrapper import Wrapper

Form = Literal["llama4", "ministral3", "log"]


class Tempered(Wrapper):
    """Scores times a factor that grows with the query's position, so that longer softmaxes stay as sharp.

        s = τ_i q·k / sqrt(d)        i: the query's position, from 0
        form="llama4"       τ = 1 + alpha ln(1 + floor((i + 1) / floor))          the unrotated layers of Llama 4
        form="ministral3"   τ = 1 + alpha ln(1 + floor(i / floor))                Ministral 3, Mistral Large 4, rotated
        form="log"          τ = 1 + alpha ln(max((i + 1) / floor, 1))             Inkling: no steps

    τ multiplies what a plan's `scale` multiplies: dot products, content terms included, but not biases. `encoding` is the
    encoding it is combined with (a name, or an Encoding); None: no positions, as in Llama 4. The factor belongs to the query, so cached
    keys stay valid.

    A factor for each query, [Lq]. Raises OptionError for an unknown form.

        >>> layer = posenc.Attention(64, 4, encoding="tempered", causal=True)
        >>> layer(torch.randn(1, 10, 64)).shape
        torch.Size([1, 10, 64])
    """

    def __init__(
        self, *, head_dim: int, encoding: Encoding | str | None = None, alpha: float = 0.1, floor: float = 8192.0,
        form: Form = "llama4", d_model: int | None = None, heads: int | None = None,
    ):  # fmt: skip
        super().__init__(encoding, d_model=d_model, heads=heads, head_dim=head_dim)
        self.head_dim = require_int("head_dim", head_dim, least=1, most=WIDEST)
        self.alpha, self.floor = require_number("alpha", alpha), require_number("floor", floor, above=0.0)
        self.form: Form = require_choice("form", form, get_args(Form))
        self.absolute = True

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, **kept) -> Plan:
        plan = super().terms(positions, x=x, host=host, **kept)
        dtype = torch.promote_types(self._device_marker.dtype, torch.float32)
        factor = temperatures(positions, self.device_of(positions, x), dtype, self.alpha, self.floor, self.form)
        scale = plan.scale_of(self.head_dim)
        return replace(plan, scale=(scale.squeeze(-1) if isinstance(scale, Tensor) else scale) * factor)


def temperatures(
    positions: Positions, device: torch.device, dtype: torch.dtype, alpha: float, floor: float, form: Form
) -> Tensor:
    """The queries' factors, [Lq] or [B, 1, Lq]. Positions before 0, those of left padding, count as 0."""
    i = positions.q_positions(device).to(torch.promote_types(dtype, torch.float32)).clamp(min=0.0)
    factor = formulas.temperature(i, alpha, floor, form, torch)
    return factor if factor.dim() == 1 else factor[:, None]
