"""Short reprs of dataclasses: the fields that differ from their defaults, tensors by dtype and shape, long tuples abbreviated.

Plan(positions=Positions(q=8 from start 0, k=8 from start 0), slopes=float32 [4])
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

LONGEST = 8
"""Numbers of a tuple that are all printed."""


def short_repr(self: Any) -> str:
    """For `__repr__` of a dataclass."""
    given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
    parts = [
        f"{name}={short(value)}" for name, value, default in given if isinstance(value, Tensor) or value != default
    ]
    return f"{type(self).__name__}({', '.join(parts)})"


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple):
        shown = [short(one) for one in value]
        if len(shown) > LONGEST:
            shown = [*shown[:3], f"… {len(shown) - 6} more …", *shown[-3:]]
        return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"
    return repr(value)
