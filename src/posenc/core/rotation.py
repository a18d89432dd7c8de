"""Rotation: rotate pairs of channels of q and k by a phase. Every rotation of the library goes through this module.

Pair c is (x_c, y_c), rotated to (x_c cos - y_c sin, x_c sin + y_c cos); the layouts place it differently. With R = 4
rotated channels of 6:

    half          [x0 x1 y0 y1 | z0 z1]    pairs (c, c + R/2)
    interleaved   [x0 y0 x1 y1 | z0 z1]    pairs (2c, 2c + 1)

Channels past R (z) pass through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]
Phases = tuple[
    Tensor, Tensor
]  # cos, sin: [B or 1, L, R/2] or [B or 1, heads, L, R/2], any magnitude inside, float32 or better


FLOAT16 = 256.0
"""The largest magnitude of a rotation that leaves float16 room for numbers up to 255."""


@dataclass(frozen=True)
class Rotation:
    """Phases for queries and for keys (None: not rotated). `values` rotates v with the keys' phases too."""

    q: Phases | None
    k: Phases | None
    layout: Layout = "half"
    values: bool = False
    magnitude: float = 1.0
    """The largest factor of q or k, where it can leave a dtype's range."""
    polar: bool = False
    """Whether channels are magnitudes, softplus(x), with the phases as they are: R/2 = D phases, and 2 D channels."""

    def queries(self, q: Tensor) -> Tensor:
        self._check_range(q)
        return q if self.q is None else apply_rotary(self._pairs(q), *self.q, self.layout)

    def keys(self, k: Tensor) -> Tensor:
        self._check_range(k)
        return k if self.k is None else apply_rotary(self._pairs(k), *self.k, self.layout)

    def _pairs(self, x: Tensor) -> Tensor:
        """x, or pairs (softplus(x), 0) of it."""
        if not self.polar:
            return x
        # contiguous: compiled code is wrong about the strides of softplus's gradient where x is a transposed view
        x = x.contiguous()
        size = torch.nn.functional.softplus(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        return torch.cat((size, torch.zeros_like(size)), -1)

    def both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys: one launch where they share their phases."""
        if (
            self.q is not None
            and self.k is not None
            and self.q[0] is self.k[0]
            and self.q[1] is self.k[1]
            and not self.polar
        ):
            return rotate_both(q, k, *self.q, self.layout)
        return self.queries(q), self.keys(k)

    def _check_range(self, x: Tensor) -> None:
        if x.dtype == torch.float16 and self.magnitude > FLOAT16:
            raise ValueError(
                f"this rotation multiplies by up to {self.magnitude:.3g}, and float16 ends at 65504: "
                f"numbers above {65504 / self.magnitude:.2g} would overflow; use bfloat16 or float32, or a smaller "
                "range of positions (xpos: max_length=4096)"
            )

    def check(self, q: Tensor, k: Tensor, v: Tensor | None) -> None:
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f"layout must be 'half' or 'interleaved', got {self.layout!r}")
        for name, phases, x in (("q", self.q, q), ("k", self.k, k), ("v", self.k if self.values else None, v)):
            if phases is None or x is None:
                continue
            cos, sin = phases
            if cos.shape != sin.shape or cos.dim() not in (3, 4):
                raise ValueError(
                    "cos and sin must both be [B or 1, L, R/2] or [B or 1, heads, L, R/2], "
                    f"got {list(cos.shape)}, {list(sin.shape)}"
                )
            if cos.dim() == 4 and cos.shape[1] not in (1, x.shape[1]):
                raise ValueError(f"phases are for {cos.shape[1]} heads, {name} has {x.shape[1]}; make them for as many")
            room = 2 * x.shape[3] if self.polar else x.shape[3]
            if cos.shape[0] not in (1, x.shape[0]) or cos.shape[-2] != x.shape[2] or 2 * cos.shape[-1] > room:
                raise ValueError(
                    f"phases of shape {list(cos.shape)} do not fit {name} of shape {list(x.shape)}: "
                    f"they need [1 or {x.shape[0]}, {x.shape[2]}, at most {room // 2}]"
                )
            if cos.device != x.device:
                raise ValueError(f"phases are on {cos.device} and {name} on {x.device}; make the plan on {x.device}")


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half") -> Tensor:
    """Rotate the first R channels of x [B, H, L, D], in float32 or better; the result has x's dtype.

    Compiled code gets the formula, which fuses into one pass; eager code gets a kernel on CUDA, and blocks that fit
    the cache on a CPU, since the formula reads x twice.
    """
    if _eager(x, cos, sin):
        return _OnePass.apply(cos, sin, layout, False, x)[0]
    return rotate_by_formula(x, cos, sin, layout)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """rotate(q), rotate(k) for queries and keys at the same positions: one launch on CUDA."""
    alike = q.dtype == k.dtype and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if q.is_cuda and alike and q.numel() and k.numel() and _eager(q, cos, sin):
        return _OnePass.apply(cos, sin, layout, False, q, k)
    return apply_rotary(q, cos, sin, layout), apply_rotary(k, cos, sin, layout)


def rotate_by_formula(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    width = 2 * cos.shape[-1]
    precision = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(precision), sin.to(precision)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    # cast once, so that the sum of the gradient's two parts is rounded once
    rotated, rest = x[..., :width].to(precision), x[..., width:]
    if layout == "half":
        a, b = rotated.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    out = out.to(x.dtype)
    return out if width == x.shape[-1] else torch.cat((out, rest), dim=-1)


def normalise(x: Tensor, factor: Tensor | None = None) -> Tensor:
    """x [B, H, L, D] divided by the norms of its vectors, times factor [H], in float32 or better; of x's dtype."""
    unit = torch.nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    return (unit if factor is None else unit * factor.to(unit.dtype)[:, None, None]).to(x.dtype)


def _eager(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if cos.dim() == 4:  # phases of each head: the formula alone has them
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False
    return (x.is_cuda and _triton()) or (x.device.type == "cpu" and x.numel() >= SMALL)


@lru_cache(maxsize=1)
def _triton() -> bool:
    return find_spec("triton") is not None


class _OnePass(torch.autograd.Function):
    """The formula in one pass over each tensor. Its gradient is the inverse rotation (times the same magnitude)."""

    @staticmethod
    def forward(ctx, cos: Tensor, sin: Tensor, layout: Layout, inverse: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        ctx.layout, ctx.inverse, ctx.shapes = layout, inverse, [x.shape for x in tensors]
        ctx.set_materialize_grads(False)
        return _rotate_eagerly(tensors, cos, sin, layout, inverse)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        return None, None, None, None, *_rotate_given(grads, ctx, not ctx.inverse)

    @staticmethod
    def jvp(ctx, _cos, _sin, _layout, _back, *tangents):  # type: ignore[override]
        there = next(x for x in tangents if x is not None)  # autograd calls this with one tangent at least
        whole = (there.new_zeros(shape) if x is None else x for x, shape in zip(tangents, ctx.shapes, strict=True))
        return _OnePass.apply(*ctx.saved_tensors, ctx.layout, ctx.inverse, *whole)


def _rotate_given(tensors: tuple[Tensor | None, ...], ctx, inverse: bool) -> tuple[Tensor | None, ...]:
    """Rotate the gradients that there are."""
    there = [x for x in tensors if x is not None]
    rotated = iter(_OnePass.apply(*ctx.saved_tensors, ctx.layout, inverse, *there) if there else ())
    return tuple(None if x is None else next(rotated) for x in tensors)


def _rotate_eagerly(
    tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout, inverse: bool
) -> tuple[Tensor, ...]:
    if tensors[0].is_cuda:
        from .rotary_kernel import rotate_tensors

        return rotate_tensors(tensors, cos, sin, layout, inverse)
    return tuple(_in_blocks(x, cos, -sin if inverse else sin, layout) for x in tensors)


def _in_blocks(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    precision = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(precision).unsqueeze(1), sin.to(precision).unsqueeze(1)
    width = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., width:] = x[..., width:]
    rows = max(BLOCK // max(x.shape[0] * x.shape[1] * width, 1), 8)
    for start in range(0, x.shape[2] if width else 0, rows):
        block = slice(start, start + rows)
        _rotate_into(out[:, :, block, :width], x[:, :, block, :width], cos[:, :, block], sin[:, :, block], layout)
    return out


SMALL = 2**16
"""Elements below which the formula's few calls cost less than the blocks' bookkeeping."""
BLOCK = 2**19
"""Elements of a block: a few megabytes, which the cores' caches hold."""


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    """Rotate x [B, H, rows, R] into out, of the same shape."""
    result = out if out.dtype == cos.dtype else torch.empty(out.shape, dtype=cos.dtype)
    x = x.to(cos.dtype)
    if layout == "half":
        (a, b), (left, right) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
        torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
        torch.mul(a, sin, out=right).addcmul_(b, cos)
    else:  # (x_c, y_c) is a complex number: one multiplication by cos + i sin
        x = x if x.stride(-1) == 1 and not any(step % 2 for step in x.stride()[:-1]) else x.contiguous()
        rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
        result.copy_(torch.view_as_real(rotated).flatten(-2))
    if result is not out:
        out.copy_(result)
