"""Tables of relative encodings, projected by linear layers: rows [n, d_model] -> [H, n, D] each.

On a GPU the rows are few (a text of 128 tokens has 255 distances), and the products take less time than the host takes to ask for
them: two linear maps are eight operations in a training step and a dozen nodes of autograd. Here they are one function and two
launches (projection_kernel.py), where both are plain linear layers in half precision; everywhere else the layers are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import pad
from torch.nn.modules.module import _has_any_global_hook

from .launches import find_allocation, has_triton
from .variants import compile_launches

MOST = 1 << 30
"""Products of one projection from which PyTorch's own matrix products are faster."""
PLAIN = (Tensor, nn.Parameter)


def project_heads(
    table: Tensor, projections: Sequence[nn.Module], heads: int, rows: slice = slice(None)
) -> tuple[Tensor, ...]:
    """[H, n, D] for each projection of the rows [n, d_model] of a table; rows: a slice without a step."""
    may = table.is_cuda and len(projections) <= 2 and not torch.compiler.is_compiling()
    weights = _find_weights(table, projections) if may else None
    if weights is not None:
        first, last, _ = rows.indices(table.shape[0])
        if torch.is_grad_enabled():
            return _apply(heads, first, last, table, *weights)
        return _project(heads, _rows(table, first, last), weights, _describe(table, weights))
    some = table if rows == slice(None) else table[rows]
    projected = []
    for projection in projections:
        x = projection(some)
        projected.append(x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(0, 1))
    return tuple(projected)


def _find_weights(table: Tensor, projections: Sequence[nn.Module]) -> list[Tensor | None] | None:
    """Each projection's weight and bias, where the kernels serve them; else None."""
    dtype, device = table.dtype, table.get_device()
    if type(table) not in PLAIN or dtype not in (torch.bfloat16, torch.float16) or not has_triton():
        return None
    if table.stride(1) != 1 or not table.numel() or torch.is_autocast_enabled("cuda") or _has_any_global_hook():
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0:
        return None
    weights: list[Tensor | None] = []
    shape = None
    for projection in projections:
        own: dict[str, Any] = projection.__dict__
        if (
            type(projection) is not nn.Linear or own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
            or own["_backward_pre_hooks"] or "forward" in own
        ):  # fmt: skip
            return None
        parameters = own["_parameters"]
        weight, bias = parameters["weight"], parameters["bias"]
        if type(weight) not in PLAIN or weight.dtype is not dtype or weight.get_device() != device:
            return None
        if not weight.is_contiguous() or weight.shape[1] != table.shape[1] or weight.shape != (shape or weight.shape):
            return None
        if bias is not None and (type(bias) not in PLAIN or bias.dtype is not dtype or not bias.is_contiguous()):
            return None
        shape = weight.shape
        weights += (weight, bias)
    if shape is None or shape[0] % 16 or shape[1] % 16 or table.stride(0) % 16:
        return None  # loads of single numbers
    return weights if table.shape[0] * shape.numel() <= MOST else None


@lru_cache(maxsize=1)
def _kernels():
    from . import projection_kernel

    return projection_kernel


def _rows(table: Tensor, first: int, last: int) -> Tensor:
    return table if last - first == table.shape[0] else table[first:last]


def _describe(table: Tensor, weights: Sequence[Tensor | None], needs: Sequence[bool] = ()) -> tuple:
    """What a variant of the kernels depends on, where `_find_weights` finds them."""
    return (table.dtype, table.get_device(), *needs, *[x is None for x in weights])


