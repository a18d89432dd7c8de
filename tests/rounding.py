"""Budgets for whole layers and models, where `tests.budget` has no plan to derive them from.

    exact, allowed = rounding.expect(run, torch.float32)     run() -> {name: tensor}, in float64, gradients included

`run` is computed in float64 a few times more, with every operation, forward and backward, followed by a random rounding
of the size that it may have in another dtype. What that does to a result is the standard deviation of a correct
computation, element by element; SIGMAS of them are allowed. As in `tests.budget` a rounding is a fraction of the size of what
is summed, not of the sum, so that a gradient that cancels to nothing has the budget of its terms:

    mm, sums, scatters ...     u c(n) (the same operation over absolute values), c(n) = 4 + 2 sqrt(n) for n terms
    a + b                      u (|a| + |b|): whatever the order in which several are added
    gelu                       u |x|; its gradient, Phi(x) + x phi(x): u (1 + |x| phi(x))
    sigmoids                   u |result|; a gradient, y (1 - y): u y
    exp, softmax               u (EXP + c(n)) |result|; its gradient p (dp - sum p dp): u c(n) p (|dp| + sum p |dp|)
    all other arithmetic       u |result|; views and copies nothing

The roundings of a correct computation are at most half as large as these (2 sqrt(n) is more than three standard
deviations of a sum's), so that six are more than twelve of its own; a wrong row, sign or scale is off by 10^4 of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import budget

DRAWS = 8
SIGMAS = 6.0
aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten.dot: 0, aten.mv: 0, aten.addmv: 1}
"""The first factor's place; its last size is the number of terms."""
SUMS = {
    aten.sum, aten.mean, aten.cumsum, aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_,
    aten.embedding_dense_backward, aten.convolution, aten._unsafe_index_put, aten.slice_backward,
}  # fmt: skip
ADDED = {aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub}
EXPONENTIALS = {aten.exp, aten.exp_, aten._softmax, aten.logsumexp, aten._log_softmax}
NORMS = {
    aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten.native_layer_norm_backward,
    aten.native_group_norm_backward, aten.native_batch_norm_backward,
}  # fmt: skip
"""Their results are differences to a mean, which may be larger."""


