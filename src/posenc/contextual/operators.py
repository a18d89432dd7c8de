"""posenc::contextual_forward, contextual_backward, contextual_substitute: the launches of the kernels. by_count is None for stick-breaking."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines.triton.device import define_operator, is_traced, launch_on
from ..engines.triton.launcher import launch
from ..engines.triton.schedule import cdiv, next_power_of_2
from ..engines.triton.structs import View
from . import count_kernels, stick_kernels
from .inverse_kernel import substitute_kernel
from .kernel_parts import Tokens

__all__ = ["backward", "call", "forward", "substitute"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, by_count: Tensor | None, real: Tensor | None, ids: Tensor | None, scale: float, strict: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stick-breaking: out [B, H, Lq, Dv] in q's dtype and left [B, H, Lq] in float32.
    Counts: out and log-sum-exp, float32; by_count [B, H, Lq, n], contiguous float32."""
    outputs = _empty_outputs(q, v, by_count)
    if by_count is None:
        _launch(stick_kernels.forward_kernel, (q, k, v), real, ids, outputs, scale, STRICT=int(strict))
    else:
        _launch(count_kernels.forward_kernel, (q, k, v), real, ids, outputs, scale, by_count, by_count.shape[3])
    return outputs


def backward(
    d_out: Tensor, d_left: Tensor | None, q: Tensor, k: Tensor, v: Tensor, by_count: Tensor | None, real: Tensor | None,
    ids: Tensor | None, out: Tensor | None, rest: Tensor, scale: float, strict: bool,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv, and of counts the gradient of by_count, float32. out, rest: forward's outputs; the first is for counts alone."""
    grads, tensors = _empty_gradients(q, k, v, by_count), (q, k, v, d_out)
    given = rest, *grads[:3]
    if by_count is None:
        _launch(stick_kernels.backward_kernel, tensors, real, ids, given, scale, d_left, STRICT=int(strict))
    else:
        more = out, by_count, grads[3], by_count.shape[3]
        _launch(count_kernels.backward_kernel, tensors, real, ids, given, scale, *more)
    return grads


def substitute(a: Tensor) -> Tensor:
    """(I + a)^-1 of strictly lower triangular matrices [.., n, n], float32."""
    a, size = a.contiguous(), a.shape[-1]
    out = torch.empty_like(a)
    with launch_on(a):
        launch(substitute_kernel, a.numel() // size**2, a, out, N=size, num_warps=4)
    return out


def choose_tile(widest: int, is_float32: bool) -> tuple[int, int, int]:
    """Queries, keys and warps of a tile; widest: the larger head size."""
    if is_float32:  # products by multiply-add, without tensor cores
        return (32, 32, 4) if widest <= 128 else (16, 16, 4)
    return (64, 32, 4) if widest <= 128 else (32, 32, 4)


def _launch(kernel, tensors, real, ids, given, scale, *more, **constants) -> None:
    """kernel(*tensors as views, masks, *given, *lengths, scale, *more), one program for each block of queries."""
    q, k, v = tensors[:3]
    views = [View(x, *x.stride()[:3]) for x in (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)]
    real = None if real is None else real.to(torch.uint8).contiguous()
    ids = None if ids is None else ids.long().contiguous()
    real_row, ids_row = (0 if x is None or x.shape[0] == 1 else x.shape[1] for x in (real, ids))
    size, v_size = q.shape[3], v.shape[3]
    block_d, block_dv = (max(16, next_power_of_2(x)) for x in (size, v_size))
    m, n, warps = choose_tile(max(block_d, block_dv), q.dtype == torch.float32)
    lengths = q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    constants |= dict(D=size, DV=v_size, BLOCK_D=block_d, BLOCK_DV=block_dv, M=m, N=n, num_warps=warps, num_stages=2)
    programs = q.shape[0] * q.shape[1] * cdiv(q.shape[2], m)
    with launch_on(q):
        launch(
            kernel, programs, *views, Tokens(real, real_row, ids, ids_row), *given, *lengths, scale, *more, **constants
        )


def _empty_outputs(q: Tensor, v: Tensor, by_count: Tensor | None) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=q.dtype if by_count is None else torch.float32)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, by_count: Tensor | None) -> list[Tensor]:
    """All but dq zeros: the kernels add to them."""
    added = (k, v) if by_count is None else (k, v, by_count)
    return [q.new_empty(q.shape, dtype=torch.float32), *(x.new_zeros(x.shape, dtype=torch.float32) for x in added)]


OPERATORS = {f: define_operator(f"contextual_{f.__name__}", f) for f in (forward, backward, substitute)}


def call(function, x: Tensor, *arguments):
    """function(*arguments), as one operator where torch.compile or a mode must meet one."""
    return (OPERATORS[function] if is_traced(x) else function)(*arguments)


@torch.library.register_fake("posenc::contextual_forward")
def _(q, k, v, by_count, real, ids, scale, strict):
    return _empty_outputs(q, v, by_count)


@torch.library.register_fake("posenc::contextual_backward")
def _(d_out, d_left, q, k, v, by_count, real, ids, out, rest, scale, strict):
    return _empty_gradients(q, k, v, by_count)


@torch.library.register_fake("posenc::contextual_substitute")
def _(a):
    return torch.empty_like(a)
