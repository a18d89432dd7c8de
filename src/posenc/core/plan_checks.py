"""Checks of what attention is given: q, k and v, and a plan's terms. Each raises in one sentence what was given and what is allowed.

check_plan, check_lookup    types, where a plan or a lookup is made
check_states                what a layer is given
check_term                  shape, device, dtype and NaN of one tensor of a plan, beside q
check_tensors               q, k and v themselves
"""

from __future__ import annotations

from math import isfinite, isnan
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .checks import show_value
from .positions import Positions
from .rotation import Rotation
from .torch_modes import has_fake_tensors

PLAIN = (Tensor, torch.nn.Parameter)
STRIDED = torch.strided
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SYMBOLS = (torch.SymFloat, torch.SymInt)
REAL = (float, int, *SYMBOLS, Real)


def check_plan(
    positions: Any, shift: Any, rotate: Any, cosine: Any, append: Any, lookups: Any, scale: Any, slopes: Any, decay: Any,
    pair: Any, sinks: Any, lookup_type: type,
) -> None:  # fmt: skip
    """Raise where a field of a plan is of a wrong type. Every layer makes a plan in each step, so right ones are let pass in few steps."""
    if not isinstance(positions, Positions):
        raise TypeError(
            f"positions={show_value(positions)} must be Positions: Positions(L), or Positions(q=..., k=...)"
        )
    for one in lookups if isinstance(lookups, (tuple, list)) else (None,):
        if not isinstance(one, lookup_type):
            given = "one: give (lookup,)" if isinstance(lookups, lookup_type) else show_value(lookups)
            raise TypeError(f"lookups must be a tuple of Lookup, got {given}")
    if rotate is not None and not isinstance(rotate, Rotation):
        raise TypeError(
            f"rotate={show_value(rotate)} must be a Rotation: encoding.rotation(positions), or Rotation((cos, sin), (cos, sin))"
        )
    if pair is not None and not callable(pair):
        raise TypeError(
            f"pair={show_value(pair)} must be a function of positions (p_q, p_k); give a table to a Lookup instead"
        )
    if scale is not None and type(scale) is not float and not isinstance(scale, Tensor):
        if isinstance(scale, bool) or not isinstance(scale, REAL):
            raise TypeError(f"scale={show_value(scale)} must be a number, or a tensor that broadcasts to [B, H, Lq]")
    if type(scale) is float and not isfinite(scale):
        raise ValueError(f"scale={scale} must be finite")
    if shift is not None:
        check_is_tensor("shift", shift)
    if cosine is not None:
        check_is_tensor("cosine", cosine)
    if isinstance(scale, Tensor):
        check_is_tensor("scale", scale)
    if slopes is not None:
        check_is_tensor("slopes", slopes)
    if sinks is not None:
        check_is_tensor("sinks", sinks)
    if append is None and decay is None:
        return
    for name, both in (("append", append), ("decay", decay)):
        if both is None:
            continue
        if not isinstance(both, (tuple, list)) or len(both) != 2:
            raise TypeError(f"{name}={show_value(both)} must be two tensors, of the queries and of the keys")
        check_is_tensor(f"{name}[0]", both[0])
        check_is_tensor(f"{name}[1]", both[1])


def check_lookup(lookup: Any, index_types: tuple[type, ...], names: tuple[str, ...]) -> None:
    """Raise where a field of a lookup is of a wrong type."""
    if not isinstance(lookup.index, index_types):
        raise TypeError(
            f"index={show_value(lookup.index)} of a Lookup must be an Index or a Grid, such as posenc.index.clip(left, right)"
        )
    fields = lookup.__dict__
    for name in names:
        x = fields[name]
        if x is not None and not (type(x) in PLAIN and x.dtype in WIDE and x.layout is STRIDED and not x.is_nested):
            check_is_tensor(name, x)


def check_is_tensor(name: str, x: Any) -> None:
    """Raise unless x is a tensor that operators take: not nested, not sparse, not floating point of 8 bits."""
    if type(x) in PLAIN and x.dtype in WIDE and x.layout is STRIDED and not x.is_nested:
        return
    if isinstance(x, Tensor):
        if x.is_nested or x.layout is not torch.strided:
            check_layout(name, x)
        if x.is_floating_point() and x.dtype not in WIDE:
            raise ValueError(f"{name} is {x.dtype}, which attention cannot compute in; give {name}.to(torch.bfloat16)")
        return
    if isinstance(x, torch.nn.Module):
        raise TypeError(f"{name} must be a tensor, got the module {type(x).__name__}; give its weight")
    raise TypeError(f"{name} must be a tensor, got {show_value(x)}; torch.tensor(...) makes one")