class Noise(TorchDispatchMode):
    """A random rounding of float32's size after every operation on float64."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.unit = budget.unit(torch.float32)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        size = self._size(func, packet, args, kwargs)  # before an operation that changes its arguments
        results = func(*args, **kwargs)
        if not isinstance(results, (Tensor, tuple, list)):
            return results
        aliases = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases) or packet in MOVES:
            return results
        if isinstance(results, Tensor):
            return self._round(results, aliases[0] is not None, size, packet)
        sizes = self._convolution_sizes(func, args) if packet is aten.convolution_backward else [None] * len(results)
        return type(results)(self._round(x, False, each, packet) for x, each in zip(results, sizes, strict=True))

    @staticmethod
    def _convolution_sizes(func, args) -> list[Tensor | None]:
        """Of the gradients of a convolution's input, weight and bias: sums, as those of a product."""
        tensors = [x.abs() for x in args[:3]]
        most = max(x.numel() for x in tensors)
        found = func(*tensors, *args[3:])
        return [None if x is None else budget.c(max(1, most // max(1, x.numel()))) * x for x in found]

    def _size(self, func, packet, args, kwargs) -> Tensor | None:
        """What the first result's rounding is a fraction of, where that is not the result itself, in roundings."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not tensors or not all(x.dtype == torch.float64 or not x.is_floating_point() for x in tensors):
            return None
        if packet in PRODUCTS:
            terms = args[PRODUCTS[packet]].shape[-1]
        elif packet in (aten.index_put, aten.index_put_) and len(args) > 3 and args[3]:
            terms = max(1, args[2].numel() // max(1, args[0].numel()))
        elif packet in SUMS:
            terms = 1
        elif packet is aten._softmax_backward_data:  # p (dp - sum p dp)
            dp, p, dim = args[0].abs(), args[1], args[2]
            return budget.c(p.shape[dim]) * p * (dp + (p * dp).sum(dim, keepdim=True))
        elif packet in (aten.gelu, aten.gelu_):  # x (1 + erf(x / sqrt(2))) / 2: the sum cancels where x is negative
            return args[0].abs()
        elif packet is aten.gelu_backward:
            grad, x = args[0].abs(), args[1]
            return grad * (1 + x.abs() * (-x.square() / 2).exp())
        elif packet is aten.sigmoid_backward:  # y (1 - y), which cancels where y is nearly 1
            return args[0].abs() * args[1].abs()
        elif packet is aten.silu_backward:
            return args[0].abs() * args[1].sigmoid() * (1 + args[1].abs())
        elif packet is aten.glu_backward:
            grad, (a, b) = args[0].abs(), args[1].chunk(2, args[2])
            return torch.cat((grad, grad * a.abs()), args[2]) * torch.cat((b, b), args[2]).sigmoid()
        elif packet in ADDED:
            sides = [x.abs() if isinstance(x, Tensor) else abs(x) for x in args[:2]]
            return sides[0] + sides[1] * abs(kwargs.get("alpha", 1))
        else:
            return None
        absolute = lambda x: x.abs() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
        positive = [absolute(x) if not isinstance(x, (list, tuple)) else x for x in args]
        if func._schema.name.endswith("_"):
            positive[0] = positive[0].clone()
        size = func(*positive, **{name: abs(x) if name in ("alpha", "beta") else x for name, x in kwargs.items()})
        if packet in SUMS:
            terms = max(1, max(x.numel() for x in tensors) // max(1, size.numel()))
        return budget.c(terms) * size

    def _round(self, x, in_place: bool, size: Tensor | None, packet):
        if not isinstance(x, Tensor) or x.dtype != torch.float64 or x.numel() == 0:
            return x
        if size is None or size.shape != x.shape:
            size = x.abs()
            if packet in EXPONENTIALS:
                size = size * (budget.EXP + budget.c(x.shape[-1] if x.dim() else 1))
            if packet in NORMS:
                size = (size + size.mean(-1, keepdim=True)) * budget.c(x.shape[-1])
        noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float64).to(x.device).mul_(2).sub_(1)
        change = (noise * size).mul_(self.unit).masked_fill_(~x.isfinite(), 0.0)
        return x.add_(change) if in_place else x + change


MOVES = {
    aten.clone, aten.copy_, aten._to_copy, aten.cat, aten.stack, aten.where, aten.masked_fill, aten.masked_fill_,
    aten.gather, aten.index, aten.index_select, aten.embedding, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.empty_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.zeros, aten.ones, aten.full,
    aten.empty, aten.empty_strided, aten.arange, aten.neg, aten.abs, aten.amax, aten.max, aten.maximum, aten.minimum,
    aten.clamp, aten.relu, aten.threshold_backward, aten.flip, aten.roll, aten.repeat, aten.constant_pad_nd, aten.fill_,
    aten.zero_, aten.scalar_tensor, aten.select_backward, aten.tril, aten.triu, aten.sign, aten.lift_fresh,
    aten._local_scalar_dense, aten.new_empty_strided, aten.unfold_backward, aten.select_scatter, aten.slice_scatter,
}  # fmt: skip
"""Nothing is computed."""
SUMS -= MOVES


def expect(run: Callable[[], dict[str, Tensor]], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results of `run`, and how far one may be from them that is computed in `dtype`.

    Fused attention is one operation, whose sums would have no rounding: call this within `sdpa_kernel(SDPBackend.MATH)`.
    """
    exact = {name: x.detach() for name, x in run().items()}
    square = {name: torch.zeros_like(x) for name, x in exact.items()}
    for draw in range(DRAWS):
        with Noise(draw):
            other = run()
        for name, x in other.items():
            square[name] += (x.detach() - exact[name]).square() / DRAWS
    factor = SIGMAS * budget.unit(dtype) / budget.unit(torch.float32)
    return exact, {name: factor * x.sqrt() for name, x in square.items()}
