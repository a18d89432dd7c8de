"""posenc::path_forward and path_backward: PaTH attention by its kernels, about log2(L / 64) + 2 launches each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..engines.triton.device import define_operator, launch_on
from ..engines.triton.schedule import cdiv, next_power_of_2
from . import path_kernels as kernels
from .operators import OPERATORS, call, launch_variant, make_tokens, make_view

__all__ = ["backward", "call", "forward"]

N = 64
"""Tokens of a block."""


class Sizes(NamedTuple):
    heads: int
    group: int
    length: int
    blocks: int
    levels: int
    nodes: int  # of all levels but the last, whose products nothing needs
    rows_q: int  # B · H
    rows_k: int


class Launches:
    """Launches of one call, with the arguments that all of them share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor):
        heads, kv_heads, blocks = q.shape[1], k.shape[1], cdiv(q.shape[2], N)
        levels = (blocks - 1).bit_length()
        nodes = sum(blocks >> level for level in range(max(1, levels - 1)))
        rows = q.shape[0] * heads, q.shape[0] * kv_heads
        self.sizes = Sizes(heads, heads // kv_heads, q.shape[2], blocks, levels, nodes, *rows)
        self.block_d, block_dv = (max(16, next_power_of_2(x.shape[3])) for x in (q, v))
        self.precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        # with 8, Triton 3.6's code for products of narrower tiles reads outside of the shared memory
        self.warps = 8 if self.block_d == 64 else 4
        self.warps_across = 8 if q.dtype == torch.float32 and self.block_d == block_dv == 64 else 4
        self.constants = q.shape[3], v.shape[3], self.block_d, block_dv, N
        self.device = q.device

    def within(self, kernel, *arguments) -> None:
        """One program for each block of each key head; wide tiles of float32 would not fit its memory."""
        given = *arguments, self.sizes, *self.constants, "bf16" if self.block_d > 64 else self.precision
        launch_variant(
            kernel, self.sizes.rows_k * self.sizes.blocks, self.device, given, num_warps=self.warps, num_stages=1
        )

    def across(self, kernel, rows: int, *arguments) -> None:
        """One program for each block of each row."""
        given = *arguments, self.sizes, *self.constants, self.precision
        launch_variant(kernel, rows * self.sizes.blocks, self.device, given, num_warps=self.warps_across, num_stages=2)

    def join_blocks(self, wholes: Tensor) -> None:
        for level in range(1, self.sizes.levels - 1):
            self._level(kernels.join_blocks, level, 1, (wholes,), (self.block_d, self.precision))

    def join_backward(self, wholes: Tensor, d_wholes: Tensor) -> None:
        part = min(64, self.block_d)
        for level in reversed(range(1, self.sizes.levels - 1)):
            constants = self.block_d, part, self.precision
            self._level(kernels.join_backward, level, 2 * self.block_d // part, (wholes, d_wholes), constants)

    def _level(self, kernel, level: int, programs: int, tensors: tuple, constants: tuple) -> None:
        count = self.sizes.rows_k * (self.sizes.blocks >> level) * programs
        given = *tensors, level, self.sizes.blocks, self.sizes.nodes, *constants
        launch_variant(kernel, count, self.device, given, num_warps=self.warps, num_stages=2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, total: Tensor | None, real: Tensor | None, ids: Tensor | None,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """out in q's dtype, and what the backward pass needs: lse, scores, inverses, wholes, q_cuts, k_cuts (path_kernels.py).
    beta [B, Hkv, L] float32, total [B, H, L] float64, both contiguous."""
    launches = Launches(q, k, v)
    sizes, made = launches.sizes, _empty_outputs(q, k, v)
    out, lse, scores, inverses, wholes, q_cuts, k_cuts = made
    q_moved, k_moved = (x.new_empty(x.shape[1:], dtype=torch.float32) for x in (q_cuts, k_cuts))
    with launch_on(q):
        views = [make_view(x) for x in (q, k, w)]
        launches.within(kernels.within_blocks, *views, beta, scores, q_moved, k_moved, wholes, inverses)
        launches.join_blocks(wholes)
        if sizes.levels:
            launches.across(kernels.move_to_cuts, sizes.rows_k, q_moved, k_moved, wholes, q_cuts, k_cuts)
        launches.across(
            kernels.attend, sizes.rows_q, scores, q_cuts, k_cuts, make_view(v), make_tokens(real, ids), total, out, lse, scale
        )  # fmt: skip
    return made


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, total: Tensor | None, real: Tensor | None,
    ids: Tensor | None, made: list[Tensor], scale: float,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv, dw, d_beta in float32, and of gates d_total in float32. made: what forward returned."""
    launches = Launches(q, k, v)
    sizes, grads = launches.sizes, _empty_gradients(q, k, v, w, total)
    dq, dk, dv, dw, d_beta, *d_total = grads
    out, lse, scores, inverses, wholes, q_cuts, k_cuts = made
    d_scores, d_wholes, delta = torch.empty_like(scores), torch.zeros_like(wholes), torch.empty_like(lse)
    dq_moved, dk_moved = (x.new_empty(x.shape[1:], dtype=torch.float32) for x in (q_cuts, k_cuts))
    tokens = make_tokens(real, ids)
    with launch_on(q):
        shared = scores, q_cuts, k_cuts, make_view(v), make_view(d_out)
        moved = lse, delta, wholes, d_wholes
        launches.across(
            kernels.attend_backward_q, sizes.rows_q, *shared, out, tokens, total, *moved, dq_moved, d_scores, scale
        )
        launches.across(
            kernels.attend_backward_k, sizes.rows_k, *shared, tokens, total, *moved, dk_moved, dv, d_total[0] if d_total else None, scale
        )  # fmt: skip
        launches.join_backward(wholes, d_wholes)
        of_q, *views = (make_view(x) for x in (q, k, w))
        of_heads = torch.empty_like(inverses), *(torch.empty_like(dk_moved) for _ in range(3))
        launches.within(kernels.within_backward_q, of_q, *views, beta, inverses, d_scores, dq_moved, *of_heads, dq)
        launches.within(
            kernels.within_backward_k, *views, beta, inverses, *of_heads, dk_moved, d_wholes, dk, dw, d_beta
        )
    return grads


def _empty_outputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    launches = Launches(q, k, v)
    sizes, size = launches.sizes, launches.block_d
    rows, kv_rows, tokens = q.shape[:2], k.shape[:2], sizes.blocks * N
    return [
        q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(*rows, tokens, N, dtype=torch.float32), q.new_empty(*kv_rows, tokens, N, dtype=torch.float32),
        q.new_empty(*kv_rows, sizes.nodes, size, size, dtype=torch.float32),
        q.new_empty(sizes.levels, *rows, tokens, size), q.new_empty(sizes.levels, *kv_rows, tokens, size),
    ]  # fmt: skip


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, w: Tensor, total: Tensor | None) -> list[Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v, w)] + [w.new_empty(w.shape[:3], dtype=torch.float32)]
    return grads if total is None else [*grads, total.new_zeros(total.shape, dtype=torch.float32)]


OPERATORS |= {f: define_operator(f"path_{f.__name__}", f) for f in (forward, backward)}


@torch.library.register_fake("posenc::path_forward")
def _(q, k, v, w, beta, total, real, ids, scale):
    return _empty_outputs(q, k, v)


@torch.library.register_fake("posenc::path_backward")
def _(d_out, q, k, v, w, beta, total, real, ids, made, scale):
    return _empty_gradients(q, k, v, w, total)
