"""Rotation: rotate pairs of channels of q and k by a phase. Every rotation of the library goes through this module.

Pair c is (x_c, y_c), rotated to (x_c cos - y_c sin, x_c sin + y_c cos); the layouts place it differently. With R = 4
rotated channels of 6:

    half          [x0 x1 y0 y1 | z0 z1]    pairs (c, c + R/2)
    interleaved   [x0 y0 x1 y1 | z0 z1]    pairs (2c, 2c + 1)

Channels past R (z) pass through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .launches import has_triton
from .memo import may_keep
from .printing import short_repr

Layout = Literal["half", "interleaved"]
Phases = tuple[Tensor, Tensor]
"""cos, sin: [B or 1, L, R/2] or [B or 1, heads, L, R/2], any magnitude inside, float32 or better."""
FLOAT16 = 256.0
"""The largest magnitude of a rotation that leaves float16 room for numbers up to 255."""


@dataclass(frozen=True)
class Rotation:
    """Phases for queries and for keys (None: not rotated). `values` rotates v with the keys' phases too.

    Phases are (cos, sin), [B or 1, L, R/2] each. `attend` raises ValueError for phases that do not fit.

        >>> rotation = posenc.RoPE(head_dim=4).rotation(posenc.Positions(3))
        >>> rotation.q[0].shape
        torch.Size([1, 3, 2])
    """

    q: Phases | None
    k: Phases | None
    layout: Layout = "half"
    values: bool = False
    magnitude: float = 1.0
    """The largest factor of q or k, where it can leave a dtype's range."""
    polar: bool = False
    """Whether channels are magnitudes, softplus(x), with the phases as they are: R/2 = D phases, and 2 D channels."""
    __repr__ = short_repr

    def rotate_q(self, q: Tensor) -> Tensor:
        """q [B, H, Lq, D], rotated by its phases."""
        self._check_range(q)
        return q if self.q is None else apply_rotary(self._pairs(q), *self.q, self.layout)

    def rotate_k(self, k: Tensor) -> Tensor:
        """k [B, Hkv, Lk, D], rotated by its phases; also values, where they rotate."""
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

    def rotate_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys: one launch where they share their phases."""
        if self.q is not None and self.k is not None and not self.polar:
            if self.q[0] is self.k[0] and self.q[1] is self.k[1]:
                return rotate_both(q, k, *self.q, self.layout)
        return self.rotate_q(q), self.rotate_k(k)

    def rotate_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values where they rotate too."""
        if self.values:
            v = self.rotate_k(v)
        q, k = self.rotate_qk(q, k)
        return q, k, v

    def rotate_again(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...] | None:
        """`rotate_qk` in eager code for tensors like earlier ones on a GPU, which were checked then; None for all others."""
        if self.q is None or self.k is None or self.values or self.polar:
            return None
        cos, sin = self.q
        if cos is not self.k[0] or sin is not self.k[1] or forward_ad._current_level >= 0 or not has_triton():
            return None
        graph = torch.is_grad_enabled()
        if graph and (cos.requires_grad or sin.requires_grad):
            return None
        from .rotary_kernel import find_ready

        ready = find_ready((q, k), cos, sin, self.layout)
        if ready is None:
            return None
        if graph and (q.requires_grad or k.requires_grad):
            return _apply_ready(ready, cos, sin, q, k)
        return ready.run((q, k), cos, sin)

    def rotate_rows(self, q: Tensor, k: Tensor, row: int) -> tuple[Tensor, Tensor] | None:
        """`rotate_qk` by the phases from `row` on, where these phases are of a longer run, on a CPU, without gradients and for
        short q and k; None elsewhere. A decoding step slices only the tensors that it multiplies with."""
        if self.q is None or self.k is None or self.polar or q.dtype != k.dtype or q.numel() + k.numel() >= JOINT:
            return None
        (q_cos, q_sin), (k_cos, k_sin) = self.q, self.k
        if q_cos.dim() != 3 or not 2 * q_cos.shape[2] == q.shape[3] == k.shape[3] or q.shape[0] != k.shape[0]:
            return None
        self._check_range(q)
        if q_cos is k_cos and q_sin is k_sin:
            q, k = _by_partners((q, k), q_cos, q_sin, self.layout, False, row)
        else:
            (q,) = _by_partners((q,), q_cos, q_sin, self.layout, False, row)
            (k,) = _by_partners((k,), k_cos, k_sin, self.layout, False, row)
        return q, k

    def _check_range(self, x: Tensor) -> None:
        if x.dtype == torch.float16 and self.magnitude > FLOAT16:
            raise ValueError(
                f"this rotation multiplies by up to {self.magnitude:.3g}, and float16 ends at 65504: "
                f"numbers above {65504 / self.magnitude:.2g} would overflow; use bfloat16 or float32, or a smaller "
                "range of positions (xpos: max_length=4096)"
            )

    def check(self, q: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Raise where the phases do not fit q, k or v."""
        for name, phases, x in (("q", self.q, q), ("k", self.k, k), ("v", self.k if self.values else None, v)):
            if phases is not None and x is not None:
                check_phases(name, x, *phases, self.layout, self.polar)


def check_phases(name: str, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, polar: bool = False) -> None:
    """Raise ValueError where phases do not fit x [B, H, L, D]."""
    if layout not in ("half", "interleaved"):
        raise ValueError(
            f"layout must be 'half' (pairs c, c + R/2: Llama, NeoX) or 'interleaved' (pairs 2c, 2c + 1: GPT-J), got {layout!r}"
        )
    if cos.shape != sin.shape or cos.dim() not in (3, 4):
        raise ValueError(
            "cos and sin must both be [B or 1, L, R/2] or [B or 1, heads, L, R/2], "
            f"got {list(cos.shape)}, {list(sin.shape)}"
        )
    if cos.dim() == 4 and cos.shape[1] not in (1, x.shape[1]):
        raise ValueError(
            f"phases are for {cos.shape[1]} heads, {name} has {x.shape[1]}; make them for {x.shape[1]} or 1"
        )
    room = 2 * x.shape[3] if polar else x.shape[3]
    if cos.shape[0] not in (1, x.shape[0]) or cos.shape[-2] != x.shape[2] or 2 * cos.shape[-1] > room:
        repeated = room // 2 < cos.shape[-1] <= room and cos.shape[-1] % 2 == 0
        hint = f"; if each phase stands there twice, give cos[..., :{cos.shape[-1] // 2}]" if repeated else ""
        raise ValueError(
            f"phases of shape {list(cos.shape)} do not fit {name} of shape {list(x.shape)}: "
            f"they need [1 or {x.shape[0]}, {x.shape[2]}, at most {room // 2}]{hint}"
        )
    if cos.device != x.device:
        raise ValueError(f"phases are on {cos.device} and {name} on {x.device}; make the plan on {x.device}")


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half") -> Tensor:
    """Rotate x, whose phases fit (`check_phases`). Compiled code gets the formula, which fuses into one pass; eager code gets a
    kernel on CUDA, and on a CPU few operations for a short x, blocks that fit the cache for a long one, since the formula reads
    x twice."""
    if _eager(x, cos, sin):
        return _rotate((x,), cos, sin, layout)[0]
    return rotate_by_formula(x, cos, sin, layout)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """rotate(q), rotate(k) for queries and keys at the same positions: one launch on CUDA."""
    alike = q.dtype == k.dtype and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if alike and _eager(q, cos, sin) and q.numel() and k.numel() and (q.is_cuda or q.numel() + k.numel() < JOINT):
        q, k = _rotate((q, k), cos, sin, layout)
        return q, k
    return apply_rotary(q, cos, sin, layout), apply_rotary(k, cos, sin, layout)


def _rotate(tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """In eager code; as an autograd function where a derivative may be wanted."""
    is_dual = forward_ad._current_level >= 0
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if tensors[0].is_cuda and not is_dual:
        from .rotary_kernel import find_ready

        ready = find_ready(tensors, cos, sin, layout)
        if ready is not None:
            return _apply_ready(ready, cos, sin, *tensors) if wanted else ready.run(tensors, cos, sin)
    if is_dual or wanted:
        return _apply_one_pass(cos, sin, layout, False, *tensors)
    return _rotate_eagerly(tensors, cos, sin, layout, False)


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
    if cos.dim() == 4:  # phases of each head: only the formula supports them
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False
    return x.is_cpu or (x.is_cuda and has_triton())


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
    """Rotate the gradients that are not None."""
    there = tuple([x for x in tensors if x is not None])
    if not there:
        return tensors
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        rotated = iter(_OnePass.apply(*ctx.saved_tensors, ctx.layout, inverse, *there))
    else:
        cos, sin = ctx.saved_tensors
        rotated = iter(_rotate_eagerly(there, cos, sin, ctx.layout, inverse))
    return tuple([None if x is None else next(rotated) for x in tensors])


class _Again(torch.autograd.Function):
    """`_OnePass` on a GPU for tensors like earlier ones (rotary_kernel.Ready), without forward-mode differentiation."""

    @staticmethod
    def forward(ctx, ready, cos: Tensor, sin: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.ready, ctx.layout = ready, ready.layout
        ctx.set_materialize_grads(False)
        return ready.run(tensors, cos, sin)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        if grads[0] is None or grads[-1] is None or torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return None, None, None, *_rotate_given(grads, ctx, not ctx.ready.inverse)
        return None, None, None, *ctx.ready.rotate_back(grads, *ctx.saved_tensors)


_apply_ready = super(torch.autograd.Function, _Again).apply
_apply_one_pass = super(torch.autograd.Function, _OnePass).apply
"""Function.apply without its inspection of each argument for torch.func, which `_eager` has excluded."""


def _rotate_eagerly(
    tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout, inverse: bool
) -> tuple[Tensor, ...]:
    if tensors[0].is_cuda:
        from .rotary_kernel import rotate_tensors

        return rotate_tensors(tensors, cos, sin, layout, inverse)
    if sum([x.numel() for x in tensors]) < SMALL and 2 * cos.shape[-1] == tensors[0].shape[-1]:
        return _by_partners(tensors, cos, sin, layout, inverse)
    return tuple(_in_blocks(x, cos, -sin if inverse else sin, layout) for x in tensors)


def _by_partners(
    tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout, inverse: bool, row: int | None = None
) -> tuple[Tensor, ...]:
    """x · [cos, cos] + partners · [-sin, sin], where the partner of a channel is the other one of its pair: few operations for
    tensors so short that each costs more than its arithmetic. row: where their phases begin in cos and sin."""
    heads = 1
    if tensors[0].stride(1) < tensors[0].stride(2):
        # [B, L, H, D] in memory, as projections are: the result keeps that layout
        tensors, heads = tuple([x.transpose(1, 2) for x in tensors]), 2
    x = tensors[0] if len(tensors) == 1 else torch.cat(tensors, heads)
    dtype = x.dtype
    precision = cos.dtype if dtype == torch.float32 else torch.promote_types(dtype, torch.float32)
    wide_cos, wide_sin = _both_channels(cos, sin, layout, precision, heads)
    if row is not None:
        length = x.shape[3 - heads]
        wide_cos, wide_sin = wide_cos.narrow(3 - heads, row, length), wide_sin.narrow(3 - heads, row, length)
    if dtype != precision:
        x = x.to(precision)
    if layout == "half":
        partners = x.roll(cos.shape[-1], -1)
    else:
        partners = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    out = torch.addcmul(x * wide_cos, partners, wide_sin, value=-1 if inverse else 1)
    if dtype != precision:
        out = out.to(dtype)
    if len(tensors) == 1:
        return (out if heads == 1 else out.transpose(1, 2),)
    first, second = tensors[0].shape[heads], tensors[1].shape[heads]
    parts = out.chunk(2, heads) if first == second else out.split((first, second), heads)
    return parts if heads == 1 else (parts[0].transpose(1, 2), parts[1].transpose(1, 2))


_channels: dict[tuple[int, int], tuple] = {}
"""cos and sin for each channel, of phases that layers share, by the identity of cos and the axis of the heads. Nothing is stored on the phases themselves,
which may be the caller's: they are known by weak references, and an entry goes when its cos does."""
MOST_CHANNELS = 64


def _both_channels(
    cos: Tensor, sin: Tensor, layout: Layout, precision: torch.dtype, heads: int
) -> tuple[Tensor, Tensor]:
    """cos and sin for each channel, [B or 1, L, R] with an axis for the heads: made once while the phases live unchanged."""
    key = id(cos), heads
    known = _channels.get(key)
    if known is not None and known[0]() is cos and known[1]() is sin and known[2] == layout and known[3] is precision:
        if known[4] == cos._version and known[5] == sin._version:
            return known[6]
    if not may_keep(cos.device) or cos.is_inference() or sin.is_inference():
        return _repeat_channels(cos, sin, layout, precision, heads)
    with torch.inference_mode(False), torch.no_grad():
        wide = _repeat_channels(cos, sin, layout, precision, heads)
    if len(_channels) >= MOST_CHANNELS:
        _channels.clear()
    own_cos = ref(cos, lambda _: _channels.pop(key, None))
    _channels[key] = own_cos, ref(sin), layout, precision, cos._version, sin._version, wide
    return wide


def _repeat_channels(
    cos: Tensor, sin: Tensor, layout: Layout, precision: torch.dtype, heads: int
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.to(precision).unsqueeze(heads), sin.to(precision).unsqueeze(heads)
    if layout == "half":
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)


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
"""Elements below which a few whole-tensor operations cost less than blocks."""
JOINT = 2**15
"""Elements of queries and keys below which one rotation of both, side by side, is faster than two."""
BLOCK = 2**19
"""Elements of a block: a few megabytes, which the cores' caches hold."""


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    """Rotate x [B, H, rows, R] into out, of the same shape."""
    result = out if out.dtype == cos.dtype else torch.empty(out.shape, dtype=cos.dtype, device=out.device)
    x = x.to(cos.dtype)
    if layout == "half":
        (a, b), (left, right) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
        torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
        torch.mul(a, sin, out=right).addcmul_(b, cos)
    else:  # (x_c, y_c) is a complex number: one multiplication by cos + i sin
        is_even = not any(step % 2 for step in (x.storage_offset(), *x.stride()[:-1]))
        x = x if x.stride(-1) == 1 and is_even else x.clone(memory_format=torch.contiguous_format)
        rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
        result.copy_(torch.view_as_real(rotated).flatten(-2))
    if result is not out:
        out.copy_(result)
