"""xPos: RoPE whose pairs also decay with distance."""

from __future__ import annotations

import math

import torch

from ...core.constants import constant
from ...core.encoding import Encoding
from ...core.errors import OptionError
from ...core.formulas import xpos_decays
from ...core.memo import STEP, Memo, may_keep
from ...core.options import require_int, require_number
from ...core.positions import Positions, Run, Side
from ...core.rotation import Layout, Phases, Rotation
from .rope import RoPE, check_range, positions_of

_rotations = Memo(most=32, numbers=1 << 22)
EXPONENT = 80.0
"""exp(±80) and a hundred times it still fit into float32 and bfloat16."""


class XPos(Encoding):
    """Extrapolatable positions (Sun et al. 2022, arXiv:2212.10554). For causal attention: scores of later keys would grow.

        pair c of q at p_q:  RoPE, times zeta_c^( (p_q - centre) / scale_base)
        pair c of k at p_k:  RoPE, times zeta_c^(-(p_k - centre) / scale_base)
        score:               decays as zeta_c^((p_q - p_k) / scale_base),   zeta_c = (2c/R + gamma) / (1 + gamma)

    The centre cancels in the score. It is fixed at max_length / 2, so that keys can be cached, and so that neither
    factor leaves exp(±80) for max_length up to 65000 (float32, bfloat16). Float16 ends at 65504: with the default 8192
    factors reach exp(10), which leaves room for |q|, |k| < 2.9 only and is refused; max_length=4096 is exp(5), room for 430.
    Positions outside [0, max_length) raise.

    q, k [B, H, L, D]. Raises OptionError for options out of range.

        >>> posenc.XPos(head_dim=16, max_length=2048).plan(posenc.Positions(8)).rotate.q[0].shape  # [1, L, D/2]
        torch.Size([1, 8, 8])
    """

    causal_only = True

    def __init__(
        self, *, head_dim: int, base: float = 10000.0, rotary_dim: int | None = None, layout: Layout = "interleaved",
        scale_base: float = 512.0, gamma: float = 0.4, max_length: int = 8192,
    ):  # fmt: skip
        super().__init__()
        require_number("scale_base", scale_base, above=0.0)
        require_number("gamma", gamma, above=0.0)
        require_int("max_length", max_length, least=1)
        self.rope = RoPE(head_dim=head_dim, base=base, rotary_dim=rotary_dim, layout=layout)
        self.scale_base, self.gamma, self.max_length = scale_base, gamma, max_length
        self.rotates_by_rows = max_length % STEP == 0 and type(self).rotation is XPos.rotation
        size = self.rope.rotary_dim
        self.rates = tuple(math.log(zeta) / scale_base for zeta in xpos_decays(size, gamma))
        steepest = max((abs(rate) for rate in self.rates), default=0.0)
        exponent = max_length / 2 * steepest
        if not exponent <= EXPONENT:
            raise OptionError(
                f"xPos factors of {max_length} positions leave float32; give max_length <= {int(2 * EXPONENT / steepest)} "
                "or a larger scale_base"
            )
        self.magnitude = math.exp(exponent)

    def rotation(self, positions: Positions) -> Rotation:
        rotation = self.rope.rotation(positions)
        device = self.device_of(positions)
        q, k = positions.q, positions.k
        plain = isinstance(q, Run) and isinstance(k, Run) and type(q.start) is int and type(k.start) is int
        if not plain or not may_keep(device):
            return self._decay(rotation, positions, device)
        assert rotation.k is not None
        key = (q, k, self.rates, self.max_length)
        found = _rotations.get(key)
        if found is None or found[0] is not rotation:  # RoPE gives the same object for the same positions
            with torch.inference_mode(False), torch.no_grad():
                found = rotation, self._decay(rotation, positions, device)
            _rotations.put(key, found, 4 * rotation.k[0].numel())
        return found[1]

    def _decay(self, rotation: Rotation, positions: Positions, device: torch.device) -> Rotation:
        assert rotation.q is not None and rotation.k is not None
        q = self._decay_phases(rotation.q, positions.q, device, 1.0)
        k = self._decay_phases(rotation.k, positions.k, device, -1.0)
        return Rotation(q, k, rotation.layout, magnitude=self.magnitude)

    def _decay_phases(self, phases: Phases, side: Side, device: torch.device, sign: float) -> Phases:
        name = f"[0, {self.max_length}), where xPos factors are safe"
        check_range(side, 0, self.max_length - 1, name, "give a larger max_length, or ")
        positions = positions_of(side, device)
        wide = torch.float32 if device.type == "mps" else torch.float64
        rates = constant(self.rates, device, wide)
        factor = (sign * (positions - self.max_length // 2).to(wide)[..., None] * rates).exp().to(phases[0].dtype)
        return phases[0] * factor, phases[1] * factor
