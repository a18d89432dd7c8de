"""The PyTorch operators: one opaque node forward and one backward, with fake kernels for torch.compile.

Called eagerly, the same two functions form an ordinary autograd function (`_Attention`), which costs the host about half
as much as operators written in Python. An operator takes the tensors that exist and their indices in `arguments.Inputs`:

    Inputs(q, k, v, None, None, table, ...)   ->   tensors [q, k, v, table, ...],  present [0, 1, 2, 5, ...]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.torch_modes import apply_function, pack_tensors, unpack_tensors
from .arguments import GRADIENTS, INPUTS, Inputs, Numbers, prepare_masks
from .device import define_operator, is_traced, launch_on
from .launch import empty_in_order, mass_size, padded, run_backward, run_forward
from .replay import describe, run_recorded
from .tables import Parts, sum_parts


def unpack(tensors: Sequence[Tensor], present: Sequence[int]) -> Inputs:
    return Inputs(*unpack_tensors(tensors, present, len(INPUTS)))  # type: ignore[arg-type]


def forward(
    tensors: list[Tensor], present: list[int], numbers: list[int], scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv], lse [B, H, Lq rounded up to 64] (base 2), mass (a band's buffer) or empty."""
    key = ("forward", tensors[0].device, tuple(numbers), scale, dropout, tuple(present), describe(tensors))

    def run(launch, *tensors):
        inputs = _with_masks(launch, unpack(tensors, present))
        out, lse, mass = run_forward(launch, inputs, Numbers(*numbers), scale, dropout)
        return out, lse, out.new_empty(0) if mass is None else mass

    with launch_on(tensors[0]):
        return run_recorded(key, tensors, run)


def _with_masks(launch, inputs: Inputs) -> Inputs:
    masks = inputs.key_mask, inputs.extra, inputs.doc_q, inputs.doc_k
    return inputs._replace(**prepare_masks(launch, inputs.q.shape[0], *masks))


attend_op = define_operator("attend", forward)


@torch.library.register_fake("posenc::attend")
def _(tensors, present, numbers, scale, dropout):
    x = unpack(tensors, present)
    out = empty_in_order(x.q, x.v.shape[3])
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
    given = (d_out, d_lse, out, lse, mass, *tensors)
    key = (
        "backward", out.device, tuple(numbers), scale, dropout, tuple(present), tuple(wanted), describe(given),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip

    def run(launch, d_out, d_lse, out, lse, mass, *tensors):
        names = {name: number in wanted for number, name in enumerate(GRADIENTS)}
        inputs = _with_masks(launch, unpack(tensors, present))
        grads = run_backward(launch, d_out, d_lse, out, lse, mass, inputs, Numbers(*numbers), scale, dropout, names)
        return [finish_gradient(launch, grads[number], inputs[number]) for number in wanted]

    with launch_on(out):
        return run_recorded(key, given, run)


def finish_gradient(launch, grad: Tensor | Parts, tensor: Tensor) -> Tensor:
    if isinstance(grad, Parts):
        return sum_parts(launch, grad, tensor.new_empty(tensor.shape))
    return grad if grad.dtype == tensor.dtype else grad.to(tensor.dtype)


attend_backward = define_operator("attend_backward", backward)


@torch.library.register_fake("posenc::attend_backward")
def _(d_out, d_lse, out, lse, mass, tensors, present, numbers, scale, dropout, wanted):
    inputs = unpack(tensors, present)
    return [
        empty_in_order(x, x.shape[3]) if number < 3 else x.new_empty(x.shape)
        for number in wanted
        for x in (inputs[number],)
    ]


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


torch.library.register_autograd("posenc::attend", _backward, setup_context=_setup)


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


def _backward_once(d_out, d_lse, out, lse, mass, tensors, *others):
    return FirstDerivative.apply(_backward_of, others, d_out, d_lse, out, lse, mass, *tensors)


def _backward_of(others, d_out, d_lse, out, lse, mass, *tensors):
    return tuple(backward(d_out, d_lse, out, lse, mass, tensors, *others))


class FirstDerivative(torch.autograd.Function):
    """function(arguments, *tensors), a backward pass, where it may be differentiated itself (create_graph, torch.func): that
    raises."""

    @staticmethod
    def forward(function, arguments, *tensors):
        return function(arguments, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("the triton engine has first derivatives only; for second ones use engine='reference'")


def attend(inputs: Inputs, numbers: Numbers, scale: float, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """`forward`, differentiable; as an operator where operators are traced (device.is_traced)."""
    tensors, present = pack_tensors(inputs)
    if is_traced(inputs.q):
        return attend_op(tensors, present, list(numbers), scale, dropout)
    return apply_function(_Attention, present, numbers, scale, dropout, *tensors)
