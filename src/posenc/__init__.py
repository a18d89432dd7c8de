"""posenc: every positional encoding for attention, behind one interface.

    encoding = posenc.create("t5", heads=8)
    attn = posenc.Attention(512, 8, encoding=encoding, causal=True)
    y = attn(x)

Names are loaded when they are first used, so that the command line starts without torch.
"""

from importlib import import_module as _import_module

from .core.errors import OptionError, UnsupportedPlan
from .encodings.registry import ENCODINGS_BY_CLASS as _CLASSES
from .encodings.registry import create, info, list_encodings
from .encodings.registry import register_encoding as register_encoding

__version__ = "0.1.0"

_NAMES = {
    "Positions": "core.positions", "Run": "core.positions",
    "Index": "core.index", "Grid": "core.index",
    "Plan": "core.plan", "Lookup": "core.plan",
    "Mask": "core.mask",
    "Rotation": "core.rotation",
    "Encoding": "core.encoding",
    "attend": "functional", "attend_lse": "functional", "engine_for": "functional", "scores": "functional", "ENGINES": "functional",
    "merge": "merging",
    "Attention": "nn.attention",
    "KVCache": "nn.cache",
    "Randomized": "encodings.randomized",
}  # fmt: skip
_MODULES = {
    "formulas": "core.formulas", "index": "core.index", "engines": "engines", "encodings": "encodings",
    "rope": "encodings.rope.convert", "scaling": "encodings.rope.scaling", "hf": "hf", "plot": "plot", "nn": "nn",
}  # fmt: skip

__all__ = [
    "OptionError",
    "UnsupportedPlan",
    "create",
    "info",
    "list_encodings",
    "register_encoding",
    *_NAMES,
    *_CLASSES,
]


def __getattr__(name: str):
    if name in _NAMES:
        value = getattr(_import_module(f"posenc.{_NAMES[name]}"), name)
    elif name in _CLASSES:
        value = _CLASSES[name].load()
    elif name in _MODULES:
        return _import_module(f"posenc.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'posenc' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__, *_MODULES})
