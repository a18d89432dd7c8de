"""The PyTorch operators: one opaque node forward and one backward, with fake kernels for torch.compile.

Called eagerly, the same two functions form an ordinary autograd function (`_Attention`), which costs the host about half
as much as operators written in Python. An operator takes the tensors that exist and their indices in `arguments.Inputs`:

    Inputs(q, k, v, None, None, table, ...)   ->   tensors [q, k, v, table, ...],  present [0, 1, 2, 5, ...]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.functions import apply_function
from .arguments import GRADIENTS, INPUTS, Inputs, Numbers
from .device import is_traced, launch_on
from .launch import mass_size, padded, run_backward, run_forward
from .replay import describe, run_recorded


def pack(inputs: Inputs) -> tuple[list[Tensor], list[int]]:
    present = [number for number, tensor in enumerate(inputs) if tensor is not None]
    return [inputs[number] for number in present], present


def unpack(tensors: Sequence[Tensor], present: Sequence[int]) -> Inputs:
    inputs: list[Tensor | None] = [None] * len(INPUTS)
    for number, tensor in zip(present, tensors, strict=True):
        inputs[number] = tensor
    return Inputs(*inputs)  # type: ignore[arg-type]


def forward(
    tensors: list[Tensor], present: list[int], numbers: list[int], scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv], lse [B, H, Lq rounded up to 64] (base 2), mass (a band's buffer) or empty."""
    inputs = unpack(tensors, present)
    num = Numbers(*numbers)
    key = ("forward", inputs.q.device, num, scale, dropout, describe(inputs))

    def run(launch, *inputs):
        return run_forward(launch, Inputs(*inputs), num, scale, dropout)

    with launch_on(inputs.q):
        return run_recorded(key, inputs, run)


attend_op = torch.library.custom_op("posenc::attend", forward, mutates_args=())


@attend_op.register_fake
def _(tensors, present, numbers, scale, dropout):
    x = unpack(tensors, present)
    out = x.q.new_empty(*x.q.shape[:3], x.v.shape[3])
    lse = x.q.new_empty(*x.q.shape[:2], padded(x.q.shape[2]), dtype=torch.float32)
    if x.value is None:
        return out, lse, x.q.new_empty(0)
    dtype = torch.int64 if x.has_token_positions else x.q.dtype
    return out, lse, x.q.new_empty(mass_size(x.q, Numbers(*numbers)), dtype=dtype)


def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, mass: Tensor, tensors: list[Tensor],
    present: list[int], numbers: list[int], scale: float, dropout: float, wanted: list[int],
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors whose indices in Inputs are `wanted`."""
    inputs = unpack(tensors, present)
    num, given = Numbers(*numbers), (d_out, d_lse, out, lse, mass, *inputs)
    key = ("backward", inputs.q.device, num, scale, dropout, tuple(wanted), describe(given))

    def run(launch, d_out, d_lse, out, lse, mass, *inputs):
        names = {name: number in wanted for number, name in enumerate(GRADIENTS)}
        grads = run_backward(launch, d_out, d_lse, out, lse, mass, Inputs(*inputs), num, scale, dropout, names)
        return [grads[number].to(inputs[number].dtype) for number in wanted]

    with launch_on(inputs.q):
        return run_recorded(key, given, run)


attend_backward = torch.library.custom_op("posenc::attend_backward", backward, mutates_args=())


@attend_backward.register_fake
def _(d_out, d_lse, out, lse, mass, tensors, present, numbers, scale, dropout, wanted):
    inputs = unpack(tensors, present)
    return [inputs[number].new_empty(inputs[number].shape) for number in wanted]


def _differentiate(ctx, d_out, d_lse, needs: Sequence[bool], run) -> list[Tensor | None]:
    """A gradient, or None, for each of the call's tensors."""
    out, lse, mass, *tensors = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    numbers = [number if need and number < len(GRADIENTS) else None for number, need in zip(ctx.present, needs)]
    wanted = [number for number in numbers if number is not None]
    grads = iter(run(d_out, d_lse, out, lse, mass, tensors, ctx.present, ctx.numbers, ctx.scale, ctx.dropout, wanted))
    return [None if number is None else next(grads) for number in numbers]


def _setup(ctx, inputs, output):
    tensors, ctx.present, ctx.numbers, ctx.scale, ctx.dropout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, d_out, d_lse, d_mass):
    return _differentiate(ctx, d_out, d_lse, ctx.needs_input_grad[0], attend_backward), None, None, None, None


attend_op.register_autograd(_backward, setup_context=_setup)


class _Attention(torch.autograd.Function):
    """`attend_op` in eager mode: present, numbers, scale, dropout, then the tensors."""

    @staticmethod
    def forward(present, numbers, scale, dropout, *tensors):
        return forward(tensors, present, numbers, scale, dropout)

    @staticmethod
    def setup_context(ctx, inputs, output):
        present, numbers, scale, dropout, *tensors = inputs
        _setup(ctx, (tensors, present, numbers, scale, dropout), output)

    @staticmethod
    def backward(ctx, d_out, d_lse, d_mass):
        run = _backward_once if torch.is_grad_enabled() else backward
        return None, None, None, None, *_differentiate(ctx, d_out, d_lse, ctx.needs_input_grad[4:], run)


def _backward_once(d_out, d_lse, out, lse, mass, tensors, present, numbers, scale, dropout, wanted):
    return _FirstDerivative.apply(present, numbers, scale, dropout, wanted, d_out, d_lse, out, lse, mass, *tensors)


class _FirstDerivative(torch.autograd.Function):
    """`backward` where it may be differentiated itself (create_graph, torch.func): that raises."""

    @staticmethod
    def forward(present, numbers, scale, dropout, wanted, d_out, d_lse, out, lse, mass, *tensors):
        return tuple(backward(d_out, d_lse, out, lse, mass, tensors, present, numbers, scale, dropout, wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("the triton engine has first derivatives only; for second ones use engine='reference'")


def attend(inputs: Inputs, numbers: Numbers, scale: float, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """`forward`, differentiable; as an operator where operators are traced (device.is_traced)."""
    tensors, present = pack(inputs)
    if is_traced(inputs.q):
        return attend_op(tensors, present, list(numbers), scale, dropout)
    return apply_function(_Attention, present, numbers, scale, dropout, *tensors)
