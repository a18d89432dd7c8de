"""Tokens of a grid: their rows and columns, and one number for both, whose differences name a row of a table.

    p = row (2 columns - 1) + column        p_k - p_q = (row_k - row_q) (2 columns - 1) + (column_k - column_q)

Columns differ by less than `columns`, so every pair of differences has a different number: a table over a grid is a table
over distances, which every engine runs fast. A class token is placed further from all patches than any two patches are apart.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.errors import OptionError
from ...core.options import require_int
from ...core.positions import Positions, Run
from ...core.torch_modes import has_fake_tensors

Size = tuple[int, int]
LARGEST = 4096
"""Rows or columns of a grid."""


def check_size(name: str, size: Size) -> Size:
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise OptionError(f"{name}={size!r} must be (rows, columns)")
    for side, number in zip(("rows", "columns"), size, strict=True):
        require_int(f"{side} of {name}", number, least=1, most=LARGEST)
    return size[0], size[1]


def rows_and_columns(
    positions: Positions, size: Size, device: torch.device, class_token: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(rows, columns) [L] or [B, L] of the queries and of the keys; -1, -1 of a class token.

    Positions with one axis number the tokens: the class token first, if there is one, then the patches row by row.
    """
    sides: list[tuple[Tensor, Tensor]] = []
    for axes, other in ((positions.q_axes, positions.k_axes), (positions.k_axes, positions.q_axes)):
        if sides and all(a is b for a, b in zip(axes, other, strict=True)):
            sides.append(sides[0])
            continue
        at = [axis.positions(device) if isinstance(axis, Run) else axis.to(device, torch.int64) for axis in axes]
        if len(at) == 1:
            patch = at[0] - 1 if class_token else at[0]
            row, column = patch.div(size[1], rounding_mode="floor"), patch.remainder(size[1])
            at = [row, column.where(patch >= 0, patch)]
        _check_inside(at[0], at[1], size, class_token)
        sides.append((at[0], at[1]))
    return sides[0], sides[1]


def _check_inside(row: Tensor, column: Tensor, size: Size, class_token: bool) -> None:
    """Read on a CPU only: elsewhere reading would synchronise."""
    if not row.is_cpu or torch.compiler.is_compiling() or has_fake_tensors() or row.numel() == 0:
        return
    least = -1 if class_token else 0
    for name, at, most in (("row", row, size[0]), ("column", column, size[1])):
        low, high = torch.stack(torch.aminmax(at)).tolist()
        if low < least or high >= most:
            allowed = f"0 to {most - 1}" + (", or -1 for the class token" if class_token else "")
            raise ValueError(f"positions have {name} {low if low < least else high}; this grid has {name}s {allowed}")


def flatten(positions: Positions, size: Size, device: torch.device, class_token: bool = False) -> Positions:
    """Positions with one axis, p of this module's formula, for a table over the grid. Those of numbered tokens are kept."""
    runs = positions.runs if len(positions.q_axes) == 1 else None
    if torch.compiler.is_compiling() or has_fake_tensors():
        runs = None
    if runs is not None and all(type(run.start) is int for run in runs):
        q, k = ((run.start, run.length) for run in runs)
        return _flatten_numbers(q, k, size, device, class_token)
    return _flatten(positions, size, device, class_token)


@lru_cache(maxsize=64)
def _flatten_numbers(q: Size, k: Size, size: Size, device: torch.device, class_token: bool) -> Positions:
    with torch.inference_mode(False), torch.no_grad():
        numbers = Run(*q)
        flat = _flatten(Positions(numbers, numbers if k == q else Run(*k)), size, device, class_token)
    flat.is_constant = True
    return flat


def _flatten(positions: Positions, size: Size, device: torch.device, class_token: bool) -> Positions:
    queries, keys = rows_and_columns(positions, size, device, class_token)
    reach = reach_of(size)
    away = reach + 1
    flat = [_flat(*queries, size, away)]
    flat.append(flat[0] if keys[0] is queries[0] else _flat(*keys, size, away))
    most = reach + away if class_token else reach
    return Positions(flat[0], flat[1], reach=(-most, most))


def _flat(row: Tensor, column: Tensor, size: Size, away: int) -> Tensor:
    return torch.where(row < 0, -away, row * (2 * size[1] - 1) + column)


def reach_of(size: Size) -> int:
    """The largest p_k - p_q of two patches."""
    return (size[0] - 1) * (2 * size[1] - 1) + size[1] - 1
