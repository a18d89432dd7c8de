"""posenc: every positional encoding for attention, behind one interface.

    encoding = posenc.create("t5", heads=8)
    attn = posenc.Attention(512, 8, encoding=encoding, causal=True)
    y = attn(x)

Names are loaded when they are first used, so that the command line starts without torch. Type checkers read the imports
below `TYPE_CHECKING`; tests/typing compares the two lists.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .core.errors import OptionError as OptionError
from .core.errors import UnsupportedPlan as UnsupportedPlan
from .encodings.registry import ENCODINGS_BY_CLASS as _CLASSES
from .encodings.registry import create as create
from .encodings.registry import info as info
from .encodings.registry import list_encodings as list_encodings
from .encodings.registry import register_encoding as register_encoding

if TYPE_CHECKING:
    from . import contextual as contextual
    from . import encodings as encodings
    from . import engines as engines
    from . import hf as hf
    from . import nn as nn
    from . import parallel as parallel
    from . import plot as plot
    from .core import formulas as formulas
    from .core import index as index
    from .core.encoding import Encoding as Encoding
    from .core.index import Grid as Grid
    from .core.index import Index as Index
    from .core.mask import Mask as Mask
    from .core.plan import Lookup as Lookup
    from .core.plan import Plan as Plan
    from .core.positions import Positions as Positions
    from .core.positions import Run as Run
    from .core.rotation import Rotation as Rotation
    from .encodings.absolute import Learned as Learned
    from .encodings.absolute import Sinusoidal as Sinusoidal
    from .encodings.bias import T5 as T5
    from .encodings.bias import ALiBi as ALiBi
    from .encodings.bias import Clipped as Clipped
    from .encodings.cape import Cape as Cape
    from .encodings.deberta import DeBERTa as DeBERTa
    from .encodings.fire import Fire as Fire
    from .encodings.fox import FoX as FoX
    from .encodings.grid.bias import GridBias as GridBias
    from .encodings.grid.continuous import ContinuousBias as ContinuousBias
    from .encodings.grid.decomposed import Decomposed as Decomposed
    from .encodings.kerple import Kerple as Kerple
    from .encodings.none import NoPosition as NoPosition
    from .encodings.randomized import Randomized as Randomized
    from .encodings.relative_logits import RelativeLogits as RelativeLogits
    from .encodings.rope import convert as _rope
    from .encodings.rope import scaling as scaling
    from .encodings.rope.axial import AxialRoPE as AxialRoPE
    from .encodings.rope.many_axes import ManyAxes as ManyAxes
    from .encodings.rope.mixed import MixedRoPE as MixedRoPE
    from .encodings.rope.mrope import MRoPE as MRoPE
    from .encodings.rope.polar import PoPE as PoPE
    from .encodings.rope.rope import RoPE as RoPE
    from .encodings.rope.xpos import XPos as XPos
    from .encodings.sandwich import Sandwich as Sandwich
    from .encodings.shaw import Shaw as Shaw
    from .encodings.sinks import Sinks as Sinks
    from .encodings.sinusoidal_2d import Sinusoidal2D as Sinusoidal2D
    from .encodings.tempered import Tempered as Tempered
    from .encodings.transformer_xl import TransformerXL as TransformerXL
    from .encodings.transformer_xl import XLNet as XLNet
    from .encodings.tupe import TUPE as TUPE
    from .engines.choose import ENGINES as ENGINES
    from .engines.choose import register_engine as register_engine
    from .engines.triton.warm_up import warm_up as warm_up
    from .flex import to_flex as to_flex
    from .functional import apply_rotary as apply_rotary
    from .functional import attend as attend
    from .functional import explain as explain
    from .functional import merge as merge
    from .functional import scores as scores
    from .nn.attention import Attention as Attention
    from .nn.cache import KVCache as KVCache
    from .nn.latent import LatentAttention as LatentAttention

    rope = _rope

__version__ = "0.1.0"

_NAMES = {
    "Positions": "core.positions", "Run": "core.positions",
    "Index": "core.index", "Grid": "core.index",
    "Plan": "core.plan", "Lookup": "core.plan",
    "Mask": "core.mask",
    "Rotation": "core.rotation",
    "Encoding": "core.encoding",
    "apply_rotary": "functional", "attend": "functional", "explain": "functional", "merge": "functional", "scores": "functional",
    "to_flex": "flex",
    "ENGINES": "engines.choose", "register_engine": "engines.choose", "warm_up": "engines.triton.warm_up",
    "Attention": "nn.attention",
    "KVCache": "nn.cache",
    "LatentAttention": "nn.latent",
    "Randomized": "encodings.randomized",
}  # fmt: skip
_MODULES = {
    "contextual": "contextual", "formulas": "core.formulas", "index": "core.index", "engines": "engines", "encodings": "encodings",
    "rope": "encodings.rope.convert", "scaling": "encodings.rope.scaling", "hf": "hf", "plot": "plot", "nn": "nn",
    "parallel": "parallel",
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

if not TYPE_CHECKING:  # a checker that read this would take every misspelt name for Any

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
