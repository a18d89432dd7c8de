"""posenc: every positional encoding for attention, behind one interface.

    scheme = posenc.create("t5", heads=8, causal=True)
    attn = posenc.Attention(512, 8, position=scheme, causal=True)
    y = attn(x)

Names are loaded when they are first used, so that the command line starts without torch.
"""

from importlib import import_module as _import_module

from .errors import OptionError, UnsupportedPlan
from .registry import CLASSES as _CLASSES
from .registry import card, create, names

__version__ = "0.1.0"

_NAMES = {
    "Where": "where", "Run": "where",
    "Index": "index", "Grid": "index",
    "Plan": "plan", "Lookup": "plan",
    "Rotation": "rotation",
    "Scheme": "scheme",
    "ENGINES": "dispatch", "attend": "dispatch", "attend_lse": "dispatch", "merge": "merging", "engine_for": "dispatch", "scores": "dispatch",
    "Attention": "attention",
    "KVCache": "cache",
    "AxialRoPE": "schemes.axes", "Sinusoidal2D": "schemes.axes",
    "Randomized": "schemes.randomized",
}  # fmt: skip
_MODULES = ("formulas", "index", "engines", "schemes", "scaling", "hf", "plot", "rotary")

__all__ = ["OptionError", "UnsupportedPlan", "card", "create", "names", *_NAMES, *_CLASSES]


def __getattr__(name: str):
    if name in _NAMES:
        value = getattr(_import_module(f"posenc.{_NAMES[name]}"), name)
    elif name in _CLASSES:
        value = _CLASSES[name].load()
    elif name in _MODULES:
        return _import_module(f"posenc.{name}")
    else:
        raise AttributeError(f"module 'posenc' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__, *_MODULES})
