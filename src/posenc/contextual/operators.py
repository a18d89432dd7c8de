"""posenc::contextual_forward and contextual_backward: the launches of the kernels. by_count is None for stick-breaking attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engines.triton.device import define_operator, is_traced, launch_on
from ..engines.triton.launcher import launch_known
from ..engines.triton.schedule import cdiv, next_power_of_2
from ..engines.triton.structs import View, view
from . import count_kernels, stick_kernels
from .kernel_parts import Tokens

__all__ = ["backward", "call", "forward", "launch_variant", "make_tokens", "make_view"]


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


def choose_tile(widest: int, is_float32: bool) -> tuple[int, int, int]:
    """Queries, keys and warps of a tile; widest: the larger head size."""
    if is_float32:  # products by multiply-add, without tensor cores
        return (32, 32, 4) if widest <= 128 else (16, 16, 4)
    return (64, 32, 4) if widest <= 128 else (32, 32, 4)


def _launch(kernel, tensors, real, ids, given, scale, *more, STRICT: int | None = None) -> None:
    """kernel(*tensors as views, masks, *given, *lengths, scale, *more), one program for each block of queries."""
    q, k, v = tensors[:3]
    size, v_size = q.shape[3], v.shape[3]
    block_d, block_dv = (max(16, next_power_of_2(x)) for x in (size, v_size))
    m, n, warps = choose_tile(max(block_d, block_dv), q.dtype == torch.float32)
    lengths = q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    constants = size, v_size, block_d, block_dv, m, n, *(() if STRICT is None else (STRICT,))
    views = [make_view(x) for x in tensors]
    programs = q.shape[0] * q.shape[1] * cdiv(q.shape[2], m)
    with launch_on(q):
        arguments = (*views, make_tokens(real, ids), *given, *lengths, scale, *more, *constants)
        launch_variant(kernel, programs, q.device, arguments, num_warps=warps, num_stages=2)


def make_view(x: Tensor) -> View:
    return view(x if x.stride(-1) == 1 else x.contiguous())


def make_tokens(real: Tensor | None, ids: Tensor | None) -> Tokens:
    real = None if real is None else real.to(torch.uint8).contiguous()
    ids = None if ids is None else ids.long().contiguous()
    return Tokens(real, _row(real), ids, _row(ids))


def _row(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.shape[1]


def launch_variant(kernel, programs: int, device: torch.device, arguments: tuple, **options: int) -> None:
    """kernel[(programs,)](*arguments), by launch_known. The variant follows from what is absent, dtypes, constants, and which addresses
    and numbers are divisible by 16 or wide."""
    key: list[object] = [id(kernel), device, options["num_warps"]]
    for x in arguments:
        for y in x if isinstance(x, tuple) else (x,):
            if isinstance(y, Tensor):
                key.append((y.dtype, y.data_ptr() & 15 == 0))
            elif isinstance(y, float):
                key.append(float)
            else:
                key.append(y if y is None or isinstance(y, str) or y <= 256 else (y & 15 == 0, y >= 1 << 31))
    launch_known(tuple(key), kernel, programs, device, arguments, **options)


def _empty_outputs(q: Tensor, v: Tensor, by_count: Tensor | None) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=q.dtype if by_count is None else torch.float32)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, by_count: Tensor | None) -> list[Tensor]:
    """All but dq zeros: the kernels add to them."""
    added = (k, v) if by_count is None else (k, v, by_count)
    return [q.new_empty(q.shape, dtype=torch.float32), *(x.new_zeros(x.shape, dtype=torch.float32) for x in added)]


OPERATORS: dict[Callable, Callable] = {f: define_operator(f"contextual_{f.__name__}", f) for f in (forward, backward)}


def call(function, q: Tensor, *arguments):
    """function(*arguments), as one operator where torch.compile or a mode must meet one."""
    return (OPERATORS[function] if is_traced(q) else function)(*arguments)


@torch.library.register_fake("posenc::contextual_forward")
def _(q, k, v, by_count, real, ids, scale, strict):
    return _empty_outputs(q, v, by_count)


@torch.library.register_fake("posenc::contextual_backward")
def _(d_out, d_left, q, k, v, by_count, real, ids, out, rest, scale, strict):
    return _empty_gradients(q, k, v, by_count)
