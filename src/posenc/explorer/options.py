"""Controls made from an encoding's own options: read from its signature, so a new encoding has sliders at once."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ..encodings.registry import SIZES, info
from ..plot.numbers import DRAWN
from ..plot.words import Words
from .state import Sorry

# What no picture of scores can show, or what a slider cannot give (tensors, objects)
HIDDEN = {
    "dropout", "norm_eps", "table", "norm", "content_bias", "position_bias", "segment_bias", "scaling", "scale", "values", "bi_data", "temper",
    "own_key_bias", "projections", "terms",
}  # fmt: skip
# (lowest, highest, step) where four times the default is not a good range
RANGES: dict[str, tuple[float, float, float]] = {
    "buckets": (4, 128, 2),
    "max_distance": (16, 1024, 16),
    "shaw.max_distance": (1, 128, 1),
    "clipped.max_distance": (1, 128, 1),
    "relative_logits.max_distance": (16, 4096, 16),
    "std": (0.0, 2.0, 0.02),
    "max_length": (64, 8192, 64),
    "offset": (0, 8, 1),
}
FURTHEST = 8192
"""The length's slider ends at 4096, so no picture shows more distances than this: a longer table has rows never seen."""
LIMITS: dict[str, tuple[float, float]] = {
    "buckets": (0, 512), "base": (1.5, 1e12), "t5.max_distance": (0, 2048), "deberta.max_distance": (0, 2048),
}  # fmt: skip
"""(lowest, highest) of a link's option where that is not FURTHEST: 512 buckets leave each a few pixels, and DeBERTa scores
every key against twice max_distance rows."""
BASES = (100.0, 1000.0, 10000.0, 100000.0, 500000.0, 1000000.0)


@dataclass(frozen=True)
class Option:
    """One control: a slider (low, high, step), a switch, or a choice."""

    name: str
    kind: Literal["slider", "switch", "choice"]
    default: Any
    low: float = 0
    high: float = 0
    step: float = 1
    choices: tuple[Any, ...] = ()

    def value(self, given: Any) -> Any:
        """What a control holds, as the option wants it."""
        if self.kind == "slider":
            return int(given) if isinstance(self.default, int) else float(given)
        if self.kind == "switch":
            return bool(given)
        kind = type(self.default)
        return kind(given)


def validate(name: str, given: Mapping[str, Any], words: Words) -> None:
    """Refuse options that cost more than a picture can show. What is merely wrong the encoding itself refuses."""
    for option, value in given.items():
        told = {"encoding": name, "option": option, "given": str(value)[:40]}
        if option in SIZES:
            raise Sorry(words("option size", **told))
        if value is None or isinstance(value, (bool, str)):
            continue
        if not isinstance(value, (int, float)):
            raise Sorry(words("option kind", **told))
        low, high = LIMITS.get(f"{name}.{option}", LIMITS.get(option, (0, FURTHEST)))
        if not low <= value <= high:
            raise Sorry(words("option high", **told, low=low, high=high))


@lru_cache(maxsize=64)
def options_of(name: str) -> tuple[Option, ...]:
    """The controls of an encoding, in its signature's order."""
    cls = info(name).load()
    hints = typing.get_type_hints(cls.__init__)
    found = []
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.name == "self" or parameter.name in SIZES or parameter.name in HIDDEN:
            continue
        default = DRAWN.get(name, {}).get(parameter.name, parameter.default)
        option = _option(name, parameter.name, default, hints.get(parameter.name))
        if option is not None:
            found.append(option)
    return tuple(found)


def _option(encoding: str, name: str, default: Any, hint: Any) -> Option | None:
    if typing.get_origin(hint) is Literal:
        return Option(name, "choice", default, choices=typing.get_args(hint))
    if isinstance(default, bool):
        return Option(name, "switch", default)
    if name == "base" and isinstance(default, float):
        return Option(name, "choice", default, choices=tuple(sorted({*BASES, default})))
    if isinstance(default, (int, float)):
        whole = isinstance(default, int)
        usual = (1 if whole else 0.0, max(8, 4 * default), 1 if whole else default / 20 or 0.05)
        low, high, step = RANGES.get(f"{encoding}.{name}", RANGES.get(name, usual))
        return Option(name, "slider", default, min(low, default), max(high, default), step)
    return None
