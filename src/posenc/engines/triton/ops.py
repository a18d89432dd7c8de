"""The PyTorch operators: one opaque node forward and one backward, with fake kernels for torch.compile.

Called one by one the same two functions are an ordinary autograd function (`Now`), which costs the host about half of what operators
written in Python do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .functions import on, quick, traced
from .launch import GRADIENTS, INPUTS, Inputs, Numbers, mass_size, padded, run_backward, run_forward

__all__ = ["INPUTS", "Numbers", "attend"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    table: Tensor | None,
    key_table: Tensor | None,
    value: Tensor | None,
    slopes: Tensor | None,
    scales: Tensor | None,
    decay_q: Tensor | None,
    decay_k: Tensor | None,
    starts: Tensor | None,
    p_q: Tensor | None,
    p_k: Tensor | None,
    keys: Tensor | None,
    spans: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    doc_q_sees: Tensor | None,
    doc_k_sees: Tensor | None,
    extra: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[int],
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, Lq, Dv], lse [B, H, Lq rounded up to 64] (base 2), mass (a band's buffer) or empty."""
    x = Inputs(
        q, k, v, bias, states, table, key_table, value, slopes, scales, decay_q, decay_k,
        starts, p_q, p_k, keys, spans, doc_q, doc_k, doc_q_sees, doc_k_sees, extra, seed,
    )  # fmt: skip
    with on(q):
        return run_forward(x, Numbers(*numbers), scale, dropout)


attend_op = torch.library.custom_op("posenc::attend", forward, mutates_args=())


@attend_op.register_fake
def _(q, k, v, bias, states, table, key_table, value, *rest):
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(*q.shape[:2], padded(q.shape[2]), dtype=torch.float32)
    if value is None:
        return out, lse, q.new_empty(0)
    shared = rest[5] is not None
    return out, lse, q.new_empty(mass_size(q, Numbers(*rest[-3])), dtype=torch.int64 if shared else q.dtype)


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    table: Tensor | None,
    key_table: Tensor | None,
    value: Tensor | None,
    slopes: Tensor | None,
    scales: Tensor | None,
    decay_q: Tensor | None,
    decay_k: Tensor | None,
    starts: Tensor | None,
    p_q: Tensor | None,
    p_k: Tensor | None,
    keys: Tensor | None,
    spans: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    doc_q_sees: Tensor | None,
    doc_k_sees: Tensor | None,
    extra: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[int],
    scale: float,
    dropout: float,
    wanted: Sequence[bool],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Gradients of the first inputs, GRADIENTS; empty where not `wanted`."""
    x = Inputs(
        q, k, v, bias, states, table, key_table, value, slopes, scales, decay_q, decay_k,
        starts, p_q, p_k, keys, spans, doc_q, doc_k, doc_q_sees, doc_k_sees, extra, seed,
    )  # fmt: skip
    grads = _gradients(d_out, d_lse, out, lse, mass, x, numbers, scale, dropout, wanted)
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _gradients(d_out, d_lse, out, lse, mass, x: Inputs, numbers, scale, dropout, wanted) -> list[Tensor | None]:
    """The same; None where not `wanted`."""
    asked = dict(zip(GRADIENTS, wanted, strict=True))
    with on(x.q):
        grads = run_backward(d_out, d_lse, out, lse, mass, x, Numbers(*numbers), scale, dropout, asked)
    return [
        None if grad is None or not want else grad.to(given.dtype)
        for grad, want, given in zip(grads, wanted, x, strict=False)
    ]


attend_backward = torch.library.custom_op("posenc::attend_backward", backward, mutates_args=())


@attend_backward.register_fake
def _(d_out, d_lse, out, lse, mass, *rest):
    inputs, wanted = rest[: len(GRADIENTS)], rest[-1]
    return tuple(out.new_empty(0) if x is None or not want else x.new_empty(x.shape) for x, want in zip(inputs, wanted))


def _setup(ctx, inputs, output):
    *tensors, ctx.numbers, ctx.scale, ctx.dropout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, d_out, d_lse, d_mass, run=None):
    out, lse, mass, *tensors = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    needs = ctx.needs_input_grad
    wanted = [bool(need) for need in needs[: len(GRADIENTS)]]
    run = run or attend_backward
    grads = run(d_out, d_lse, out, lse, mass, *tensors, ctx.numbers, ctx.scale, ctx.dropout, wanted)
    given = [grad if tensor is not None and want else None for grad, tensor, want in zip(grads, tensors, wanted)]
    return *given, *(None,) * (len(needs) - len(given))


attend_op.register_autograd(_backward, setup_context=_setup)


class Now(torch.autograd.Function):
    @staticmethod
    def forward(*inputs):
        return forward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *grads):
        return _backward(ctx, *grads, run=Once.apply if torch.is_grad_enabled() else _now)


def _now(d_out, d_lse, out, lse, mass, *rest):
    *tensors, numbers, scale, dropout, wanted = rest
    return _gradients(d_out, d_lse, out, lse, mass, Inputs(*tensors), numbers, scale, dropout, wanted)


class Once(torch.autograd.Function):
    """`backward` where its own derivative may be asked for (create_graph, torch.func): there is none."""

    @staticmethod
    def forward(*inputs):
        return backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("the triton engine has first derivatives only; for second ones use engine='reference'")


def attend(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """`forward`, differentiable: as an operator where something traces or watches operators."""
    return attend_op(*inputs) if traced(inputs[0]) else quick(Now, *inputs)