def _project(heads: int, rows: Tensor, weights: Sequence[Any], variant: tuple) -> tuple[Tensor, ...]:
    kernels, allocate = _kernels(), _find_allocation(rows)
    n, (width, size) = rows.shape[0], weights[0].shape
    shape, stride, dtype = (heads, n, width // heads), (width // heads, width, 1), rows.dtype
    programs = kernels.tiles(n, width)
    out, other_out = allocate(shape, stride, dtype), None
    other: tuple = (None, 0, None, None)
    if len(weights) == 4:
        other_out = allocate(shape, stride, dtype)
        other, programs = (weights[2], size, weights[3], other_out), 2 * programs
    args = rows, rows.stride(0), weights[0], size, weights[1], out, *other, n, width, size
    kernels.launch(kernels.project, programs, variant, args)
    return (out,) if other_out is None else (out, other_out)


class _Project(torch.autograd.Function):
    """`_project` of the rows first .. last; weights: each projection's weight and bias or None."""

    @staticmethod
    def forward(ctx, heads: int, first: int, last: int, table: Tensor, *weights):
        ctx.save_for_backward(table, *weights)
        ctx.set_materialize_grads(False)
        needs, rows = ctx.needs_input_grad[3:], _rows(table, first, last)
        ctx.heads, ctx.first, ctx.last = heads, first, last
        ctx.variant = _describe(table, weights, needs)
        _compile_once(heads, table, first, last, weights, needs, ctx.variant)
        return _project(heads, rows, weights, ctx.variant)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        table, *weights = ctx.saved_tensors
        first, last, needs = ctx.first, ctx.last, ctx.needs_input_grad[3:]
        width, n = weights[0].shape[0], last - first
        if torch.is_grad_enabled() or any(x is None for x in grads):
            every = [None if x is None else x.transpose(0, 1).reshape(n, width) for x in grads]
            d_rows, *others = _by_formula(_rows(table, first, last), weights, every, needs)
            if d_rows is not None:
                d_rows = pad(d_rows, (0, 0, first, table.shape[0] - last))
            return None, None, None, d_rows, *others
        given = []
        for x in grads:
            assert x is not None
            as_made = x.stride() == (width // ctx.heads, width, 1)  # [n, H D] in memory, as the kernels take it
            given.append(x if as_made else x.transpose(0, 1).reshape(n, width))
        return None, None, None, *_gradients(table, first, last, weights, given, needs, ctx.variant)


_apply = super(torch.autograd.Function, _Project).apply
"""Function.apply without its inspection of each argument for torch.func, which `_find_weights` has excluded."""


def _by_formula(rows: Tensor, weights, grads, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients by differentiable operations."""
    total = None
    found: list[Tensor | None] = []
    for number, d in enumerate(grads):
        weight = weights[2 * number]
        if d is None:
            found += (None, None)
            continue
        if needs[0]:
            part = d @ weight
            total = part if total is None else total + part
        found.append(d.t() @ rows if needs[1 + 2 * number] else None)
        found.append(d.sum(0) if needs[2 + 2 * number] else None)
    return [total, *found]


def _gradients(
    table: Tensor, first: int, last: int, weights: Sequence[Any], grads: list[Tensor], needs: Sequence[bool], variant: tuple
) -> list[Tensor | None]:  # fmt: skip
    kernels, allocate = _kernels(), _find_allocation(table)
    rows, n, (width, size) = _rows(table, first, last), last - first, weights[0].shape
    count, dtype = table.shape[0], table.dtype
    found: list[Tensor | None] = [allocate((count, size), (size, 1), dtype) if needs[0] else None]
    for x, need in zip(weights, needs[1:], strict=True):
        found.append(allocate(tuple(x.shape), x.stride(), dtype) if need else None)
    each = kernels.tiles(width, size) if any(needs[1:]) else 0
    other: tuple = (grads[1], weights[2], size, *found[3:]) if len(grads) == 2 else (None, None, 0, None, None)
    args = (
        rows, rows.stride(0), grads[0], weights[0], size, found[1], found[2], *other, found[0], each, first, count, n, width, size
    )  # fmt: skip
    programs = each * len(grads) + (kernels.tiles(count, size) if needs[0] else 0)
    if programs:
        kernels.launch(kernels.gradients, programs, variant, args)
    return found


_compiled: set[tuple] = set()


def _compile_once(
    heads: int, table: Tensor, first: int, last: int, weights: Sequence[Any], needs: Sequence[bool], variant: tuple
) -> None:
    """The kernels of both passes at once, before the first of them runs: one after the other they would take the sum of their times."""

    def run() -> None:
        outs = _project(heads, _rows(table, first, last), weights, variant)
        _gradients(table, first, last, weights, list(outs), needs, variant)

    if variant not in _compiled:
        _compiled.add(variant)
        compile_launches(table.device, run)


def _find_allocation(like: Tensor) -> Callable[..., Tensor]:
    """allocate(shape, stride, dtype) where the tensor is."""
    allocate = find_allocation(like.device)
    if allocate is None or like.get_device() != torch.cuda.current_device():
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
    return allocate
