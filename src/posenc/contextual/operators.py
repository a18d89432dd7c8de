"""posenc::stick_forward, stick_backward, count_forward, count_backward: the launches of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines.triton.device import define_operator, is_traced, launch_on
from ..engines.triton.launcher import launch
from ..engines.triton.schedule import cdiv, next_power_of_2
from ..engines.triton.structs import View
from . import count_kernels, stick_kernels

__all__ = ["call", "count_backward", "count_forward", "stick_backward", "stick_forward"]


def stick_forward(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, ids: Tensor | None, scale: float, strict: bool
) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] in q's dtype and left [B, H, Lq] in float32."""
    out, left = _empty_outputs(q, v, q.dtype)
    views, (real, ids, *rows), lengths, constants = _arguments((q, k, v), real, ids)
    with launch_on(q):
        launch(
            stick_kernels.forward_kernel, _programs(q, constants), *views, real, ids, out, left, *lengths, *rows, scale,
            STRICT=int(strict), **constants,
        )  # fmt: skip
    return out, left


def stick_backward(
    d_out: Tensor, d_left: Tensor | None, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, ids: Tensor | None,
    left: Tensor, scale: float, strict: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, float32."""
    dq, dk, dv = _empty_gradients(q, k, v)
    views, (real, ids, *rows), lengths, constants = _arguments((q, k, v, d_out), real, ids)
    with launch_on(q):
        launch(
            stick_kernels.backward_kernel, _programs(q, constants), *views, real, ids, left, d_left, dq, dk, dv, *lengths, *rows,
            scale, STRICT=int(strict), **constants,
        )  # fmt: skip
    return dq, dk, dv


def count_forward(
    q: Tensor, k: Tensor, v: Tensor, by_count: Tensor, real: Tensor | None, ids: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and log-sum-exp [B, H, Lq], float32; by_count [B, H, Lq, n], contiguous float32."""
    out, lse = _empty_outputs(q, v)
    views, (real, ids, *rows), lengths, constants = _arguments((q, k, v), real, ids)
    with launch_on(q):
        launch(
            count_kernels.forward_kernel, _programs(q, constants), *views, real, ids, by_count, out, lse, *lengths, by_count.shape[3],
            *rows, scale, **constants,
        )  # fmt: skip
    return out, lse


def count_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, by_count: Tensor, real: Tensor | None, ids: Tensor | None, out: Tensor,
    lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and the gradient of by_count, float32."""
    dq, dk, dv = _empty_gradients(q, k, v)
    d_counts = torch.zeros_like(by_count)
    views, (real, ids, *rows), lengths, constants = _arguments((q, k, v, d_out), real, ids)
    with launch_on(q):
        launch(
            count_kernels.backward_kernel, _programs(q, constants), *views, real, ids, by_count, out, lse, dq, dk, dv, d_counts, *lengths,
            by_count.shape[3], *rows, scale, **constants,
        )  # fmt: skip
    return dq, dk, dv, d_counts


def choose_tile(widest: int, is_float32: bool) -> tuple[int, int, int]:
    """Queries, keys and warps of a tile; widest: the larger head size."""
    if is_float32:  # products by multiply-add, without tensor cores
        return (32, 32, 4) if widest <= 128 else (16, 16, 4)
    return (64, 32, 4) if widest <= 128 else (32, 32, 4)


def _arguments(tensors, real, ids):
    """Views, (real, ids and their strides), lengths and constants of a launch."""
    q, k, v = tensors[:3]
    views = [View(x, *x.stride()[:3]) for x in (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)]
    real = None if real is None else real.to(torch.uint8).contiguous()
    ids = None if ids is None else ids.long().contiguous()
    masks = real, ids, *(0 if x is None or x.shape[0] == 1 else x.shape[1] for x in (real, ids))
    size, v_size = q.shape[3], v.shape[3]
    block_d, block_dv = (max(16, next_power_of_2(x)) for x in (size, v_size))
    m, n, warps = choose_tile(max(block_d, block_dv), q.dtype == torch.float32)
    lengths = q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    constants = dict(D=size, DV=v_size, BLOCK_D=block_d, BLOCK_DV=block_dv, M=m, N=n, num_warps=warps, num_stages=2)
    return views, masks, lengths, constants


def _programs(q: Tensor, constants: dict) -> int:
    return q.shape[0] * q.shape[1] * cdiv(q.shape[2], constants["M"])


def _empty_outputs(q: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of keys and values zeros: the kernels add to them."""
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    return q.new_empty(q.shape, dtype=torch.float32), dk, dv


OPERATORS = {f: define_operator(f.__name__, f) for f in (stick_forward, stick_backward, count_forward, count_backward)}


def call(function, q: Tensor, *arguments):
    """function(*arguments), as one operator where torch.compile or a mode must meet one."""
    return (OPERATORS[function] if is_traced(q) else function)(*arguments)


@torch.library.register_fake("posenc::stick_forward")
def _(q, k, v, real, ids, scale, strict):
    return _empty_outputs(q, v, q.dtype)


@torch.library.register_fake("posenc::stick_backward")
def _(d_out, d_left, q, k, v, real, ids, left, scale, strict):
    return _empty_gradients(q, k, v)


@torch.library.register_fake("posenc::count_forward")
def _(q, k, v, by_count, real, ids, scale):
    return _empty_outputs(q, v)


@torch.library.register_fake("posenc::count_backward")
def _(d_out, q, k, v, by_count, real, ids, out, lse, scale):
    return *_empty_gradients(q, k, v), torch.empty_like(by_count)
