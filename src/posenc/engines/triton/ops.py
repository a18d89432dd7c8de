"""The PyTorch operators: one opaque node forward and one backward, with fake kernels for torch.compile.

Called eagerly, the same two functions are an ordinary autograd function (`_Attention`), which costs the host about half of
what operators written in Python do. An operator takes the tensors that are there and their places in `arguments.Inputs`:

    Inputs(q, k, v, None, None, table, ...)   ->   tensors [q, k, v, table, ...],  present [0, 1, 2, 5, ...]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.functions import apply_function
from .arguments import GRADIENTS, INPUTS, Inputs, Numbers
from .functions import is_traced, launch_on
from .launch import mass_size, padded, run_backward, run_forward


def pack(inputs: Inputs) -> tuple[list[Tensor], list[int]]:
    present = [place for place, tensor in enumerate(inputs) if tensor is not None]
    return [inputs[place] for place in present], present


def unpack(tensors: Sequence[Tensor], present: Sequence[int]) -> Inputs:
    slots: list[Tensor | None] = [None] * len(INPUTS)
    for place, tensor in zip(present, tensors, strict=True):
        slots[place] = tensor
    return Inputs(*slots)  # type: ignore[arg-type]


def forward(
    tensors: list[Tensor], present: list[int], numbers: list[int], scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv], lse [B, H, Lq rounded up to 64] (base 2), mass (a band's buffer) or empty."""
    inputs = unpack(tensors, present)
    with launch_on(inputs.q):
        return run_forward(inputs, Numbers(*numbers), scale, dropout)


attend_op = torch.library.custom_op("posenc::attend", forward, mutates_args=())


@attend_op.register_fake
def _(tensors, present, numbers, scale, dropout):
    x = unpack(tensors, present)
    out = x.q.new_empty(*x.q.shape[:3], x.v.shape[3])
    lse = x.q.new_empty(*x.q.shape[:2], padded(x.q.shape[2]), dtype=torch.float32)
    if x.value is None:
        return out, lse, x.q.new_empty(0)
    dtype = torch.int64 if x.shared else x.q.dtype
    return out, lse, x.q.new_empty(mass_size(x.q, Numbers(*numbers)), dtype=dtype)


def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, mass: Tensor, tensors: list[Tensor],
    present: list[int], numbers: list[int], scale: float, dropout: float, wanted: list[int],
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors at the places `wanted` of Inputs."""
    inputs = unpack(tensors, present)
    asked = {name: place in wanted for place, name in enumerate(GRADIENTS)}
    with launch_on(inputs.q):
        grads = run_backward(d_out, d_lse, out, lse, mass, inputs, Numbers(*numbers), scale, dropout, asked)
    return [grads[place].to(inputs[place].dtype) for place in wanted]  # type: ignore[union-attr]


attend_backward = torch.library.custom_op("posenc::attend_backward", backward, mutates_args=())


@attend_backward.register_fake
def _(d_out, d_lse, out, lse, mass, tensors, present, numbers, scale, dropout, wanted):
    inputs = unpack(tensors, present)
    return [inputs[place].new_empty(inputs[place].shape) for place in wanted]


def _differentiate(ctx, d_out, d_lse, needs: Sequence[bool], run) -> list[Tensor | None]:
    """A gradient, or None, for each of the call's tensors."""
    out, lse, mass, *tensors = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    places = [place if need and place < len(GRADIENTS) else None for place, need in zip(ctx.present, needs)]
    wanted = [place for place in places if place is not None]
    found = iter(run(d_out, d_lse, out, lse, mass, tensors, ctx.present, ctx.numbers, ctx.scale, ctx.dropout, wanted))
    return [None if place is None else next(found) for place in places]


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
        run = _once if torch.is_grad_enabled() else backward
        return None, None, None, None, *_differentiate(ctx, d_out, d_lse, ctx.needs_input_grad[4:], run)


def _once(d_out, d_lse, out, lse, mass, tensors, present, numbers, scale, dropout, wanted):
    return _FirstDerivative.apply(present, numbers, scale, dropout, wanted, d_out, d_lse, out, lse, mass, *tensors)


class _FirstDerivative(torch.autograd.Function):
    """`backward` where its own derivative may be asked for (create_graph, torch.func): there is none."""

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
    """`forward`, differentiable: as an operator where something traces or watches operators."""
    tensors, present = pack(inputs)
    if is_traced(inputs.q):
        return attend_op(tensors, present, list(numbers), scale, dropout)
    return apply_function(_Attention, present, numbers, scale, dropout, *tensors)
