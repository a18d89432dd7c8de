"""Scheme: what every positional encoding is. It makes plans and names no engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from .plan import Plan
from .rotation import Rotation
from .where import Where


class Host(Protocol):
    """What a scheme may use of the attention layer that it serves."""

    d_model: int
    heads: int
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class Scheme(nn.Module):
    """A positional encoding. A subclass fills in the places where it enters and nothing else:

    embed      1. the input:        x + P[p]                  absolute schemes
    rotation   2. queries and keys: R(p) q, R(p) k            rotary schemes
    terms      3. scores, 4. values: lookups, slopes, ...     relative schemes

    One instance serves one layer or many: sharing a table is sharing the module.
    """

    absolute = False
    """Whether the numbers depend on absolute positions, so that a padded row needs its true ones."""
    length_dependent = False
    """Whether the rotation depends on the total length, so that keys must be cached unrotated."""
    _here: Tensor

    def __init__(self):
        super().__init__()
        # Follows .to(device) for schemes without parameters; empty, so meta-device construction cannot spoil it.
        self.register_buffer("_here", torch.empty(0), persistent=False)

    def embed(self, x: Tensor, where: Where) -> Tensor:
        """x [B, L, d_model] with the position added; the queries' side of `where` holds the positions."""
        return x

    def rotation(self, where: Where) -> Rotation | None:
        """The rotation of queries and keys."""
        return None

    def terms(self, where: Where, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        """The terms added to scores and values. x: the queries' input [B, Lq, d_model]; host: the attention layer."""
        return Plan(where)

    def plan(self, where: Where, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        """Everything this scheme does inside attention, for these positions."""
        rotation = self.rotation(where)
        plan = self.terms(where, x=x, host=host)
        return plan if rotation is None else replace(plan, rotate=rotation)

    def reset_host(self, host: Host) -> None:
        """Initialise the layer's projections as the original model did, where the scheme needs that."""

    def device_of(self, where: Where, x: Tensor | None = None) -> torch.device:
        """Where to make tensors: on the input's device, a position tensor's, or the module's."""
        for candidate in (x, where.q, where.k):
            if isinstance(candidate, Tensor):
                return candidate.device
        return self._here.device
