"""Controls for an encoding's options, derived from its signature, so that a new encoding has them without further code."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ...core.translation import Translation
from ...encodings.registry import SIZES, info
from ...plot import trained
from ...plot.analysis import DRAWN_OPTIONS
from ..url_state import InputError

# options without effect on the figures, and those that no slider can set (tensors, objects)
HIDDEN = {
    "dropout", "norm_eps", "table", "norm", "content_bias", "position_bias", "segment_bias", "scaling", "scale", "values", "bi_data", "temper",
    "own_key_bias", "projections", "terms", "eps", "least",
}  # fmt: skip
# (lowest, highest, step), for options where 0 to four times the default is not a good range
RANGES: dict[str, tuple[float, float, float]] = {
    "buckets": (4, 128, 2),
    "max_distance": (16, 1024, 16),
    "shaw.max_distance": (1, 128, 1),
    "clipped.max_distance": (1, 128, 1),
    "relative_logits.max_distance": (16, 4096, 16),
    "std": (0.0, 2.0, 0.02),
    "max_length": (64, 8192, 64),
    "offset": (0, 8, 1),
    "floor": (256, 8192, 256),
    "hidden": (1, 1024, 1),
    "sandwich.size": (2, 512, 2),
}
FURTHEST = 8192
"""The length slider ends at 4096, so figures show at most this many distances; further table rows stay unused."""
LIMITS: dict[str, tuple[float, float]] = {
    "buckets": (0, 512),
    "base": (1.5, 1e12),
    "t5.max_distance": (0, 2048),
    "deberta.max_distance": (0, 2048),
    "sandwich.size": (2, 1024),
    "hidden": (1, 1024),
}
"""(lowest, highest) of an option in a link, if not (0, FURTHEST): with 512 buckets each has a few pixels, and DeBERTa
scores every key against 2 max_distance rows."""
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
        """A control's value, converted to the option's type."""
        return type(self.default)(given)

    def settings(self) -> dict[str, Any]:
        """The Gradio arguments of its control."""
        common = {"label": self.name, "visible": True, "value": self.default}
        if self.kind == "slider":
            return {**common, "minimum": self.low, "maximum": self.high, "step": self.step}
        if self.kind == "choice":
            named = [(f"{one:g}" if isinstance(one, float) else str(one), one) for one in self.choices]
            return {**common, "choices": named}
        return common


def validate(name: str, given: Mapping[str, Any], words: Translation) -> None:
    """Refuse options that are too expensive to draw; the encoding itself refuses invalid ones."""
    for option, value in given.items():
        context = {"encoding": name, "option": option, "given": str(value)[:40]}
        if option in SIZES:
            raise InputError(words("option size", **context))
        if value is None or isinstance(value, (bool, str)):
            continue
        if not isinstance(value, (int, float)):
            raise InputError(words("option kind", **context))
        low, high = LIMITS.get(f"{name}.{option}", LIMITS.get(option, (0, FURTHEST)))
        if not low <= value <= high:
            raise InputError(words("option high", **context, low=low, high=high))


@lru_cache(maxsize=64)
def options_of(name: str) -> tuple[Option, ...]:
    """The controls of an encoding, in its signature's order."""
    cls = info(name).load()
    hints = typing.get_type_hints(cls.__init__)
    found = []
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.name == "self" or parameter.name in SIZES or parameter.name in HIDDEN:
            continue
        if parameter.name == "std" and trained.fits(name, {}):  # the drawn table is a trained one
            continue
        default = DRAWN_OPTIONS.get(name, {}).get(parameter.name, parameter.default)
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