def check_layout(name: str, x: Tensor) -> None:
    """Raise for a tensor that is nested or sparse."""
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; pack the texts into one row with documents=, or pad them with key_mask="
        )
    if x.layout is not torch.strided:
        raise ValueError(f"{name} is of layout {str(x.layout).removeprefix('torch.')}; give {name}.to_dense()")


def check_term(
    q: Tensor, readable: bool, name: str, tensor: Tensor, shape: tuple[int, ...] | None = None, number: int | None = None
) -> None:  # fmt: skip
    """Raise where the shape, device or dtype of a plan's tensor does not fit q, or where it holds NaN.

    readable   values may be read without a synchronisation
    shape      the first size may also be 1
    number     of the lookup that has the tensor
    """
    fits = shape is None or tensor.shape == shape or tensor.shape == (1, *shape[1:])
    if fits and tensor.device == q.device and tensor.is_floating_point() and not (readable and holds_nan(tensor)):
        return
    of_heads = number is not None and name != "states"
    name = name if number is None else f"lookups[{number}].{name}"
    if shape is not None and not fits:
        if of_heads:
            check_heads(name, tensor, q)
        check_shape(name, tensor, [(1, shape[0]), *shape[1:]])
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; move the encoding: .to(q.device)")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    raise ValueError(f"{name} holds NaN; find out how it was loaded or trained")


def check_heads(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise where a table is for another number of heads: its first size."""
    heads = q.shape[1]
    if tensor.dim() and tensor.shape[0] not in (1, heads):
        swapped = ""
        if tensor.shape[0] == q.shape[2]:
            swapped = f" If q {list(q.shape)} is [B, L, H, D], give [B, H, L, D]: q.transpose(1, 2)."
        raise ValueError(
            f"the encoding was made for {tensor.shape[0]} heads ({name} is {list(tensor.shape)}), q has {heads}; "
            f"make it with heads={heads}.{swapped}"
        )


def check_shape(name: str, tensor: Tensor, shape: list) -> None:
    allowed = [size if isinstance(size, tuple) else (size,) for size in shape]
    if tensor.dim() != len(shape) or any(a not in b for a, b in zip(tensor.shape, allowed, strict=True)):
        wanted = ", ".join(" or ".join(map(str, sorted(set(size)))) for size in allowed)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")


FEW = 1 << 12
"""Values up to which one elementwise comparison is fastest; larger tensors are summed first."""


def holds_nan(tensor: Tensor) -> bool:
    if has_fake_tensors():
        return False
    if tensor.numel() <= FEW:
        return not tensor.equal(tensor)  # NaN does not equal itself
    if torch.is_grad_enabled():
        tensor = tensor.detach()
    return isnan(tensor.sum().item()) and bool(torch.isnan(tensor).any())


def check_states(name: str, x: Tensor, d_model: int, batch: int | None = None) -> None:
    """Raise unless x is [B, L, d_model]; batch: the rows that it must have."""
    check_is_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != d_model or batch not in (None, x.shape[0]):
        rows = "B, L" if batch is None else f"{batch}, M"
        raise ValueError(f"{name} must be [{rows}, {d_model}], got {list(x.shape)}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q [B, H, Lq, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv] are tensors that attention takes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor [B, heads, L, D], got {type(x).__name__}")
        check_is_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be a tensor [B, heads, L, D], got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
        if x is q:
            dtype, device = x.dtype, x.device
        elif x.dtype != dtype:
            raise ValueError(f"q is {dtype} and {name} is {x.dtype}; give one dtype")
        elif x.device != device:
            raise ValueError(f"q is on {device} and {name} on {x.device}; move them to one device")
    q_rows, q_heads, _, q_size = q.shape
    k_rows, k_heads, k_length, k_size = k.shape
    v_rows, v_heads, v_length, _ = v.shape
    if q_rows != k_rows or q_rows != v_rows:
        raise ValueError(f"q, k and v have {q_rows}, {k_rows} and {v_rows} batch rows; give the same number")
    if q_size != k_size:
        raise ValueError(f"q has head size {q_size} and k {k_size}; they must be equal")
    if k_heads != v_heads or k_length != v_length:
        raise ValueError(f"k and v must have the same heads and length, got {list(k.shape)} and {list(v.shape)}")
    if k_heads == 0 or q_heads % k_heads:
        raise ValueError(
            f"q has {q_heads} heads and k has {k_heads}; the number of query heads must be a multiple of that of key heads"
        )
