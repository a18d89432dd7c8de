"""Checks of the options that an encoding is made with: each returns its value or raises OptionError in one sentence.

Nothing here imports torch. Sizes have an upper bound, so that a mistyped digit raises instead of allocating.
"""

from __future__ import annotations

import math
from typing import TypeVar

from .checks import show_value
from .errors import OptionError

WIDEST = 2**20
"""The largest d_model, head_dim or number of heads."""
LONGEST = 2**31 - 1
"""The largest number of positions or distance of a table."""
LARGEST = 2**30
"""Numbers in one table."""

Choice = TypeVar("Choice")


def require_int(name: str, value: int, *, least: int = 0, most: int = LONGEST) -> int:
    """An integer in [least, most]; bools and floats raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(
            f"{name}={show_value(value)} must be an integer, at least {least}, got {type(value).__name__}"
        )
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise OptionError(f"{name}={show_value(value)} must be {bound}")
    return value


def require_number(
    name: str, value: float, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """A finite number, at least `least`, more than `above` and less than `below`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    # no math.isfinite: torch.compile traces comparisons of a symbolic number
    if -math.inf < number < math.inf and number >= least and above < number < below:
        return number
    allowed = " and ".join(
        [f"at least {least:g}"] * (least > -math.inf)
        + [f"more than {above:g}"] * (above > -math.inf)
        + [f"less than {below:g}"] * (below < math.inf)
    )
    kind, given = ("finite number", "") if is_number else ("number", f", got {type(value).__name__}")
    raise OptionError(f"{name}={show_value(value)} must be a {kind} {allowed}".rstrip() + given)


def require_choice(name: str, value: Choice, allowed: tuple[Choice, ...]) -> Choice:
    """One of a few strings."""
    if not isinstance(value, str) or value not in allowed:
        *most, last = map(repr, allowed)
        raise OptionError(f"{name}={show_value(value)} is unknown; use {', '.join(most)} or {last}")
    return value


def require_bool(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={show_value(value)} must be True or False")
    return value


def require_table(name: str, *sizes: int) -> tuple[int, ...]:
    """The shape of a table whose numbers fit into memory."""
    count = math.prod(sizes)
    if count > LARGEST:
        shape = " × ".join(map(str, sizes))
        raise OptionError(
            f"{name} would have {shape} = {count} numbers, at most {LARGEST} are allowed; make it smaller"
        )
    return sizes
